"""Event arguments are computed when a hook names them, and stored only as long as they are right."""

import math
import pickle
from copy import copy, deepcopy
from dataclasses import asdict, fields, replace
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch
from builders import make_batches, make_model, make_trainer

from hookline import HookManager, SimpleTrainer, StepContext, Trainer, TrainingHook
from hookline.ranks import Ranks


def trainer_of(batches: int = 3, **options: Any) -> SimpleTrainer:
    """Make a trainer of one layer, and of a number of batches."""
    return make_trainer(model=make_model(3, 1), data=make_batches(batches), **options)


def test_before_the_first_batch() -> None:
    """There is no loss yet, and that is nan."""
    trainer = trainer_of()
    args = trainer.event_args
    assert math.isnan(args.loss)
    assert (args.step, args.epoch, args.batch_idx, trainer.progress.batches) == (0, 0, -1, 0)


@pytest.mark.req("004-12", "004-13", "004-17")
def test_the_step_context() -> None:
    """Every step brings a StepContext with the seven fields, the live model and the live optimizer."""
    trainer = trainer_of()
    seen: list[StepContext] = []

    @trainer.on("step_end")
    def watch(ctx: StepContext) -> None:
        assert isinstance(ctx.loss, float) and isinstance(ctx.grad_norm, float)
        seen.append(ctx)

    trainer.train()
    assert [ctx.step for ctx in seen] == [1, 2, 3]
    assert all(ctx.model is trainer.model and ctx.optimizer is trainer.optimizers[0] for ctx in seen)
    assert all(ctx.lr == 0.1 for ctx in seen)
    assert all(ctx.grad_norm > 0 and ctx.loss > 0 for ctx in seen)  # still readable: they were read in time


@pytest.mark.req("004-12")
def test_the_values_of_the_step_context() -> None:
    """Loss, gradient norm before clipping, learning rate and tokens are those of the step, as a plain loop has them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    data = [torch.randn(2, 4, 3) for _ in range(3)]
    plain = deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    expected = []
    for step, batch in enumerate(data, 1):
        loss = plain(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.param_groups[0]["lr"] = 0.1 / step
        optimizer.step()
        expected.append((step, loss.item(), norm.item(), 0.1 / step, 8 * step))
    step_fn = lambda model, batch: model(batch).pow(2).mean()  # noqa: E731
    trainer = make_trainer(model=model, data=data, max_grad_norm=0.05, step_fn=step_fn, count_tokens=lambda batch: 8)
    trainer.schedulers = [torch.optim.lr_scheduler.LambdaLR(trainer.optimizers[0], lambda done: 1 / (done + 1))]
    seen: list[Any] = []
    trainer.on("step_end")(lambda ctx: seen.append((ctx.step, ctx.loss, ctx.grad_norm, ctx.lr, ctx.tokens_seen)))
    trainer.train()
    assert len(seen) == 3 and all(norm > 0.05 for _, _, norm, *_ in expected)
    for found, wanted in zip(seen, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


RUNS: list[dict[str, Any]] = [
    {}, {"max_grad_norm": 0.01}, {"accumulate": 2}, {"accumulate": 2, "max_grad_norm": 0.01},
    {"accumulate": 3, "loss_weight": "samples"}, {"precision": "fp16"},
]  # fmt: skip


def run_with_rates(read: Any, **options: Any) -> Trainer:
    """Train seven batches with a rate that changes at every step and a third step that is skipped; `read` is a hook."""
    trainer = trainer_of(7, validate_every=2, **options)
    trainer.val_loaders = {"val": [(torch.ones(2, 3), torch.ones(2, 1))]}
    trainer.schedulers.append(torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.5))
    trainer.on("gradients_ready", at=3, name="skip")(lambda trainer: trainer.skip_step("for the test"))
    trainer.add_hook(read)
    return trainer


def numbers(ctx: StepContext) -> tuple[float, ...]:
    return ctx.step, ctx.loss, ctx.grad_norm, ctx.lr, ctx.tokens_seen


class ReadsAtOnce(TrainingHook):
    on_error = "raise"

    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def on_step_end(self, ctx: StepContext) -> None:
        self.seen.append(numbers(ctx))


@pytest.mark.req("004-39")
@pytest.mark.parametrize("where", ["validation_batch_end", "validation_end", "train_batch_start", "after", "thread"])
@pytest.mark.parametrize("options", RUNS, ids=str)
def test_a_kept_context_stays_true(options: dict[str, Any], where: str) -> None:
    """Its numbers are those of its step, in a later event, after the next steps, after the run, in another thread."""
    at_once = ReadsAtOnce()
    run_with_rates(at_once, **options).train()

    class Keeps(TrainingHook):
        on_error = "raise"

        def __init__(self) -> None:
            self.kept: list[StepContext] = []
            self.seen: list[tuple[float, ...]] = []

        def on_step_end(self, ctx: StepContext) -> None:
            self.kept.append(ctx)

        def read(self) -> None:
            self.seen += map(numbers, self.kept[len(self.seen) :])

    keeps = Keeps()
    trainer = run_with_rates(keeps, **options)
    if where not in ("after", "thread"):
        trainer.on(where, name="reads", on_error="raise")(lambda: keeps.read())
    trainer.train()
    if where == "thread":
        reader = Thread(target=keeps.read)
        reader.start()
        reader.join()
    keeps.read()  # what no event has read
    assert keeps.seen == at_once.seen
    assert len({row[1] for row in keeps.seen}) == len(keeps.seen)
    norms = [row[2] for row in keeps.seen if math.isfinite(row[2])]
    # With a GradScaler the first gradients overflow.
    assert len(set(norms)) == len(norms) == len(keeps.seen) - 2 * ("precision" in options)


@pytest.mark.req("004-39")
def test_a_context_read_by_another_thread_during_its_event_and_while_a_hook_validates() -> None:
    """A validation inside the event runs other batches, and a thread may read at any moment."""
    at_once = ReadsAtOnce()
    run_with_rates(at_once).train()
    seen: list[tuple[float, ...]] = []

    class Inside(TrainingHook):
        on_error = "raise"

        def on_step_end(self, ctx: StepContext, trainer: Trainer) -> None:
            self.ctx = ctx
            trainer.validate()

        def on_validation_batch_end(self) -> None:
            if self.ctx.step > len(seen):
                reader = Thread(target=lambda: seen.append(numbers(self.ctx)))
                reader.start()
                reader.join()

    run_with_rates(Inside()).train()
    assert seen == at_once.seen


@pytest.mark.req("004-39", "004-11")
def test_a_context_is_copied_like_any_dataclass() -> None:
    """copy, deepcopy, pickle, replace and asdict work at once and later, and give plain values."""
    made: list[Any] = []
    kept: list[StepContext] = []

    def every_way(ctx: StepContext) -> None:
        made.append((replace(ctx, step=10), asdict(ctx), copy(ctx), deepcopy(ctx), pickle.loads(pickle.dumps(ctx))))

    trainer = trainer_of()
    trainer.on("step_end", name="now", on_error="raise")(lambda ctx: every_way(ctx))
    trainer.on("step_end", name="later", on_error="raise")(lambda ctx: kept.append(ctx))
    trainer.train()
    for ctx in list(kept):
        every_way(ctx)
    for ctx, (replaced, as_dict, *copies) in zip([*kept, *kept], made, strict=True):
        assert numbers(replaced) == (10, *numbers(ctx)[1:])
        assert tuple(as_dict) == tuple(field.name for field in fields(StepContext))
        assert (as_dict["loss"], as_dict["grad_norm"]) == (ctx.loss, ctx.grad_norm)
        assert all(numbers(copied) == numbers(ctx) and type(copied) is StepContext for copied in copies)
        assert copies[0] == ctx == replace(ctx) != replaced
    assert f"loss={kept[0].loss!r}" in repr(kept[0])


class Probe:
    """Shows by a weak reference to it how long an object lives that holds it."""


def test_what_a_kept_context_holds() -> None:
    """Neither the graph of its loss nor the gradients of its step; and gradients of no step that nobody kept."""
    trainer = trainer_of(4)
    kept: list[StepContext] = []
    gradients: list[Any] = []
    graphs: list[Any] = []
    alive: list[int] = []

    @trainer.on("before_backward", name="graph")
    def attach_to_graph(loss: torch.Tensor) -> None:
        graphs.append(ref(probe := Probe()))  # a node of the graph itself takes no weak reference
        loss.grad_fn.metadata["probe"] = probe  # type: ignore[union-attr]

    trainer.on("gradients_ready", name="grads")(lambda grads: gradients.append(ref(grads["0.weight"])))
    trainer.on("step_end", at=2, name="keeps")(lambda ctx: kept.append(ctx))
    trainer.on("train_batch_start", name="count")(lambda: alive.append(sum(grad() is not None for grad in gradients)))
    trainer.train()
    assert alive == [0, 0, 0, 0]
    assert [graph() for graph in graphs] == [None] * 4
    assert kept[0].grad_norm > 0


def test_a_kept_window_stays_true() -> None:
    """`trainer.window()` of a step is not emptied when the next one begins."""
    trainer = trainer_of(4, accumulate=2)
    kept: list[Any] = []
    trainer.on("step_end")(lambda trainer: kept.append(trainer.window()))
    trainer.train()
    assert [[part.batch_idx for part in window] for window in kept] == [[0, 1], [2, 3]]


def test_kept_metrics_stay_true() -> None:
    """Every event has a dict, so that one a hook keeps is not overwritten: of batches and of validations."""
    trainer = trainer_of(3, validate_every=1)
    trainer.val_loaders = {"val": [(torch.ones(2, 3), torch.ones(2, 1))]}
    kept: list[dict[str, Any]] = []
    copies: list[dict[str, Any]] = []
    for event in ("train_batch_end", "validation_batch_end", "validation_end", "eval_end"):
        trainer.on(event, name=event)(lambda metrics: (kept.append(metrics), copies.append(dict(metrics))))
    trainer.train()
    assert kept == copies
    assert len({id(metrics) for metrics in kept}) == len(kept) == 12


def test_the_norm_is_that_of_the_gradients_before_clipping() -> None:
    """At the step's end it is still known, with a clip link and without one."""
    norms: dict[bool, list[float]] = {}
    for clip in (False, True):
        trainer = trainer_of(1, max_grad_norm=0.01 if clip else None)
        norms[clip] = []
        trainer.on("step_end")(lambda ctx, clip=clip: norms[clip].append(ctx.grad_norm))
        trainer.train()
    assert norms[False] == pytest.approx(norms[True])
    assert norms[False][0] > 0.01


@pytest.mark.req("002-43")
def test_metrics_are_shared_recorded_and_protected() -> None:
    """A later hook sees an earlier one's key, the record stores the numbers, and no hook changes another's key."""
    trainer = trainer_of(1)
    seen: list[dict[str, Any]] = []

    @trainer.on("train_batch_end", name="adds")
    def adds(metrics: dict[str, Any]) -> None:
        metrics["mine"], metrics["tensor"], metrics["note"] = 3.5, torch.tensor(2.0), "text is not recorded"

    @trainer.on("train_batch_end", name="removes")
    def removes(metrics: dict[str, Any]) -> None:
        del metrics["mine"]
        metrics["loss"] = 0.0

    trainer.on("train_batch_end", name="looks")(lambda metrics: seen.append(dict(metrics)))
    trainer.train()
    assert seen[0]["mine"] == 3.5
    assert seen[0]["loss"] > 0
    recorded = {key: value for line in trainer.record.metrics for key, value in line.items()}
    assert (recorded["mine"], recorded["tensor"]) == (3.5, 2.0)
    assert "note" not in recorded
    assert [event["hook"] for event in trainer.record.events if event["kind"] == "hook_overruled"] == ["removes"]


class SetsLoss(TrainingHook):
    """Replaces the loss of each validation by its number, and keeps what was measured."""

    def __init__(self) -> None:
        self.measured: list[float] = []

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.measured.append(metrics["val/loss"])
        metrics["val/loss"] = float(len(self.measured))


class SetsEvalLoss(SetsLoss):
    """The same in the other spelling."""

    on_validation_end = None  # type: ignore[assignment]

    def on_eval_end(self, metrics: dict[str, Any]) -> None:
        self.measured.append(metrics["eval/loss"])
        metrics["eval/loss"] = float(len(self.measured))


def wrote(trainer: Trainer) -> list[tuple[Any, ...]]:
    """Return who replaced which metric, where, and both values, as the record has them."""
    events = [event for event in trainer.record.events if event["kind"] == "hook_wrote"]
    return [tuple(event[key] for key in ("hook", "on", "what", "step", "old", "new")) for event in events]


@pytest.mark.req("002-72")
@pytest.mark.parametrize("kind", [SetsLoss, SetsEvalLoss])
def test_a_hook_can_replace_a_metric_of_a_validation(kind: type[SetsLoss], capsys: pytest.CaptureFixture[str]) -> None:
    """Hooks of either spelling, built-ins, schedulers and the record get the new value; the record has both."""
    hook, seen = kind(), []
    trainer = trainer_of(2, val_dataloader=make_batches(1), max_epochs=6, lr=0.1)
    trainer.schedulers = [torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizers[0], patience=1)]
    trainer.add_console_logging()
    trainer.hooks.register("early_stopping", monitor="val/loss", patience=3)
    trainer.add_hook(hook, "sets")
    trainer.on("validation_end", name="val")(lambda metrics: seen.append(metrics["val/loss"]))
    trainer.on("eval_end", name="eval")(lambda metrics: seen.append(metrics["eval/loss"]))
    trainer.train()
    assert trainer.record.run["reason"] == "stopped by early_stopping: val/loss has not improved on 1 for 3 checks"
    assert seen == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0] and trainer.lr == pytest.approx(0.01)
    assert [line["val/loss"] for line in trainer.record.metrics if "val/loss" in line] == [1.0, 2.0, 3.0, 4.0]
    assert "validation  val/loss 4.0000" in capsys.readouterr().out
    assert wrote(trainer) == [
        ("sets", "on_validation_end", "val/loss", 2 * number, hook.measured[number - 1], float(number))
        for number in (1, 2, 3, 4)
    ]


@pytest.mark.req("002-72")
def test_a_number_is_replaced_by_a_number_alone() -> None:
    """What is removed, or becomes something else, is put back and reported."""
    trainer = trainer_of(1, val_dataloader=make_batches(1))
    seen: list[dict[str, Any]] = []
    trainer.on("validation_end", name="removes")(lambda metrics: metrics.pop("val/loss"))
    trainer.on("validation_end", name="writes")(lambda metrics: metrics.update({"val/loss": "low"}))
    trainer.on("validation_end", name="looks")(lambda metrics: seen.append(dict(metrics)))
    trainer.train()
    assert isinstance(seen[0]["val/loss"], float) and wrote(trainer) == []
    reverted = [event["hook"] for event in trainer.record.events if event["kind"] == "hook_overruled"]
    assert reverted == ["removes", "writes"]


def test_with_several_ranks_metrics_of_a_validation_are_not_replaced() -> None:
    """A rank whose hook sets another value than the others' would stop, or schedule, alone."""
    hook = SetsLoss()
    trainer = trainer_of(1, val_dataloader=make_batches(1))
    trainer.add_hook(hook)
    trainer.hooks.failures.ranks = Ranks(0, 2)
    assert trainer.validate()["val/loss"] == hook.measured[0] != 1.0
    assert trainer.hooks.entry("sets_loss").overruled == {"on_validation_end": 1}


@pytest.mark.req("002-72")
def test_a_loop_of_ones_own_takes_replaced_metrics() -> None:
    """Fired by hand, the event changes the dict that was passed, and the manager's run has both values."""
    manager, metrics = HookManager([SetsLoss()]), {"val/loss": 0.5}
    manager.on_train_start()
    manager.on_validation_end(metrics=metrics, step=3)
    assert metrics == {"val/loss": 1.0}
    assert wrote(manager.run) == [("sets_loss", "on_validation_end", "val/loss", 3, 0.5, 1.0)]


def test_what_a_hook_adds_to_metrics_before_it_removes_itself_is_recorded() -> None:
    """A hook that is called once may be gone when its event is over."""
    trainer = trainer_of(1)

    @trainer.on("train_batch_end", name="once")
    def once(metrics: dict[str, Any], trainer: Trainer) -> None:
        metrics["mine"] = 1.0
        trainer.remove_hook("once")

    trainer.train()
    assert any(line.get("mine") == 1.0 for line in trainer.record.metrics)


def test_the_training_loss_is_known_inside_of_everything_that_runs_other_batches() -> None:
    """A hook that runs the model inside a validation sees the loss of the last training batch in the state."""
    trainer, losses = trainer_of(1), list[float]()
    trainer.on("train_batch_end", name="train")(lambda loss: losses.append(loss))

    @trainer.on("validation_batch_end", name="look")
    def look(trainer: Trainer) -> None:
        with trainer.inference():
            losses.append(trainer.refresh_state()["latest_loss"])

    trainer.train()
    trainer.validate([(torch.ones(4, 3), torch.full((4, 1), 100.0))])
    assert len(losses) == 2 and losses[0] == losses[1]


def test_metrics_survive_a_validation_in_the_same_event() -> None:
    """A hook that validates in between does not lose what others added."""
    trainer = trainer_of(1)
    trainer.on("train_batch_end", name="adds")(lambda metrics: metrics.update(mine=1.0))
    trainer.on("train_batch_end", name="validates")(
        lambda trainer: trainer.validate(list(trainer.train_loaders["train"]))
    )
    trainer.on("validation_batch_end", name="looks")(lambda metrics: None)
    trainer.train()
    assert any(line.get("mine") == 1.0 for line in trainer.record.metrics)


def test_the_clock_starts_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between making a trainer and training is not the run's; earlier attempts are."""
    now = [100.0]
    monkeypatch.setattr("hookline.run.progress.monotonic", lambda: now[0])
    progress = trainer_of().progress
    now[0] = 500.0
    progress.begin_run(None)
    now[0] = 507.0
    assert progress.seconds == 7.0
    progress.load_state_dict({**progress.state_dict(), "seconds": 3.0}, None)
    assert progress.seconds == 10.0


def test_only_single_numbers_of_what_hooks_add_to_metrics_are_recorded() -> None:
    """Hooks may pass each other anything; a NumPy string has one element and is not a number."""
    numpy = pytest.importorskip("numpy")
    trainer = trainer_of(1)

    @trainer.on("train_batch_end")
    def add(metrics: dict[str, Any]) -> None:
        metrics.update(a=1, b=2.0, c="x", d=torch.ones(1), e=torch.ones(2), n=numpy.int64(3), word=numpy.str_("good"))

    trainer.train()
    (row,) = trainer.record.metrics
    assert {key: row[key] for key in "abdn"} == {"a": 1, "b": 2.0, "d": 1.0, "n": 3}
    assert row.keys().isdisjoint({"c", "e", "word"})


def test_validation_metrics_have_both_prefixes() -> None:
    """'val/…' for on_validation_end and 'eval/…' for on_eval_end; keys without a prefix stay as they are."""
    trainer = trainer_of(1)
    seen: list[Any] = []
    trainer.on("validation_end", name="val")(lambda metrics: metrics.update(other=2.0) or seen.append(sorted(metrics)))
    trainer.on("eval_end", name="eval")(lambda metrics: seen.append(sorted(metrics)))
    trainer.validate([(torch.ones(1, 3), torch.ones(1, 1))])
    assert seen == [["other", "val/loss"], ["eval/loss", "other"]]


def test_one_dictionary_that_hooks_may_write_to() -> None:
    """Keys that hooks add stay; the others are current, and train() returns the same object."""
    trainer = trainer_of(2)
    seen: list[Any] = []

    @trainer.on("train_batch_end", name="writer")
    def write(state: dict[str, Any], loss: float) -> None:
        state["mine"] = state.get("mine", 0) + 1
        seen.append((state["current_batch_idx"], state["latest_loss"] == loss, state["status"]))

    final = trainer.train()
    assert seen == [(0, True, "training"), (1, True, "training")]
    assert final is trainer.refresh_state() and final["mine"] == 2
    assert (final["status"], final["model_params"], final["model"]) == ("completed", 4, trainer.model)


@pytest.mark.req("001-41")
def test_model_params_counts_frozen_parameters_too() -> None:
    """It is the size of the model, not of what is trained."""
    trainer = trainer_of(1)
    trainer.model[0].bias.requires_grad_(False)
    seen: list[int] = []
    trainer.on("train_batch_end")(lambda state: seen.append(state["model_params"]))
    assert trainer.train()["model_params"] == 4
    assert seen == [4]


def test_losses_that_cannot_be_read_after_an_error() -> None:
    """After a device error closing events get NaN; while training continues it is an error."""
    trainer = trainer_of(2)

    def broken() -> float:
        raise RuntimeError("the device is gone")

    trainer.stats.mean_loss = broken
    with pytest.raises(RuntimeError, match="the device is gone"):
        trainer.refresh_state()
    trainer.run_status.close(failed=True)
    assert math.isnan(trainer.refresh_state()["avg_loss"])
