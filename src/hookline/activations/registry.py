"""`ModelRegistry`: a registry that attaches forward hooks to a model, and has the methods that create such hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import torch

from hookline._parameters import PositiveInt, check
from hookline._text import counted, format_table
from hookline.activations.attention import AttentionMaps, attention_session
from hookline.activations.capture import Cache, Capture, capture_session
from hookline.activations.capture_store import CaptureStore
from hookline.activations.debug import Debug
from hookline.activations.forward_hooks import ForwardDispatcher
from hookline.activations.hooked_modules import HookedModule, patterns_of
from hookline.activations.monitor import COSTS, DEFAULT_METRICS, Monitor
from hookline.core.base import hook_attribute
from hookline.core.entry import Entry
from hookline.core.handle import Handle
from hookline.core.registry import Registry
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline._keywords import CaptureHookKeywords, CaptureKeywords, DebugKeywords, MonitorKeywords


@dataclass(frozen=True)
class FireRow:
    """One hook at one module."""

    hook: str
    module: str
    calls: int
    """Calls of the module since the first hook selected it."""
    fired: int
    """How often the hook was called there and returned without error."""
    why: str = ""
    """Why the hook was never called there; empty if it was."""


@dataclass(frozen=True)
class FireReport:
    """Every forward hook at every module it selects; prints as a table."""

    rows: tuple[FireRow, ...]

    @property
    def silent(self) -> list[str]:
        """The hooks that were called nowhere, in registration order."""
        fired = {row.hook for row in self.rows if row.fired}
        return [hook for hook in dict.fromkeys(row.hook for row in self.rows) if hook not in fired]

    def of(self, hook: str) -> list[FireRow]:
        """Return the rows of one hook."""
        return [row for row in self.rows if row.hook == hook]

    def __str__(self) -> str:
        if not self.rows:
            return "no forward hooks"
        cells = [(row.hook, row.module or "-", str(row.calls), str(row.fired), row.why) for row in self.rows]
        table = format_table(("hook", "module", "calls", "fired", "why not"), cells)
        return f"{table}\nnever fired: {', '.join(self.silent)}" if self.silent else table


class ModelRegistry(Registry):
    """A registry whose forward hooks are called whenever their modules run.

    Args:
        captures: Keeps the states of all capture hooks.
        cleanup_interval: The number of module calls after which states that are too old are dropped.
        enable_intervention: Whether hooks with `intervene = True` are accepted.

    Raises:
        ConfigError: If a parameter has an invalid value.
    """

    def __init__(
        self, captures: CaptureStore, *, cleanup_interval: int = 1000, enable_intervention: bool = False
    ) -> None:
        super().__init__()
        self.captures = captures
        self.enable_intervention = enable_intervention
        self.cleanup_interval = check(cleanup_interval, PositiveInt, "cleanup_interval")
        self.dispatcher = ForwardDispatcher(self)
        self._stays_attached = True  # After the last `attached` block.
        self._attached_blocks = 0  # Several threads may be in such a block.

    # ---- watching --------------------------------------------------------------------------------------------------

    def watch(self, model: torch.nn.Module) -> ForwardDispatcher:
        """Resolve module patterns against this model from now on, and return the dispatcher of the forward hooks.

        Raises:
            HooklineError: If a pattern matches nothing in the model.
        """
        self.dispatcher.watch(model)
        self._stays_attached = True
        return self.dispatcher

    def watch_for_trainer(self, model: torch.nn.Module, args: Any) -> None:
        """Watch a model for a trainer: hooks are attached only while it runs the model, and do not keep it alive.

        Args:
            model: The model.
            args: Where forward hooks read step, epoch and phase.
        """
        self.dispatcher.watch(model, attached=False)
        self.dispatcher.run, self.dispatcher.begin_batch = args, None
        self._stays_attached = False

    def attach(self) -> None:
        """Attach the forward hooks to the watched model until `close`."""
        self._set_attached(stays=True)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the forward hooks to the watched model inside the block, unless they already are."""
        self._set_attached(blocks=1)
        try:
            yield
        finally:
            self._set_attached(blocks=-1)

    def _set_attached(self, stays: bool | None = None, blocks: int = 0) -> None:
        with self.lock:
            self._stays_attached = self._stays_attached if stays is None else stays
            self._attached_blocks += blocks
            attached = self._stays_attached or self._attached_blocks > 0  # Another thread may validate or predict.
            if self.dispatcher.attached != attached:
                self.dispatcher.attached = attached
                if self.entries("forward"):
                    self._changed()

    def reopen(self) -> None:
        """Attach the forward hooks again, and set up the hooks that `close` closed."""
        super().reopen()
        self.attach()

    def close(self) -> None:
        """Close every hook, and remove the forward hooks from the model until `reopen`, `attach` or `watch`."""
        self._set_attached(stays=False)
        super().close()

    def silenced(self) -> AbstractContextManager[None]:
        """Call no forward hook for modules that this thread runs inside the block."""
        return self.dispatcher.silenced()

    # ---- capture ---------------------------------------------------------------------------------------------------

    def register_capture_hook(
        self,
        module: Any,
        hook_id: str | None = None,
        layer_idx: int | None = None,
        capture_input: bool = True,
        capture_output: bool = True,
        **options: Unpack[CaptureHookKeywords],
    ) -> Handle:
        """Register a hook that captures the inputs and outputs of modules.

        Args:
            module: A module, or a pattern in the watched model.
            hook_id: The hook's name; by default the class's.
            layer_idx: A number that is stored with each state.
            capture_input: Whether to capture inputs.
            capture_output: Whether to capture outputs.
            **options: Options of `Capture` and of `register`, such as `every`.

        Returns:
            The hook's name, which can also remove it.

        Raises:
            HooklineError: If there is nothing to capture, or a pattern matches nothing.
        """
        what = [part for part, wanted in (("input", capture_input), ("output", capture_output)) if wanted]
        if not what:
            raise HooklineError(f"capture hook {hook_id!r}: capture_input and capture_output are both False")
        return self.register(Capture, hook_id, modules=module, what=what, layer_idx=layer_idx, **options)

    def register_monitoring_hook(
        self,
        module: Any,
        hook_id: str | None = None,
        metrics: Callable[[torch.Tensor], Any] | Sequence[str | Callable[[torch.Tensor], Any]] | None = None,
        **options: Unpack[MonitorKeywords],
    ) -> Handle:
        """Register a hook that monitors statistics, time and memory of module calls.

        Args:
            module: A module, or a pattern in the watched model.
            hook_id: The hook's name; by default the class's.
            metrics: The values to monitor: names, functions of the output, or one function; see `Monitor`. By default,
                the statistics of the output, `time` and `memory`.
            **options: Options of `Monitor` and of `register`.

        Returns:
            The hook's name, which can also remove it.
        """
        if metrics is None:
            metrics = (*DEFAULT_METRICS, *COSTS)
        return self.register(Monitor, hook_id, modules=module, metrics=metrics, **options)

    def register_debug_hook(
        self, module: Any, hook_id: str | None = None, conditions: Any = None, **options: Unpack[DebugKeywords]
    ) -> Handle:
        """Register a hook that breaks at a terminal, or records a finding, where a condition holds.

        Args:
            module: A module, or a pattern in the watched model.
            hook_id: The hook's name; by default the class's.
            conditions: When to break; see `Debug`.
            **options: Options of `Debug` and of `register`.

        Returns:
            The hook's name, which can also remove it.
        """
        return self.register(Debug, hook_id, modules=module, conditions=conditions, **options)

    def fire_report(self) -> FireReport:
        """Return how often each forward hook was called at each of its modules, and why some never were."""
        if self.dispatcher.compiled_stats is not None:
            self.dispatcher.compiled_stats.count_calls()
        rows = []
        for entry in self.entries("forward"):
            for hooked, name in self.dispatcher.selected_by(entry).items():
                fired = hooked.fired[entry.name]
                why = "" if fired else self._why_not(entry, hooked)
                rows.append(FireRow(entry.name, name, hooked.calls, fired, why))
            # Modules that are passed as objects need no model.
            is_pattern = [not isinstance(given, (torch.nn.Module, weakref.ref)) for given in patterns_of(entry)]
            if any(is_pattern) and self.dispatcher.model is None:
                rows.append(FireRow(entry.name, "", 0, 0, "its patterns need a model"))
        return FireReport(tuple(rows))

    def _why_not(self, entry: Entry, hooked: HookedModule) -> str:
        """Return the nearest cause: first the hook's own switches, then the module, then the schedule."""
        failures = entry.failures.total and counted(entry.failures.total, "failure")
        if not entry.enabled:
            return f"off ({failures})" if failures else "off"
        if not entry.is_called_here(self.ranks):
            return "not for this rank"
        if hooked.module_ref() is None:
            return "the module no longer exists"
        if not self.dispatcher.attached:
            return "its trainer has not run the model, or the run has ended"
        if hooked.calls == 0:
            return "the module was never called (bypassed)"
        if failures:
            return f"it failed every time ({failures})"
        if not entry.schedule.always:
            return f"not due yet ({entry.schedule})"
        return "not called since the hook was registered, or only while hooks were silenced"

    def get_captured_states(self, hook_id: str) -> list[Any]:
        """Return the states that a hook has collected, oldest first.

        A `CapturedState` for each call that a capture hook has seen; a `MonitoredState` (`name`, `step`, `values`) for
        each module and step of a monitoring hook; every `Inspection` and `Finding` of a debug hook; for any other hook,
        its attribute `states`. Waits for the device if a monitoring hook has values on one.

        Raises:
            HooklineError: If no hook has this name, or it collects no states.
        """
        entry = self.entry(hook_id)
        states = hook_attribute(entry.hook, "states")
        if states is None:
            kind = type(entry.hook).__name__
            raise HooklineError(
                f"hook {entry.name!r} ({kind}) collects no states: it has no attribute `states`; "
                f"get_hook({entry.name!r}) returns the hook itself"
            )
        return list(states)

    def clear_captured_states(self, hook_id: str | None = None) -> None:
        """Remove the states that one hook or all hooks have collected."""
        for entry in self.entries("forward") if hook_id is None else [self.entry(hook_id)]:
            hook_attribute(entry.hook, "clear_states")()

    @contextmanager
    def capturing(
        self,
        model: torch.nn.Module,
        modules: Any = "*",
        *,
        early_stop: bool = False,
        what: str | Sequence[str] = "output",
        **options: Unpack[CaptureKeywords],
    ) -> Iterator[Cache]:
        """Capture inside a ``with`` block; afterwards no hook is left on the model.

        Args:
            model: The model to capture from.
            modules: The modules to capture, as for any forward hook.
            early_stop: Whether `Cache.run` ends the forward pass after the last selected module.
            what: The part to capture: "input", "output" or "both".
            **options: Options of `Capture`.

        Yields:
            The cache.

        >>> with manager.capturing(model, "blocks.*.mlp") as cache:
        ...     model(batch)
        >>> cache["blocks.3.mlp"]
        """
        cache = Cache(Capture(modules, what, **options), model)
        with capture_session(ModelRegistry(CaptureStore(max_states=None)), model, cache, early_stop):
            yield cache

    def attention_maps(
        self, model: torch.nn.Module, modules: Any = None, **options: Unpack[CaptureKeywords]
    ) -> AbstractContextManager[AttentionMaps]:
        """Capture attention weights inside a ``with`` block: [batch, heads, queries, keys] for each module.

        Each map costs batch x heads x queries x keys numbers and a matrix product; `maps.cost` adds it up.

        Args:
            model: The model to capture from.
            modules: The attention modules to capture; by default all.
            **options: Options of `Capture`: `dtype`, `device`, `reduce`, ….

        Returns:
            A context manager that yields the maps.

        >>> with manager.attention_maps(model) as maps:
        ...     model(batch)
        >>> maps["blocks.3.attention"]
        """
        return attention_session(ModelRegistry(CaptureStore(max_states=None)), model, modules, options)
