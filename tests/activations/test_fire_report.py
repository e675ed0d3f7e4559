"""The fire report: how often each hook was called at each module, and why one never was."""

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

from hookline import ForwardHook, HookManager
from hookline.core.schedule import Reading

INPUT = torch.ones(2, 3)


class Watch(ForwardHook):
    """Does nothing."""

    def __init__(self, modules: Any = "*") -> None:
        self.modules = modules

    def on_forward(self) -> None:
        pass


class Model(nn.Module):
    """Two layers that run and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(data).relu())


def watched(model: nn.Module, *hooks: ForwardHook, **options: Any) -> HookManager:
    """A manager that watches a model; hooks are named a, b, …"""
    manager = HookManager()
    manager.watch(model)
    for letter, hook in zip("abcdef", hooks, strict=False):
        manager.register(hook, letter, **options)
    return manager


def why(report: Any) -> dict[str, str]:
    """The reason by module."""
    return {row.module: row.why for row in report.rows}


def test_calls_and_fires_are_counted_per_module() -> None:
    """A bypassed module differs from those that ran; the hook itself is not silent."""
    model = Model()
    manager = watched(model, Watch())
    for _ in range(3):
        model(INPUT)
    report = manager.fire_report()
    assert [(row.module, row.calls, row.fired) for row in report.rows] == [
        ("first", 3, 3), ("second", 3, 3), ("unused", 0, 0),
    ]  # fmt: skip
    assert why(report) == {"first": "", "second": "", "unused": "the module was never called (bypassed)"}
    assert report.silent == [] and report.of("a") == list(report.rows)


def test_a_module_whose_weights_are_used_without_calling_it_is_seen() -> None:
    """Attention takes its output projection's weights and never calls it, so a hook there is never called."""
    layer = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, batch_first=True)
    manager = watched(layer, Watch("linear1"), Watch("self_attn.out_proj"))
    layer(torch.randn(2, 3, 8))
    report = manager.fire_report()
    assert report.silent == ["b"]
    assert why(report) == {"linear1": "", "self_attn.out_proj": "the module was never called (bypassed)"}


def test_a_hook_that_is_off_or_not_due() -> None:
    """Each has its reason, with the schedule."""
    model = Model()
    manager = watched(model, Watch("first"), enabled=False)
    manager.register(Watch("first"), "b", every=10)
    manager.register(Watch("first"), "c", ranks=3)
    manager.begin_batch(Reading(1, 1, 1))
    model(INPUT)
    report = manager.fire_report()
    assert [row.why for row in report.rows] == ["off", "not due yet (every 10 steps)", "not for this rank"]
    assert report.silent == ["a", "b", "c"] and {row.calls for row in report.rows} == {1}
    manager.begin_batch(Reading(10, 10, 1))
    manager.decide_due_hooks(Reading(10, 10, 1))
    model(INPUT)
    assert manager.fire_report().silent == ["a", "c"]


@pytest.mark.req("003-38")
@pytest.mark.hooks_fail(raises=ValueError)
def test_a_hook_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Before it is switched off and after."""
    caplog.set_level(logging.CRITICAL, "hookline")

    class Broken(Watch):
        def on_forward(self) -> None:
            raise ValueError("boom")

    model = Model()
    manager = watched(model, Broken("first"))
    model(INPUT)
    assert why(manager.fire_report()) == {"first": "it failed every time (1 failure)"}
    model(INPUT)
    model(INPUT)
    assert why(manager.fire_report()) == {"first": "off (3 failures)"}


def test_patterns_that_wait_for_a_model() -> None:
    """A module given as it is needs none; a pattern beside it is still waiting."""
    model = Model()
    manager = HookManager()
    manager.register(Watch("first"), "pattern")
    manager.register(Watch([model.first, "second"]), "both")
    manager.register(Watch(model.first), "given")
    model(INPUT)
    waiting = "its patterns need a model"
    report = manager.fire_report()
    assert [(row.hook, row.fired, row.why) for row in report.rows] == [
        ("pattern", 0, waiting), ("both", 1, ""), ("both", 0, waiting), ("given", 1, ""),
    ]  # fmt: skip
    assert report.silent == ["pattern"]
    manager.watch(model)
    assert waiting not in str(manager.fire_report())


def test_calls_before_the_hook_came_are_not_its_own() -> None:
    """The module has calls already, from before and from a silenced block."""
    model = Model()
    manager = watched(model, Watch("first"))
    model(INPUT)
    manager.register(Watch("first"), "late")
    with manager.silenced():
        model(INPUT)
    row = manager.fire_report().of("late")[0]
    assert (row.calls, row.fired) == (2, 0) and row.why.startswith("not called since the hook was registered")


def test_a_module_that_is_gone() -> None:
    """A hook on a module that no longer exists says so."""
    module = nn.Linear(3, 2)
    manager = HookManager()
    manager.register_capture_hook(module, "a")
    del module
    gc.collect()
    assert [row.why for row in manager.fire_report().rows] == ["the module no longer exists"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_calls_and_fires_are_counted_in_compiled_code(wrapped: bool) -> None:
    """Also of a hook that was registered after the compilation; a module that compiled code omits is reported."""
    torch._dynamo.reset()
    model = Model()
    compiled: Any = torch.compile(model, backend="eager") if wrapped else model
    if not wrapped:
        model.compile(backend="eager")
    compiled(INPUT)
    manager = watched(model, Watch(["first", "unused"]))
    compiled(INPUT)
    compiled(INPUT)
    first, unused = manager.fire_report().rows
    assert (first.calls, first.fired, first.why) == (2, 2, "")
    assert (unused.calls, unused.fired, unused.why) == (0, 0, "the module was never called (bypassed)")


def test_the_report_prints_as_a_table() -> None:
    """Columns line up; the last line names the silent hooks."""
    model = Model()
    manager = watched(model, Watch("first"), Watch("unused"))
    model(INPUT)
    lines = str(manager.fire_report()).splitlines()
    assert lines[0].split() == ["hook", "module", "calls", "fired", "why", "not"]
    assert lines[1].split() == ["a", "first", "1", "1"] and lines[-1] == "never fired: b"
    assert lines[2].index("the module was never called") == lines[0].index("why not")
    assert str(HookManager().fire_report()) == "no forward hooks"


def test_a_monitor_under_the_name_of_a_capture_that_is_gone_is_counted() -> None:
    """A name may be given to a hook of another kind."""
    manager, module = HookManager(), nn.Linear(2, 2)
    manager.register_capture_hook(module, "it")
    module(torch.ones(1, 2))
    manager.remove("it")
    manager.register_monitoring_hook(module, "it")
    module(torch.ones(1, 2))
    assert manager.fire_report().of("it")[0].fired == 2
