"""One watched module: its torch hooks, and how often it ran."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from hookline.activations.adding_up import entitled, forget_title
from hookline.activations.compiled import OUTSIDE, Place, enter_graph, never_a_frame_of_its_own
from hookline.activations.direct import DirectCall, can_take, leave_at, take_from
from hookline.activations.fires import Fires
from hookline.activations.meter import Meter
from hookline.activations.operators import give_back, take_token
from hookline.activations.torch_hook import TorchHook
from hookline.events.dispatch import Fire

NO_TOKEN = torch.empty(0, device="cpu")
_changing = threading.RLock()  # how modules are called; one thread may take a hook away while another runs its module
TAKEN_OFF = object()  # torch calls a hook without keyword inputs that another thread takes off at this moment


class Site(Place):
    """One watched module. It does not keep the module alive."""

    def __init__(self, name: str, module: torch.nn.Module, fire: Fire) -> None:
        self.name = name
        self.names: dict[str, str] = {}  # of hooks that call it something else: a module given as it is has no name
        self.calls = 0  # since it is watched, but for those that hooks count on the direct way
        self.fired = Fires()
        self.module_ref = weakref.ref(module)
        self.wants = OUTSIDE  # what compiled code shows to its hooks
        self.token = NO_TOKEN  # stands for it there
        self.tally = NO_TOKEN  # of its statistics there, if that is all they want
        self.home = NO_TOKEN, 0  # the table of tallies, and which one of them
        self.title = ""  # of the tally
        self.meter: Meter | None = None
        self.hear = Behind(self, fire, OUTSIDE, "")
        self.key = _new_key()  # of the torch hook behind the module
        self.attached = False
        self._fire = fire
        self._call: DirectCall | None = None  # while the direct way is open
        self._before: RemovableHandle | None = None

    @property
    def module(self) -> torch.nn.Module | None:
        return self.module_ref()

    @property
    def all_calls(self) -> int:
        """How often the module ran since it is watched."""
        return self.calls + self.fired.direct

    def name_for(self, hook: str) -> str:
        """What a hook calls the module."""
        return self.names.get(hook, self.name)

    def be_called(self, call: DirectCall) -> None:
        """Have the module called directly, by this and no longer by another."""
        module = self.module_ref()
        with _changing:
            if module is None or not self.attached or not can_take(module):
                return
            if leave_at(module, call, self._call):
                self._call = call

    def change_over(self, heard: Any) -> None:
        """Have the module called as the hooks that are due now want it, if they do."""
        call = getattr(heard, "direct", {}).get(self)
        if call is not None and call is not self._call:
            self.be_called(call)

    def attach(self, measures: bool, directly: bool = False) -> None:
        """Have a torch hook on the module, and with `measures` one before it; `directly` opens the direct way to it."""
        module = self.module
        if module is None:
            return
        if measures != (self._before is not None):
            self._measure(module, measures)
        if not self.attached:
            self.put_on(directly)
        elif not directly:  # there is a compiler now; the torch hook keeps its place among others
            with _changing:
                take_from(module, self._call)
                self._call = None

    def put_on(self, directly: bool) -> None:
        """What ``register_forward_hook(hook, with_kwargs=True)`` does without making a handle, most of its cost."""
        module = self.module_ref()
        if module is None:
            return
        with _changing:
            module._forward_hooks_with_kwargs[self.key] = True  # first: another thread may run the module
            module._forward_hooks[self.key] = self.hear
            if directly and self._call is not None:
                leave_at(module, self._call)
            self.attached = True

    def take_off(self) -> None:
        """What the handle's `remove` would do."""
        module = self.module_ref()
        with _changing:
            if module is not None:
                module._forward_hooks.pop(self.key, None)
                module._forward_hooks_with_kwargs.pop(self.key, None)
                take_from(module, self._call)
            self.attached = False

    def _measure(self, module: torch.nn.Module, measures: bool) -> None:
        if self._before is not None:
            self._before.remove()
        self.meter = Meter() if measures else None
        self._before = module.register_forward_pre_hook(Before(self.meter)) if self.meter else None

    def enter_graphs(self, wants: str) -> None:
        """Graphs that are made from now on show the hooks what they want."""
        if self.token is NO_TOKEN:
            self.token, self.title = take_token(self), entitled(self)
        self._want(wants)

    def _want(self, wants: str) -> None:
        """Another torch hook for another wish: before each run, compiled code looks which one is there."""
        if wants == self.wants:
            return
        self.wants, module = wants, self.module_ref()
        self.hear = Behind(self, self._fire, wants, self.title)
        if self.attached and module is not None:
            module._forward_hooks[self.key] = self.hear

    def detach(self) -> None:
        """Leave the module as it was."""
        if self.attached:
            self.take_off()
        if self._before is not None:
            self._before.remove()
        if self.token is not NO_TOKEN:
            give_back(self.token)
            self.token = self.tally = NO_TOKEN
            forget_title(self.title)
            self.home, self.title = (NO_TOKEN, 0), ""
            self._want(OUTSIDE)
        self._before = self.meter = self._call = None


def _new_key() -> int:
    """A number that no other torch hook has."""
    key: int = RemovableHandle.next_id
    RemovableHandle.next_id += 1
    return key


class Behind(TorchHook):
    """The torch hook behind a module: tells its hooks; returns the output that goes on, None for the same.

    What compiled code must know of the site are two texts. To look at them before each run takes it a third of what a
    look at the site would take.
    """

    __name__ = "hookline_tap"

    def __init__(self, site: Site, fire: Fire, wants: str, title: str) -> None:
        self.site, self.fire, self.wants, self.title = site, fire, wants, title

    def __call__(self, module: Any, inputs: Any, kwargs: Any, output: Any = TAKEN_OFF) -> Any:
        site = self.site
        if is_dynamo_compiling():
            if not enter_graph(site, self.wants, self.title, inputs, kwargs, output):
                torch._dynamo.graph_break("a forward hook must be called outside of the graph")
            return None
        if output is TAKEN_OFF:
            return None
        site.calls += 1
        heard, meter = self.fire.on_forward, site.meter
        measured = meter.end(module) if meter is not None else None
        return None if heard is None else heard(site, module, inputs, kwargs, output, measured)

    @property
    def tells(self) -> tuple[str, str]:
        """What compiled code knows of it."""
        return self.wants, self.title


class Before(TorchHook):
    """The torch hook before a module."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if not is_dynamo_compiling():  # a hook that measures breaks the graph, and both are called outside
            self.meter.begin(module)


never_a_frame_of_its_own(Behind.__call__)
never_a_frame_of_its_own(Before.__call__)
