"""The catalogue tells the truth: order, arguments and the state of the gradients, compared with recorded runs."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import StepContext, StopTraining, Trainer, get_trainer
from hookline.core.catalog import ARGUMENTS, CATALOG

Story = list[tuple[str, dict[str, Any]]]
Grads = dict[str, torch.Tensor]

MICRO = ["on_train_batch_start", "on_forward", "on_before_backward", "on_after_backward"]
READY = ["on_gradients_ready", "on_update"]
OPTIMIZER = ["on_before_optimizer_step", "on_after_optimizer_step"]
DONE = ["on_train_batch_end", "on_step_end"]
STEP = [*MICRO, *READY, *OPTIMIZER, *DONE]
VALIDATION_BATCH = ["on_validation_batch_start", "on_forward", "on_validation_batch_end"]


def make_model() -> torch.nn.Sequential:
    """Two layers, the same every time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def make_batches(count: int, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same batches every time."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator)) for _ in range(count)
    ]


def make_trainer(batches: int = 2, lr: float = 0.1, **options: Any) -> Trainer:
    """A trainer that writes nothing unless told otherwise."""
    model = options.pop("model", None) or make_model()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    options = {
        "record": False,
        "console": False,
        "loss_fn": torch.nn.functional.mse_loss,
        "sanity_batches": 0,
        **options,
    }
    return get_trainer("simple", model, options.pop("data", None) or make_batches(batches), optimizer, "cpu", **options)


def grads_now(model: torch.nn.Module) -> Grads:
    """Copies of the gradients that are there."""
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def listen(trainer: Trainer) -> Story:
    """Register a function that names everything at every event; what they hear goes into one list."""
    story: Story = []
    for event in CATALOG.values():
        trainer.hooks.register(
            witness(event.name, event.argument_names, story, trainer.model), event.name, event=event.name
        )
    return story


def witness(event: str, arguments: list[str], story: Story, model: torch.nn.Module) -> Callable[..., Any]:
    """A function whose signature names all the arguments of an event."""

    def hear(**values: Any) -> Any:
        if event == "on_forward" and values["name"] != "0":
            return None
        told = {"gradients": grads_now(model), "training": model.training, **values}
        if isinstance(values.get("state"), dict):
            told["status"] = values["state"].get("status")
        if "metrics" in values:
            told["metrics"] = dict(values["metrics"])
        if "grads" in values:
            told["grads"] = {name: grad.clone() for name, grad in values["grads"].items()}
        story.append((event, told))
        return values.get("grads")

    kind = inspect.Parameter.KEYWORD_ONLY
    hear.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in arguments])  # type: ignore[attr-defined]
    return hear


def names(story: Story) -> list[str]:
    """The events alone."""
    return [event for event, _ in story]


def told_at(story: Story, event: str) -> list[dict[str, Any]]:
    """What was told at every firing of one event."""
    return [told for name, told in story if name == event]


# ---- the order ---------------------------------------------------------------------------------------------


@pytest.mark.req("001-17", "000-17", "000-27", "004-14")
def test_a_plain_run() -> None:
    """Epochs hold batches, a batch holds its step, and forward hooks fire before the loss."""
    trainer = make_trainer(2, max_epochs=2)
    story = listen(trainer)
    trainer.train()
    epoch = ["on_epoch_start", *STEP, *STEP, "on_epoch_end"]
    assert names(story) == ["on_train_start", *epoch, *epoch, "on_train_end"]


@pytest.mark.req("004-21", "004-23", "002-67")
def test_a_run_with_everything() -> None:
    """Clip, validation and checkpoint come where the catalogue's rows stand: first firings are in its order."""
    trainer = make_trainer(2, val_dataloader=make_batches(2), max_grad_norm=0.1, record=True)
    trainer.add_checkpointing()
    story = listen(trainer)
    trainer.train()
    step = [*MICRO, *READY, "on_gradient_clip", *OPTIMIZER, *DONE]
    validation = ["on_validation_start", *VALIDATION_BATCH, *VALIDATION_BATCH, "on_validation_end"]
    end = ["on_epoch_end", "on_checkpoint_save", "on_train_end"]
    assert names(story) == ["on_train_start", "on_epoch_start", *step, *step, *validation, *end]
    heard = list(dict.fromkeys(names(story)))
    assert heard == [name for name in CATALOG if name in heard]
    assert set(CATALOG) - set(heard) == {"on_step_skipped", "on_checkpoint_load", "on_exception"}


def test_accumulation_with_a_short_last_window() -> None:
    """Three batches in windows of two: the step's events fire after the second batch and after the last."""
    trainer = make_trainer(3, accumulate=2)
    story = listen(trainer)
    trainer.train()
    window_open = [*MICRO, "on_train_batch_end"]
    assert names(story) == [
        "on_train_start", "on_epoch_start", *window_open, *STEP, *STEP, "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    steps = [told["step"] for name, told in story if name == "on_train_batch_end"]
    assert steps == [1, 1, 2]


def test_several_optimizers() -> None:
    """One backward and one chain; each optimizer has its pair of events, in list order."""
    model = make_model()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.1 * (index + 1)) for index in (0, 2)]
    trainer = make_trainer(1, model=model, optimizer=optimizers)
    story = listen(trainer)
    trainer.train()
    step = [*MICRO, *READY, *OPTIMIZER, *OPTIMIZER, *DONE]
    assert names(story) == ["on_train_start", "on_epoch_start", *step, "on_epoch_end", "on_train_end"]
    before = told_at(story, "on_before_optimizer_step")
    assert [told["optimizer_idx"] for told in before] == [0, 1]
    assert [told["optimizer"] for told in before] == optimizers


def test_a_step_that_amp_skipped() -> None:
    """Under fp16 a non-finite gradient gives on_step_skipped in the place of on_after_optimizer_step, and no chain."""
    batches = make_batches(2)
    batches[0] = (batches[0][0], torch.full((4, 1), math.inf))
    trainer = make_trainer(data=batches, precision="fp16")
    before = [param.clone() for param in trainer.model.parameters()]
    story = listen(trainer)
    moved = []
    trainer.on("step_end")(lambda: moved.append(not torch.equal(before[0], next(trainer.model.parameters()))))
    trainer.train()
    skipped = [*MICRO, "on_gradients_ready", "on_before_optimizer_step", "on_step_skipped", *DONE]
    assert names(story) == ["on_train_start", "on_epoch_start", *skipped, *STEP, "on_epoch_end", "on_train_end"]
    assert moved == [False, True]
    told = told_at(story, "on_step_skipped")[0]
    assert told["reason"] == "non-finite gradients under GradScaler"
    assert told["gradients"] and not torch.isfinite(told["gradients"]["0.weight"]).all()
    assert [event["kind"] for event in trainer.record.events if event["kind"] == "step_skipped"] == ["step_skipped"]  # type: ignore[attr-defined]


def test_validation_every_few_steps() -> None:
    """Validation due at a step comes after that step's on_step_end and carries its number."""
    trainer = make_trainer(3, val_dataloader=make_batches(1), validate_every=2)
    story = listen(trainer)
    trainer.train()
    validation = ["on_validation_start", *VALIDATION_BATCH, "on_validation_end"]
    assert names(story) == [
        "on_train_start", "on_epoch_start", *STEP, *STEP, *validation, *STEP, "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    assert {told["step"] for name, told in story if "validation" in name} == {2}


@pytest.mark.req("004-23")
def test_a_checkpoint_at_a_step() -> None:
    """On a checkpoint step on_step_end comes first, then on_checkpoint_save with the same number."""
    trainer = make_trainer(3, record=True)
    trainer.add_checkpointing(save_every_n_epochs=None, save_every_n_steps=2)
    story = listen(trainer)
    trainer.train()
    assert names(story) == [
        "on_train_start", "on_epoch_start", *STEP, *STEP, "on_checkpoint_save", *STEP, "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    told = told_at(story, "on_checkpoint_save")[0]
    assert told["step"] == 2
    assert Path(told["checkpoint_path"]).parent == Path(told["path"])
    assert (Path(told["checkpoint_path"]) / "manifest.json").is_file()


def test_a_resumed_run(tmp_path: Path) -> None:
    """Loading comes before on_train_start, which then says resumed."""
    first = make_trainer(2, record=True)
    first.add_checkpointing()
    first.train()
    trainer = make_trainer(2, max_epochs=2)
    story = listen(trainer)
    trainer.fit(resume=first.run_dir)
    assert names(story) == [
        "on_checkpoint_load", "on_train_start", "on_epoch_start", *STEP, *STEP, "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    assert told_at(story, "on_train_start")[0]["resumed"] is True
    assert told_at(story, "on_train_start")[0]["step"] == 2
    assert told_at(story, "on_epoch_start")[0]["epoch"] == 1


@pytest.mark.parametrize("event", ["on_train_batch_start", "on_after_backward", "on_step_end"])
@pytest.mark.parametrize("way", ["raise", "ask"])
def test_a_stop(event: str, way: str) -> None:
    """A stop from any event completes the step, everybody hears the rest of it, and only then the run ends."""
    trainer = make_trainer(3)

    def stop(trainer: Trainer) -> None:
        if way == "raise":
            raise StopTraining("enough")
        trainer.request_stop("enough", by="stop")

    trainer.hooks.register(stop, event=event)
    story = listen(trainer)
    trainer.train()
    assert names(story) == ["on_train_start", "on_epoch_start", *STEP, "on_train_end"]
    assert told_at(story, "on_train_end")[0]["reason"] == "stopped by stop: enough"
    assert told_at(story, "on_train_end")[0]["status"] == "completed"


@pytest.mark.req("002-69")
def test_a_run_that_fails() -> None:
    """The event in which it failed is the last of its step; on_exception and on_train_end follow."""
    trainer = make_trainer(3)

    def fail(step: int) -> None:
        if step == 2:
            raise ValueError("broken")

    trainer.hooks.register(fail, event="on_gradients_ready", on_error="raise")
    story = listen(trainer)
    with pytest.raises(ValueError, match="broken") as failure:
        trainer.train()
    half = [*MICRO, "on_gradients_ready"]
    assert names(story) == ["on_train_start", "on_epoch_start", *STEP, *half, "on_exception", "on_train_end"]
    assert told_at(story, "on_exception")[0]["exception"] is failure.value
    assert [told["status"] for told in (*told_at(story, "on_exception"), *told_at(story, "on_train_end"))] == [
        "error"
    ] * 2


def test_training_step_outside_of_a_run() -> None:
    """training_step() fires the events of its batch and of its step, and no others."""
    trainer = make_trainer(1)
    story = listen(trainer)
    trainer.training_step(make_batches(1)[0])
    assert names(story) == STEP


# ---- the arguments -----------------------------------------------------------------------------------------

SOMETHING = object()
TYPES: dict[str, Any] = {
    "trainer": Trainer, "model": torch.nn.Module, "optimizer": torch.optim.Optimizer, "optimizer_idx": int,
    "device": torch.device, "config": SOMETHING, "step": int, "epoch": int, "batch": tuple, "batch_idx": int,
    "dataloader_idx": int, "dataloader_name": str, "loader_idx": int, "loader_name": str, "tokens_seen": int,
    "lr": float, "loss": float, "metrics": dict, "state": dict, "ctx": StepContext, "grad_norm": float, "grads": dict,
    "reason": str, "checkpoint_path": str, "path": str, "resumed": bool, "exception": BaseException, "name": str,
    "module": torch.nn.Module, "inputs": tuple, "output": torch.Tensor, "phase": str, "kwargs": dict,
    "live_output": torch.Tensor, "seconds": float, "memory": int,
}  # fmt: skip


def test_every_argument_has_a_type_here() -> None:
    """An argument that the catalogue gains must be given a type in this test."""
    assert set(ARGUMENTS) <= set(TYPES)


@pytest.fixture(scope="module")
def whole_story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Every event of the catalogue, heard in three runs: one with everything, one skipped step, one failure."""
    where: dict[str, Any] = {"record": True, "output_dir": str(tmp_path_factory.mktemp("runs"))}
    first = make_trainer(3, accumulate=2, val_dataloader=make_batches(2), max_grad_norm=0.1, **where)
    first.add_checkpointing()
    story = listen(first)
    first.train()
    second = make_trainer(2, max_epochs=2)
    more = listen(second)
    second.on("gradients_ready", name="guard")(lambda trainer: trainer.skip_step("a guard said so"))
    second.on("epoch_end", name="bad", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        second.fit(resume=first.run_dir)
    return story + more


@pytest.mark.parametrize("event", CATALOG.values(), ids=lambda event: event.name)
def test_every_argument_of_every_event(event: Any, whole_story: Story) -> None:
    """At each firing of each event, each argument its row promises is there and of the right type."""
    firings = told_at(whole_story, event.name)
    assert firings
    for told in firings:
        for name in event.argument_names:
            wanted = torch.Tensor if event.attributes.get(name) == "live_loss" else TYPES[name]
            wanted = dict if event.name == "on_update" and name == "state" else wanted
            assert name in told
            assert told[name] is not None
            assert wanted is SOMETHING or isinstance(told[name], wanted), f"{name} is a {type(told[name])}"


def test_what_the_arguments_say(whole_story: Story) -> None:
    """Counters, aliases and values of one run agree with each other."""
    story = whole_story[: names(whole_story).index("on_train_end") + 1]
    assert [told["batch_idx"] for told in told_at(story, "on_train_batch_start")] == [0, 1, 2]
    assert [told["step"] for told in told_at(story, "on_step_end")] == [1, 2]
    assert all(
        told["loader_name"] == told["dataloader_name"] == "train" for told in told_at(story, "on_train_batch_end")
    )
    assert all(told["loader_name"] == "val" for told in told_at(story, "on_validation_batch_end"))
    assert [told["batch_idx"] for told in told_at(story, "on_validation_batch_end")] == [0, 1]
    assert [told["phase"] for told in told_at(story, "on_forward")] == ["train"] * 3 + ["validation"] * 2
    assert [told["training"] for told in told_at(story, "on_forward")] == [True] * 3 + [False] * 2
    losses = [told["loss"] for told in told_at(story, "on_train_batch_end")]
    assert [told["loss"].item() for told in told_at(story, "on_before_backward")] == losses
    assert [told["metrics"] for told in told_at(story, "on_train_batch_end")] == [{"loss": loss} for loss in losses]
    ends = told_at(story, "on_step_end")
    assert ends[0]["loss"] == pytest.approx((losses[0] + losses[1]) / 2)
    assert ends[1]["loss"] == pytest.approx(losses[2])
    clips = [told["grad_norm"] for told in told_at(story, "on_gradient_clip")]
    assert [told["grad_norm"] for told in ends] == clips
    assert all(norm > 0.1 for norm in clips)


# ---- what is true of the gradients -------------------------------------------------------------------------


def close(first: Grads, second: Grads) -> bool:
    """Whether two sets of gradients are the same up to rounding."""
    return first.keys() == second.keys() and all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


class Reference:
    """The same run, worked out by hand: windows of two, gradients doubled by a link, then clipped, then SGD."""

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


class Seen:
    """One firing with its micro-batch, its step and the reference, for the facts below to look at."""

    def __init__(self, told: dict[str, Any], reference: Reference, index: int) -> None:
        self.told, self.reference = told, reference
        self.gradients: Grads = told["gradients"]
        self.batch, self.step = told.get("batch_idx", index), told["step"] - 1

    def is_(self, wanted: Grads) -> bool:
        return close(self.gradients, wanted)


SO_FAR = "those of the window so far; none at its first micro-batch"
FACTS: dict[str, Callable[[Seen], bool]] = {
    "none": lambda seen: not seen.gradients,
    SO_FAR: lambda seen: seen.is_(seen.reference.before[seen.batch]),
    "as at on_train_batch_start": lambda seen: seen.is_(seen.reference.before[seen.batch]),
    "this micro-batch's share added: maybe partial, scaled, local to the rank": lambda seen: seen.is_(
        seen.reference.partial[seen.batch]
    ),
    "complete, unscaled, reduced over ranks; before the update chain": lambda seen: seen.is_(
        seen.reference.complete[seen.step]
    ),
    "complete, unscaled, reduced; as the links before this one left them": lambda seen: seen.is_(
        {name: grad * 2 for name, grad in seen.reference.complete[seen.step].items()}
    ),
    "clipped; grad_norm is the norm before it": lambda seen: (
        seen.is_(seen.reference.final[seen.step])
        and math.isclose(seen.told["grad_norm"], seen.reference.norms[seen.step], rel_tol=1e-5)
    ),
    "final: what the optimizer uses": lambda seen: seen.is_(seen.reference.final[seen.step]),
    "still there, as the optimizer used them": lambda seen: seen.is_(seen.reference.final[seen.step]),
    "gone if a step was made, else those of the window so far": lambda seen: (
        seen.is_(seen.reference.partial[0]) if seen.batch == 0 else not seen.gradients
    ),
    "gone; ctx.grad_norm still knows their norm": lambda seen: (
        not seen.gradients and math.isclose(seen.told["grad_norm"], seen.reference.norms[seen.step], rel_tol=1e-5)
    ),
}
ELSEWHERE = {
    "still there, unused": "test_a_step_that_amp_skipped",
    "unknown": "on_exception and on_train_end promise nothing",
}


@pytest.fixture(scope="module")
def gradient_story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Story, Reference]:
    """A run of two windows, one of them short, with a doubling link, a clip, validation and a checkpoint."""
    where: dict[str, Any] = {"record": True, "output_dir": str(tmp_path_factory.mktemp("runs"))}
    batches = make_batches(3)
    trainer = make_trainer(
        data=batches, accumulate=2, max_grad_norm=0.1, lr=0.5, val_dataloader=make_batches(1), **where
    )
    trainer.add_checkpointing()
    trainer.on("update", name="double")(lambda grads: {name: grad * 2 for name, grad in grads.items()})
    story = listen(trainer)
    trainer.train()
    reference = Reference(batches, 0.1, 0.5)
    after = dict(trainer.model.named_parameters())
    assert all(torch.allclose(after[name], param, atol=1e-6) for name, param in reference.model.named_parameters())
    return story, reference


@pytest.mark.req("004-15", "004-31", "000-27")
@pytest.mark.parametrize("event", CATALOG.values(), ids=lambda event: event.name)
def test_every_gradients_cell(event: Any, gradient_story: tuple[Story, Reference]) -> None:
    """What a row says about the gradients is what a recorded run shows at that event."""
    if event.gradients in ELSEWHERE or event.name == "on_checkpoint_load":
        assert event.gradients in ELSEWHERE or event.gradients == "none"
        return
    story, reference = gradient_story
    firings = [told for told in told_at(story, event.name) if told.get("phase") != "validation"]
    assert firings
    for index, told in enumerate(firings):
        assert FACTS[event.gradients](Seen(told, reference, index)), f"{event.name}: {event.gradients}"


def test_the_live_loss_carries_a_graph() -> None:
    """on_before_backward gets the undivided loss with its graph; everybody else a plain float."""
    trainer = make_trainer(2, accumulate=2)
    seen: list[bool] = []
    trainer.on("before_backward")(lambda loss: seen.append(loss.requires_grad))
    trainer.train()
    assert seen == [True, True]
