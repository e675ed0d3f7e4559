"""Capture for a ``with`` block: the cache it yields, and the hooks that are on the model until it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline._words import nearest
from hookline.activations.capture import Capture
from hookline.activations.capture_store import CapturedState, save_states
from hookline.activations.compile.detection import run_uncompiled
from hookline.activations.forward_hooks import ForwardStopped
from hookline.core.base import ForwardHook
from hookline.errors import HooklineError

if TYPE_CHECKING:  # the manager makes sessions
    from hookline.activations.registry import ModelRegistry


class Cache:
    """The states captured in a block, by module name or glob. It can be read after the block, too.

    If several threads capture from one model at once, each cache has only the states of its thread. States of threads
    that do not capture themselves, such as the workers of a pool, are in every open cache.
    """

    def __init__(
        self,
        hook: Capture,
        model: torch.nn.Module,
        other_threads: Set[str] = frozenset(),
        early_stop: EarlyStop | None = None,
    ) -> None:
        self._hook, self._model = hook, weakref.ref(model)  # weak, because the cache may outlive the model
        self._early_stop = early_stop
        self._states: list[CapturedState] | None = None  # once the block has ended
        self._other_threads = other_threads  # threads that capture for themselves

    @property
    def states(self) -> list[CapturedState]:
        """Every state, oldest first."""
        states = self._hook.states if self._states is None else self._states
        return [state for state in states if state.thread not in self._other_threads]

    def close(self) -> None:
        """Take the states over from the hook, at the end of the block."""
        self._states = self._hook.take_states()
        self._states = self.states

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; return None if `early_stop` ended the pass after the last selected module."""
        model = self._model()
        if model is None:
            raise HooklineError("the model of this cache no longer exists")
        with self._early_stop.stopping() if self._early_stop is not None else nullcontext():
            return model(*args, **kwargs)
        return None

    def __getitem__(self, name: str) -> Any:
        """Return the last output of one module, or for a glob a dict of them (inputs if only these are captured)."""
        last = {state.name: state for state in self.states}
        if name in last:
            return last[name].main
        matching = {key: state.main for key, state in last.items() if fnmatchcase(key, name)}
        if not matching:
            raise HooklineError(f"nothing was captured of {name!r}; {nearest(name, last)}")
        return matching

    def __contains__(self, name: str) -> bool:
        return any(state.name == name for state in self.states)

    def __len__(self) -> int:
        return len(self.states)

    def save(self, path: str | Path) -> Path:
        """Write every captured tensor to a safetensors file, keyed ``module/call/part/index``."""
        return save_states(self.states, path)


class EarlyStop(ForwardHook):
    """Ends the forward pass of `Cache.run` when every selected module has run and was captured.

    Other threads that run the model at the same time are not stopped.
    """

    def __init__(self, modules: Any, num_modules: int) -> None:
        self.modules, self._num_modules = modules, num_modules
        self._local = threading.local()  # has the names of the modules that ran, in a thread that is to be stopped

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the forward pass that this thread runs in the block."""
        self._local.names = set()
        try:
            yield
        except ForwardStopped:
            pass
        finally:
            del self._local.names

    def on_forward(self, name: str) -> None:
        """Note that a module ran; stop after the last."""
        names = self._local.__dict__.get("names")
        if names is not None:
            names.add(name)
            if len(names) >= self._num_modules:
                raise ForwardStopped


class CaptureSession:
    """A capture hook on a model, alone in its manager, until it is closed."""

    def __init__(self, manager: ModelRegistry, model: torch.nn.Module, hook: Capture, early_stop: bool = False) -> None:
        self.hook = hook
        self.early_stop: EarlyStop | None = None
        self._manager = manager
        manager.dispatcher.compilable = False  # sessions run uncompiled, so nothing is prepared for graphs
        manager.watch(model)
        manager.register(hook, "cache", on_error="raise" if early_stop else None)
        if early_stop:
            selected = manager.dispatcher.selected_by(manager.entry("cache"))
            self.early_stop = EarlyStop(hook.modules, len(selected))
            manager.register(self.early_stop, "early_stop", after="cache", on_error="raise")

    def close(self) -> None:
        """Remove everything from the model."""
        for name in self._manager:
            self._manager.remove(name)


@contextmanager
def capture_session(
    make_manager: Callable[..., ModelRegistry],
    model: torch.nn.Module,
    modules: Any,
    early_stop: bool,
    options: Mapping[str, Any],
) -> Iterator[Cache]:
    """Capture from a model until the block ends; then no hook is left on it.

    Args:
        make_manager: The class `ModelRegistry`, which imports this module.
        model: The model to capture from.
        modules: The modules to capture, as for any forward hook.
        early_stop: Whether `Cache.run` ends the forward pass after the last selected module.
        options: The options of `Capture`.

    Yields:
        The cache.
    """
    with run_uncompiled(), _concurrent_threads(model) as other_threads:
        manager = make_manager(max_captured_states=None)
        session = CaptureSession(manager, model, Capture(modules, **options), early_stop)
        cache = Cache(session.hook, model, other_threads, session.early_stop)
        try:
            yield cache
        finally:
            cache.close()  # takes the states, which closing the session drops
            session.close()


# For each open block of a model: the thread it is in, and the other threads with open blocks at the same time.
_open_blocks: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[str, set[str]]]] = weakref.WeakKeyDictionary()
_open_blocks_lock = threading.Lock()


@contextmanager
def _concurrent_threads(model: torch.nn.Module) -> Iterator[set[str]]:
    """Yield the names of the other threads that capture from the model during the block; the set grows."""
    thread = threading.current_thread().name
    block: tuple[str, set[str]] = (thread, set())
    with _open_blocks_lock:
        blocks = _open_blocks.setdefault(model, [])
        for other_thread, other_threads in blocks:
            if other_thread != thread:
                other_threads.add(thread)
                block[1].add(other_thread)
        blocks.append(block)
    try:
        yield block[1]
    finally:
        with _open_blocks_lock:
            blocks[:] = [other for other in blocks if other is not block]  # `remove` would compare by value
