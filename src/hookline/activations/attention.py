"""Attention maps: where every head of a model looks, for as long as a block lasts.

Fused attentions never write their weights down. Inside the block, each call of torch that attends is followed by a
computation of its weights, beside it: what the model gets is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hookline.activations.attention_cost import AttentionCost
from hookline.activations.attention_switch import attention_with_weights
from hookline.activations.attention_weights import ATTENTIONS, Finder
from hookline.activations.cache import Cache
from hookline.activations.capture import Capture
from hookline.activations.moment import tensors_in
from hookline.activations.running import Running
from hookline.errors import HooklineError, nearest
from hookline.registry.select import select

KNOWN = "scaled_dot_product_attention, nn.MultiheadAttention and a softmax over [batch, heads, queries, keys]"
logger = logging.getLogger("hookline")


class AttentionPoints(torch.nn.Module):
    """A module for each one that may attend, under its name: its attention's weights pass through it.

    So whatever hears modules hears attention: ``manager.watch(maps.points)``, or ``maps.points[name]`` for one of them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._modules.update({name: torch.nn.Identity() for name in names})  # `add_module` would refuse their dots

    def __getitem__(self, name: str) -> torch.nn.Module:
        point = self._modules.get(name)
        if point is None:
            raise HooklineError(f"there is no point {name!r}; {nearest(name, self._modules)}")
        return point


class AttentionMaps(Cache):
    """The weights of every attention that ran, by the name of its module: [batch, heads, queries, keys].

    Read as any cache, by name or glob, and it outlives its block. `cost` tells what it has cost, `switched` which
    models attend in another way meanwhile.
    """

    def __init__(self, hook: Capture, model: torch.nn.Module, sight: AttentionSight, switched: Sequence[str]) -> None:
        super().__init__(hook, model)
        self.points, self.cost, self.switched = sight.points, sight.cost, tuple(switched)


class AttentionSight(TorchFunctionMode):
    """Sees what this thread calls of torch; where that attends, the weights are sent through the module's point."""

    def __init__(self, names: dict[torch.nn.Module, str], running: Running) -> None:
        super().__init__()
        self.points, self.cost = AttentionPoints(names.values()), AttentionCost()
        self._names, self._running = names, running
        self._told: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function as it would have been called, then look at it."""
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        finder = ATTENTIONS.get(function)
        if finder is not None and (name := self._selected()) is not None:
            self._look(name, finder, made, args, kwargs)
        return made

    def _selected(self) -> str | None:
        """The name of the module that runs now, if its attention is wanted."""
        module = self._running.innermost
        return None if module is None else self._names.get(module)

    def _look(self, name: str, finder: Finder, made: Any, args: Any, kwargs: Any) -> None:
        device = tensors_in(made)[0].device
        with torch.no_grad(), self.cost.watch.timing(device):
            weights = self._weights(name, finder, made, args, kwargs)
            if weights is not None:
                self.cost.maps += 1
                self.cost.bytes += weights.nbytes
                self.points[name](weights)

    def _weights(self, name: str, finder: Finder, made: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The weights of one call; where they cannot be had, the model goes on and its module is named, once."""
        try:
            weights = finder(made, args, kwargs)
        except Exception as error:
            if name not in self._told:
                self._told.add(name)
                logger.warning("the attention of %r cannot be shown: %s: %s", name, type(error).__name__, error)
            return None
        return None if weights is None else weights.detach()


@contextmanager
def attention_seen(model: torch.nn.Module, modules: Any) -> Iterator[tuple[AttentionSight, list[str]]]:
    """See the attention of the selected modules (None selects all), in this thread, until the block is left."""
    running = Running()
    sight = AttentionSight(_named(model, modules), running)
    with attention_with_weights(model) as switched, running.following(model), sight:
        yield sight, switched
    kind = type(model).__name__
    if sight.cost.maps:
        logger.info("the attention of %s: %s", kind, sight.cost)  # which waits for the device only if it is printed
    elif running.entered:
        logger.warning("%s ran, and no attention was seen in what was selected; known are %s", kind, KNOWN)


def _named(model: torch.nn.Module, modules: Any) -> dict[torch.nn.Module, str]:
    """The names of the selected modules; a model that attends in its own forward goes by its class."""
    every = dict(model.named_modules())
    chosen = every if modules is None else select(modules, every, "module")
    return {module: name or type(model).__name__ for name, module in chosen.items()}
