"""`attach` in a loop of the user's own: what each optional line adds, when events fire, and that nothing stays."""

from typing import Any

import pytest
import torch
from own_loops import Calls, Events, assert_same, batches, events_of, loss_of, make, rows_of, state_of, train
from torch import nn

import hookline
from hookline import CheckpointHook, EarlyStopping, ForwardHook, HooklineError, HookManager, StopTraining, TrainingHook

OF_STEP = ["gradients_ready", "before_optimizer_step", "after_optimizer_step"]
OBSERVERS = ["gradient_monitor", "gradient_flow", "activation_stats", "ema", "lr_monitor", "json_log"]


class Draws(ForwardHook):
    """An observer that draws random numbers and writes into what it gets."""

    modules = "*"

    def on_forward(self, output: Any) -> None:
        output.add_(torch.rand(()))


@pytest.mark.parametrize("lines", ["none", "batches", "backward", "all"])
def test_what_each_optional_line_adds(lines: str) -> None:
    """Without one, steps and forward passes are seen; `batches` adds batches and epochs, `backward` the loss."""
    model, optimizer = make()
    events, calls = Events(), Calls()
    with hookline.attach(model, optimizer, hooks=[events, calls]) as hl:
        data = hl.batches(batches(3)) if lines in ("batches", "all") else batches(3)
        train(model, optimizer, data, hl if lines in ("backward", "all") else None)
    of_loss = ["before_backward", "after_backward"] if lines in ("backward", "all") else []
    has_batches = lines in ("batches", "all")
    of_batch = [["train_batch_start"], ["train_batch_end"]] if has_batches else [[], []]
    step = [*of_batch[0], *of_loss, *OF_STEP, *of_batch[1], "step_end"]
    epoch = [["epoch_start"], ["epoch_end"]] if has_batches else [[], []]
    assert events.names() == ["train_start", *epoch[0], *step * 3, *epoch[1], "train_end"]
    assert [at for at, phase, name in calls.seen if name == "first"] == [1, 2, 3]
    assert {phase for _, phase, _ in calls.seen} == {"train"}
    rows = rows_of(hl)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(("train/loss" in row) == bool(of_loss) for row in rows)
    assert any("train/epoch_loss" in row for row in rows) == (lines == "all"), "the mean of nothing is no number"
    verdict = "healthy" if of_loss else "not judged"
    assert hl.run.record.run["outcome"] == "completed" and hl.run.record.run["verdict"]["health"] == verdict


@pytest.mark.parametrize("lines", ["none", "all"])
def test_observers_change_no_bit(lines: str) -> None:
    """Weights, running means and random streams are those of the loop without hooks."""
    model, optimizer = make()
    train(model, optimizer, batches())
    expected, next_number = state_of(model), torch.rand(())
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[*OBSERVERS, Events(), Draws()]) as hl:
        train(model, optimizer, hl.batches(batches()) if lines == "all" else batches(), hl if lines == "all" else None)
    assert_same(state_of(model), expected)
    assert torch.rand(()) == next_number


def everything_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the attributes and the hooks of a model and an optimizer."""
    objects = [*model.modules(), optimizer]
    names = [sorted(vars(each)) for each in objects]
    hooks = [len(value) for each in objects for name, value in vars(each).items() if name.endswith("_hooks") and value]
    on_parameters = [len(param._backward_hooks or ()) for param in model.parameters()]
    return [names, hooks, on_parameters, [method for each in objects for method in vars(each) if method == "step"]]


@pytest.mark.parametrize("ends", ["normally", "with an error"])
def test_nothing_stays_on_model_and_optimizer(ends: str) -> None:
    """Neither hooks nor attributes, even if the loop fails, and if hooks were there that run the model again."""
    model, optimizer = make()
    before = everything_on(model, optimizer)
    hooks: list[Any] = [*OBSERVERS, Calls(), Events(), "nan_forensics", "throughput"]
    try:
        with hookline.attach(model, optimizer, hooks=hooks) as hl:
            train(model, optimizer, hl.batches(batches()), hl)
            if ends == "with an error":
                raise ValueError("mine")
    except ValueError:
        pass
    assert everything_on(model, optimizer) == before
    train(model, optimizer, batches())
    assert hl.run.step == 6, "a step after the block is not the run's"


def test_a_step_ends_late() -> None:
    """What the loop logs and schedules after step() belongs to its step, whose learning rate is the one it used."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rates = []

    class Rates(TrainingHook):
        def on_step_end(self, step: int, lr: float, trainer: Any) -> None:
            rates.append((step, lr, trainer.lr))

    with hookline.attach(model, optimizer, hooks=[Rates()]) as hl:
        for number, batch in enumerate(batches(3), 1):
            train(model, optimizer, [batch])
            scheduler.step()
            hl.log("mine", number)
    assert rates == [(1, 0.05, 0.025), (2, 0.025, 0.0125), (3, 0.0125, 0.00625)]
    assert [(row["step"], row["mine"], row["train/lr"]) for row in rows_of(hl)] == [
        (1, 1, 0.05), (2, 2, 0.025), (3, 3, 0.0125)
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["forward", "backward", "batch", "validation", "should_stop", "save", "exit", "error"])
def test_what_ends_a_step(what: str) -> None:
    """The next forward pass that hooks see, backward pass or batch, a validation, a question, or the block's end."""
    model, optimizer = make()
    events = Events()
    batch = batches(1)[0]

    def ended() -> bool:
        return "step_end 1" in events.seen

    try:
        with hookline.attach(model, optimizer, hooks=[events, *([Calls()] if what == "forward" else [])]) as hl:
            data = hl.batches(batches(2)) if what == "batch" else iter([batch])
            train(model, optimizer, [next(data)])
            assert not ended()
            if what == "forward":
                loss_of(model, batch)
            elif what == "backward":
                hl.backward(loss_of(model, batch))
            elif what == "batch":
                next(data)
            elif what == "validation":
                with hl.validation():
                    assert ended()
            elif what == "should_stop":
                assert not hl.should_stop
            elif what == "save":
                hl.save()
            elif what == "error":
                raise ValueError("mine")
            assert ended() or what == "exit"
    except ValueError:
        assert events.names()[-3:] == ["step_end", "exception", "train_end"]
    assert ended() and [row["step"] for row in rows_of(hl)] == [1]


def test_a_step_before_an_epoch_is_not_in_it() -> None:
    """A loop may warm up before it reads batches; that step ends before the epoch begins."""
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[events := Events()]) as hl:
        train(model, optimizer, batches(1))
        train(model, optimizer, hl.batches(batches(1)), hl)
    names = [event for event in events.seen if event.startswith(("step_end", "epoch"))]
    assert names == ["step_end 1", "epoch_start 1", "step_end 2", "epoch_end 2"]


def test_validations_early_stopping_and_the_best_checkpoint() -> None:
    """What is logged inside of a validation is what these hooks read; the loop over batches ends when one stops it."""
    model, optimizer = make()
    values = iter([3.0, 2.0, 2.5, 2.75])
    events, epochs = Events(), 0
    hooks = [events, EarlyStopping("val/loss", patience=2), CheckpointHook(monitor="val/loss")]
    with hookline.attach(model, optimizer, hooks=hooks) as hl:
        while not hl.should_stop:
            train(model, optimizer, hl.batches(batches(2)), hl)
            with hl.validation():
                model.eval()
                hl.log("val/loss", torch.tensor(next(values)))
                model.train()
            epochs += 1
    assert epochs == 4 and hl.run.stopped_by == "early_stopping"
    assert hl.run.record.run["outcome"] == "stopped"
    best = [event for event in events_of(hl) if event["kind"] == "best_checkpoint"]
    assert [(event["step"], event["value"]) for event in best] == [(2, 3.0), (4, 2.0)]
    assert [row["val/loss"] for row in rows_of(hl) if "val/loss" in row] == [3.0, 2.0, 2.5, 2.75]
    one = events.names()[events.names().index("validation_start") :][:4]
    assert one[:2] == ["validation_start", "validation_end"] and "epoch_end" in one[2:]


def test_forward_passes_without_grad_are_a_validation() -> None:
    """Also if the loop does not say so: monitors of training leave them out, and they begin no step."""
    model, optimizer = make()
    calls = Calls()
    with hookline.attach(model, optimizer, hooks=[calls]) as hl:
        for batch in batches(2):
            train(model, optimizer, [batch])
            model.eval()
            with torch.no_grad():
                model(batch[0])
            model.train()
    firsts = [(step, phase) for step, phase, name in calls.seen if name == "first"]
    assert firsts == [(1, "train"), (1, "validation"), (2, "train"), (2, "validation")] and hl.run.step == 2


def test_a_model_that_is_trained_in_eval_mode() -> None:
    """Its steps are counted as any others: what makes a training step is its gradient."""
    model, optimizer = make()
    model.eval()
    calls = Calls()
    with hookline.attach(model, optimizer, hooks=[calls]):
        train(model, optimizer, batches(3))
    assert [(step, phase) for step, phase, name in calls.seen if name == "last"] == [
        (1, "train"), (2, "train"), (3, "train")
    ]  # fmt: skip


@pytest.mark.parametrize("reads_batches", [True, False])
def test_a_hook_that_stops(reads_batches: bool, caplog: pytest.LogCaptureFixture) -> None:
    """`batches` ends after its step; a loop that does not ask trains on, and is told so once."""

    class Enough(TrainingHook):
        def on_step_end(self, step: int) -> None:
            if step == 2:
                raise StopTraining("two are enough")

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Enough()]) as hl:
        train(model, optimizer, hl.batches(batches()) if reads_batches else batches())
        assert hl.should_stop
    assert hl.run.step == (2 if reads_batches else 6)
    assert ("asked to stop (two are enough), but the loop continues training" in caplog.text) != reads_batches


def test_a_pass_that_is_left_early() -> None:
    """`break` ends neither the run nor the count; the next pass is the next epoch."""
    model, optimizer = make()
    events = Events()
    with hookline.attach(model, optimizer, hooks=[events]) as hl:
        for _ in range(2):
            for batch in hl.batches(batches()):
                train(model, optimizer, [batch], hl)
                break
        assert hl.run.epoch == 1
    assert events.names().count("epoch_start") == events.names().count("epoch_end") == 2 and hl.run.step == 2


def test_a_manager_keeps_what_its_hooks_were_registered_with() -> None:
    """Schedule, policy and name; and a config may add hooks to it."""
    seen = []
    manager = HookManager()

    @manager.on("step_end", every=2)
    def note(step: int) -> None:
        seen.append(step)

    model, optimizer = make()
    with hookline.attach(model, optimizer, {"lifecycle": ["lr_monitor"]}, hooks=manager) as hl:
        train(model, optimizer, batches(5))
    assert seen == [2, 4] and {"note", "lr_monitor"} <= set(hl.run.hooks)


@pytest.mark.parametrize("hook", ["throughput", "loss_spike", "profiler"])
def test_a_hook_that_would_stay_blind_is_refused(hook: str) -> None:
    """By name and with what to change, once the first step has shown what the loop reports."""
    model, optimizer = make()
    needs = rf"'{hook}' needs a run that knows.*hl\.ba(tches|ckward)\("
    attached = hookline.attach(model, optimizer, hooks=[hook])
    with pytest.raises(HooklineError, match=needs) as refused, attached as hl:
        train(model, optimizer, batches())
    assert "\n" not in str(refused.value) and hl.run.step == 1


@pytest.mark.parametrize("hook", ["confusion_matrix", "sample_predictions"])
def test_hooks_of_validation_batches_are_refused_at_once(hook: str) -> None:
    """Validation batches stay in the user's loop."""
    model, optimizer = make()
    with pytest.raises(HooklineError, match=f"'{hook}' needs a run that .*; your own loop cannot"):
        hookline.attach(model, optimizer, hooks=[hook])


def validates(model: nn.Module, optimizer: torch.optim.Optimizer, hl: Any) -> None:
    for _ in range(2):
        train(model, optimizer, batches(2))
        with hl.validation():
            hl.log("val/loss", 0.5)


EPOCHS = r"'{}' needs a run that knows the batches .*`for batch in hl\.batches\(loader\)`"
COUNTS = r"'{}' runs every .*, which your own loop does not count; count steps, or read the batches with"
BLIND: list[tuple[str, dict[str, Any], str]] = [
    ("checkpoint", {}, EPOCHS),
    ("checkpoint", {"monitor": "train/loss"}, EPOCHS),
    ("checkpoint", {"monitor": "val/loss", "every": "2 epochs"}, EPOCHS),
    ("early_stopping", {"monitor": "train/loss"}, EPOCHS),
    ("early_stopping", {"monitor": "val/loss", "warmup": "2 epochs"}, EPOCHS),
    ("early_stopping", {"monitor": "val/loss", "min_epochs": 1}, EPOCHS),
    ("lr_monitor", {"frequency": "epoch"}, EPOCHS),
    ("activation_stats", {"every": "1 epoch"}, COUNTS),
    ("gradient_monitor", {"every": "10k tokens"}, COUNTS),
    ("ema", {"every": "1 epoch"}, COUNTS),
]


@pytest.mark.parametrize(("hook", "parameters", "refusal"), BLIND)
def test_a_hook_that_counts_epochs_is_refused_in_a_loop_without(
    hook: str, parameters: dict[str, Any], refusal: str
) -> None:
    """It would wait for the end of the first epoch until the last day of the run."""
    model, optimizer = make()
    manager = HookManager()
    manager.register(hook, **parameters)
    attached = hookline.attach(model, optimizer, hooks=manager)
    with pytest.raises(HooklineError, match=refusal.format(hook)) as refused, attached as hl:
        validates(model, optimizer, hl)
    assert "\n" not in str(refused.value) and hl.run.step == 1
    model, optimizer = make()
    manager = HookManager()
    manager.register(hook, **parameters)
    with hookline.attach(model, optimizer, hooks=manager) as hl:
        train(model, optimizer, hl.batches(batches(2)), hl)
    assert hl.run.record.run["outcome"] == "completed"


def test_a_hook_that_counts_the_batches_of_a_loader_is_refused() -> None:
    """Loaders have names only in Hookline's trainer."""
    model, optimizer = make()
    manager = HookManager()
    manager.register("activation_stats", every="2 batches of books")
    refusal = "'activation_stats' runs every 2 batches of books, which your own loop does not count; count steps$"
    with pytest.raises(HooklineError, match=refusal):
        hookline.attach(model, optimizer, hooks=manager)


@pytest.mark.parametrize("reads_batches", [True, False])
@pytest.mark.parametrize("hook", ["early_stopping", "checkpoint"])
def test_a_loss_that_the_loop_does_not_report_is_not_nan(hook: str, reads_batches: bool) -> None:
    """A hook that follows the loss says how to report it, and stops no run because of a NaN that nobody computed."""
    model, optimizer = make()
    manager = HookManager()
    manager.register(hook, monitor="train/loss", **({} if reads_batches else {"every": 2}))
    refusal = r"'train/loss' is unknown, because the loop reports no loss: call `hl\.backward\(loss\)`"
    with pytest.raises(HooklineError, match=refusal), hookline.attach(model, optimizer, hooks=manager) as hl:
        train(model, optimizer, hl.batches(batches()) if reads_batches else batches())
    assert "metric_not_finite" not in {event["kind"] for event in events_of(hl)}


def test_events_by_hand_are_those_of_the_attached_run() -> None:
    """A manager that is attached fires into its run, whose position hooks get; nothing is counted twice."""
    seen = []

    class Results(TrainingHook):
        def on_validation_end(self, metrics: Any, step: int, trainer: Any) -> None:
            seen.append((metrics["val/loss"], step, trainer))

    manager = HookManager([Results()])
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=manager) as hl:
        train(model, optimizer, batches(3))
        manager.on_validation_end(metrics={"val/loss": 0.5})
        manager.on_step_end()
    assert seen == [(0.5, 3, hl.run)] and hl.run is manager.run and hl.run.step == 3


def test_an_optimizer_that_replaces_the_attached_one_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks do not see the steps of an optimizer that was not attached; one warning says so."""
    model, optimizer = make()
    with hookline.attach(model, optimizer, output_dir=None) as hl:
        train(model, optimizer, batches(3))
        assert "another optimizer" not in caplog.text
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        train(model, other, batches(4))
    assert hl.run.step == 3
    (warning,) = [record.getMessage() for record in caplog.records if "another optimizer" in record.getMessage()]
    assert "another optimizer (SGD) trains the model, and hooks do not see its steps" in warning


def test_other_optimizers_beside_the_attached_one_are_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer of another model may step as often as it likes."""
    model, optimizer = make()
    discriminator, other = make()
    with hookline.attach(model, optimizer, output_dir=None):
        for batch in batches(4):
            train(discriminator, other, [batch, batch])
            train(model, optimizer, [batch])
    assert "another optimizer" not in caplog.text


def test_an_optimizer_of_another_attached_run_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    """Two runs may share a model; the hooks of each see the steps of its own optimizer."""
    model, optimizer = make()
    other = torch.optim.SGD(model.parameters(), lr=0.01)
    with hookline.attach(model, optimizer) as first, hookline.attach(model, other) as second:
        train(model, optimizer, batches(3))
        train(model, other, batches(4))
    assert "another optimizer" not in caplog.text and (first.run.step, second.run.step) == (3, 4)


def test_a_wrapper_that_steps_the_attached_optimizer_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its own step is that of the optimizer inside, which hooks see."""

    class Wrapper(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            optimizer.step()

    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        train(model, Wrapper(model.parameters(), lr=0.01), batches(4))
    assert "another optimizer" not in caplog.text and hl.run.step == 4
