"""Capturing for one piece of code: `with manager.capturing(model, "blocks.*") as cache`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from hookline.activations.capture import Capture
from hookline.activations.captured import CapturedState
from hookline.activations.moment import tensors_in
from hookline.errors import HooklineError, nearest


class EnoughSeen(BaseException):
    """Leaves a model after the last module that was wanted."""


class StoppingCapture(Capture):
    """A capture that ends the forward pass once every wanted module has run."""

    built_in = False
    on_error = "raise"

    def __init__(self, modules: Any, wanted: int, **options: Any) -> None:
        super().__init__(modules, **options)
        self._wanted, self._seen = wanted, set[str]()

    def _add(self, state: CapturedState) -> None:
        super()._add(state)
        self._seen.add(state.name)
        if len(self._seen) >= self._wanted:
            self._seen.clear()  # for the next run
            raise EnoughSeen


class Cache:
    """What was captured, read by module name or glob. It outlives the block it was made in."""

    def __init__(self, hook: Capture, model: torch.nn.Module) -> None:
        self._hook, self._model = hook, model
        self._kept: list[CapturedState] | None = None

    @property
    def states(self) -> list[CapturedState]:
        """Every state, oldest first."""
        return self._hook.states if self._kept is None else self._kept

    def close(self) -> None:
        """Take the states over from the hook, which is about to go."""
        self._kept = self._hook.states

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; returns None when the pass was ended early, after the last wanted module."""
        try:
            return self._model(*args, **kwargs)
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


def save_states(states: list[CapturedState], path: str | Path) -> Path:
    """Write captured tensors to a safetensors file; names, steps and phases go into its metadata."""
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    about: dict[str, str] = {}
    for state in states:
        for part in ("inputs", "kwargs", "outputs"):
            for index, tensor in enumerate(tensors_in(getattr(state, part))):
                key = f"{state.name}/{state.call}/{part}/{index}"
                tensors[key] = tensor.detach().cpu().clone().contiguous()
                about[key] = f"step={state.step} phase={state.phase} layer_idx={state.layer_idx}"
    Path(path).write_bytes(save(tensors, metadata=about))
    return Path(path)
