"""Dispatch `on_forward`: attach torch hooks to the modules that forward hooks select, and call the hooks that are due.

Torch hooks are attached with the first forward hook that selects a module and removed with the last, so that a model
without forward hooks has none. A hook that is not due costs its modules one branch per call. A disabled hook costs
nothing: its torch hooks are removed, except in processes that compile, where their return would cause a recompilation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hookline._tensors import iter_tensors, tensor_version
from hookline.activations.compile import detection
from hookline.activations.cow_views import ViewTracker
from hookline.activations.hooked_modules import NO_BACKWARD, HookedModule, HookedModules, Measured, backward_id
from hookline.core.base import Hook
from hookline.core.catalog import CATALOG
from hookline.core.dispatch import FAILED, BoundHook, Dispatch, first_raised, invoke
from hookline.core.entry import Entry
from hookline.core.failures import step_of
from hookline.core.registry import HookRegistry
from hookline.errors import LiveWrite, RegistrationError

if TYPE_CHECKING:  # Imported when something is compiled.
    from hookline.activations.compile.compiled_stats import CompiledStats

ON_FORWARD = CATALOG["on_forward"]
LIVE_VALUES = ("inputs", "kwargs", "output")
DUE_HOOKS: Any = object()  # Passed to `on_forward` instead of a module, asks for the hooks that are due.

Observe = Callable[[Any, Any, Any], None]
"""Observes the live inputs, keyword inputs and output of one module; must not change them."""


# ---- event arguments -------------------------------------------------------------------------------------------------


class NoRun:
    """The run's values outside of a run; whatever drives the model may set `step`."""

    epoch, phase, trainer, model = 0, "inference", None, None

    def __init__(self) -> None:
        self.step = 0


class ForwardArgs:
    """The event arguments of `on_forward`: one call of one module. Tensors become copy-on-write views when read."""

    def __init__(
        self,
        run: Any,
        name: str,
        module: torch.nn.Module,
        inputs: Any,
        kwargs: Any,
        output: Any,
        measured: Measured | None,
    ) -> None:
        self._run, self._measured = run, measured
        self.name, self.module = name, module
        self.live_inputs, self.live_kwargs, self.live_output = inputs, kwargs, output
        self.views: ViewTracker | None = None

    def _view(self, value: Any) -> Any:
        if self.views is None:
            self.views = ViewTracker()
        return self.views.view(value)

    @property
    def inputs(self) -> Any:
        return self._view(self.live_inputs)

    @property
    def kwargs(self) -> Any:
        return self._view(self.live_kwargs)

    @property
    def output(self) -> Any:
        return self._view(self.live_output)

    @property
    def seconds(self) -> float:
        return self._measured.seconds if self._measured else float("nan")

    @property
    def memory(self) -> int:
        """What the call left allocated on an accelerator; elsewhere the bytes of its output."""
        if self._measured is not None and self._measured.memory >= 0:
            return self._measured.memory
        return sum(tensor.nbytes for tensor in iter_tensors(self.live_output))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)  # step, epoch, phase, trainer and model are the run's.


def first_floating(value: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of a nested value: the one that statistics of an output describe."""
    if isinstance(value, torch.Tensor):  # Nearly always.
        return value if value.is_floating_point() else None
    return next((tensor for tensor in iter_tensors(value) if tensor.is_floating_point()), None)


# ---- one hook --------------------------------------------------------------------------------------------------------


class ForwardCall:
    """One forward hook as the dispatcher calls it after any of its modules."""

    def __init__(self, dispatcher: ForwardDispatcher, hook: BoundHook, timed: bool) -> None:
        self._dispatcher, self._hook, self._timed = dispatcher, hook, timed
        self._failures = dispatcher.registry.failures
        self._intervenes = bool(getattr(hook.owner, "intervene", False)) and dispatcher.enable_intervention

    def __call__(
        self, hooked: HookedModule, module: Any, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
    ) -> Any:
        """Call the hook; return the output that the model continues with, which only an intervention changes."""
        hook = self._hook
        args = ForwardArgs(self._dispatcher.run, hooked.name_for(hook.hook), module, inputs, kwargs, output, measured)
        checks_output = "live_output" in hook.listener.wanted and not self._intervenes
        versions = [(tensor, tensor_version(tensor)) for tensor in iter_tensors(output)] if checks_output else []
        returned = None
        try:
            returned = invoke(
                ON_FORWARD, hook, self._failures, args, read=self._read, timed=self._timed, grad=self._intervenes
            )
        finally:
            self._check(args, versions, returned)
        if returned is FAILED:
            return output
        hooked.fired[hook.hook] += 1
        return returned if self._intervenes and returned is not None else output

    def _read(self, args: ForwardArgs) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Read what the hook names; an intervention gets the live tensors, so that gradients flow through them."""
        listener, live = self._hook.listener, LIVE_VALUES if self._intervenes else ()
        values = {name: getattr(args, f"live_{name}" if name in live else name) for name in listener.wanted}
        return listener.arguments(values)

    def _check(self, args: ForwardArgs, versions: Sequence[tuple[torch.Tensor, int]], returned: Any) -> None:
        """Detect an observer that wrote, or that returned something to replace the output."""
        hook = self._hook.hook
        if any(tensor_version(tensor) != version for tensor, version in versions):
            raise LiveWrite(f"hook {hook!r} wrote into live_output of {args.name!r}, which is read-only")
        if args.views is not None and args.views.written():
            message = f"wrote into its copy of the activations of {args.name!r}; the model's tensors are unchanged"
            self._failures.report_revert(hook, ON_FORWARD.name, step_of(args), message)
        if returned is not None and returned is not FAILED and not self._intervenes:
            message = "returned a value, which is ignored: observers cannot change the output (set intervene=True)"
            self._failures.report_revert(hook, ON_FORWARD.name, step_of(args), message)


# ---- all hooks -------------------------------------------------------------------------------------------------------


class ForwardDispatcher:
    """Keeps the torch hooks on modules up to date with a registry's forward hooks, and makes its `on_forward`."""

    def __init__(
        self,
        registry: HookRegistry,
        enable_intervention: bool = False,
        clean_up: Callable[[], None] | None = None,
        cleanup_interval: int = 1000,
    ) -> None:
        """Listen to changes of a registry.

        Args:
            registry: Where the forward hooks are registered.
            enable_intervention: Whether hooks with `intervene = True` are accepted.
            clean_up: Called after every `cleanup_interval` module calls that hooks listened to.
            cleanup_interval: See `clean_up`.
        """
        self.registry = registry
        self.enable_intervention = enable_intervention
        self.modules = HookedModules(registry.slots)
        self.run: Any = NoRun()
        self.compilable = True  # False for hooks of a block that runs uncompiled: nothing is prepared for graphs.
        self.compiled_stats: CompiledStats | None = None  # Made when something is compiled.
        self._clean_up, self._cleanup_interval, self._until_cleanup = clean_up, cleanup_interval, cleanup_interval
        self._suspended = threading.local()  # Has the `depth` of suspending blocks in each thread.
        self._suspending_blocks = 0  # In all threads.
        self._taken_off = False
        self._waiting_dispatch: Dispatch | None = None  # The `on_forward` that returns with the torch hooks.
        self._lock = threading.RLock()
        registry.add_registration_check(self._check)
        registry.on_change(self.sync)
        registry.dispatch_table.compile_with("on_forward", self.compile)

    # ---- attaching -----------------------------------------------------------------------------------------------

    def watch(self, model: torch.nn.Module) -> None:
        """Resolve patterns against this model from now on; a pattern that matches nothing in it is an error."""
        for entry in self.registry.entries("forward"):
            self.modules.check(entry, model)
        self.modules.watch(model)
        self.registry.dispatch_table.reset()
        self.sync()

    def _check(self, entry: Entry) -> None:
        """Reject a pattern that matches nothing at registration, not when the hook should be called."""
        if "on_forward" not in entry.listeners:
            return
        if getattr(entry.hook, "intervene", False) and not self.enable_intervention:
            raise RegistrationError(
                f"{entry.name!r} intervenes, and interventions are off: "
                "give enable_intervention=True to the trainer or to HookManager"
            )
        self.modules.check(entry, self.modules.model)

    def sync(self) -> None:
        """Attach torch hooks to the modules that hooks select now, and detach them from all others."""
        has_compiled = self.compilable and detection.has_compiled()
        if has_compiled and self.registry.entries("forward"):
            from hookline.activations.compile.dynamo import guard_on_hooks

            guard_on_hooks()  # Takes the compiler's lock, so not inside ours.
        with self._lock:
            entries = self.registry.entries("forward")
            self.modules.forget_others(entries)
            if not entries:
                self.detach()
            elif not self._taken_off:
                self._attach(entries, has_compiled)

    def _attach(self, entries: Sequence[Entry], has_compiled: bool) -> None:
        measure: dict[HookedModule, bool] = {}
        for entry in entries:
            if has_compiled or is_listening(entry):
                measures = measures_calls(entry)
                for hooked in self.modules.selected_by(entry):
                    measure[hooked] = measure.get(hooked, False) or measures
        for hooked in self.modules:
            if hooked in measure:
                hooked.attach(measure[hooked])
            else:
                hooked.detach()
        if has_compiled:
            from hookline.activations.compile.dynamo import enter_graphs

            enter_graphs(self, entries)
        elif self.compilable:
            detection.prepare_before_compiling(self)

    def prepare_compile(self) -> None:
        """Make the torch hooks ready to be traced; something is about to be compiled."""
        from hookline.activations.compile.dynamo import guard_on_hooks

        guard_on_hooks(reset=False)
        with self._lock:
            entries = self.registry.entries("forward")
            if entries and not self._taken_off:
                self._attach(entries, has_compiled=True)

    def detach(self) -> None:
        """Remove the torch hooks from every module."""
        with self._lock:
            if self.compiled_stats is not None:
                self.compiled_stats.close()
            for hooked in self.modules:
                hooked.detach()

    def take_off(self) -> None:
        """Remove the torch hooks until `put_back`, and call no hook until then, not even for calls that have begun."""
        slots = self.registry.slots
        with self._lock:
            self._taken_off, self._waiting_dispatch = True, slots.on_forward
            slots.on_forward = None  # type: ignore[attr-defined]
            for hooked in self.modules:
                hooked.take_off()

    def put_back(self) -> None:
        """Restore the torch hooks that `take_off` removed."""
        with self._lock:
            self._taken_off = False
            self.registry.slots.on_forward = self._waiting_dispatch  # type: ignore[attr-defined]
            for hooked in self.modules:
                hooked.attach(hooked.timer is not None)

    # ---- dispatching ---------------------------------------------------------------------------------------------

    def compile(self, hooks: list[BoundHook], timed: bool) -> Dispatch | None:
        """Make the callable of `on_forward` for the hooks that are due now; None if there are none."""
        hooks = [hook for hook in hooks if not _is_closed(self.registry.entry(hook.hook))]
        if not hooks:
            return None
        calls: dict[Any, list[tuple[BoundHook, Observe | None, ForwardCall]]] = {}
        for hook in hooks:
            # A hook may prepare a function for each module, as the built-in captures and monitors do. To read arguments
            # and check for writes would cost them more than what they do: a capture on every module of a small model
            # would take 2.1 instead of 1.5 times the plain model.
            bind = None if hook.recovering else getattr(hook.owner, "bind_module", None)
            forward_call = ForwardCall(self, hook, timed)
            for hooked in self.modules.selected_by(self.registry.entry(hook.hook)):
                hooked.fired.setdefault(hook.hook, 0)
                observe = bind(hooked, self) if bind is not None else None
                calls.setdefault(hooked, []).append((hook, observe, forward_call))
        failures = self.registry.failures

        def on_forward(
            hooked: HookedModule, module: Any, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
        ) -> Any:
            if (self._suspending_blocks and self.is_suspended()) or backward_id() != NO_BACKWARD:
                return None  # In the second case backward repeats a forward pass that hooks have seen.
            at_module = calls.get(hooked)
            if at_module is None:
                return hooks if hooked is DUE_HOOKS else None
            self._until_cleanup -= 1
            if self._until_cleanup <= 0:
                self._until_cleanup = self._cleanup_interval
                if self._clean_up is not None:
                    self._clean_up()
            raised: Exception | None = None
            for hook, observe, call in at_module:  # Each gets the output of the one before; a failure stops none.
                try:
                    if observe is None:
                        output = call(hooked, module, inputs, kwargs, output, measured)
                        continue
                    seen = (inputs, kwargs, output)
                    result = invoke(ON_FORWARD, hook, failures, self.run, seen, call=observe, timed=timed, grad=False)
                    if result is not FAILED:
                        hooked.fired[hook.hook] += 1
                except Exception as error:
                    raised = first_raised(raised, error)
            if raised is not None:
                raise raised
            return output

        return on_forward

    def due_hooks(self) -> Sequence[BoundHook]:
        """Return the hooks that would be called if one of their modules ran now."""
        dispatch = self.registry.slots.on_forward
        return (dispatch and dispatch(DUE_HOOKS, None, None, None, None, None)) or ()

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Call no forward hook for what this thread runs inside the block."""
        self._suspended.depth = self._suspended.__dict__.get("depth", 0) + 1
        with self._lock:
            self._suspending_blocks += 1
        try:
            yield
        finally:
            self._suspended.depth -= 1
            with self._lock:
                self._suspending_blocks -= 1

    def is_suspended(self) -> bool:
        """Return whether this thread is in a `silenced` block."""
        return bool(self._suspended.__dict__.get("depth", 0))


def is_listening(entry: Entry) -> bool:
    """Return whether a hook is enabled and not closed."""
    return entry.enabled and not _is_closed(entry)


def _is_closed(entry: Entry) -> bool:
    """Return whether a hook with a `close` method was closed at the end of its run; others continue to be called."""
    return entry.closed and getattr(entry.hook.close, "__func__", None) is not Hook.close


def measures_calls(entry: Entry) -> bool:
    """Return whether a hook names an argument that is measured from before the module runs."""
    return any(name in entry.listeners["on_forward"].wanted for name in ("seconds", "memory"))
