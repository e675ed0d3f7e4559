"""How an attached run ends, and what `attach` refuses: one clear line each."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import Events, batches, events_of, make, rows_of, train
from torch import nn

import hookline
from hookline import HooklineError, TrainingHook

USES: dict[str, Any] = {
    "batches": lambda hl, model: next(hl.batches(batches())),
    "backward": lambda hl, model: hl.backward(next(model.parameters()).sum()),
    "optimizer_step": lambda hl, model: hl.optimizer_step(),
    "log": lambda hl, model: hl.log("x", 1),
    "validation": lambda hl, model: hl.validation().__enter__(),
    "save": lambda hl, model: hl.save(),
    "load": lambda hl, model: hl.load("runs"),
    "load_state_dict": lambda hl, model: hl.load_state_dict({}),
}


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ValueError("mine"), "failed", "ValueError: mine"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (SystemExit(3), "interrupted", "SystemExit: 3"),
        (SystemExit("bye"), "interrupted", "SystemExit: bye"),
        (SystemExit(0), "completed", None),
        (SystemExit(), "completed", None),
    ],
    ids=repr,
)
def test_what_ends_the_block_ends_the_record(error: BaseException, outcome: str, reason: str | None) -> None:
    """The exception goes on to the caller, the record has its reason, and the last step that was made is in it."""
    model, optimizer = make()
    events = Events()
    with pytest.raises(type(error)) as raised, hookline.attach(model, optimizer, hooks=[events]) as hl:
        train(model, optimizer, hl.batches(batches(3)), hl)
        train(model, optimizer, batches(1), hl)
        raise error
    assert raised.value is error
    run = hl.run.record.run
    assert (run["outcome"], run["reason"]) == (outcome, reason)
    assert [row["step"] for row in rows_of(hl) if "train/loss" in row] == [1, 2, 3, 4]
    assert events.names()[-3:] == ["step_end", "exception" if reason else "epoch_end", "train_end"]


def test_the_traceback_is_in_the_record() -> None:
    """So that `hookline show` and the report can say where a run failed that nobody watched."""
    model, optimizer = make()
    with pytest.raises(ValueError, match="mine"), hookline.attach(model, optimizer) as hl:
        raise ValueError("mine")
    (event,) = [event for event in events_of(hl) if event["kind"] == "exception"]
    assert event["error"] == "ValueError: mine"
    assert 'raise ValueError("mine")' in event["traceback"] and "test_attach_ends.py" in event["traceback"]


@pytest.mark.hooks_fail(raises=RuntimeError)
def test_a_hook_that_fails_while_the_run_ends_replaces_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The last step ends with the run that fails; what a hook raises then is a warning."""

    class Bad(TrainingHook):
        on_error = "raise"

        def on_step_end(self) -> None:
            raise RuntimeError("of the hook")

    model, optimizer = make()
    with pytest.raises(ValueError, match="mine"), hookline.attach(model, optimizer, hooks=[Bad()]) as hl:
        train(model, optimizer, batches(1))
        raise ValueError("mine")
    assert "while the run was ending: RuntimeError: of the hook" in caplog.text
    assert hl.run.record.run["reason"] == "ValueError: mine"


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("when", ["has not begun", "has ended"])
def test_outside_of_the_block_nothing_is_recorded_in_silence(use: str, when: str) -> None:
    """The methods say that the run has not begun, or has ended."""
    model, optimizer = make()
    hl = hookline.attach(model, optimizer)
    if when == "has ended":
        with hl:
            pass
    with pytest.raises(HooklineError, match=re.escape(f"hl.{use}: the run {when}; call it inside of `with")):
        USES[use](hl, model)
    assert not hl.should_stop


def test_batches_that_are_read_after_the_block() -> None:
    """An iterator that outlives its block fires no events into a run that has ended."""
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[events := Events()]) as hl:
        left = hl.batches(batches())
        next(left)
    seen = list(events.seen)
    with pytest.raises(HooklineError, match=r"hl\.batches: the run has ended"):
        next(left)
    assert events.seen == seen


def test_two_runs_of_one_optimizer() -> None:
    """A second one would count the same steps, and is refused until the first has ended; so is beginning twice."""
    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        with pytest.raises(HooklineError, match="another run is already attached to this optimizer"):
            hookline.attach(model, optimizer).begin()
        with pytest.raises(HooklineError, match=r"in progress; call hl\.end\(\) first"):
            hl.begin()
        train(model, optimizer, batches(2))
    hl.end()
    assert hl.run.step == 2
    with hookline.attach(model, optimizer) as other:
        train(model, optimizer, batches(1))
    assert other.run.step == 1
    assert len(list(Path("runs").iterdir())) == 2, "a run that is refused leaves no directory"


def test_two_models_may_be_attached_at_once() -> None:
    """Each run counts its own steps."""
    (first, one), (second, two) = make(), make()
    with hookline.attach(first, one) as outer, hookline.attach(second, two) as inner:
        train(first, one, batches(2))
        train(second, two, batches(3))
    assert (outer.run.step, inner.run.step) == (2, 3)


def test_a_block_may_be_entered_again() -> None:
    """It is another run, which counts on, as a second `train()` of a trainer."""
    model, optimizer = make()
    hl = hookline.attach(model, optimizer)
    for _ in range(2):
        with hl:
            train(model, optimizer, batches(2))
    assert hl.run.step == 4 and len(list(Path("runs").iterdir())) == 2


MODEL, OPTIMIZER = make()
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
LOADER = torch.utils.data.DataLoader([1])  # type: ignore[arg-type, var-annotated]
NO_OPTIMIZER = "attach: expected an optimizer, a list of optimizers .* got {}"
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "swapped": ((OPTIMIZER, MODEL), {}, r"expected a torch.nn.Module first, got AdamW"),
    "a loader": ((MODEL, LOADER), {}, NO_OPTIMIZER.format("DataLoader")),
    "a loader in a list": ((MODEL, [OPTIMIZER, LOADER]), {}, NO_OPTIMIZER.format("DataLoader")),
    "a scheduler": ((MODEL, SCHEDULER), {}, NO_OPTIMIZER.format("StepLR")),
    "parameters": ((MODEL, MODEL.parameters()), {}, NO_OPTIMIZER.format("generator")),
    "no optimizer": ((MODEL, None), {}, NO_OPTIMIZER.format("NoneType")),
    "an empty list": ((MODEL, []), {}, "at least one optimizer, got an empty list"),
    "an empty dict": ((MODEL, {}), {}, "at least one optimizer, got an empty dict"),
    "an optimizer twice": ((MODEL, [OPTIMIZER, OPTIMIZER]), {}, "an optimizer was passed twice"),
    "another model": ((nn.Linear(2, 2), OPTIMIZER), {}, "were they created from another model"),
    "no parameters": ((nn.ReLU(), OPTIMIZER), {}, "nothing to train"),
    "one hook": ((MODEL, OPTIMIZER), {"hooks": Events()}, "hooks: expected a list of hooks .* got Events"),
    "a name": ((MODEL, OPTIMIZER), {"hooks": "ema"}, "hooks: expected a list of hooks .* got str"),
    "a config as hooks": ((MODEL, OPTIMIZER), {"hooks": {"update": []}}, "got dict; pass a config as `config=`"),
    "a scaler": ((MODEL, OPTIMIZER), {"scaler": 2.0}, "scaler: expected a GradScaler, got float"),
    "an accelerator": ((MODEL, OPTIMIZER), {"accelerator": "cpu"}, "accelerator: expected an Accelerator, got str"),
    "a step_fn": ((MODEL, OPTIMIZER), {"step_fn": 1}, "step_fn: expected a function .* got int"),
    "a directory": ((MODEL, OPTIMIZER), {"output_dir": 1}, "output_dir: expected a path or None, got int"),
    "hooks as a config": ((MODEL, OPTIMIZER, ["ema"]), {}, r"config: .*\(hooks go into `hooks=\[…\]`\), got list"),
    "a hook as a config": ((MODEL, OPTIMIZER, Events()), {}, r"config: .*\(hooks go into `hooks=\[…\]`\), got Events"),
    "a config": ((MODEL, OPTIMIZER, 1), {}, "expected a mapping with lifecycle, forward, update, got 1"),
    "a missing config": ((MODEL, OPTIMIZER, "no.yaml"), {}, "no.yaml: cannot be read: it does not exist"),
    "a misspelt hook": ((MODEL, OPTIMIZER), {"hooks": ["emma"]}, "did you mean 'ema'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what: str) -> None:
    """One line that says what was expected and what came; no run is begun."""
    args, options, message = WRONG[what]
    with pytest.raises(HooklineError, match=message) as refused:
        hookline.attach(*args, **options)
    assert "\n" not in str(refused.value) and not Path("runs").exists()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda hl: hl.backward(1.0), "expected a loss with one element, got float; reduce it"),
        (lambda hl: hl.backward(torch.zeros(3)), r"got a tensor of shape \(3,\); reduce it"),
        (lambda hl: hl.log("x", torch.zeros(3)), r"hl.log\('x'\): expected one number, got a tensor of shape \(3,\)"),
        (lambda hl: next(hl.batches(3)), "hl.batches: expected an iterable of batches, got int"),
        (lambda hl: hl.load(3), "hl.load: expected the path of a run or a checkpoint, got int"),
        (lambda hl: hl.load("elsewhere"), "elsewhere does not exist; pass the path of a run"),
        (lambda hl: hl.load_state_dict(None), r"expected what hl.state_dict\(\) returned"),
        (lambda hl: hl.load_state_dict({"hooks": {}}), "there is no .*progress"),
    ],
)
def test_wrong_values_inside_of_the_block(use: Any, message: str) -> None:
    """The same for the methods."""
    model, optimizer = make()
    with pytest.raises(HooklineError, match=message), hookline.attach(model, optimizer) as hl:
        use(hl)
    assert hl.run.record.run["outcome"] == "failed"


def test_a_validation_inside_of_a_validation() -> None:
    """Its results would be those of one of them."""
    model, optimizer = make()
    refused = pytest.raises(HooklineError, match="a validation is already in progress")
    with hookline.attach(model, optimizer) as hl, hl.validation(), refused, hl.validation():
        pass


def test_models_that_hooks_cannot_see_into() -> None:
    """FSDP1 and DeepSpeed are refused by their names, with what to use instead."""
    wrapper = type("FullyShardedDataParallel", (nn.Sequential,), {})(nn.Linear(2, 2))
    with pytest.raises(HooklineError, match=r"FSDP1 is not supported.*use FSDP2"):
        hookline.attach(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1))
