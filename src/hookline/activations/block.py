"""Capturing for one block of code, and what of it is kept for the next block on the same model.

Finding the modules and preparing their torch hooks costs more than running a small model. So the next block that wants
the same of a model finds everything prepared and only puts the torch hooks back, unless the model has changed since.
Nothing of this is on the model between two blocks, no tensor is kept, and it goes with the model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hookline.activations.capture import Capture
from hookline.activations.captured import thread_name
from hookline.activations.compiled import is_loaded

if TYPE_CHECKING:  # it makes blocks
    from hookline.activations.manager import HookManager

PLAIN = (str, int, bool, type(None), torch.dtype)  # options that are what they look like
KINDS_KEPT = 8  # different blocks of one model

Shape = list[tuple[weakref.ref[torch.nn.Module], type, tuple[str, ...], tuple[int, ...]]]


class Block:
    """A capture of a model with a manager of its own: no name can be taken, and nothing outlives the block."""

    def __init__(self, manager: HookManager, model: torch.nn.Module, hook: Capture) -> None:
        self.hook = hook
        self._manager, self._shape, self._compiles = manager, _shape_of(model), is_loaded()
        manager.watch(model)
        manager.register(hook, "cache")

    @property
    def sites(self) -> int:
        """How many modules it captures."""
        return len(self._manager.tap.sites.of(self._manager.entry("cache")))

    def fits(self, model: torch.nn.Module) -> bool:
        """Whether it is for this model, still made of the same modules under the same names."""
        if self._shape[0][0]() is not model:  # another that compares equal
            return False
        for ref, kind, names, children in self._shape:
            module = ref()
            if module is None or type(module) is not kind:
                return False
            inside = module._modules
            if (names or inside) and (tuple(inside.keys()) != names or tuple(map(id, inside.values())) != children):
                return False
        return self._compiles == is_loaded()

    def open(self) -> None:
        """Put the torch hooks back that `close` took off."""
        self.hook.hand_over()  # what another thread was about to put there
        self._manager.tap.put_back()

    def close(self) -> bool:
        """Take the torch hooks off; returns whether they can be put back another time. What was captured stays."""
        self._manager.tap.lift()
        entry = self._manager.entry("cache")  # what failed is not tried again
        return is_loaded() == self._compiles and entry.enabled and not entry.failures.total  # nor what graphs may know

    def end(self) -> None:
        """Leave the model as it was, for good."""
        self._manager.remove("cache")


def _shape_of(model: torch.nn.Module) -> Shape:
    """What a model is made of. All are alive as long as this holds, so no other module has one of the ids."""
    return [
        (weakref.ref(module), type(module), tuple(module._modules.keys()), tuple(map(id, module._modules.values())))
        for module in model.modules()
    ]


_kept: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, Block]] = weakref.WeakKeyDictionary()


def kind_of_block(modules: Any, early_stop: bool, options: Mapping[str, Any]) -> Hashable | None:
    """What blocks that capture the same have in common; None where that cannot be told."""
    patterns = tuple(modules) if isinstance(modules, (list, tuple)) else (modules,)
    told = all(isinstance(one, str) for one in patterns) and all(type(one) in PLAIN for one in options.values())
    return (patterns, early_stop, *sorted(options.items())) if told else None


def take_kept(model: torch.nn.Module, kind: Hashable | None, make: Callable[[], Block]) -> Block:
    """A block that is ready and open: one that was kept, which nobody else has meanwhile, or a new one."""
    block = _kept.get(model, {}).pop(kind, None) if kind is not None else None
    if block is None or not block.fits(model):
        return make()  # the other has taken its torch hooks off already
    block.open()
    return block


def keep(model: torch.nn.Module, kind: Hashable, block: Block) -> None:
    """Keep a closed block for the next time."""
    kept = _kept.setdefault(model, {})
    if len(kept) >= KINDS_KEPT:
        kept.clear()
    kept[kind] = block


Opened = tuple[str, set[str]]  # by which thread, and which others have a block at the same time

_open: weakref.WeakKeyDictionary[torch.nn.Module, list[Opened]] = weakref.WeakKeyDictionary()
_opening = threading.Lock()


@contextmanager
def beside_others(model: torch.nn.Module) -> Iterator[set[str]]:
    """The other threads that capture from a model while this block lasts: what they run is for their own caches."""
    opened: Opened = thread_name(), set()
    with _opening:
        others = _open.setdefault(model, [])
        for thread, beside in others:
            if thread != opened[0]:
                beside.add(opened[0])
                opened[1].add(thread)
        others.append(opened)
    try:
        yield opened[1]
    finally:
        with _opening:
            others[:] = [other for other in others if other is not opened]  # another may look the same


def forget(model: torch.nn.Module) -> None:
    """Keep nothing for a model."""
    _kept.pop(model, None)
