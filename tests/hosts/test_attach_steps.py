"""Steps of loops with several optimizers, closures, accumulation, a GradScaler, or hooks that skip a step."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from own_loops import Events, assert_same, batches, events_of, loss_of, make, rows_of, state_of, train
from torch import nn
from torch.nn import functional

import hookline
from hookline import ClipNorm, HooklineError, HookManager, TrainingHook, UpdateHook
from hookline.hosts.attach import Attached

OPTIMIZERS: list[Any] = [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"fused": True}),
]


class SkipAtReady(TrainingHook):
    """Skips steps 2 and 4 before the update chain."""

    def on_gradients_ready(self, trainer: Any, step: int) -> None:
        if step in (2, 4):
            trainer.skip_step("mine")


class SkipAtOptimizer(TrainingHook):
    """The same, after it."""

    def on_before_optimizer_step(self, trainer: Any, step: int) -> None:
        if step in (2, 4):
            trainer.skip_step("mine")


class SkipInUpdate(UpdateHook):
    """The same, inside of it."""

    def on_update(self, grads: Any, trainer: Any, step: int) -> Any:
        if step in (2, 4):
            trainer.skip_step("mine")
        return grads


@pytest.mark.parametrize("hook", [SkipAtReady, SkipAtOptimizer, SkipInUpdate])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_skipped_step_is_one_that_was_not_made(kind: Any, options: dict[str, Any], hook: Any) -> None:
    """Bit for bit that of a loop which leaves out `step()`: momentum, decay and the optimizer's counters, too."""
    model, optimizer = make(kind, **options)
    for number, batch in enumerate(batches(), 1):
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        if number not in (2, 4):
            optimizer.step()
        optimizer.zero_grad()
    expected, expected_state = state_of(model), optimizer.state_dict()
    model, optimizer = make(kind, **options)
    events = Events()
    with hookline.attach(model, optimizer, hooks=[hook(), events]) as hl:
        train(model, optimizer, batches())
    assert_same(state_of(model), expected)
    torch.testing.assert_close(optimizer.state_dict(), expected_state, rtol=0, atol=0)
    assert [event for event in events.seen if event.startswith("step_skipped")] == ["step_skipped 2", "step_skipped 4"]
    assert hl.run.skipped_steps == 2
    assert [event["reason"] for event in events_of(hl) if event["kind"] == "step_skipped"] == ["mine"] * 2


def test_an_update_hook_does_what_the_loop_would() -> None:
    """Clipping by a hook and clipping by torch give the same weights, and the norm is recorded."""
    model, optimizer = make()
    for batch in batches():
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    expected = state_of(model)
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[ClipNorm(0.1)]) as hl:
        train(model, optimizer, batches())
    assert_same(state_of(model), expected)
    assert all(row["train/grad_norm"] > 0.1 for row in rows_of(hl))


# ---- several optimizers ----------------------------------------------------------------------------------------------


class Gan(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def train_gan(lines: str | None, hooks: Any = (), clip: float | None = None) -> tuple[Any, Any]:
    """Train with the usual stale gradients: the generator's loss leaves some on the discriminator."""
    torch.manual_seed(0)
    gan = Gan()
    optimizers = {
        "judge": torch.optim.Adam(gan.judge.parameters(), lr=1e-2),
        "generator": torch.optim.Adam(gan.generator.parameters(), lr=1e-2),
    }

    def step(name: str, loss: torch.Tensor, hl: Attached | None) -> None:
        optimizers[name].zero_grad()
        if hl is None or lines == "none" or (lines == "judge" and name == "generator"):
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            hl.backward(loss)
        if clip:
            nn.utils.clip_grad_norm_(gan.get_submodule(name).parameters(), clip)
        optimizers[name].step()

    def loop(hl: Attached | None) -> None:
        real = hl.batches(batches()) if hl is not None and lines in ("batches", "judge") else batches()
        for inputs, _ in real:
            fake = gan.generator(torch.randn(4, 4))
            scores = torch.cat([gan.judge(inputs), gan.judge(fake.detach())])
            truth = torch.tensor([[1.0]] * 4 + [[0.0]] * 4)
            step("judge", functional.binary_cross_entropy_with_logits(scores, truth), hl)
            step("generator", functional.binary_cross_entropy_with_logits(gan.judge(fake), truth[:4]), hl)

    if lines is None:
        loop(None)
        return state_of(gan), None
    with hookline.attach(gan, optimizers, hooks=hooks) as hl:
        loop(hl)
    return state_of(gan), hl


@pytest.mark.parametrize("lines", ["none", "backward", "batches"])
def test_a_gan_trains_as_without_hooks(lines: str) -> None:
    """A dict of optimizers are separate steps, of which each has its own events, loss and gradients."""
    expected, _ = train_gan(None)
    events = Events()
    weights, hl = train_gan(lines, [events])
    assert_same(weights, expected)
    assert hl.run.step == 12 and events.names().count("step_end") == 12
    assert events.names().count("train_batch_end") == (6 if lines == "batches" else 0)
    losses = [row["train/loss"] for row in rows_of(hl) if "train/loss" in row]
    assert len(losses) == (0 if lines == "none" else 12)


def test_a_step_without_a_loss_has_not_that_of_the_step_before() -> None:
    """A loop may tell the loss of one of two steps in a batch."""
    _, hl = train_gan("judge")
    assert [row["step"] for row in rows_of(hl) if "train/loss" in row] == [1, 3, 5, 7, 9, 11]


@pytest.mark.parametrize("lines", ["none", "backward", "batches"])
def test_clipping_sees_the_gradients_of_its_step_alone(lines: str) -> None:
    """The norm of the generator's step leaves out the gradients that its loss has left on the discriminator."""
    expected, _ = train_gan(None, clip=0.05)
    weights, _ = train_gan(lines, [ClipNorm(0.05)])
    assert_same(weights, expected)


@pytest.mark.parametrize("hook", ["gradient_flow", "gradient_monitor"])
def test_a_step_is_not_blamed_for_the_gradients_of_other_optimizers(hook: str) -> None:
    """In the discriminator's first step the generator has no gradients, and none is missing."""
    manager = HookManager()
    manager.register(hook, every=1)
    _, hl = train_gan("none", manager)
    assert not [event for event in events_of(hl) if event["kind"].startswith("gradient")]
    missing = [value for row in rows_of(hl) for name, value in row.items() if name.endswith("missing")]
    assert missing and not any(missing)


def test_a_list_of_optimizers_is_one_step() -> None:
    """One norm over the parameters of both, and one step for hooks; it may leave one of them out."""

    def loop(clips: bool) -> None:
        for number, batch in enumerate(batches()):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizers[0].step()
            if number != 3:
                optimizers[1].step()
            model.zero_grad()

    results = []
    for hooks in (None, [ClipNorm(0.1)]):
        model, _ = make()
        rest = [param for name, param in model.named_parameters() if not name.startswith("first")]
        optimizers = [torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.1)]
        if hooks is None:
            loop(clips=True)
        else:
            events = Events()
            with hookline.attach(model, optimizers, hooks=[*hooks, events]) as hl:
                loop(clips=False)
        results.append(state_of(model))
    assert_same(*results)
    assert hl.run.step == 6 and events.names().count("gradients_ready") == 6
    assert events.names().count("after_optimizer_step") == 11


# ---- accumulation and closures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", ["none", "backward", "batches"])
def test_accumulation(lines: str) -> None:
    """A step is what lies between two calls of step(); its loss is the sum of what was passed to backward."""
    model, optimizer = make()
    events, losses = Events(), []
    with hookline.attach(model, optimizer, hooks=[events]) as hl:
        for number, batch in enumerate(hl.batches(batches()) if lines == "batches" else batches(), 1):
            loss = loss_of(model, batch) / 2
            losses.append(loss.item())
            if lines == "none":
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                hl.backward(loss)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    names = events.names()
    assert hl.run.step == names.count("step_end") == names.count("gradients_ready") == 3
    assert names.count("before_backward") == (0 if lines == "none" else 6)
    assert names.count("train_batch_end") == (6 if lines == "batches" else 0)
    if lines != "none":
        sums = [sum(losses[at : at + 2]) for at in (0, 2, 4)]
        assert [row["train/loss"] for row in rows_of(hl)] == pytest.approx(sums, rel=1e-6)


@pytest.mark.parametrize("reads_batches", [False, True])
def test_several_losses_of_a_batch_are_one_step(reads_batches: bool) -> None:
    """Each with a backward pass of its own, as those of a discriminator: the step's loss is their sum."""
    model, optimizer = make()
    losses = []
    with hookline.attach(model, optimizer, hooks=[events := Events()]) as hl:
        for batch in hl.batches(batches(3)) if reads_batches else batches(3):
            parts = [loss_of(model, batch), 0.5 * loss_of(model, batch)]
            losses.append(sum(part.item() for part in parts))
            for part in parts:
                hl.backward(part)
            optimizer.step()
            optimizer.zero_grad()
    names = events.names()
    assert names.count("step_end") == names.count("gradients_ready") == 3 and names.count("before_backward") == 6
    assert names.count("train_batch_end") == (3 if reads_batches else 0)
    assert [row["train/loss"] for row in rows_of(hl)] == pytest.approx(losses)


def train_by_closures(
    kind: Any, hooks: list[Any] | None, lines: str = "none", leave_out: int | None = None
) -> tuple[list[float], int, dict[str, torch.Tensor], Any]:
    """Train with closures; return losses, calls of the closure, weights, and the run if there are hooks."""
    model, optimizer = make(kind, lr=0.1)
    model.eval()
    losses, calls = [], 0

    def closure(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        hl.backward(loss) if hl is not None and lines == "backward" else loss.backward()  # type: ignore[no-untyped-call]
        return loss

    attached: Any = nullcontext() if hooks is None else hookline.attach(model, optimizer, hooks=hooks)
    with attached as hl:
        for number, batch in enumerate(batches(3), 1):
            if number != leave_out:
                losses.append(optimizer.step(partial(closure, batch)).item())
    return losses, calls, state_of(model), hl


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
@pytest.mark.parametrize("lines", ["none", "backward"])
def test_closures(kind: Any, lines: str) -> None:
    """The closure is called as often and returns what it did; events of the step come once its gradients are there."""
    norms = []

    class Norms(TrainingHook):
        def on_gradients_ready(self, grads: Any) -> None:
            norms.append(grads.norm().item())

    *plain, weights, _ = train_by_closures(kind, None)
    events = Events()
    *attached, same_weights, hl = train_by_closures(kind, [events, Norms()], lines)
    assert attached == plain
    assert_same(same_weights, weights)
    assert hl.run.step == 3 and events.names().count("step_end") == 3 and len(norms) == 3 and all(norms)
    if lines == "backward":
        assert [row["train/loss"] for row in rows_of(hl)] == pytest.approx(plain[0])


def test_a_skipped_step_of_a_closure() -> None:
    """The optimizer finds no gradients after the closure, so that weights and momentum stay as they are."""
    kind = partial(torch.optim.SGD, momentum=0.9)
    *_, expected, _ = train_by_closures(kind, None, leave_out=2)
    *_, weights, _ = train_by_closures(kind, [SkipAtReady()])
    assert_same(weights, expected)


# ---- a GradScaler ----------------------------------------------------------------------------------------------------


def train_scaled(hooks: Sequence[Any], tells: bool = True, fused: bool = False) -> tuple[Any, Any, Any]:
    """Train six steps, of which the third overflows."""
    model, optimizer = make(fused=fused or None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    with hookline.attach(model, optimizer, hooks=hooks, scaler=scaler) as hl:
        for number, batch in enumerate(hl.batches(batches()), 1):
            hl.backward(loss_of(model, batch) * (1e38 if number == 3 else 1.0))
            if tells:
                hl.optimizer_step()
            else:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, hl, scaler


def test_a_grad_scaler() -> None:
    """Hooks get the loss and the gradients unscaled; a step that the scaler skips is a skipped step."""
    norms, losses = [], []

    class Look(TrainingHook):
        def on_before_optimizer_step(self, grad_norm: float) -> None:
            norms.append(grad_norm)

        def on_before_backward(self, loss: Any) -> None:
            losses.append(loss.item())

    model, optimizer = make()
    expected = []
    for number, batch in enumerate(batches(), 1):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        expected.append((loss.item(), nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()))  # type: ignore[misc]
        if number != 3:
            optimizer.step()
        optimizer.zero_grad()
    events = Events()
    trained, hl, _ = train_scaled([events, Look()])
    assert_same(state_of(trained), state_of(model))  # scales are powers of two, so that no bit is lost
    assert [loss for loss, _ in expected[:2]] == losses[:2]
    assert norms[:2] == pytest.approx([norm for _, norm in expected[:2]]) and norms[3:] == pytest.approx(
        [norm for _, norm in expected[3:]]
    )
    assert hl.run.step == 6 and hl.run.skipped_steps == 1
    at_third = [event for event in events.seen if event.endswith(" 3")]
    assert "step_skipped 3" in at_third and "after_optimizer_step 3" not in at_third and "step_end 3" in at_third
    assert [event["step"] for event in events_of(hl)] == [3]


def test_a_step_that_the_scaler_skips_vanishes_unless_the_loop_says_so() -> None:
    """The known limit of `scaler.step(optimizer)`: nothing is called where the scaler skips."""
    events = Events()
    _, hl, _ = train_scaled([events], tells=False)
    assert hl.run.step == 5 and "step_skipped" not in events.names()


@pytest.mark.parametrize("reads_batches", [False, True])
@pytest.mark.parametrize("skips", ["loop", "scaler"])
def test_the_loss_of_a_step_that_the_loop_leaves_out_is_in_no_other(skips: str, reads_batches: bool) -> None:
    """Where the gradients are gone when the next backward pass begins, no step was made of them."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if skips == "scaler" else None
    losses = []
    with hookline.attach(model, optimizer, scaler=scaler) as hl:
        for number, batch in enumerate(hl.batches(batches()) if reads_batches else batches(), 1):
            loss = loss_of(model, batch)
            if number == 3 and scaler is not None:
                loss = loss * 1e38
            elif number != 3:
                losses.append(loss.item())
            hl.backward(loss)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif number != 3:
                optimizer.step()
            optimizer.zero_grad()
    assert [row["train/loss"] for row in rows_of(hl)] == pytest.approx(losses)
    assert hl.run.skipped_steps == 1
    assert [(event["kind"], event["step"]) for event in events_of(hl)] == [("step_skipped", 3)]


@pytest.mark.parametrize("hook", [ClipNorm(1.0), "gradient_monitor", SkipInUpdate()])
def test_a_fused_optimizer_under_a_scaler_has_scaled_gradients(hook: Any) -> None:
    """It unscales inside of its step, so hooks that read gradients are refused when they are attached."""
    with pytest.raises(HooklineError, match="fused=False"):
        train_scaled([hook], fused=True)


def test_a_fused_optimizer_under_a_scaler_refuses_one_event_that_reads_gradients() -> None:
    """Also if the hook listens to others; one that only counts steps is fine."""

    class Norm(Events):
        def on_step_end(self, step: int, grad_norm: float) -> None:
            """Would be shown a scaled norm."""

    with pytest.raises(HooklineError, match=r"reads gradients, which are scaled .*fused=False"):
        train_scaled([Norm()], fused=True)
    _, hl, _ = train_scaled([Events(), "ema", "lr_monitor"], fused=True)
    assert hl.run.step == 6


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_that_was_not_passed_is_noticed(unscales: bool) -> None:
    """A fused optimizer steps with a scale: hooks would clip scaled gradients, unless the loop unscales them before."""
    model, optimizer = make(fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    clipped = pytest.raises(HooklineError, match=r"'clip_norm' needs a run that has unscaled gradients.*fused=False")
    with nullcontext() if unscales else clipped, hookline.attach(model, optimizer, hooks=[ClipNorm(0.1)]) as hl:
        for batch in batches():
            scaler.scale(loss_of(model, batch)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert hl.run.step == (6 if unscales else 0)
    assert all(row["train/grad_norm"] < 100 for row in rows_of(hl))


def test_optimizer_step_wants_to_know_which() -> None:
    """Of several optimizers one must be named; one that was not attached is refused."""
    model, optimizer = make()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookline.attach(model, [optimizer, other]) as hl:
        with pytest.raises(HooklineError, match="pass one of the run's 2 optimizers"):
            hl.optimizer_step()
        with pytest.raises(HooklineError, match="this SGD was not passed to attach"):
            hl.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_loop_that_steps_its_schedulers_itself_has_none_for_hooks() -> None:
    seen = []

    class Schedulers(TrainingHook):
        def on_step_end(self, trainer: Any) -> None:
            seen.append(list(trainer.schedulers))

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Schedulers()]) as hl:
        hl.backward(loss_of(model, batches(1)[0]))
        optimizer.step()
    assert seen == [[]]


def climb(model: nn.Module, rho: float) -> None:
    """Add the gradient, scaled, to the weights."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(param.grad, alpha=rho)  # type: ignore[arg-type]


@pytest.mark.parametrize("reads_batches", [False, True])
def test_two_passes_of_which_the_loop_steps_the_first_by_hand_are_one_step(reads_batches: bool) -> None:
    """Sharpness-aware minimization: the gradient comes from above, and no step was skipped."""

    def train_sharply(model: nn.Module, optimizer: torch.optim.Optimizer, given: Any, backward: Any) -> list[float]:
        losses = []
        for batch in given:
            weights = [param.detach().clone() for param in model.parameters()]
            backward(loss_of(model, batch))
            climb(model, 0.05)
            optimizer.zero_grad()
            losses.append(loss_of(model, batch))
            backward(losses[-1])
            with torch.no_grad():
                for param, weight in zip(model.parameters(), weights, strict=True):
                    param.copy_(weight)
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses]

    model, optimizer = make()
    losses = train_sharply(model, optimizer, batches(), torch.Tensor.backward)
    expected = state_of(model)
    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        train_sharply(model, optimizer, hl.batches(batches()) if reads_batches else batches(), hl.backward)
    assert_same(state_of(model), expected)
    assert (hl.run.skipped_steps, hl.run.step, events_of(hl)) == (0, len(batches()), [])
    assert [row["train/loss"] for row in rows_of(hl)] == pytest.approx(losses)
