"""Bad hooks are found, and the messages say what is wrong and what would be right; good ones pass."""

import time
from typing import Any

import pytest
import torch

from hookline import TrainingHook, UpdateHook
from hookline.testing import assert_harmless, assert_resumable, assert_within_budget


class MeanLoss(TrainingHook):
    """A good hook: it logs the mean of all losses."""

    saves = ("total", "count")

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def on_step_end(self, loss: float, trainer: Any) -> None:
        self.total, self.count = self.total + loss, self.count + 1
        trainer.log("mean_loss", self.total / self.count)


class Draws(TrainingHook):
    isolate_rng = False

    def on_train_batch_start(self) -> None:
        torch.rand(1)


class Writes(TrainingHook):
    def on_step_end(self, model: torch.nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(0.999)


class Forgets(MeanLoss):
    def state_dict(self) -> Any:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


class Slow(TrainingHook):
    def on_step_end(self) -> None:
        time.sleep(0.01)


class Calls(TrainingHook):
    def __init__(self, calls: int) -> None:
        self.calls = calls

    def on_step_end(self) -> None:
        for number in range(self.calls):
            abs(number)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (Draws(), r"^hook 'draws' changes training from step 1 on, through the random .*fix this: remove isolate_rng"),
        (
            Writes(),
            r"^hook 'writes' changes training from step 2 on, through the parameters .*; it modified the parameters in "
            r"on_step_end, step 1\. To fix this: work on a copy",
        ),
    ],
    ids=["draws", "writes"],
)
def test_harm_is_told(hook: TrainingHook, words: str) -> None:
    """With hook, step, event, what was changed, and what would be right."""
    with pytest.raises(AssertionError, match=words):
        assert_harmless(hook)


def test_a_good_hook_passes() -> None:
    """In all three."""
    assert_harmless(MeanLoss())
    assert_resumable(MeanLoss())
    assert_within_budget(MeanLoss(), microseconds_per_step=5000, calls_per_step=200)


def test_a_hook_that_draws_is_resumable() -> None:
    """Its own random streams begin with the same call, whatever interrupts the run at its event."""

    class Noise(UpdateHook):
        def on_update(self, grads: Any) -> Any:
            return {name: grad + 0.1 * torch.randn_like(grad) for name, grad in grads.items()}

    assert_resumable(Noise())


def test_a_forgotten_state_is_told() -> None:
    """With the metric, the two values, where the run was killed, and the attribute that was not saved."""
    words = (
        r"^hook 'forgets' does not resume exactly\. Killed at on_epoch_start in step 5 and resumed after step 5, "
        r"metric 'mean_loss' at step 6 is [\d.]+ \(float\) instead of [\d.]+ \(float\)\. "
        r"It changed without saving: count\. To fix this: list what it depends on in `saves`"
    )
    with pytest.raises(AssertionError, match=words):
        assert_resumable(Forgets())
    assert_resumable(Forgets(), ignore=["mean_loss", "count"])


def test_more_that_is_not_resumed() -> None:
    """What a hook holds, what it does to the weights, and an event that comes again."""

    class Holds(TrainingHook):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_end(self, step: int) -> None:
            self.steps.append(step)

    class Trains(UpdateHook):
        def __init__(self) -> None:
            self._factor = 1.0

        def on_update(self, grads: Any) -> Any:
            self._factor *= 0.9
            return {name: grad * self._factor for name, grad in grads.items()}

    class Notes(TrainingHook):
        _noted = False

        def on_step_end(self, trainer: Any) -> None:
            if not self._noted:
                trainer.note("began")
            self._noted = True

    with pytest.raises(AssertionError, match=r"attribute 'steps' at the end is \[.*without saving: steps\."):
        assert_resumable(Holds)
    with pytest.raises(AssertionError, match=r"(train/loss|the model's final state).*without saving: _factor\."):
        assert_resumable(Trains())
    with pytest.raises(AssertionError, match=r"event 'began' at step \d+ is .* of missing.*without saving: _noted"):
        assert_resumable(Notes())


def test_times_are_not_compared() -> None:
    """What differs between two runs that nothing has interrupted says nothing."""

    class Times(TrainingHook):
        def on_step_end(self, trainer: Any) -> None:
            self.now = time.perf_counter()
            trainer.log("now", self.now)

    assert_resumable(Times())


def test_a_budget_of_time() -> None:
    """The message has the cost, the budget and the event; one above 10 ms is enough for a hook that takes 10 ms."""
    with pytest.raises(AssertionError, match=r"'slow' costs [\d,]+ µs a step, above its budget of 50 \(.*step_end"):
        assert_within_budget(Slow(), microseconds_per_step=50)
    assert_within_budget(Slow(), microseconds_per_step=300_000)
    assert_within_budget(Slow(), microseconds_per_step=1000, every=1000)


def test_load_does_not_count() -> None:
    """Of the times of a step the fastest counts, so that what comes between now and then is no cost of the hook."""

    class Disturbed(TrainingHook):
        calls = 0

        def on_step_end(self) -> None:
            Disturbed.calls += 1
            if Disturbed.calls % 7 == 0:
                time.sleep(0.02)

    assert_within_budget(Disturbed(), microseconds_per_step=1000)


def test_a_budget_of_calls_is_exact() -> None:
    """The same hook has the same number of calls every time, and one that makes 100 more has 100 more."""
    for _ in range(3):
        costs = []
        for calls in (10, 110):
            with pytest.raises(AssertionError, match=r"'calls' costs \d+ calls a step, above its budget") as raised:
                assert_within_budget(Calls(calls), calls_per_step=0)
            costs.append(int(str(raised.value).split()[3]))
        assert costs[1] - costs[0] == 100
    assert_within_budget(Calls(100), calls_per_step=costs[1])


def test_a_budget_is_needed() -> None:
    """Without one there is nothing to assert."""
    with pytest.raises(TypeError, match=r"pass a budget: microseconds_per_step=100, calls_per_step=50"):
        assert_within_budget(MeanLoss())


def test_random_streams_of_the_test_stay() -> None:
    """A test that draws numbers draws the same ones with the kit as without it."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert_resumable(MeanLoss())
    assert_within_budget(MeanLoss(), microseconds_per_step=5000)
    assert torch.equal(torch.rand(1), expected)
