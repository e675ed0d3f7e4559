"""Which modules are watched, and under which names."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hookline.activations.site import Site
from hookline.errors import HooklineError
from hookline.events.dispatch import Fire
from hookline.registry.entry import Entry
from hookline.registry.select import select


class Sites:
    """The watched modules of a registry: those of one model by name, and any module that was given as it is."""

    def __init__(self, fire: Fire) -> None:
        self._fire = fire
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._sites: weakref.WeakKeyDictionary[torch.nn.Module, Site] = weakref.WeakKeyDictionary()
        self._of: dict[str, tuple[Entry, list[Site]]] = {}

    @property
    def model(self) -> torch.nn.Module | None:
        return None if self._model is None else self._model()

    def __iter__(self) -> Iterator[Site]:
        return iter(list(self._sites.values()))

    def watch(self, model: torch.nn.Module) -> None:
        """Resolve names against this model; the torch hooks on another one are taken off."""
        if self.model is not model:
            for site in self:
                site.detach()
            self._sites.clear()
        self._model = weakref.ref(model)
        self._of.clear()

    def check(self, entry: Entry, model: torch.nn.Module | None) -> None:
        """Raise when a hook's patterns match nothing in a model."""
        chosen = self._modules(entry, model)
        if model is self.model:  # `of` will be asked next
            self._of[entry.name] = (entry, [self._site(name, module, entry.name) for name, module in chosen.items()])

    def of(self, entry: Entry) -> list[Site]:
        """The sites that a hook selects."""
        known = self._of.get(entry.name)
        if known is None or known[0] is not entry:
            self.check(entry, self.model)
            known = self._of[entry.name]
        return known[1]

    def forget_others(self, entries: Iterable[Entry]) -> None:
        """Drop what is known of hooks that are gone."""
        staying = {id(entry) for entry in entries}
        for name in [name for name, (entry, _) in self._of.items() if id(entry) not in staying]:
            for site in self._of.pop(name)[1]:
                site.fired.unfollow(name)
                site.names.pop(name, None)

    def _site(self, name: str, module: torch.nn.Module, hook: str) -> Site:
        known = self._sites.get(module)
        if known is None:
            known = self._sites[module] = Site(name, module, self._fire)
        if name != known.name:
            known.names[hook] = name
        return known

    def _modules(self, entry: Entry, model: torch.nn.Module | None) -> dict[str, torch.nn.Module]:
        """What `modules` selects; a module given as it is needs no model, a pattern waits for one."""
        pattern = getattr(entry.hook, "modules", "*")
        listed = list(pattern) if isinstance(pattern, (list, tuple, set, frozenset)) else [pattern]
        if not listed or None in listed:
            raise HooklineError(f"hook {entry.name!r}: modules={pattern!r} selects nothing; '*' selects all")
        patterns = [_alive(one) for one in listed]
        named = dict(model.named_modules()) if model is not None else {}
        known = {id(module): name for name, module in named.items()}
        given = [one for one in patterns if isinstance(one, torch.nn.Module)]
        rest = [one for one in patterns if one is not None and not isinstance(one, torch.nn.Module)]
        chosen = select(rest, named, f"hook {entry.name!r}: module") if rest and model is not None else {}
        for index, module in enumerate(given):
            own = entry.name if len(given) == 1 else f"{entry.name}.{index}"
            chosen[known.get(id(module)) or own] = module
        return chosen


def weakly(modules: Any) -> Any:
    """The same selection, not keeping alive a module that is given as it is."""
    if isinstance(modules, (list, tuple)):
        return [weakly(one) for one in modules]
    return weakref.ref(modules) if isinstance(modules, torch.nn.Module) else modules


def _alive(pattern: Any) -> Any:
    """A weakly held module itself; None when it is gone."""
    return pattern() if isinstance(pattern, weakref.ref) else pattern
