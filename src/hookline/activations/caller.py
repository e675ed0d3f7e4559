"""How the tap calls one forward hook: what it names, by its failure policy, and with a look at what it did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from hookline.activations.direct import Keep
from hookline.activations.moment import ForwardMoment, Measured
from hookline.activations.site import Site
from hookline.errors import LiveWrite
from hookline.events.catalog import CATALOG
from hookline.events.dispatch import Bound, Cost, first_raised
from hookline.events.moment import known_step

if TYPE_CHECKING:
    from hookline.activations.tap import Tap

ON_FORWARD = CATALOG["on_forward"]

Call = Callable[[Site, torch.nn.Module, Any, Any, Any, Measured | None], Any]
"""Tells hooks of a module call; returns the output that goes on."""


def calls_of(tap: Tap, item: Bound, timed: bool) -> Callable[[Site], Call]:
    """What calls a hook at each of its modules. A hook may bring a shorter way of its own: captures do."""
    caller = Caller(tap, item)
    shortcut = getattr(item.owner, "shortcut", None) if not item.recovering else None

    def call_at(site: Site) -> Call:
        keep = shortcut(site, tap) if shortcut is not None else None
        if keep is None:
            return _with_clock(caller.call, item.cost) if timed else caller.call
        return Shortcut(tap, item, _keep_with_clock(keep, item.cost) if timed else keep)

    return call_at


def one_after_the_other(calls: Sequence[Call]) -> Call:
    """Several hooks of one module: each gets what the one before it let go on, and all are called whoever fails."""
    if len(calls) == 1:
        return calls[0]
    shortcuts = [call for call in calls if isinstance(call, Shortcut)]
    return Shortcuts(shortcuts) if len(shortcuts) == len(calls) else _all_calls(calls)


def _all_calls(calls: Sequence[Call]) -> Call:
    def all_of_them(
        site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
    ) -> Any:
        raised: Exception | None = None
        for call in calls:
            try:
                output = call(site, module, inputs, kwargs, output, measured)
            except Exception as error:
                raised = first_raised(raised, error)
        if raised is not None:
            raise raised
        return output

    return all_of_them


def _keep_with_clock(keep: Keep, cost: Cost) -> Keep:
    def timed(inputs: Any, kwargs: Any, output: Any) -> None:
        began = perf_counter_ns()
        try:
            keep(inputs, kwargs, output)
        finally:
            cost.calls += 1
            cost.ns += perf_counter_ns() - began

    return timed


def _with_clock(call: Call, cost: Cost) -> Call:
    def timed(
        site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
    ) -> Any:
        began = perf_counter_ns()
        try:
            return call(site, module, inputs, kwargs, output, measured)
        finally:
            cost.add(perf_counter_ns() - began)

    return timed


class ShortWay(ABC):
    """Hooks that change nothing and bring a shorter way. They count their calls themselves."""

    keep: Keep
    functions: Sequence[Any]
    """All that `keep` consists of."""

    def __call__(
        self, site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
    ) -> Any:
        try:
            self.keep(inputs, kwargs, output)
        except Exception as error:
            self.failed(error, site, module, inputs, kwargs, output)
        return output

    @abstractmethod
    def failed(
        self, error: Exception, site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any
    ) -> None:
        """Report it; raises what must be raised."""


class Shortcut(ShortWay):
    """One hook's shorter way, under its failure policy."""

    def __init__(self, tap: Tap, item: Bound, keep: Keep) -> None:
        self.keep, self.functions = keep, [keep]
        self._tap, self._item = tap, item

    def failed(
        self, error: Exception, site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any
    ) -> None:
        """Report it; raises what must be raised."""
        moment = ForwardMoment(self._tap.run, site.name_for(self._item.hook), module, inputs, kwargs, output, None)
        raised = self._tap.registry.desk.failed(ON_FORWARD, self._item, error, moment)
        if raised is not None:
            raise raised


class Shortcuts(ShortWay):
    """The shorter ways of several hooks of one module, each under its own policy; all are taken whoever fails."""

    def __init__(self, shortcuts: Sequence[Shortcut]) -> None:
        keeps = [(shortcut.keep, shortcut) for shortcut in shortcuts]

        def keep_all(inputs: Any, kwargs: Any, output: Any) -> None:
            failures: list[tuple[Shortcut, Exception]] | None = None
            for keep, shortcut in keeps:
                try:
                    keep(inputs, kwargs, output)
                except Exception as error:
                    failures = [*(failures or ()), (shortcut, error)]
            if failures:
                raise _Failures(failures)

        self.keep, self.functions = keep_all, [keep_all, *(shortcut.keep for shortcut in shortcuts)]

    def failed(
        self, error: Exception, site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any
    ) -> None:
        """Report each; raises the first that must be raised."""
        raised: Exception | None = None
        assert isinstance(error, _Failures), "the shorter ways of several hooks fail together"
        for shortcut, one in error.failures:
            try:
                shortcut.failed(one, site, module, inputs, kwargs, output)
            except Exception as insisted:
                raised = first_raised(raised, insisted)
        if raised is not None:
            raise raised from None


class _Failures(Exception):
    """Which of several hooks have failed, and how."""

    def __init__(self, failures: list[tuple[Shortcut, Exception]]) -> None:
        super().__init__(f"{len(failures)} hooks have failed")
        self.failures = failures


class Caller:
    """One forward hook as the tap calls it; what can be known beforehand is."""

    def __init__(self, tap: Tap, item: Bound) -> None:
        listener = item.listener
        self.tap, self.item, self.desk = tap, item, tap.registry.desk
        self.live = bool(getattr(item.owner, "intervene", False)) and tap.enable_intervention
        self.reads_live = "live_output" in listener.wanted
        self.function, self.positional, self.keywords = listener.call, listener.positional, listener.keywords

    def call(
        self, site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
    ) -> Any:
        """Call the hook; returns the output that goes on, which only an intervention may change."""
        item, raised, returned = self.item, None, None
        moment = ForwardMoment(self.tap.run, site.name_for(item.hook), module, inputs, kwargs, output, measured)
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(grad and self.live)  # the context manager would cost 1.5 µs
        try:
            arguments, named = self.arguments(moment)
            try:
                returned = self.function(*arguments, **named)
            except Exception as error:
                raised = self.desk.failed(ON_FORWARD, item, error, moment)
            else:
                site.fired.add(item.hook)
                if item.recovering:
                    self.desk.recovered(ON_FORWARD, item)
        finally:
            torch._C._set_grad_enabled(grad)  # a hook may have switched it
        self.look_back(moment, returned)
        if raised is not None:
            raise raised
        return returned if self.live and returned is not None else output

    def arguments(self, moment: ForwardMoment) -> tuple[list[Any], dict[str, Any]]:
        """What the hook names. An intervention gets the live tensors: gradients flow through what it returns."""
        if self.live:
            values = moment.live_values(self.item.listener.wanted)
            return [values[name] for name in self.positional], {
                key: values[name] for key, name in self.keywords.items()
            }
        if self.reads_live:
            moment.remember_versions()
        arguments = [getattr(moment, name) for name in self.positional]
        return arguments, {key: getattr(moment, name) for key, name in self.keywords.items()} if self.keywords else {}

    def look_back(self, moment: ForwardMoment, returned: Any) -> None:
        """Whether an observer did what observers don't: wrote, or wanted to change the output."""
        hook = self.item.hook
        if self.reads_live and moment.live_written():
            raise LiveWrite(f"hook {hook!r} wrote into live_output of {moment.name!r}, which is there to be read")
        if moment.made_copies and moment.copies.written():
            message = f"wrote into its copy of the activations of {moment.name!r}; the model's own are unchanged"
            self.desk.overruled(hook, "on_forward", known_step(moment), message)
        if returned is not None and not self.live:
            message = "returned something, which is ignored: it only observes (intervene=True changes the output)"
            self.desk.overruled(hook, "on_forward", known_step(moment), message)
