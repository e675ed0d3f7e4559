"""Capturing for one piece of code: `with manager.capturing(model, "blocks.*") as cache`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Set
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from hookline.activations.capture import Capture
from hookline.activations.captured import CapturedState, Record, state_of
from hookline.activations.direct import Keep
from hookline.activations.saved_states import save_states
from hookline.activations.site import Site
from hookline.errors import HooklineError, nearest


class EnoughSeen(BaseException):
    """Leaves a model after the last module that was wanted; raised inside `Cache.run` only, which expects it."""


class StoppingCapture(Capture):
    """A capture that ends the forward pass of `Cache.run` once every wanted module has run.

    Nobody else's: another thread may run the model meanwhile, and wants its output.
    """

    built_in = False
    on_error = "raise"

    def __init__(self, modules: Any, **options: Any) -> None:
        super().__init__(modules, **options)
        self.wanted = 0  # modules; told once they are known
        self._pass = threading.local()  # has the modules that were seen, in a thread that is to be stopped

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """End the forward pass that this thread runs in the block."""
        self._pass.seen = set()
        try:
            yield
        finally:
            del self._pass.seen

    def shortcut(self, site: Site, tap: Any) -> Keep | None:
        """The capture's, with a look whether that was the last."""
        keep = super().shortcut(site, tap)
        if keep is None:
            return None

        def keep_and_look(inputs: Any, kwargs: Any, output: Any) -> None:
            keep(inputs, kwargs, output)
            self._saw(site.name_for(self._own_name))

        return keep_and_look

    def _keep(self, name: str, *rest: Any) -> None:
        super()._keep(name, *rest)
        self._saw(name)

    def _saw(self, name: str) -> None:
        seen = self._pass.__dict__.get("seen")
        if seen is not None:
            seen.add(name)
            if len(seen) >= self.wanted:
                raise EnoughSeen


class Cache:
    """What was captured, read by module name or glob. It outlives the block it was made in.

    Where several threads capture from one model at once, each has what it ran itself. What threads run that capture
    nothing of their own, workers of a pool for one, is in every cache that is open.
    """

    def __init__(self, hook: Capture, model: torch.nn.Module, left_out: Set[str] = frozenset()) -> None:
        self._hook, self._model = hook, weakref.ref(model)  # it may outlive the model
        self._kept: list[CapturedState | Record] | None = None
        self._left_out = left_out  # threads that have a block of their own

    @property
    def states(self) -> list[CapturedState]:
        """Every state, oldest first."""
        kept = self._hook.states if self._kept is None else self._kept
        made = [state for one in kept if (state := state_of(one)).thread not in self._left_out]
        if self._kept is not None:
            self._kept = [*made]
        return made

    def close(self) -> None:
        """Take the states over from the hook, which is about to go."""
        self._kept = self._hook.hand_over()
        if self._left_out:
            self._kept = [*self.states]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; returns None when the pass was ended early, after the last wanted module."""
        model = self._model()
        if model is None:
            raise HooklineError("the model that this cache was made for no longer exists")
        hook = self._hook
        try:
            with hook.stopping() if isinstance(hook, StoppingCapture) else nullcontext():
                return model(*args, **kwargs)
        except EnoughSeen:
            return None

    def __getitem__(self, name: str) -> Any:
        """The last output of one module, or for a glob a dict of them (inputs where only those were captured)."""
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
        """Write every captured tensor to a safetensors file, keyed ``module/call/index``."""
        return save_states(self.states, path)
