"""Verification reports which hook changes training, from which step on, and through what."""

import copy
from typing import Any

import pytest
import torch

from hookline import ForwardHook, Trainer, TrainingHook, UpdateHook, get_trainer
from hookline.testing import assert_harmless, small_trainer
from hookline.verify import NotRepeatable, verify


class AtStep3(TrainingHook):
    """Do something at the third step."""

    def on_train_batch_start(self, step: int, trainer: Any, batch: Any) -> None:
        if step == 3:
            self.meddle(trainer, batch)

    def meddle(self, trainer: Any, batch: Any) -> None: ...


class WritesParameters(AtStep3):
    def meddle(self, trainer: Any, batch: Any) -> None:
        with torch.no_grad():
            next(trainer.model.parameters()).add_(1e-7)


class WritesLearningRate(AtStep3):
    def meddle(self, trainer: Any, batch: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] *= 1.0000001


class WritesBatch(AtStep3):
    def meddle(self, trainer: Any, batch: Any) -> None:
        batch[0].mul_(1.000001)


class Draws(AtStep3):
    def meddle(self, trainer: Any, batch: Any) -> None:
        torch.rand(1)


class Seeds(AtStep3):
    isolate_rng = False

    def meddle(self, trainer: Any, batch: Any) -> None:
        torch.manual_seed(1)


class PatchesForward(AtStep3):
    """Scales the output of a layer before a batch norm, which takes most of the change out of the loss again."""

    def meddle(self, trainer: Any, batch: Any) -> None:
        trainer.model[0].register_forward_hook(lambda module, inputs, output: output * 1.001)


class Validates(AtStep3):
    def meddle(self, trainer: Any, batch: Any) -> None:
        trainer.validate([batch])


class RunsTheModel(AtStep3):
    def meddle(self, trainer: Any, batch: Any) -> None:
        with trainer.inference() as model:
            model(batch[0])


class Stops(AtStep3):
    def meddle(self, trainer: Any, batch: Any) -> None:
        trainer.request_stop("enough")


class Breaks(TrainingHook):
    """Writes what the backward pass of the third step needs."""

    def on_before_backward(self, trainer: Any, step: int) -> None:
        if step == 3:
            with torch.no_grad():
                trainer.model[-1].weight.mul_(2)


class Doubles(UpdateHook):
    def on_update(self, grads: Any) -> Any:
        return {name: grad * 2 for name, grad in grads.items()}


class WritesActivations(ForwardHook):
    modules = "0"

    def on_forward(self, output: Any) -> None:
        output.zero_()


class Watches(TrainingHook):
    def on_train_batch_end(self, loss: float, metrics: Any, state: Any) -> None: ...


def verdict_on(hook: Any) -> Any:
    """Return the verdict on one hook."""

    def make() -> Trainer:
        trainer = small_trainer()
        trainer.add_hook(hook, name="hook")
        return trainer

    return next(verdict for verdict in verify(make, steps=6) if verdict.hook == "hook")


@pytest.mark.parametrize(
    ("hook", "through"),
    [
        (WritesParameters(), "parameters"),
        (WritesLearningRate(), "learning rate"),
        (WritesBatch(), "batch"),
        (PatchesForward(), "activations"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TrainingHook) else value,
)
def test_what_a_hook_changes_is_named_with_its_step(hook: Any, through: str) -> None:
    """The smallest change counts."""
    verdict = verdict_on(hook)
    assert (verdict.step, verdict.through, verdict.fine) == (3, through, False)
    assert f"step 3 on, through the {through}" in str(verdict)


def momentum_of(trainer: Any) -> torch.Tensor:
    """Return a tensor of the optimizer's state."""
    found: torch.Tensor = next(iter(trainer.optimizers[0].state.values()))["exp_avg"]
    return found


def replace_gradient(trainer: Any) -> None:
    param = trainer.model[0].weight
    param.grad = param.grad * 2


WRITES = {
    "gradients": lambda trainer: trainer.model[0].weight.grad.mul_(2),
    "gradients, through .data": lambda trainer: trainer.model[0].weight.grad.data.mul_(2),
    "gradients, replaced": replace_gradient,
    "parameters, through .data": lambda trainer: trainer.model[0].weight.data[1, 1].add_(1),
    "parameters, a buffer": lambda trainer: trainer.model[1].running_mean.add_(1),
    "train or eval mode": lambda trainer: trainer.model.eval(),
    "train or eval mode, without effect": lambda trainer: trainer.model[0].eval(),
    "optimizer state": lambda trainer: momentum_of(trainer).zero_(),
    "optimizer options": lambda trainer: trainer.optimizers[0].param_groups[0].update(weight_decay=0.5),
}


BEFORE_THE_STEP = ("on_gradients_ready", "on_before_optimizer_step")
AT_EVENTS = [(what, event) for what in WRITES for event in BEFORE_THE_STEP]
AT_EVENTS += [(what, "on_train_batch_end") for what in WRITES if not what.startswith("gradients")]  # cleared by then


@pytest.mark.parametrize(("what", "event"), AT_EVENTS)
def test_a_write_to_any_part_of_training_is_named(what: str, event: str) -> None:
    """At whichever event it happens."""

    def write(self: Any, trainer: Any, step: int) -> None:
        if step == 3:
            WRITES[what](trainer)

    verdict = verdict_on(type("Writes", (TrainingHook,), {event: write})())
    assert (verdict.step, verdict.through, verdict.fine) == (3, what.partition(",")[0], False)


@pytest.mark.parametrize("write", [lambda loss: loss.mul_(2), lambda loss: loss.data.mul_(2)])
def test_a_write_into_the_loss_is_named(write: Any) -> None:
    """In place, or through .data."""

    class Writes(TrainingHook):
        def on_before_backward(self, loss: Any, step: int) -> None:
            if step == 3:
                write(loss)

    verdict = verdict_on(Writes())
    assert (verdict.step, verdict.through, verdict.event) == (3, "loss", "on_before_backward")


def patch_forward(trainer: Any) -> None:
    forward = trainer.model[0].forward
    trainer.model[0].forward = lambda inputs: forward(inputs) * 2


SETTINGS = {
    "dropout": lambda trainer: setattr(trainer.model[3], "p", 0.1),
    "momentum of a batch norm": lambda trainer: setattr(trainer.model[1], "momentum", 0.9),
    "submodule": lambda trainer: trainer.model.__setitem__(3, torch.nn.Dropout(0.1)),
    "forward": patch_forward,
    "hook of a parameter": lambda trainer: trainer.model[0].weight.register_hook(lambda grad: grad * 2),
    "parameter left out of the optimizer": lambda trainer: trainer.optimizers[0].param_groups[0]["params"].pop(),
    "list of batches": lambda trainer: trainer.train_loaders["train"].reverse(),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_the_record_does_not_have_is_found_by_its_effect(setting: str) -> None:
    """The record of a run has no trace of these."""

    class Sets(AtStep3):
        def meddle(self, trainer: Any, batch: Any) -> None:
            SETTINGS[setting](trainer)

    verdict = verdict_on(Sets())
    assert not verdict.fine and verdict.step in (3, 4)


def test_a_write_after_the_last_step_is_named() -> None:
    """The weights that a run ends with are compared, too."""

    class Writes(TrainingHook):
        def on_train_end(self, state: Any) -> None:
            next(state["model"].parameters()).data.zero_()

    verdict = verdict_on(Writes())
    assert (verdict.step, verdict.through, verdict.event) == (6, "parameters", "on_train_end")


@pytest.mark.parametrize("hook", [Validates(), RunsTheModel()], ids=lambda hook: type(hook).__name__)
def test_batches_that_a_hook_runs_for_itself_are_not_training(hook: Any) -> None:
    """A validation and an inference call the observed model and change nothing."""
    assert verdict_on(hook).harmless


def test_declared_changes_are_fine() -> None:
    """A transform, and a hook that declares that it seeds, are meant to change training."""
    doubled, seeded = verdict_on(Doubles()), verdict_on(Seeds())
    assert (doubled.step, doubled.through, doubled.event) == (1, "gradients", "on_before_optimizer_step")
    assert (seeded.step, seeded.through) == (3, "random streams")
    assert doubled.fine and seeded.fine and not doubled.harmless


def test_what_was_undone_changes_nothing_and_is_noted() -> None:
    """This covers random draws and writes into copies of activations."""
    drew, wrote = verdict_on(Draws()), verdict_on(WritesActivations())
    assert drew.harmless and "drew" in drew.notes[0]
    assert wrote.harmless and "wrote into its copy" in wrote.notes[0]


def test_ending_a_run_early_is_a_change() -> None:
    """The run makes fewer steps."""
    verdict = verdict_on(Stops())
    assert (verdict.step, verdict.through) == (3, "number of steps")


def test_a_hook_that_breaks_the_backward_pass_is_judged_as_the_others_are() -> None:
    """The exception names no hook, but training fails with this one alone."""

    class SwitchesGradientsOff(TrainingHook):
        def on_before_backward(self) -> None:
            torch.set_grad_enabled(False)

    def make() -> Trainer:
        trainer = small_trainer()
        for hook in (Breaks(), SwitchesGradientsOff(), Watches()):
            trainer.add_hook(hook)
        return trainer

    verdicts = {verdict.hook: verdict for verdict in verify(make, 4)}
    broken = verdicts["breaks"]
    assert (broken.step, broken.through, broken.fine) == (3, "number of steps", False)
    assert broken.notes[-1].startswith("ended the run: RuntimeError: ")
    assert not verdicts["switches_gradients_off"].fine and verdicts["watches"].fine


def test_all_hooks_are_judged_one_by_one() -> None:
    """Every hook is tried alone, in the order of registration."""

    def make() -> Trainer:
        trainer = small_trainer()
        trainer.add_hook(Watches())
        trainer.add_hook(WritesBatch())
        return trainer

    assert [(verdict.hook, verdict.fine) for verdict in verify(make, 4)] == [
        ("identity", True),
        ("watches", True),
        ("writes_batch", False),
    ]


def test_training_that_is_not_repeatable_is_reported() -> None:
    """Nothing can be said about hooks then."""
    count = iter(range(10))

    def make() -> Trainer:
        trainer = small_trainer()
        trainer.lr = 0.1 + next(count)
        return trainer

    with pytest.raises(NotRepeatable, match=r"step 1 on, in the learning rate.*trainer\.seed"):
        verify(make, 2)


def test_the_test_kit_passes_a_harmless_hook_and_names_a_harmful_one() -> None:
    """Users call `assert_harmless` in their own tests."""
    assert_harmless(Watches())
    with pytest.raises(AssertionError, match=r"'writes_batch' changes training from step 3 on, through the batch"):
        assert_harmless(WritesBatch())
    with pytest.raises(AssertionError, match=r"'breaks' changes training from step 3 on.*ended the run: RuntimeError"):
        assert_harmless(Breaks())


def test_in_the_test_kit_a_failing_hook_fails() -> None:
    """The failure policy does not apply there."""

    class Fails(TrainingHook):
        def on_train_batch_end(self) -> None:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        assert_harmless(Fails())


def test_the_test_kit_leaves_the_random_streams_of_the_tests_alone() -> None:
    """Making the small model seeds nothing outside."""
    torch.manual_seed(11)
    before = torch.get_rng_state()
    small_trainer()
    assert torch.equal(torch.get_rng_state(), before)


class Replaces(TrainingHook):
    """Replaces a part of the third batch that the model does not use."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def on_train_batch_start(self, step: int, batch: Any) -> None:
        if step == 3:
            batch["unused"] = self.part


def trainer_with_unused(part: Any) -> Trainer:
    """A trainer whose batches have a part that the model does not use."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    batches = [{"x": torch.ones(2, 3), "unused": part} for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"step_fn": lambda model, batch: model(batch["x"]).mean(), "record": False, "console": False}
    return get_trainer("simple", model, batches, optimizer, "cpu", **options)


PAIR = torch.tensor([1.0, 2.0])
OTHERS = [PAIR.double(), PAIR.view(2, 1), torch.nextafter(PAIR, PAIR + 1), PAIR[:0], {"a": PAIR}, None, 1, [PAIR, PAIR]]


@pytest.mark.parametrize("part", OTHERS, ids=str)
def test_any_bit_of_a_batch_counts(part: Any) -> None:
    """Values, dtypes, shapes and nesting, whether the model uses them or not."""
    with pytest.raises(AssertionError, match="changes training from step 3 on, through the batch"):
        assert_harmless(Replaces(part), lambda: trainer_with_unused(PAIR), steps=4)


@pytest.mark.parametrize("part", [PAIR, torch.tensor([float("nan")]), torch.ones(0), None, {"a": [1, PAIR]}], ids=str)
def test_equal_bits_are_equal(part: Any) -> None:
    """Also those of NaN."""
    assert_harmless(Replaces(copy.deepcopy(part)), lambda: trainer_with_unused(part), steps=4)
