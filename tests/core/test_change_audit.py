"""Hooks may change what training consists of, and the record says which hook changed what."""

import logging
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer

from hookline import SimpleTrainer, TrainingHook
from hookline.core.change_audit import RunSnapshot


class Changes(TrainingHook):
    """Makes a change at one step, or at every one."""

    def __init__(self, change: Any, at: int | None = None) -> None:
        self.change, self.at = change, at

    def on_train_batch_end(self, trainer: Any, batch: Any, step: int) -> None:
        """Make the change."""
        if self.at in (None, step):
            self.change(trainer, batch)


def audited_trainer(*hooks: Any, **options: Any) -> SimpleTrainer:
    """Make a trainer of one layer and 40 steps."""
    return make_trainer(*hooks, model=torch.nn.Linear(3, 1), data=make_batches(40), **options)


def noted(trainer: Any) -> list[dict[str, Any]]:
    """Train and return what the record says about changes."""
    trainer.train()
    return [event for event in trainer.record.events if event["kind"] in ("hook_wrote", "lr_changed")]


def halve_lr(trainer: Any, batch: Any) -> None:
    """Change a learning rate in its group."""
    trainer.optimizers[0].param_groups[0]["lr"] /= 2


def change_params(trainer: Any, batch: Any) -> None:
    """Change a parameter in place."""
    trainer.model.weight.detach().add_(1)


def test_a_learning_rate_written_into_a_group_is_recorded_whenever_it_happens() -> None:
    """With the hook, the event, the step and both values."""
    (event,) = noted(audited_trainer(Changes(halve_lr, at=11)))
    fields = {key: event[key] for key in ("kind", "hook", "on", "what", "step", "old", "new", "times")}
    assert fields == {
        "kind": "hook_wrote", "hook": "changes", "on": "on_train_batch_end", "what": "learning rate",
        "step": 11, "old": [0.1], "new": [0.05], "times": 1,
    }  # fmt: skip


def test_a_hook_that_writes_at_every_step_does_not_fill_the_record() -> None:
    """It is noted at the first, second, fourth, eighth … time and at the end, with the count."""
    assert [event["times"] for event in noted(audited_trainer(Changes(halve_lr)))] == [1, 2, 4, 8, 16, 32, 40]


def test_the_closing_line_says_what_hooks_wrote_to(capsys: pytest.CaptureFixture[str]) -> None:
    """With the exact count, or that there were at least so many where not every call is compared; for each run."""
    trainer = audited_trainer(Changes(halve_lr), console=True)
    trainer.train()
    assert "hook 'changes' modified the learning rate (40 times)" in capsys.readouterr().out
    trainer.hooks.disable("changes")
    trainer.fit(max_steps=41)
    assert "modified" not in capsys.readouterr().out
    audited_trainer(Changes(change_params), console=True).train()
    assert "hook 'changes' modified the parameters (at least " in capsys.readouterr().out
    audited_trainer(Changes(change_params), console=True, debug=True).train()
    assert "hook 'changes' modified the parameters (40 times)" in capsys.readouterr().out


def test_the_closing_line_of_a_run_whose_writes_were_all_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The count is exact, even if that of the run before was not."""
    trainer = audited_trainer(Changes(change_params), console=True)
    trainer.train()
    assert "hook 'changes' modified the parameters (at least " in capsys.readouterr().out
    trainer.remove_hook("changes")
    trainer.on("train_start", name="changes")(lambda trainer: change_params(trainer, None))
    trainer.fit(max_steps=41)
    assert "hook 'changes' modified the parameters (1 time)" in capsys.readouterr().out


def test_a_rate_assigned_through_the_trainer_is_noted_once() -> None:
    """`trainer.lr = …` notes it itself."""

    def assign(trainer: Any, batch: Any) -> None:
        trainer.lr = 0.05

    assert [event["kind"] for event in noted(audited_trainer(Changes(assign, at=3)))] == ["lr_changed"]


def test_rates_that_are_tensors_are_compared_by_version() -> None:
    """Reading them would wait for a device."""

    def fill(trainer: Any, batch: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"].fill_(0.01)

    (event,) = noted(audited_trainer(Changes(fill, at=5), lr=torch.tensor(0.1)))
    assert event["what"] == "learning rate"


@pytest.mark.parametrize(
    ("what", "step", "change"),
    [("parameters", 18, change_params), ("batch", 11, lambda trainer, batch: batch[0].add_(1))],
)
def test_a_write_is_noted_and_logged_once(what: str, step: int, change: Any, caplog: pytest.LogCaptureFixture) -> None:
    """To the batch at any step, to parameters at one call in 17 and at the first."""
    with caplog.at_level(logging.WARNING):
        (event,) = noted(audited_trainer(Changes(change, at=step)))
    assert (event["what"], event["step"]) == (what, step)
    assert sum(f"hook 'changes' modified the {what}" in message for message in caplog.messages) == 1


def test_parameters_are_compared_at_the_first_call_and_at_one_in_17() -> None:
    """A hook that writes at every step is noted at once, and again 17 calls later."""
    steps = [event["step"] for event in noted(audited_trainer(Changes(change_params)))]
    assert steps == [1, 18, 40]  # the third time, at step 35, is written down at the end


def test_a_scheduled_hook_is_compared_by_its_own_calls() -> None:
    """The first call is compared at whichever step it comes."""
    trainer = audited_trainer()
    trainer.add_hook(Changes(change_params), every=10)
    assert [(event["what"], event["step"]) for event in noted(trainer)] == [("parameters", 10)]


def test_everything_is_compared_at_one_call_in_136(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the mode of modules; at the first call, too, and at no other in between."""
    full: list[bool] = []
    read: Any = RunSnapshot.changes
    monkeypatch.setattr(RunSnapshot, "changes", lambda self: [full.append(self._full), read(self)][1])
    trainer = audited_trainer(Changes(lambda trainer, batch: trainer.model.eval(), at=137), max_steps=140, max_epochs=4)
    assert [(event["what"], event["step"]) for event in noted(trainer)] == [("train or eval mode", 137)]
    assert [step for step, is_full in enumerate(full, 1) if is_full] == [1, 137]


@pytest.mark.parametrize("switch", ["debug", "verify"])
def test_with_debug_and_in_verify_parameters_are_compared_at_every_call(switch: str) -> None:
    """One write at any step is enough."""
    trainer = audited_trainer(Changes(change_params, at=11), debug=switch == "debug")
    trainer.hooks.audits_every_call = switch == "verify"
    (event,) = noted(trainer)
    assert (event["what"], event["step"]) == ("parameters", 11)


def test_events_outside_steps_are_always_checked() -> None:
    """One write at the end of an epoch is enough."""

    class AtTheEnd(TrainingHook):
        def on_epoch_end(self, model: Any) -> None:
            with torch.no_grad():
                model.weight.zero_()

    (event,) = noted(audited_trainer(AtTheEnd()))
    assert (event["hook"], event["on"], event["what"]) == ("at_the_end", "on_epoch_end", "parameters")


def test_hooks_that_only_read_are_not_noted() -> None:
    """Naming the trainer changes nothing."""
    assert noted(audited_trainer(Changes(lambda trainer, batch: trainer.lr + batch[0].sum()))) == []


HOOKS_BY_ARGUMENT: dict[str, Any] = {
    "trainer": lambda write: lambda trainer: write(trainer.model, trainer.optimizers[0]),
    "ctx": lambda write: lambda ctx: write(ctx.model, ctx.optimizer),
    "state": lambda write: lambda state: write(state["model"], state["optimizer"]),
}
"""Hooks of on_step_end that write to the model or the optimizer, by the argument through which they do."""
WRITES_AT_STEP_END: dict[str, Any] = {
    "parameters": lambda model, optimizer: model[0].weight.data.zero_(),
    "train or eval mode": lambda model, optimizer: model.eval(),
    "learning rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "optimizer state": lambda model, optimizer: optimizer.state[model[0].weight]["momentum_buffer"].zero_(),
}


@pytest.mark.req("004-35")
@pytest.mark.parametrize("what", WRITES_AT_STEP_END)
@pytest.mark.parametrize("argument", HOOKS_BY_ARGUMENT)
def test_a_hook_is_named_whichever_argument_it_writes_through(argument: str, what: str) -> None:
    """`ctx` and `state` lead to the model and the optimizer, as `trainer` does."""
    trainer = make_deep_trainer("lr_monitor")
    trainer.on("step_end", name="through")(HOOKS_BY_ARGUMENT[argument](WRITES_AT_STEP_END[what]))
    first = noted(trainer)[0]
    assert (first["hook"], first["on"], first["what"], first["step"]) == ("through", "on_step_end", what, 1)


@pytest.mark.req("004-35")
@pytest.mark.parametrize(
    ("hook", "what"),
    [
        (lambda model: model.eval(), "train or eval mode"),
        (lambda model: model[0].weight.data.zero_(), "parameters"),
        (lambda optimizer: optimizer.param_groups[0].update(lr=0.5), "learning rate"),
        (lambda optimizer: optimizer.state.clear(), "optimizer state"),
        (lambda batch: batch[0].zero_(), "batch"),
    ],
)
def test_a_hook_that_names_nothing_else_is_named(hook: Any, what: str) -> None:
    """A hook needs neither the trainer nor `ctx` to write to what it is passed."""
    trainer = make_deep_trainer("lr_monitor")
    trainer.on("train_batch_end", name="through")(hook)
    first = noted(trainer)[0]
    assert (first["hook"], first["what"], first["step"]) == ("through", what, 1)


def test_inference_tensors_have_no_versions_and_are_left_out() -> None:
    """A frozen parameter or a learning rate may be one; the other parameters are still compared."""
    trainer = audited_trainer(Changes(change_params), debug=True)
    with torch.inference_mode():
        trainer.model.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        trainer.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1)
    assert {event["what"] for event in noted(trainer)} == {"parameters"}
    assert trainer.hooks.entry("changes").failures.total == 0


# ---- what only a snapshot finds ----------------------------------------------------------------------------


def momentum_of(trainer: Any) -> torch.Tensor:
    """Return the momentum buffer of a parameter."""
    return next(iter(trainer.optimizers[0].state.values()))["momentum_buffer"]


def replace_gradient(trainer: Any) -> None:
    """Assign another gradient."""
    trainer.model[0].weight.grad = trainer.model[0].weight.grad * 2


WRITES = {
    "gradients": lambda trainer, loss: trainer.model[0].weight.grad.mul_(2),
    "gradients, through .data": lambda trainer, loss: trainer.model[0].weight.grad.data.mul_(2),
    "gradients, replaced": lambda trainer, loss: replace_gradient(trainer),
    "parameters, through .data": lambda trainer, loss: trainer.model[0].weight.data.add_(1),
    "buffers": lambda trainer, loss: trainer.model[1].running_mean.add_(1),
    "buffers, through .data": lambda trainer, loss: trainer.model[1].running_mean.data.add_(1),
    "requires_grad of parameters": lambda trainer, loss: trainer.model[0].weight.requires_grad_(False),
    "submodules": lambda trainer, loss: trainer.model.__setitem__(2, torch.nn.Linear(3, 1)),
    "submodules, forward": lambda trainer, loss: setattr(trainer.model[2], "forward", lambda x: x.sum(1, True)),
    "train or eval mode": lambda trainer, loss: trainer.model.eval(),
    "train or eval mode, of one module": lambda trainer, loss: trainer.model[1].eval(),
    "optimizer state": lambda trainer, loss: momentum_of(trainer).zero_(),
    "optimizer state, through .data": lambda trainer, loss: momentum_of(trainer).data.add_(1),
    "optimizer options": lambda trainer, loss: trainer.optimizers[0].param_groups[0].update(weight_decay=0.5),
}
"""What a hook may write to at on_before_optimizer_step."""


class Writes(TrainingHook):
    """Writes at one step."""

    def __init__(self, write: Any, at: int) -> None:
        self.write, self.at = write, at

    def on_before_optimizer_step(self, trainer: Any, step: int) -> None:
        if step == self.at:
            self.write(trainer, None)


class WritesLoss(TrainingHook):
    """Writes into the loss at one step."""

    def __init__(self, write: Any, at: int) -> None:
        self.write, self.at = write, at

    def on_before_backward(self, loss: Any, step: int) -> None:
        if step == self.at:
            self.write(None, loss)


LOSSES = {
    "loss": lambda trainer, loss: loss.mul_(2),
    "loss, through .data": lambda trainer, loss: loss.data.mul_(2),
}
CASES = [(Writes, *item) for item in WRITES.items()] + [(WritesLoss, *item) for item in LOSSES.items()]


def make_deep_trainer(hook: Any, **options: Any) -> Any:
    """Make a trainer whose optimizer has a state and whose model has buffers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trainer = make_trainer(model=model, data=make_batches(40), optimizer=optimizer, **options)
    trainer.add_hook(hook, "writes")
    return trainer


@pytest.mark.req("004-35")
@pytest.mark.parametrize(("kind", "what", "write"), CASES, ids=[case[1] for case in CASES])
def test_a_sampled_call_is_compared_with_everything_a_hook_may_write_to(
    kind: Any, what: str, write: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hook, event, step and what was written are in the record, and in one warning."""
    monkeypatch.setattr("hookline.core.change_audit.VERSIONS_ONE_IN", 7)
    monkeypatch.setattr("hookline.core.change_audit.SNAPSHOT_ONE_IN", 7)
    (event,) = noted(make_deep_trainer(kind(write, at=8)))
    written, on = what.partition(",")[0], "on_before_backward" if kind is WritesLoss else "on_before_optimizer_step"
    fields = {key: event[key] for key in ("kind", "hook", "on", "what", "step")}
    assert fields == {"kind": "hook_wrote", "hook": "writes", "on": on, "what": written, "step": 8}
    assert [message for message in caplog.messages if "modified" in message] == [
        f"hook 'writes' modified the {written} in {on}, step 8"
    ]


@pytest.mark.parametrize("what", ["train or eval mode", "optimizer options", "gradients, through .data"])
def test_the_first_call_of_a_hook_is_compared(what: str) -> None:
    """A hook that leaves the model in eval mode changes it only once."""
    (event,) = noted(make_deep_trainer(Writes(WRITES[what], at=1)))
    assert (event["what"], event["step"]) == (what.partition(",")[0], 1)


@pytest.mark.parametrize(("kind", "what", "write"), CASES, ids=[case[1] for case in CASES])
def test_with_debug_every_call_is_compared_with_everything(kind: Any, what: str, write: Any) -> None:
    """One write at any step is enough."""
    (event,) = noted(make_deep_trainer(kind(write, at=11), debug=True))
    assert (event["what"], event["step"]) == (what.partition(",")[0], 11)


def test_with_debug_a_hook_needs_to_name_nothing() -> None:
    """It may have the model from its constructor."""
    trainer = make_deep_trainer("lr_monitor", debug=True)
    trainer.on("step_end", name="closure")(lambda: trainer.model.eval())
    (event,) = noted(trainer)
    assert (event["hook"], event["what"], event["step"]) == ("closure", "train or eval mode", 1)


def test_changed_options_are_recorded_with_both_values() -> None:
    """Of each group, those options that changed."""
    (event,) = noted(make_deep_trainer(Writes(WRITES["optimizer options"], at=1)))
    assert (event["old"], event["new"]) == ([{"weight_decay": 0}], [{"weight_decay": 0.5}])


@pytest.mark.parametrize("debug", [False, True])
def test_what_a_hook_restores_is_not_noted(debug: bool) -> None:
    """A hook may put the model into eval mode for itself, and read everything."""

    def read(trainer: Any, loss: Any) -> None:
        trainer.model.eval()
        with torch.no_grad():
            trainer.model(torch.ones(1, 3))
        trainer.model.train()
        with trainer.inference() as model:
            model(torch.ones(1, 3))
        sum(param.grad.norm() + param.data.norm() for param in trainer.params.values())
        trainer.optimizers[0].state_dict()

    class Reads(TrainingHook):
        def on_before_optimizer_step(self, trainer: Any) -> None:
            read(trainer, None)

    assert noted(make_deep_trainer(Reads(), debug=debug)) == []


def test_nan_values_are_not_taken_for_a_write() -> None:
    """A NaN in a parameter or a batch equals itself."""
    trainer = make_deep_trainer(Writes(lambda trainer, loss: None, at=1), debug=True)
    with torch.no_grad():
        trainer.model[0].weight.fill_(torch.nan)
    assert noted(trainer) == []


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_hook_that_writes_and_then_fails_is_noted() -> None:
    """Its failure does not hide what it wrote."""

    def write_and_fail(trainer: Any, loss: Any) -> None:
        trainer.model.eval()
        raise ValueError("too late")

    trainer = make_deep_trainer(Writes(write_and_fail, at=1))
    assert [event["what"] for event in noted(trainer)] == ["train or eval mode"]
    assert trainer.hook_failures == 1


class CountsSteps(torch.optim.SGD):
    """Keeps a number in its state, beside the mappings by parameter."""

    def step(self, closure: Any = None) -> Any:
        """Count, and update the parameters."""
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


class Unreadable(list[Any]):
    """A list that cannot be described."""

    def __iter__(self) -> Any:
        raise ValueError("not to be read")


@pytest.mark.parametrize("debug", [False, True])
def test_an_optimizer_may_keep_other_values_in_its_state(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The hook is called at every step, and nothing is logged."""
    steps: list[int] = []
    trainer = audited_trainer(Changes(lambda trainer, batch: steps.append(trainer.step)), debug=debug)
    trainer.optimizers[0].__class__ = CountsSteps
    with caplog.at_level(logging.WARNING, "hookline"):
        assert noted(trainer) == []
    assert len(steps) == 40 and not caplog.records


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_in_a_batch_are_not_read(caplog: pytest.LogCaptureFixture) -> None:
    """Their memory is not one value per element."""
    calls: list[int] = []
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])
    hook = Changes(lambda trainer, batch: calls.append(1))
    trainer = make_trainer(
        hook, data=[{"x": nested}] * 3,
        step_fn=lambda model, batch: sum(model(x).pow(2).mean() for x in batch["x"].unbind()),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer.fit(max_steps=3)
    assert len(calls) == 3 and not caplog.records


@pytest.mark.parametrize("debug", [False, True])
def test_a_comparison_that_fails_is_logged_once_and_the_hook_is_called(
    debug: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not the hook's failure."""
    calls: list[int] = []
    trainer = audited_trainer(Changes(lambda trainer, batch: calls.append(1)), debug=debug)
    trainer.optimizers[0].param_groups[0]["extra"] = Unreadable()
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer.train()
    assert len(calls) == 40 and trainer.hooks.entry("changes").failures.total == 0
    assert ["cannot be checked" in record.getMessage() for record in caplog.records] == [True]


def test_running_a_batch_again_is_not_a_write_to_buffers() -> None:
    """`trainer.rerunning` restores them; a hook that writes them without it is named."""

    def rerun(trainer: Any, batch: Any) -> None:
        with trainer.rerunning(trainer.random_state()) as forward:
            forward(batch)

    def write(trainer: Any, batch: Any) -> None:
        trainer.model[0].running_mean.add_(1)

    for change, expected in ((rerun, []), (write, ["buffers"])):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        trainer = make_trainer(Changes(change, at=2), model=model, debug=True)
        trainer.fit(max_steps=3)
        assert [event["what"] for event in trainer.record.events if event["kind"] == "hook_wrote"] == expected
