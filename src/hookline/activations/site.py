"""One watched module: its torch hooks, and how often it ran."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from hookline.activations.compiled import OUTSIDE, enter_graph, give_back, never_a_frame_of_its_own, take_token
from hookline.activations.meter import Meter
from hookline.events.dispatch import Fire

NO_TOKEN = torch.empty(0, device="cpu")


class Site:
    """One watched module. It does not keep the module alive."""

    def __init__(self, name: str, module: torch.nn.Module, fire: Fire) -> None:
        self.name = name
        self.calls = 0  # since it is watched
        self.fired: dict[str, int] = {}  # by hook
        self.module_ref = weakref.ref(module)
        self.wants = OUTSIDE  # what compiled code shows to its hooks
        self.token = NO_TOKEN  # stands for it there
        self.meter: Meter | None = None
        self.hear = _tap(self, fire)
        self._before: RemovableHandle | None = None
        self._key: int | None = None  # of the torch hook behind the module

    @property
    def module(self) -> torch.nn.Module | None:
        return self.module_ref()

    @property
    def attached(self) -> bool:
        return self._key is not None

    def attach(self, measures: bool) -> None:
        """Have a torch hook on the module, and with `measures` one before it."""
        module = self.module
        if module is None:
            return
        if measures != (self._before is not None):
            self._measure(module, measures)
        if self._key is None:
            self._key = _put_on(module, self.hear)

    def _measure(self, module: torch.nn.Module, measures: bool) -> None:
        if self._before is not None:
            self._before.remove()
        self.meter = Meter() if measures else None
        self._before = module.register_forward_pre_hook(_meter(self.meter)) if self.meter else None

    def enter_graphs(self, wants: str) -> None:
        """Graphs that are made from now on show the hooks what they want."""
        if self.token is NO_TOKEN:
            self.token = take_token(self)
        self.wants = wants

    def detach(self) -> None:
        """Leave the module as it was."""
        module = self.module
        if self._key is not None and module is not None:
            _take_off(module, self._key)
        if self._before is not None:
            self._before.remove()
        if self.token is not NO_TOKEN:
            give_back(self.token)
            self.token, self.wants = NO_TOKEN, OUTSIDE
        self._key = self._before = self.meter = None


def _put_on(module: torch.nn.Module, hook: Callable[..., Any]) -> int:
    """What ``register_forward_hook(hook, with_kwargs=True)`` does without making a handle, most of its cost."""
    key = RemovableHandle.next_id
    RemovableHandle.next_id += 1
    module._forward_hooks[key] = hook
    module._forward_hooks_with_kwargs[key] = True
    return key


def _take_off(module: torch.nn.Module, key: int) -> None:
    """What the handle's `remove` would do."""
    module._forward_hooks.pop(key, None)
    module._forward_hooks_with_kwargs.pop(key, None)


def _tap(site: Site, fire: Fire) -> Callable[..., Any]:
    """The torch hook behind a module: tells its hooks; returns the output that goes on, None for the same."""

    def hookline_tap(module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any) -> Any:
        if is_dynamo_compiling():
            if not enter_graph(site, inputs, kwargs, output):
                torch._dynamo.graph_break("a forward hook must be called outside of the graph")
            return None
        site.calls += 1
        heard, meter = fire.on_forward, site.meter
        measured = meter.end(module) if meter is not None else None
        return None if heard is None else heard(site, module, inputs, kwargs, output, measured)

    return hookline_tap


def _meter(meter: Meter) -> Callable[..., None]:
    """The torch hook before a module."""

    def hookline_meter(module: torch.nn.Module, inputs: Any) -> None:
        if not is_dynamo_compiling():  # a hook that measures breaks the graph, and both are called outside
            meter.begin(module)

    return hookline_meter


# Every torch hook that is made here has the code of these two.
never_a_frame_of_its_own(_tap(None, None))  # type: ignore[arg-type]
never_a_frame_of_its_own(_meter(None))  # type: ignore[arg-type]
