"""The event catalog is true: order, arguments and the state of the gradients are compared with recorded runs."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer

from hookline import StepContext, StopTraining, Trainer
from hookline.core.catalog import ARGUMENTS, CATALOG

Story = list[tuple[str, dict[str, Any]]]
Grads = dict[str, torch.Tensor]

MICRO = ["on_train_batch_start", "on_forward", "on_before_backward", "on_after_backward"]
READY = ["on_gradients_ready", "on_update"]
OPTIMIZER = ["on_before_optimizer_step", "on_after_optimizer_step"]
DONE = ["on_train_batch_end", "on_step_end"]
STEP = [*MICRO, *READY, *OPTIMIZER, *DONE]
VALIDATION_BATCH = ["on_validation_batch_start", "on_forward", "on_validation_batch_end"]


def trainer_of(batches: int = 2, **options: Any) -> Trainer:
    """Make a trainer of a number of batches, without a sanity check."""
    return make_trainer(**{"data": make_batches(batches), "sanity_batches": 0, **options})


def grads_now(model: torch.nn.Module) -> Grads:
    """Return copies of the current gradients."""
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def listen(trainer: Trainer) -> Story:
    """Register a function that names every argument at every event; their calls are appended to one list."""
    recorded: Story = []
    for event in CATALOG.values():
        trainer.hooks.register(
            recorder(event.name, event.argument_names, recorded, trainer.model), event.name, event=event.name
        )
    return recorded


def recorder(event: str, arguments: list[str], recorded: Story, model: torch.nn.Module) -> Callable[..., Any]:
    """Return a function whose signature names all the arguments of an event."""

    def hear(**values: Any) -> Any:
        if event == "on_forward" and values["name"] != "0":
            return None
        args = {"gradients": grads_now(model), "training": model.training, **values}
        if isinstance(values.get("state"), dict):
            args["status"] = values["state"].get("status")
        if "metrics" in values:
            args["metrics"] = dict(values["metrics"])
        if "grads" in values:
            args["grads"] = {name: grad.clone() for name, grad in values["grads"].items()}
        recorded.append((event, args))
        return values.get("grads")

    kind = inspect.Parameter.KEYWORD_ONLY
    hear.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in arguments])
    return hear


def names(recorded: Story) -> list[str]:
    """Return the names of the events alone."""
    return [event for event, _ in recorded]


def calls_of(recorded: Story, event: str) -> list[dict[str, Any]]:
    """Return the arguments of every call of one event."""
    return [args for name, args in recorded if name == event]


# ---- the order ---------------------------------------------------------------------------------------------


@pytest.mark.req("001-17", "000-17", "000-27", "004-14")
def test_events_of_a_plain_run() -> None:
    """Epochs contain batches, a batch contains its step, and forward hooks are called before the loss."""
    trainer = trainer_of(2, max_epochs=2)
    recorded = listen(trainer)
    trainer.train()
    epoch = ["on_epoch_start", *STEP, *STEP, "on_epoch_end"]
    assert names(recorded) == ["on_train_start", *epoch, *epoch, "on_train_end"]


@pytest.mark.req("004-21", "004-23", "002-67")
def test_events_of_a_run_with_everything() -> None:
    """With clipping, validation and checkpoints, events first fire in the order of the catalog."""
    trainer = trainer_of(2, val_dataloader=make_batches(2), max_grad_norm=0.1, record=True)
    trainer.add_checkpointing()
    recorded = listen(trainer)
    trainer.train()
    step = [*MICRO, *READY, "on_gradient_clip", *OPTIMIZER, *DONE]
    validation = ["on_validation_start", *VALIDATION_BATCH, *VALIDATION_BATCH, "on_validation_end"]
    end = ["on_epoch_end", "on_checkpoint_save", "on_train_end"]
    assert names(recorded) == ["on_train_start", "on_epoch_start", *step, *step, *validation, *end]
    fired = list(dict.fromkeys(names(recorded)))
    assert fired == [name for name in CATALOG if name in fired]
    assert set(CATALOG) - set(fired) == {"on_step_skipped", "on_checkpoint_load", "on_exception"}


def test_accumulation_with_a_short_last_window() -> None:
    """With three batches in windows of two, the step's events fire after the second batch and after the last."""
    trainer = trainer_of(3, accumulate=2)
    recorded = listen(trainer)
    trainer.train()
    window_open = [*MICRO, "on_train_batch_end"]
    assert names(recorded) == [
        "on_train_start", "on_epoch_start", *window_open, *STEP, *STEP, "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    steps = [args["step"] for name, args in recorded if name == "on_train_batch_end"]
    assert steps == [1, 1, 2]


def test_events_of_several_optimizers() -> None:
    """There is one backward pass and one update chain; each optimizer has its pair of events, in list order."""
    model = make_model()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.1 * (index + 1)) for index in (0, 2)]
    trainer = trainer_of(1, model=model, optimizer=optimizers)
    recorded = listen(trainer)
    trainer.train()
    step = [*MICRO, *READY, *OPTIMIZER, *OPTIMIZER, *DONE]
    assert names(recorded) == ["on_train_start", "on_epoch_start", *step, "on_epoch_end", "on_train_end"]
    before = calls_of(recorded, "on_before_optimizer_step")
    assert [args["optimizer_idx"] for args in before] == [0, 1]
    assert [args["optimizer"] for args in before] == optimizers


def test_events_of_a_step_that_amp_skipped() -> None:
    """Under fp16, a non-finite gradient fires on_step_skipped instead of on_after_optimizer_step, and no on_update."""
    batches = make_batches(2)
    batches[0] = (batches[0][0], torch.full((4, 1), math.inf))
    trainer = trainer_of(data=batches, precision="fp16")
    before = [param.clone() for param in trainer.model.parameters()]
    recorded = listen(trainer)
    moved = []
    trainer.on("step_end")(lambda: moved.append(not torch.equal(before[0], next(trainer.model.parameters()))))
    trainer.train()
    skipped = [*MICRO, "on_gradients_ready", "on_before_optimizer_step", "on_step_skipped", *DONE]
    assert names(recorded) == ["on_train_start", "on_epoch_start", *skipped, *STEP, "on_epoch_end", "on_train_end"]
    assert moved == [False, True]
    args = calls_of(recorded, "on_step_skipped")[0]
    assert args["reason"] == "non-finite gradients under GradScaler"
    assert args["gradients"] and not torch.isfinite(args["gradients"]["0.weight"]).all()
    assert [event["kind"] for event in trainer.record.events if event["kind"] == "step_skipped"] == ["step_skipped"]


def test_validation_every_few_steps() -> None:
    """A validation that is due at a step comes after its on_step_end, with the same step number."""
    trainer = trainer_of(3, val_dataloader=make_batches(1), validate_every=2)
    recorded = listen(trainer)
    trainer.train()
    validation = ["on_validation_start", *VALIDATION_BATCH, "on_validation_end"]
    assert names(recorded) == [
        "on_train_start", "on_epoch_start", *STEP, *STEP, *validation, *STEP, "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    assert {args["step"] for name, args in recorded if "validation" in name} == {2}


@pytest.mark.req("004-23")
def test_a_checkpoint_at_a_step() -> None:
    """At a checkpoint step, on_step_end comes first, then on_checkpoint_save with the same step number."""
    trainer = trainer_of(3, record=True)
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=2)
    recorded = listen(trainer)
    trainer.train()
    assert names(recorded) == [
        "on_train_start", "on_epoch_start", *STEP, *STEP, "on_checkpoint_save", *STEP, "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    args = calls_of(recorded, "on_checkpoint_save")[0]
    assert args["step"] == 2
    assert Path(args["checkpoint_path"]).parent == Path(args["path"])
    assert (Path(args["checkpoint_path"]) / "manifest.json").is_file()


def test_events_of_a_resumed_run() -> None:
    """on_checkpoint_load comes before on_train_start, whose argument `resumed` is then true."""
    first = trainer_of(2, record=True)
    first.add_checkpointing()
    first.train()
    trainer = trainer_of(2, max_epochs=2)
    recorded = listen(trainer)
    trainer.fit(resume=first.run_dir)
    assert names(recorded) == [
        "on_checkpoint_load", "on_train_start", "on_epoch_start", *STEP, *STEP, "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    assert calls_of(recorded, "on_train_start")[0]["resumed"] is True
    assert calls_of(recorded, "on_train_start")[0]["step"] == 2
    assert calls_of(recorded, "on_epoch_start")[0]["epoch"] == 1


@pytest.mark.parametrize("event", ["on_train_batch_start", "on_after_backward", "on_step_end"])
@pytest.mark.parametrize("way", ["raise", "ask"])
def test_a_stop_completes_the_step(event: str, way: str) -> None:
    """A stop requested at any event takes effect after all events of that step."""
    trainer = trainer_of(3)

    def stop(trainer: Trainer) -> None:
        if way == "raise":
            raise StopTraining("enough")
        trainer.request_stop("enough", by="stop")

    trainer.hooks.register(stop, event=event)
    recorded = listen(trainer)
    trainer.train()
    assert names(recorded) == ["on_train_start", "on_epoch_start", *STEP, "on_train_end"]
    assert calls_of(recorded, "on_train_end")[0]["reason"] == "stopped by stop: enough"
    assert calls_of(recorded, "on_train_end")[0]["status"] == "completed"


@pytest.mark.req("002-69")
def test_events_of_a_run_that_fails() -> None:
    """The event that failed is the last of its step; on_exception and on_train_end follow."""
    trainer = trainer_of(3)

    def fail(step: int) -> None:
        if step == 2:
            raise ValueError("broken")

    trainer.hooks.register(fail, event="on_gradients_ready", on_error="raise")
    recorded = listen(trainer)
    with pytest.raises(ValueError, match="broken") as failure:
        trainer.train()
    half = [*MICRO, "on_gradients_ready"]
    assert names(recorded) == ["on_train_start", "on_epoch_start", *STEP, *half, "on_exception", "on_train_end"]
    assert calls_of(recorded, "on_exception")[0]["exception"] is failure.value
    assert [args["status"] for args in (*calls_of(recorded, "on_exception"), *calls_of(recorded, "on_train_end"))] == [
        "error"
    ] * 2


def test_training_step_outside_of_a_run() -> None:
    """training_step() fires the events of its batch and of its step, and no others."""
    trainer = trainer_of(1)
    recorded = listen(trainer)
    trainer.training_step(make_batches(1)[0])
    assert names(recorded) == STEP


# ---- the arguments -----------------------------------------------------------------------------------------

SOMETHING = object()
TYPES: dict[str, Any] = {
    "trainer": Trainer, "model": torch.nn.Module, "optimizer": torch.optim.Optimizer, "optimizer_idx": int,
    "device": torch.device, "config": SOMETHING, "step": int, "epoch": int, "batch": tuple, "batch_idx": int,
    "dataloader_idx": int, "dataloader_name": str, "loader_idx": int, "loader_name": str, "tokens_seen": int,
    "lr": float, "loss": float, "metrics": dict, "state": dict, "ctx": StepContext, "grad_norm": float, "grads": dict,
    "reason": str, "checkpoint_path": str, "path": str, "resumed": bool, "exception": BaseException, "name": str,
    "module": torch.nn.Module, "inputs": tuple, "output": torch.Tensor, "target": torch.Tensor, "phase": str,
    "kwargs": dict, "live_output": torch.Tensor, "seconds": float, "memory": int,
}  # fmt: skip


def test_every_argument_has_a_type_here() -> None:
    """An argument that is added to the catalog must get a type in this test."""
    assert set(ARGUMENTS) <= set(TYPES)


@pytest.fixture(scope="module")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Record every event of the catalog in three runs: one with everything, one skipped step, one failure."""
    where: dict[str, Any] = {"record": True, "output_dir": str(tmp_path_factory.mktemp("runs"))}
    first = trainer_of(3, accumulate=2, val_dataloader=make_batches(2), max_grad_norm=0.1, **where)
    first.add_checkpointing()
    recorded = listen(first)
    first.train()
    second = trainer_of(2, max_epochs=2)
    more = listen(second)
    second.on("gradients_ready", name="guard")(lambda trainer: trainer.skip_step("a guard said so"))
    second.on("epoch_end", name="bad", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        second.fit(resume=first.run_dir)
    return recorded + more


@pytest.mark.parametrize("event", CATALOG.values(), ids=lambda event: event.name)
def test_every_argument_of_every_event(event: Any, recorded_runs: Story) -> None:
    """At every event, each argument in the catalog is available and of the right type."""
    firings = calls_of(recorded_runs, event.name)
    assert firings
    for args in firings:
        for name in event.argument_names:
            wanted = torch.Tensor if event.attributes.get(name) == "live_loss" else TYPES[name]
            wanted = dict if event.name == "on_update" and name == "state" else wanted
            assert name in args
            assert args[name] is not None
            assert wanted is SOMETHING or isinstance(args[name], wanted), f"{name} is a {type(args[name])}"


def test_arguments_agree_with_each_other(recorded_runs: Story) -> None:
    """Counters, aliases and values of one run agree with each other."""
    recorded = recorded_runs[: names(recorded_runs).index("on_train_end") + 1]
    assert [args["batch_idx"] for args in calls_of(recorded, "on_train_batch_start")] == [0, 1, 2]
    assert [args["step"] for args in calls_of(recorded, "on_step_end")] == [1, 2]
    assert all(
        args["loader_name"] == args["dataloader_name"] == "train" for args in calls_of(recorded, "on_train_batch_end")
    )
    assert all(args["loader_name"] == "val" for args in calls_of(recorded, "on_validation_batch_end"))
    assert [args["batch_idx"] for args in calls_of(recorded, "on_validation_batch_end")] == [0, 1]
    assert [args["phase"] for args in calls_of(recorded, "on_forward")] == ["train"] * 3 + ["validation"] * 2
    assert [args["training"] for args in calls_of(recorded, "on_forward")] == [True] * 3 + [False] * 2
    losses = [args["loss"] for args in calls_of(recorded, "on_train_batch_end")]
    assert [args["loss"].item() for args in calls_of(recorded, "on_before_backward")] == losses
    assert [args["metrics"] for args in calls_of(recorded, "on_train_batch_end")] == [{"loss": loss} for loss in losses]
    ends = calls_of(recorded, "on_step_end")
    assert ends[0]["loss"] == pytest.approx((losses[0] + losses[1]) / 2)
    assert ends[1]["loss"] == pytest.approx(losses[2])
    clips = [args["grad_norm"] for args in calls_of(recorded, "on_gradient_clip")]
    assert [args["grad_norm"] for args in ends] == clips
    assert all(norm > 0.1 for norm in clips)


# ---- what is true of the gradients -------------------------------------------------------------------------


def close(first: Grads, second: Grads) -> bool:
    """Return True if two sets of gradients are equal up to rounding."""
    return first.keys() == second.keys() and all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


class Reference:
    """The same run, computed by hand: windows of two, gradients doubled by an update hook, then clipped, then SGD."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]], max_norm: float, lr: float) -> None:
        model = make_model()
        self.partial: list[Grads] = []  # after each micro-batch's backward
        self.before: list[Grads] = []  # at each micro-batch's start
        self.complete: list[Grads] = []
        self.final: list[Grads] = []
        for window in (batches[:2], batches[2:]):
            shares: Grads = {}
            for inputs, targets in window:
                self.before.append(dict(shares))
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                fresh = torch.autograd.grad(loss, list(model.parameters()))
                for (name, _), grad in zip(model.named_parameters(), fresh, strict=True):
                    shares[name] = shares.get(name, torch.zeros_like(grad)) + grad / 2
                self.partial.append(dict(shares))
            self.complete.append({name: grad * 2 / len(window) for name, grad in shares.items()})
            doubled = {name: grad * 2 for name, grad in self.complete[-1].items()}
            norm = torch.cat([grad.flatten() for grad in doubled.values()]).norm()
            self.final.append({name: grad * min(1.0, max_norm / float(norm)) for name, grad in doubled.items()})
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.sub_(lr * self.final[-1][name])
        self.norms = [float(torch.cat([grad.flatten() for grad in step.values()]).norm()) * 2 for step in self.complete]
        self.model = model


class Firing:
    """One event with its micro-batch, its step and the reference, for the checks below."""

    def __init__(self, args: dict[str, Any], reference: Reference, index: int) -> None:
        self.args, self.reference = args, reference
        self.gradients: Grads = args["gradients"]
        self.batch, self.step = args.get("batch_idx", index), args["step"] - 1

    def is_(self, wanted: Grads) -> bool:
        return close(self.gradients, wanted)


SO_FAR = "those of the window so far; none at its first micro-batch"
FACTS: dict[str, Callable[[Firing], bool]] = {
    "none": lambda seen: not seen.gradients,
    SO_FAR: lambda seen: seen.is_(seen.reference.before[seen.batch]),
    "as at on_train_batch_start": lambda seen: seen.is_(seen.reference.before[seen.batch]),
    "include this micro-batch's share; may be partial, scaled, local to the rank": lambda seen: seen.is_(
        seen.reference.partial[seen.batch]
    ),
    "complete, unscaled, reduced over ranks; before the update chain": lambda seen: seen.is_(
        seen.reference.complete[seen.step]
    ),
    "complete, unscaled, reduced; as the update hooks before this one left them": lambda seen: seen.is_(
        {name: grad * 2 for name, grad in seen.reference.complete[seen.step].items()}
    ),
    "clipped; grad_norm is the norm before it": lambda seen: (
        seen.is_(seen.reference.final[seen.step])
        and math.isclose(seen.args["grad_norm"], seen.reference.norms[seen.step], rel_tol=1e-5)
    ),
    "final: what the optimizer uses": lambda seen: seen.is_(seen.reference.final[seen.step]),
    "still there, as the optimizer used them": lambda seen: seen.is_(seen.reference.final[seen.step]),
    "cleared if a step was made, otherwise those of the window so far": lambda seen: (
        seen.is_(seen.reference.partial[0]) if seen.batch == 0 else not seen.gradients
    ),
    "cleared; ctx.grad_norm still has their norm": lambda seen: (
        not seen.gradients and math.isclose(seen.args["grad_norm"], seen.reference.norms[seen.step], rel_tol=1e-5)
    ),
}
ELSEWHERE = {
    "still there, unused": "test_events_of_a_step_that_amp_skipped",
    "unknown": "on_exception and on_train_end promise nothing",
}


@pytest.fixture(scope="module")
def recorded_gradients(tmp_path_factory: pytest.TempPathFactory) -> tuple[Story, Reference]:
    """Record a run of two windows, one of them short, with doubled gradients, clipping, validation and a checkpoint."""
    where: dict[str, Any] = {"record": True, "output_dir": str(tmp_path_factory.mktemp("runs"))}
    batches = make_batches(3)
    trainer = trainer_of(data=batches, accumulate=2, max_grad_norm=0.1, lr=0.5, val_dataloader=make_batches(1), **where)
    trainer.add_checkpointing()
    trainer.on("update", name="double")(lambda grads: {name: grad * 2 for name, grad in grads.items()})
    recorded = listen(trainer)
    trainer.train()
    reference = Reference(batches, 0.1, 0.5)
    after = dict(trainer.model.named_parameters())
    assert all(torch.allclose(after[name], param, atol=1e-6) for name, param in reference.model.named_parameters())
    return recorded, reference


@pytest.mark.req("004-15", "004-31", "000-27")
@pytest.mark.parametrize("event", CATALOG.values(), ids=lambda event: event.name)
def test_gradients_are_as_the_catalog_says(event: Any, recorded_gradients: tuple[Story, Reference]) -> None:
    """The catalog's text about the gradients of an event agrees with a recorded run."""
    if event.gradients in ELSEWHERE or event.name == "on_checkpoint_load":
        assert event.gradients in ELSEWHERE or event.gradients == "none"
        return
    recorded, reference = recorded_gradients
    firings = [args for args in calls_of(recorded, event.name) if args.get("phase") != "validation"]
    assert firings
    for index, args in enumerate(firings):
        assert FACTS[event.gradients](Firing(args, reference, index)), f"{event.name}: {event.gradients}"


def test_the_live_loss_has_a_graph() -> None:
    """on_before_backward gets the undivided loss with its graph; all other events get a plain float."""
    trainer = trainer_of(2, accumulate=2)
    seen: list[bool] = []
    trainer.on("before_backward")(lambda loss: seen.append(loss.requires_grad))
    trainer.train()
    assert seen == [True, True]
