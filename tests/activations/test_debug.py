"""The debug hook: conditions on activations, findings, and the break at a terminal."""

import bdb
import gc
import io
import json
import logging
import math
import sys
import weakref
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from torch import nn

from hookline import HooklineError, HookManager
from hookline.activations.debug import Debug

LOGGER = "hookline"


class Net(nn.Module):
    """A small CNN with a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3)
        self.relu = nn.ReLU()
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pooled = self.relu(self.conv(images)).mean(dim=(2, 3))
        return self.head(pooled)


def watched(model: nn.Module, hook: Debug, **options: Any) -> HookManager:
    """A manager that watches a model with one debug hook."""
    manager = HookManager()
    manager.watch(model)
    manager.register(hook, **options)
    return manager


IMAGES = torch.ones(2, 1, 5, 5)


@pytest.mark.req("003-27")
def test_nan_and_inf_are_found_where_they_begin() -> None:
    """NaN and Inf are checked by default; the first finding names the module in which they arose."""
    model, hook = Net(), Debug()
    watched(model, hook)
    model(IMAGES)
    assert hook.findings == [] and hook.found == 0
    with torch.no_grad():
        model.head.bias[0] = math.inf
        model.head.bias[1] = math.nan
    model(IMAGES)
    assert [(one.module, one.condition, one.value) for one in hook.findings] == [
        ("head", "nan > 0", 2.0),
        ("head", "inf > 0", 2.0),
    ]


@pytest.mark.req("003-27")
@pytest.mark.parametrize(
    ("conditions", "holds"),
    [
        ({"absmax": "> 3.9"}, True),
        ({"absmax": "> 4"}, False),
        ({"absmax": ">= 4"}, True),
        ({"mean": "< -0.3"}, True),
        ({"mean": "<-1e0"}, False),
        ({"std": "> 1"}, True),
        ({"std": "> 10"}, False),
        ({"zeros": "> 0.3"}, True),
        ({"zeros": "> 0.5"}, False),
        ({"min": "== -4"}, True),
        ({"max": "!= 3"}, False),
        ({"l2": "<= 5"}, True),
        ({"l2": "< 5"}, False),
        ({"nan": "> 0"}, False),
        ({"inf": False, "max": "> 2"}, True),
    ],
)
def test_named_conditions(conditions: dict[str, Any], holds: bool) -> None:
    """Each statistic is compared as written; `zeros` is a fraction."""
    model, hook = nn.Identity(), Debug(nn.Identity, conditions)
    watched(nn.Sequential(model), hook)
    model(torch.tensor([0.0, 3.0, -4.0]))
    assert bool(hook.findings) == holds


@pytest.mark.req("003-27")
def test_a_condition_may_be_a_function_or_a_list() -> None:
    """A function gets name and output and may return a tensor; in a list each condition is checked."""

    def negative(name: str, output: torch.Tensor) -> torch.Tensor:
        assert name == "0"
        return (output < 0).any()

    model, hook = nn.Sequential(nn.Identity()), Debug("0", [negative, {"absmax": "> 1"}, {"max": "> 100"}])
    watched(model, hook)
    model(torch.tensor([-2.0, 1.0]))
    model(torch.tensor([0.5]))
    assert [(one.condition, one.value, one.call) for one in hook.findings] == [
        ("negative", None, 1),
        ("absmax > 1", 2, 1),
    ]
    assert hook.findings[0].statistics["min"] == -2


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"absmx": "> 1"}, "conditions.absmx: unknown statistic 'absmx'; did you mean 'absmax'?"),
        ({"absmax": True}, "conditions.absmax: invalid comparison True; write '> 1e4'"),
        ({"nan": "often"}, "conditions.nan: invalid comparison 'often'; write True or '> 3'"),
        ({"mean": "> high"}, "conditions.mean: invalid comparison '> high'"),
        ({"mean": "> nan"}, "conditions.mean: invalid comparison '> nan'"),
        ({"mean": 3}, "conditions.mean: invalid comparison 3"),
        ("", "conditions.: unknown statistic ''"),
        ("absmax big", "conditions.absmax: invalid comparison 'big'; write '> 1e4'"),
        ("> 3", "conditions.>: unknown statistic '>'"),
        ("nann", "conditions.nann: unknown statistic 'nann'; did you mean 'nan'?"),
        ("absmax", "conditions.absmax: invalid comparison 'absmax'; write '> 1e4'"),
        ([{"nan": True}, 7], "conditions: invalid condition 7"),
        ({"nan": False}, "checks nothing; pass a condition, or set inspect"),
        ({}, "checks nothing"),
    ],
)
def test_a_wrong_condition_is_refused_at_construction(conditions: Any, message: str) -> None:
    """The message has the path, the bad value and what to write."""
    with pytest.raises(HooklineError) as caught:
        Debug(conditions=conditions)
    assert message in str(caught.value)


def test_keep_must_be_positive() -> None:
    """keep=0 is refused."""
    with pytest.raises(HooklineError, match="keep: expected an integer of at least 1, got 0"):
        Debug(keep=0)


@pytest.mark.parametrize(
    ("conditions", "labels"),
    [
        ("nan", ["nan > 0"]),
        (["nan", "inf"], ["nan > 0", "inf > 0"]),
        ({"inf": True, "nan": ">=1e0"}, ["inf > 0", "nan >= 1"]),
        (["absmax >= 0", {"mean": "!= 0"}], []),
    ],
)
def test_a_finding_names_its_condition(conditions: Any, labels: list[str]) -> None:
    """In one spelling, however it was written; a tensor with a NaN meets no condition but those on counts."""
    model, hook = nn.Sequential(nn.Identity()), Debug("0", conditions)
    watched(model, hook)
    model(torch.tensor([math.nan, math.inf, 1.0]))
    assert [finding.condition for finding in hook.findings] == labels


@pytest.mark.req("003-27", "003-28")
def test_a_finding_has_place_time_and_statistics() -> None:
    """Module, step, phase, call, statistics, inputs and outputs, and the user's part of the stack."""
    encoder = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, batch_first=True)
    hook = Debug("self_attn", {"absmax": "> 0"})
    manager = watched(encoder, hook)
    manager.dispatcher.run.step = 7
    encoder(torch.randn(2, 3, 8))  # the line that the stack must show
    finding = hook.findings[0]
    assert (finding.module, finding.step, finding.phase, finding.call) == ("self_attn", 7, "inference", 1)
    assert set(finding.inputs) == {"float32 (2, 3, 8) on cpu"} and len(finding.inputs) == 3
    assert finding.outputs == ("float32 (2, 3, 8) on cpu",)
    assert finding.statistics["absmax"] == finding.value and finding.statistics["nan"] == 0
    assert finding.stack[-1].startswith(f"{__file__}:") and "the line that the stack must show" in finding.stack[-1]
    assert len(finding.stack) <= 12
    assert not any("/hookline/activations/" in frame or "/torch/nn/" in frame for frame in finding.stack)


def test_every_tensor_of_an_output_is_checked() -> None:
    """The cell state of an LSTM is part of its output; integers are skipped."""
    lstm = nn.LSTM(3, 4)
    hook = Debug("", {"max": "> 50"})
    watched(lstm, hook)
    lstm(torch.ones(2, 1, 3), (torch.zeros(1, 1, 4), torch.full((1, 1, 4), 1000.0)))
    assert len(hook.findings) == 1 and hook.findings[0].value is not None and hook.findings[0].value > 50
    assert len(hook.findings[0].outputs) == 3


def test_statistics_of_unusual_tensors() -> None:
    """Complex numbers count as pairs; integer, empty, sparse and meta tensors have none."""
    model, hook = nn.Sequential(nn.Identity()), Debug("0", {"l2": ">= 0"}, inspect=True)
    watched(model, hook)
    for odd in (torch.arange(3), torch.zeros(0), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        model(odd)
    assert hook.findings == [] and all(math.isnan(one.mean) for one in hook.inspected) and len(hook.inspected) == 4
    model((torch.arange(2), torch.tensor([3 - 4j])))
    model(torch.tensor([2.0], dtype=torch.bfloat16))
    pair, number = (finding.statistics for finding in hook.findings)
    assert pair["l2"] == 5 and number["mean"] == 2 and number["std"] == 0


def test_findings_are_bounded_and_the_first_are_kept() -> None:
    """The first findings are kept, the rest are counted."""
    model, hook = nn.Sequential(nn.Identity()), Debug("0", {"mean": "> 0"}, keep=2)
    watched(model, hook)
    for value in (1.0, 2.0, 3.0):
        model(torch.tensor([value, value]))
    assert [finding.value for finding in hook.findings] == [1.0, 2.0] and hook.found == 3
    assert "and 1 more, not kept" in hook.table()


def test_one_warning_per_module_and_condition(caplog: pytest.LogCaptureFixture) -> None:
    """A run full of NaN does not fill the console."""
    caplog.set_level(logging.WARNING, LOGGER)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    watched(model, Debug(), name="guard")
    for _ in range(3):
        model(torch.tensor([math.nan, 1.0]))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and lines[0].startswith("hook 'guard': 0: nan > 0 (1) at step 0, inference, call 1; output")


def test_the_warning_about_a_whole_model_has_a_name_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """The root module's name is empty; the warning calls it the model."""
    caplog.set_level(logging.WARNING, LOGGER)
    model = nn.Identity()
    watched(model, Debug(nn.Identity), name="guard")
    model(torch.tensor([math.nan, 1.0]))
    assert caplog.records[0].getMessage().startswith("hook 'guard': the model: nan > 0 (1) at step 0")


def test_the_table_is_readable() -> None:
    """One line per finding under a header, or 'no findings'."""
    model, hook = nn.Sequential(nn.Identity()), Debug("0", [{"max": "> 1"}, lambda name, output: True])
    watched(model, hook)
    assert hook.table() == "no findings"
    model(torch.tensor([1.0, 3.0]))
    header, first, second = hook.table().splitlines()
    assert header.split() == [
        "module",
        "condition",
        "value",
        "step",
        "phase",
        "call",
        "mean",
        "std",
        "absmax",
        "output",
    ]
    assert first.split()[:5] == ["0", "max", ">", "1", "3"] and second.split()[:3] == ["0", "<lambda>", "-"]
    assert first.index("float32 (2,) on cpu") == header.index("output")


def test_a_function_may_hold_for_integers() -> None:
    """An output without floating tensors gives a finding without statistics."""
    model, hook = nn.Sequential(nn.Identity()), Debug("0", lambda name, output: output.numel() > 1)
    watched(model, hook)
    model(torch.arange(3))
    assert hook.findings[0].statistics == {} and hook.findings[0].outputs == ("int64 (3,) on cpu",)
    assert " - " in hook.table()


@pytest.mark.req("003-28")
def test_inspection_keeps_every_call() -> None:
    """Shape, dtype, device, mean, std and absmax of each output tensor, the latest `keep` of them."""
    model, hook = Net().to(torch.float64), Debug(["conv", "head"], {}, inspect=True, keep=3)
    watched(model, hook)
    model(IMAGES.double())
    images = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    model(images)
    assert [(one.module, one.call) for one in hook.inspected] == [("head", 1), ("conv", 2), ("head", 2)]
    conv, expected = hook.inspected[1], model.conv(images)
    assert (conv.shape, conv.dtype, conv.device) == ((2, 4, 3, 3), "float64", "cpu")
    assert conv.mean == pytest.approx(expected.mean().item()) and conv.std == pytest.approx(expected.std().item())
    assert conv.absmax == pytest.approx(expected.abs().max().item()) and hook.findings == []


def test_inspection_of_integers_has_no_numbers() -> None:
    """Shape, dtype and device are still there."""
    model, hook = nn.Sequential(nn.Identity()), Debug("0", inspect=True)
    watched(model, hook)
    model(torch.arange(3))
    assert hook.inspected[0].dtype == "int64" and math.isnan(hook.inspected[0].mean)


class Terminal:
    """Stands for the debugger: keeps the local variables of its frame, and quits if asked to."""

    def __init__(self, quits: bool = False) -> None:
        self.frames: list[dict[str, Any]] = []
        self.quits = quits

    def __call__(self) -> None:
        self.frames.append(dict(sys._getframe(1).f_locals))
        if self.quits:
            raise bdb.BdbQuit


class Stream(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal


TERMINAL, FILE = Stream(True), Stream(False)


def fake_terminal(
    monkeypatch: pytest.MonkeyPatch, quits: bool = False, stdin: Any = TERMINAL, stdout: Any = TERMINAL
) -> Terminal:
    """Pretend that standard input and output are a terminal."""
    terminal = Terminal(quits)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "breakpointhook", terminal)
    return terminal


@pytest.mark.req("003-27")
def test_at_a_terminal_it_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The debugger opens whenever the condition holds, with name, output and finding in its frame."""
    terminal = fake_terminal(monkeypatch)
    model, hook = nn.Sequential(nn.Identity()), Debug("0", {"max": "> 1"}, keep=1)
    watched(model, hook)
    for value in (0.0, 2.0, 3.0):
        model(torch.tensor([value, value]))
    assert [frame["output"][0].item() for frame in terminal.frames] == [2.0, 3.0]
    assert terminal.frames[0]["name"] == "0" and terminal.frames[0]["finding"] is hook.findings[0]
    assert len(hook.findings) == 1 and hook.found == 2


@pytest.mark.parametrize(
    ("options", "streams"),
    [
        ({"break_at_terminal": False}, {}),
        ({}, {"stdin": FILE}),
        ({}, {"stdout": FILE}),
        ({}, {"stdin": None}),
    ],
)
def test_it_breaks_only_at_a_terminal(
    options: dict[str, Any], streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor with break_at_terminal=False, or in a process whose input or output is not a terminal."""
    terminal = fake_terminal(monkeypatch, **streams)
    model, hook = nn.Sequential(nn.Identity()), Debug("0", {"max": "> 1"}, **options)
    watched(model, hook)
    model(torch.tensor([2.0]))
    assert terminal.frames == [] and hook.found == 1


def test_quitting_the_debugger_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not count as a failure of the hook."""
    fake_terminal(monkeypatch, quits=True)
    model = nn.Sequential(nn.Identity())
    manager = watched(model, Debug("0", {"max": "> 1"}))
    with pytest.raises(KeyboardInterrupt, match="quit in the debugger in hook 'debug', on_forward, step 0"):
        model(torch.tensor([2.0]))
    assert manager.entry("debug").failures.total == 0


@pytest.mark.req("003-38")
@pytest.mark.hooks_fail(raises=KeyError)
def test_a_condition_that_raises_does_not_break_the_forward_pass(caplog: pytest.LogCaptureFixture) -> None:
    """The failure is reported with the hook's name, and the model's output is unchanged."""
    caplog.set_level(logging.WARNING, LOGGER)

    def broken(name: str, output: torch.Tensor) -> bool:
        raise KeyError("no such thing")

    model = Net()
    manager = watched(model, Debug("head", broken), name="guard")
    assert torch.equal(model(IMAGES), Net()(IMAGES))
    assert "hook 'guard', on_forward, step 0: failed: KeyError" in caplog.text
    assert manager.entry("guard").failures.total == 1 and manager.is_enabled("guard")


def test_in_a_run_findings_are_in_the_record() -> None:
    """Step and phase are the run's, and events.jsonl has each finding with the hook's name."""
    trainer = make_trainer(model=make_model(between=None), data=make_batches(3), record=True)
    trainer.add_hook(Debug("1", {"absmax": "> -1", "nan": True}), "guard")
    trainer.train()
    hook = trainer.hooks.get("guard")
    assert [(one.step, one.phase, one.call) for one in hook.findings] == [(n, "train", n) for n in (1, 2, 3)]
    events = [json.loads(line) for line in (trainer.run_dir / "events.jsonl").read_text().splitlines()]
    noted = [event for event in events if event["kind"] == "debug_finding"]
    assert [event["step"] for event in noted] == [1, 2, 3]
    assert noted[0]["by"] == "guard" and noted[0]["module"] == "1" and noted[0]["statistics"]["nan"] == 0


def test_it_does_not_keep_a_module_alive() -> None:
    """A module that is given directly can be garbage collected."""
    module = nn.Linear(2, 2)
    hook = Debug(module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None and hook.findings == []


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["warn", "raise"])
@pytest.mark.hooks_fail(raises=ValueError)
def test_what_a_condition_on_gradients_raises_is_a_failure_of_the_hook(policy: str) -> None:
    """Backward runs to its end, unless the policy ends it."""
    model, manager = nn.Linear(2, 2), HookManager()

    def broken(name: str, grad: Any) -> bool:
        raise ValueError("broken condition")

    manager.register_debug_hook(model, "guard", conditions=broken, on_error=policy)
    loss = model(torch.ones(1, 2)).sum()
    if policy == "raise":
        with pytest.raises(ValueError, match="broken condition"):
            loss.backward()
    else:
        loss.backward()
        assert model.weight.grad is not None
    assert [hook.failures for hook in manager.list_hooks()] == [1]


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_condition_on_gradients_that_always_raises_switches_the_hook_off() -> None:
    """After three failures in a row, also within one backward pass; a success in between starts the count again."""
    model, manager = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), HookManager()
    manager.watch(model)
    called: list[str] = []
    fails = [True, True, False, True, True, True]

    def broken(name: str, grad: Any) -> bool:
        called.append(name)
        if fails[len(called) - 1]:
            raise ValueError("broken condition")
        return False

    manager.register_debug_hook("*", "guard", conditions=broken)
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
    assert len(called) == 6
    assert [(hook.enabled, hook.failures) for hook in manager.list_hooks()] == [(False, 5)]


def test_a_hook_that_is_removed_before_backward_checks_no_gradients() -> None:
    """Nor does it end the backward pass."""
    model, manager = nn.Linear(2, 2), HookManager()
    called: list[str] = []
    for policy in ("warn", "raise"):
        manager.register_debug_hook(model, "guard", conditions=lambda name, grad: called.append(name), on_error=policy)
        loss = model(torch.ones(1, 2)).sum()
        manager.remove("guard")
        loss.backward()
    assert called == [] and model.weight.grad is not None


def test_conditions_on_gradients_leave_training_unchanged() -> None:
    """Gradients are the same bits with and without them, and a pass without grad is not checked."""
    gradients = []
    for conditions in (["nan"], ["nan", "grad_l2 >= 0"]):
        torch.manual_seed(0)
        model, manager = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), HookManager()
        manager.watch(model)
        manager.register_debug_hook("*", "guard", conditions=conditions)
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))
        gradients.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert [finding.module for finding in manager.get("guard").findings] == ["2", "1", "0"]


def test_a_finding_about_a_gradient_has_the_step_of_its_forward_pass() -> None:
    """It is written to the record of the run like any other."""
    model = nn.Sequential(nn.Linear(2, 2))
    data = [(torch.ones(1, 2), torch.zeros(1, 2))] * 3
    trainer = make_trainer(model=model, data=data)
    trainer.add_hook("debug", modules="0", conditions=["grad_l2 >= 0"])
    trainer.train()
    events = [event for event in trainer.record.events if event["kind"] == "debug_finding"]
    assert [event["step"] for event in events] == [1, 2, 3]
    assert [event["condition"] for event in events] == ["grad_l2 >= 0"] * 3
