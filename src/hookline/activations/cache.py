"""Capturing for one piece of code: `with manager.capturing(model, "blocks.*") as cache`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from hookline.activations.capture import Capture
from hookline.activations.captured import CapturedState, Record, state_of
from hookline.activations.direct import Keep
from hookline.activations.moment import tensors_in
from hookline.activations.site import Site
from hookline.errors import HooklineError, nearest


class EnoughSeen(BaseException):
    """Leaves a model after the last module that was wanted."""


class StoppingCapture(Capture):
    """A capture that ends the forward pass once every wanted module has run."""

    built_in = False
    on_error = "raise"

    def __init__(self, modules: Any, **options: Any) -> None:
        super().__init__(modules, **options)
        self.wanted = 0  # modules; told once they are known
        self._seen: set[str] = set()

    def hand_over(self) -> list[CapturedState | Record]:
        """Give away what was captured; nothing has been seen."""
        self._seen.clear()
        return super().hand_over()

    def shortcut(self, site: Site, tap: Any) -> Keep | None:
        """The capture's, with a look whether that was the last."""
        keep = super().shortcut(site, tap)
        if keep is None:
            return None

        def keep_and_look(inputs: Any, kwargs: Any, output: Any) -> None:
            keep(inputs, kwargs, output)
            self._saw(site.name)

        return keep_and_look

    def _keep(self, name: str, *rest: Any) -> None:
        super()._keep(name, *rest)
        self._saw(name)

    def _saw(self, name: str) -> None:
        self._seen.add(name)
        if len(self._seen) >= self.wanted:
            self._seen.clear()  # for the next run
            raise EnoughSeen


class Cache:
    """What was captured, read by module name or glob. It outlives the block it was made in."""

    def __init__(self, hook: Capture, model: torch.nn.Module) -> None:
        self._hook, self._model = hook, model
        self._kept: list[CapturedState | Record] | None = None

    @property
    def states(self) -> list[CapturedState]:
        """Every state, oldest first."""
        if self._kept is None:
            return self._hook.states
        made = [state_of(kept) for kept in self._kept]
        self._kept = [*made]
        return made

    def close(self) -> None:
        """Take the states over from the hook, which is about to go."""
        self._kept = self._hook.hand_over()

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
