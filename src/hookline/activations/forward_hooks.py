"""Dispatch `on_forward`: attach torch hooks to the modules that forward hooks select, and call the hooks that are due.

Torch hooks are attached with the first forward hook that selects a module and removed with the last, so that a model
without forward hooks has none. Those of a trainer are attached while it runs the model, because other trainers may run
the same model before and after. A hook that is not due costs its modules one branch per call. A disabled hook costs
nothing: its torch hooks are removed, except in processes that compile, where their return would cause a recompilation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger
from hookline._tensors import clone_tensor, copy_on_write, iter_tensors, kind_of, map_tensors, num_bytes, tensor_version
from hookline._text import counted
from hookline.activations.compile import detection
from hookline.activations.hooked_modules import (
    NO_BACKWARD,
    HookedModule,
    Measured,
    Register,
    backward_id,
    register_on_module,
    select_modules,
    weak_selection,
)
from hookline.core.base import ForwardHook, Hook, hook_attribute
from hookline.core.catalog import CATALOG
from hookline.core.dispatch import FAILED, BoundHook, Dispatch, first_raised, invoke
from hookline.core.entry import Entry
from hookline.core.failures import Incident, step_of
from hookline.errors import LiveWrite, RegistrationError
from hookline.stats import borrowed

if TYPE_CHECKING:
    from hookline.activations.compile.compiled_stats import CompiledStats  # Imported when something is compiled.
    from hookline.activations.registry import ModelRegistry  # It creates the dispatcher.

ON_FORWARD = CATALOG["on_forward"]

Observe = Callable[[Any, Any, Any], None]
"""Observes the live inputs, keyword inputs and output of one module; must not change them."""


class ForwardStopped(BaseException):
    """Ends a forward pass after the last selected module; raised and caught only inside `Cache.run`."""


# ---- event arguments -------------------------------------------------------------------------------------------------


class BuiltInForwardHook(ForwardHook):
    """Base of the built-in observers: they report the tensors that they cannot use under their registered names."""

    def __init__(self, modules: Any) -> None:
        self.modules = weak_selection(modules)
        self._registered_name = self.name or type(self).__name__
        self._registry: Any = None

    def setup(self, registry: Any, name: str) -> None:
        """Store the hook's registered name and its registry."""
        self._registry, self._registered_name = registry, name

    def _pass_over(self, module: str, tensor: torch.Tensor, what: str = "skips") -> None:
        if self._registry is not None:  # It is registered.
            self._registry.dispatcher.pass_over(self._registered_name, module, tensor, what)


def observer_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what `_tensors.copy_on_write` does, including borrowed tensors; None if it cannot be copied.

    A borrowed tensor is cloned at once, because torch does not see the writes of compiled code into its own buffers.
    """
    return clone_tensor(tensor) if borrowed.threads and borrowed.is_borrowed() else copy_on_write(tensor)


@dataclass(eq=False)
class ForwardArgs:
    """The event arguments of `on_forward` for one hook and one call of a module.

    An observer gets copy-on-write views of the tensors, created when they are read. An intervention gets the live
    tensors, so gradients flow through its result.
    """

    dispatcher: ForwardDispatcher
    hook: BoundHook
    intervenes: bool
    name: str
    module: torch.nn.Module
    live_inputs: Any
    live_kwargs: Any
    live_output: Any
    measured: Measured | None
    views: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # With their versions when they were created.

    def read(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments that the hook names."""
        listener = self.hook.listener
        return listener.arguments({name: getattr(self, name) for name in listener.wanted})

    def _view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        view = observer_view(tensor)
        if view is None:
            self.dispatcher.pass_over(self.hook.hook, self.name, tensor)
            return None
        self.views.append((view, tensor_version(view)))
        return view

    @property
    def inputs(self) -> Any:
        return self.live_inputs if self.intervenes else map_tensors(self._view, self.live_inputs)

    @property
    def kwargs(self) -> Any:
        return self.live_kwargs if self.intervenes else map_tensors(self._view, self.live_kwargs)

    @property
    def output(self) -> Any:
        return self.live_output if self.intervenes else map_tensors(self._view, self.live_output)

    @property
    def seconds(self) -> float:
        return self.measured.seconds if self.measured else float("nan")

    @property
    def memory(self) -> int:
        """Bytes that the call left allocated on an accelerator; elsewhere, the bytes of its output."""
        if self.measured is not None and self.measured.memory >= 0:
            return self.measured.memory
        return sum(num_bytes(tensor) for tensor in iter_tensors(self.live_output))

    @property
    def model(self) -> Any:
        model = self.dispatcher.run.model
        return self.dispatcher.model if model is None else model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatcher.run, name)  # step, epoch, phase and trainer are the run's.


class NoRun:
    """The run that forward hooks read if no trainer is known; code that fires no events may set it."""

    step, epoch, phase, trainer, model = 0, 0, "inference", None, None


# ---- all hooks -------------------------------------------------------------------------------------------------------


class ForwardDispatcher:
    """Keeps the torch hooks on modules up to date with a manager's forward hooks, and makes its `on_forward`."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry = registry
        self.run: Any = NoRun()
        """Where hooks read step, epoch, phase, trainer and model: the event arguments of the run, once there is one."""
        self.begin_batch: Callable[[], bool] | None = None
        """In your own loop, begins a micro-batch at its first forward pass."""
        self.register: Register = register_on_module
        """Has torch call the forward hook of a module."""
        self.is_elsewhere: Callable[[], bool] | None = None
        """Tells whether what this thread runs is not of the run; no hook is called for it then."""
        self.fail: Callable[[Exception], None] | None = None
        """Gets what would end the run, instead of the code that runs the model; it may raise it."""
        self.attached = True
        """Whether forward hooks are called: until `HookManager.close`, or while the trainer that has them runs."""
        self.compilable = True  # False for hooks of a block that runs uncompiled: nothing is prepared for graphs.
        self.compiled_stats: CompiledStats | None = None  # Created when something is compiled.
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._hooked: weakref.WeakKeyDictionary[torch.nn.Module, HookedModule] = weakref.WeakKeyDictionary()
        self._selected: dict[str, tuple[Entry, dict[HookedModule, str]]] = {}  # By hook; the modules with their names.
        self._until_cleanup = registry.cleanup_interval
        self._silent_threads: list[int] = []  # Once for each `silenced` block that a thread is in.
        self._passed_over: set[tuple[str, str]] = set()  # Hooks and modules for which this was reported.
        # Held while modules are selected, and while torch hooks are attached or removed.
        self._lock = threading.RLock()
        weakref.finalize(registry.slots, detach_all, self._hooked).atexit = False
        registry.add_registration_check(self._check)
        registry.on_change(self.sync)
        registry.dispatch_table.set_maker("on_forward", self.make_dispatch)

    # ---- attaching -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that patterns are resolved against."""
        return None if self._model is None else self._model()

    @property
    def modules(self) -> list[HookedModule]:
        """The modules that hooks select or have selected."""
        return list(self._hooked.values())

    def watch(self, model: torch.nn.Module, attached: bool = True) -> None:
        """Resolve patterns against this model from now on.

        Args:
            model: The model.
            attached: Whether hooks are called from now on; a trainer's hooks are called only while it runs the model.

        Raises:
            HooklineError: If a pattern matches nothing in the model.
        """
        with self._lock:
            # This raises before anything has changed. Only once, because a user's predicate may have side effects.
            selections = [(entry, select_modules(entry, model)) for entry in self.registry.entries("forward")]
            if self.model is not model:
                self._update([])
                self._hooked.clear()
            self.attached = attached
            self._model = weakref.ref(model)
            self._selected = {}
            for entry, modules in selections:
                self._select(entry, modules)
        self.registry.dispatch_table.reset()
        self.sync()  # Takes the compiler's lock, so it must not be inside ours.

    def _check(self, entry: Entry) -> None:
        """Reject a pattern that matches nothing at registration, not when the hook should be called."""
        if "on_forward" not in entry.listeners:
            return
        if hook_attribute(entry.hook, "intervene") and not self.registry.enable_intervention:
            raise RegistrationError(
                f"{entry.name!r} intervenes, but interventions are disabled: "
                "pass enable_intervention=True to the trainer (in a config under `trainer:`) or to HookManager"
            )
        self.selected_by(entry)

    def selected_by(self, entry: Entry) -> dict[HookedModule, str]:
        """Return the modules that a hook selects, with the names under which the hook sees them."""
        selection = self._selected.get(entry.name)
        if selection is not None and selection[0] is entry:
            return selection[1]
        with self._lock:  # Otherwise another thread could watch another model between selecting and storing.
            return self._select(entry, select_modules(entry, self.model))

    def _select(self, entry: Entry, modules: Mapping[str, torch.nn.Module]) -> dict[HookedModule, str]:
        """Store which modules a hook selects, by their names."""
        selected: dict[HookedModule, str] = {}
        for name, module in modules.items():
            hooked = self._hooked.get(module)
            if hooked is None:
                hooked = self._hooked[module] = HookedModule(module, self.registry.slots, self.register)
            selected[hooked] = name
        self._selected[entry.name] = (entry, selected)
        return selected

    def sync(self, compiling: bool = False) -> None:
        """Attach torch hooks to the modules that hooks select now, and detach them from all others.

        Args:
            compiling: Whether code is about to be compiled, perhaps for the first time in this process.
        """
        has_compiled = compiling or (self.compilable and detection.has_compiled())
        if has_compiled and self.registry.entries("forward"):
            from hookline.activations.compile.dynamo import guard_on_hooks

            guard_on_hooks(reset=not compiling)  # Takes the compiler's lock, so it must not be inside ours.
        with self._lock:
            entries = self.registry.entries("forward")
            # A selection is removed with its hook, because another hook may get its name.
            self._selected = {entry.name: (entry, self.selected_by(entry)) for entry in entries}
            if not entries:
                self.detach()
            elif has_compiled:
                from hookline.activations.compile.dynamo import enter_graphs

                self._update(entries if self.attached else [])
                enter_graphs(self, entries)
            else:
                self._update([entry for entry in entries if self.is_listening(entry)])
                if self.compilable:
                    detection.prepare_before_compiling(self)

    def _update(self, entries: Sequence[Entry]) -> None:
        """Keep torch hooks for these hooks and no others."""
        attached: dict[HookedModule, str] = {}
        measured: dict[HookedModule, str] = {}
        for entry in entries:
            attached.update(self.selected_by(entry))
            if measures_calls(entry):
                measured.update(self.selected_by(entry))
        for hooked in self.modules:
            hooked.update(hooked in attached, hooked in measured, returns=not self.attached)

    def detach(self) -> None:
        """Remove the torch hooks from every module."""
        with self._lock:
            if self.compiled_stats is not None:
                self.compiled_stats.close()
            self._update([])

    # ---- dispatching ---------------------------------------------------------------------------------------------

    def make_dispatch(self, hooks: list[BoundHook]) -> Dispatch | None:
        """Make the callable of `on_forward` for the hooks that are due now; None if there are none."""
        hooks = [hook for hook in hooks if self.is_listening(self.registry.entry(hook.hook))]
        begin_batch = self.begin_batch
        if not hooks and begin_batch is None:
            return None
        calls: dict[Any, list[tuple[BoundHook, str, Observe | None]]] = {}
        for hook in hooks:
            # A hook may prepare a function for each module, as the built-in captures and monitors do. Reading arguments
            # and checking for writes would cost more than their own work: a capture on every module of a small model
            # would take 2.1 instead of 1.5 times the plain model.
            entry = self.registry.entry(hook.hook)
            # Wrappers of a user's hook, such as the guard of random numbers, are around its `on_forward`.
            is_wrapped = not hook.built_in and hook.call is not hook.listener.call
            bind = None if is_wrapped else hook_attribute(hook.owner, "bind_module")
            for hooked, name in self.selected_by(entry).items():
                module = hooked.module_ref()
                observe = bind(name, module, self.run) if bind is not None and module is not None else None
                calls.setdefault(hooked, []).append((hook, name, observe))
        failures = self.registry.failures

        def on_forward(
            hooked: HookedModule, module: Any, inputs: Any, kwargs: Any, output: Any, measured: Measured | None
        ) -> Any:
            if ((self._silent_threads or self.is_elsewhere) and self.is_silenced()) or backward_id() != NO_BACKWARD:
                return None  # In the second case, backward repeats a forward pass that hooks have seen.
            if begin_batch is not None and begin_batch():  # Different hooks may be due now.
                dispatch = self.registry.slots.on_forward
                return dispatch and dispatch(hooked, module, inputs, kwargs, output, measured)
            at_module = calls.get(hooked)
            if at_module is None:
                return None
            self._until_cleanup -= 1  # Counts may be lost between threads, which only delays the clean-up.
            if self._until_cleanup <= 0:
                self._until_cleanup = self.registry.cleanup_interval
                self.registry.captures.sweep()
            raised: Exception | None = None
            for hook, name, observe in at_module:  # Each gets the previous one's output; a failure stops none.
                values = (inputs, kwargs, output)
                try:
                    if observe is None:
                        output = self._call(hook, hooked, name, module, values, measured)
                    else:
                        if hook.built_in:
                            returned = invoke(ON_FORWARD, hook, failures, self.run, values, call=observe)
                        else:
                            returned = self._call_bound(hook, name, observe, values)
                        if returned is not FAILED:
                            hooked.fired[hook.hook] += 1
                except Exception as error:
                    raised = first_raised(raised, error)
                except ForwardStopped:
                    if raised is None:  # Otherwise the failure of an earlier hook ends the pass.
                        raise
            if raised is not None:
                if self.fail is None:
                    raise raised
                self.fail(raised)
            return output

        return on_forward

    def _call_bound(self, hook: BoundHook, name: str, observe: Observe, values: tuple[Any, Any, Any]) -> Any:
        """Call the function that a user's hook has bound to a module, and check that it leaves the tensors alone."""
        versions = []
        for value in (*values[0], *values[1].values(), values[2]):
            tensors = (value,) if isinstance(value, torch.Tensor) else iter_tensors(value)
            versions += [(tensor, tensor_version(tensor)) for tensor in tensors]
        try:
            return invoke(ON_FORWARD, hook, self.registry.failures, self.run, values, call=observe, grad=False)
        finally:  # A hook that raises may have written before.
            _check_unwritten(versions, f"hook {hook.hook!r} wrote into the tensors of {name!r}, which are read-only")

    def _call(
        self,
        hook: BoundHook,
        hooked: HookedModule,
        name: str,
        module: torch.nn.Module,
        values: tuple[Any, Any, Any],
        measured: Measured | None,
    ) -> Any:
        """Call a hook after one of its modules; return the output, which only an intervention changes."""
        intervenes = self.registry.enable_intervention and bool(hook_attribute(hook.owner, "intervene"))
        inputs, kwargs, output = values
        args = ForwardArgs(self, hook, intervenes, name, module, inputs, kwargs, output, measured)
        failures = self.registry.failures
        checks_output = "live_output" in hook.listener.wanted and not intervenes
        versions = [(tensor, tensor_version(tensor)) for tensor in iter_tensors(output)] if checks_output else []
        returned = None
        try:
            returned = invoke(ON_FORWARD, hook, failures, args, read=ForwardArgs.read, grad=intervenes)
        finally:  # A hook that raises may have written before.
            _check_unwritten(versions, f"hook {hook.hook!r} wrote into live_output of {name!r}, which is read-only")
            if any(tensor_version(view) != version for view, version in args.views):
                message = f"wrote into its copy of the activations of {name!r}; the model's tensors are unchanged"
                failures.report_revert(hook.hook, ON_FORWARD.name, step_of(args), message)
        if returned is FAILED:
            return output
        hooked.fired[hook.hook] += 1
        if returned is not None and not intervenes:
            message = "returned a value, which is ignored: observers cannot change the output (set intervene=True)"
            failures.report_revert(hook.hook, ON_FORWARD.name, step_of(args), message)
        return returned if intervenes and returned is not None else output

    def is_listening(self, entry: Entry) -> bool:
        """Return whether a hook is enabled and not closed at the end of its run, as hooks with `close` are."""
        closed = entry.closed and getattr(hook_attribute(entry.hook, "close"), "__func__", None) is not Hook.close
        return self.attached and entry.enabled and not closed

    def pass_over(self, hook: str, module: str, tensor: torch.Tensor, what: str = "skips") -> None:
        """Report, once per hook and module, that the hook cannot handle a tensor because of its kind."""
        if (hook, module) not in self._passed_over:
            self._passed_over.add((hook, module))
            message = f"{what} {kind_of(tensor)} tensors of {module!r}"
            incident = Incident("passed_over", hook, ON_FORWARD.name, step_of(self.run), message)
            self.registry.failures.report(incident, True)

    def is_silenced(self) -> bool:
        """Return whether no forward hook is called for what this thread runs."""
        is_elsewhere = self.is_elsewhere is not None and self.is_elsewhere()
        return is_elsewhere or threading.get_ident() in self._silent_threads

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Call no forward hook for modules that this thread runs inside the block."""
        thread = threading.get_ident()  # A list needs no lock: appending to it and removing from it are atomic.
        self._silent_threads.append(thread)
        try:
            yield
        finally:
            self._silent_threads.remove(thread)


def _check_unwritten(versions: Iterable[tuple[torch.Tensor, int]], message: str) -> None:
    if any(tensor_version(tensor) != version for tensor, version in versions):
        raise LiveWrite(message)


def detach_all(hooked: Mapping[torch.nn.Module, HookedModule]) -> None:
    """Remove the torch hooks of a manager that no longer exists."""
    attached = [module for module in list(hooked.values()) if module.handle is not None]
    for module in list(hooked.values()):
        module.update(attached=False)
    if attached:
        modules = counted(len(attached), "module")
        words = "a HookManager was garbage-collected, so its hooks were removed from %s; keep it in a variable"
        logger.warning(words, modules)


def measures_calls(entry: Entry) -> bool:
    """Return whether a hook names an argument that is measured from before the module runs."""
    wanted = entry.listeners["on_forward"].wanted
    return "seconds" in wanted or "memory" in wanted
