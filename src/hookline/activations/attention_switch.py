"""Switching a model, for the time of a block, to an attention that has weights to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hookline.activations.compiled import as_plain_python

SHOWN = (None, "eager", "sdpa")  # what Hugging Face calls attentions that are made of torch's own functions


@contextmanager
def attention_with_weights(model: torch.nn.Module) -> Iterator[list[str]]:
    """Yields what was switched, in words; all of it is as before when the block is left, however it is left.

    Hugging Face models with an attention of somebody else's (flash, flex) use "eager" meanwhile, and compiled code runs
    as it was written: neither kernels of others nor compiled graphs can be looked into.
    """
    switched: list[str] = []
    with ExitStack() as restored:
        for module in filter(_hides_weights, model.modules()):
            switched.append(f"{type(module).__name__}: {_implementation(module)} → eager")
            restored.enter_context(_eager(module))
        restored.enter_context(as_plain_python())
        yield switched


def _hides_weights(module: torch.nn.Module) -> bool:
    return hasattr(module, "set_attn_implementation") and _implementation(module) not in SHOWN


def _implementation(module: torch.nn.Module) -> Any:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = [(config, config._attn_implementation) for config in _configs(model.config)]
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        for config, implementation in before:  # the outer ones first: setting one sets those inside it
            config._attn_implementation = implementation


def _configs(config: Any) -> Iterator[Any]:
    """A model's configuration, then those inside it: a vision model's and a text model's, for one."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)
