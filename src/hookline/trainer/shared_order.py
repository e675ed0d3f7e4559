"""The order of training's batches, where a validation loader shares what decides it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hookline.trainer.sampler import ResumableSampler


@contextmanager
def order_untouched(training: Iterable[Any], validating: Iterable[Any]) -> Iterator[None]:
    """Whatever is read inside the block, training's loaders go on as if nothing had been.

    A validation may be on a training loader, too, or on one with the same generator or sampler.
    """
    own, read = _deciding(training), _deciding(validating)
    kept = [(own[key], _state(own[key])) for key in own.keys() & read.keys()]
    try:
        yield
    finally:
        for part, state in kept:
            (part.set_state if isinstance(part, torch.Generator) else part.load_state_dict)(state)


def _deciding(loaders: Iterable[Any]) -> dict[int, Any]:
    """The generators and samplers of some loaders, by identity."""
    found = {}
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        samplers = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
        for part in (*samplers, *(getattr(one, "generator", None) for one in (loader, *samplers))):
            if isinstance(part, (torch.Generator, ResumableSampler)):
                found[id(part)] = part
    return found


def _state(part: torch.Generator | ResumableSampler) -> Any:
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
