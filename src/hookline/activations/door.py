"""Learning in time that there is a compiler."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from hookline.activations.compiled import is_loaded, never_a_frame_of_its_own


class Door:
    """A torch hook on the outermost module of a model that looks, at every run, whether Dynamo has been imported.

    It is there only until then. Dynamo takes a second or two to import: too long for those who never compile, who would
    otherwise pay for it with their first forward hook. Whoever has made an optimizer has it already.
    """

    def __init__(self, opened: Callable[[], None]) -> None:
        self._opened = opened
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._handle: RemovableHandle | None = None

    def wait_at(self, model: torch.nn.Module | None) -> None:
        """Wait at this model, and nowhere else."""
        if (self._model() if self._model is not None else None) is model:
            return
        if self._handle is not None:
            self._handle.remove()
        self._model = weakref.ref(model) if model is not None else None
        self._handle = model.register_forward_pre_hook(_door(self._opened)) if model is not None else None


def _door(opened: Callable[[], None]) -> Callable[..., None]:
    def hookline_door(module: torch.nn.Module, inputs: Any) -> None:
        if not is_dynamo_compiling() and is_loaded():
            opened()

    return hookline_door


never_a_frame_of_its_own(_door(lambda: None))  # every other has the same code
