"""Which modules are watched, under which names, and how often they ran."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hookline.activations.moment import Measured
from hookline.registry.entry import Entry
from hookline.registry.select import select

MOST_NESTED = 100
Maker = Callable[["Site"], Callable[..., Any]]


class Site:
    """One watched module. It does not keep the module alive."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.calls = 0  # since it is watched
        self.fired: dict[str, int] = {}  # by hook
        self._module = weakref.ref(module)
        self._before: RemovableHandle | None = None
        self._after: RemovableHandle | None = None
        self._begun = threading.local()  # a stack: a module may run inside itself, and in several threads

    @property
    def module(self) -> torch.nn.Module | None:
        return self._module()

    @property
    def attached(self) -> bool:
        return self._after is not None

    @property
    def measures(self) -> bool:
        return self._before is not None

    def attach(self, before: Maker | None, after: Maker | None) -> None:
        """Have the torch hooks that are wanted, and no others."""
        module = self.module
        if (before is None) != (self._before is None) and self._after is not None:
            self._after.remove()  # the hook behind the module differs with the one before it
            self._after = None
        self._before = self._switch(self._before, before, module and module.register_forward_pre_hook)
        self._after = self._switch(
            self._after, after, module and (lambda hook: module.register_forward_hook(hook, with_kwargs=True))
        )

    def _switch(self, handle: RemovableHandle | None, wanted: Maker | None, register: Any) -> RemovableHandle | None:
        if wanted is None and handle is not None:
            handle.remove()
            return None
        if wanted is not None and handle is None and register is not None:
            return register(wanted(self))  # type: ignore[no-any-return]
        return handle

    def begin(self) -> None:
        """The module is about to run."""
        stack = self._begun.__dict__.setdefault("stack", [])
        if len(stack) > MOST_NESTED:  # calls that ended in an exception have left their beginnings here
            stack.clear()
        stack.append((perf_counter_ns(), _allocated(self.module)))

    def end(self) -> Measured | None:
        """What the call cost, if its beginning was seen."""
        stack = self._begun.__dict__.get("stack")
        if not stack:
            return None
        began, allocated = stack.pop()
        now = _allocated(self.module) if allocated >= 0 else -1
        return Measured((perf_counter_ns() - began) / 1e9, now - allocated if now >= 0 else -1)


class Sites:
    """The watched modules of a registry: those of one model by name, and any module that was given as it is."""

    def __init__(self) -> None:
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
                site.attach(None, None)
            self._sites.clear()
        self._model = weakref.ref(model)
        self._of.clear()

    def check(self, entry: Entry, model: torch.nn.Module | None) -> None:
        """Raise when a hook's patterns match nothing in a model."""
        self._modules(entry, model)

    def of(self, entry: Entry) -> list[Site]:
        """The sites that a hook selects."""
        known = self._of.get(entry.name)
        if known is None or known[0] is not entry:
            chosen = self._modules(entry, self.model)
            known = self._of[entry.name] = (entry, [self._site(name, module) for name, module in chosen.items()])
        return known[1]

    def forget_others(self, entries: Iterable[Entry]) -> None:
        """Drop what is known of hooks that are gone."""
        names = {entry.name for entry in entries}
        self._of = {name: known for name, known in self._of.items() if name in names}

    def _site(self, name: str, module: torch.nn.Module) -> Site:
        if module not in self._sites:
            self._sites[module] = Site(name, module)
        return self._sites[module]

    def _modules(self, entry: Entry, model: torch.nn.Module | None) -> dict[str, torch.nn.Module]:
        """What `modules` selects; a module given as it is needs no model, a pattern waits for one."""
        pattern = getattr(entry.hook, "modules", "*")
        patterns = [
            _alive(one) for one in (pattern if isinstance(pattern, (list, tuple, set, frozenset)) else [pattern])
        ]
        named = dict(model.named_modules()) if model is not None else {}
        known = {id(module): name for name, module in named.items()}
        given = [one for one in patterns if isinstance(one, torch.nn.Module)]
        rest = [one for one in patterns if one is not None and not isinstance(one, torch.nn.Module)]
        chosen = select(rest, named, "module") if rest and model is not None else {}
        for index, module in enumerate(given):
            own = entry.name if len(given) == 1 else f"{entry.name}.{index}"
            chosen[known.get(id(module)) or own] = module
        return chosen


def _allocated(module: torch.nn.Module | None) -> int:
    """Bytes allocated on the module's CUDA device; -1 where there is no such count."""
    parameter = next(module.parameters(), None) if module is not None else None
    if parameter is None or parameter.device.type != "cuda":
        return -1
    return torch.cuda.memory_allocated(parameter.device)


def weakly(modules: Any) -> Any:
    """The same selection, not keeping alive a module that is given as it is."""
    if isinstance(modules, (list, tuple)):
        return [weakly(one) for one in modules]
    return weakref.ref(modules) if isinstance(modules, torch.nn.Module) else modules


def _alive(pattern: Any) -> Any:
    """A weakly held module itself; None when it is gone."""
    return pattern() if isinstance(pattern, weakref.ref) else pattern
