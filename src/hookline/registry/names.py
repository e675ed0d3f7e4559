"""Things that a config may name: hooks, models, data, optimizers, schedulers, losses, trainers.

A name leads to a factory: a built-in (a line ``"module:attribute"``, imported on first use), one registered with a
decorator, or an entry point of an installed package. A config file can name nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from hookline.errors import HooklineError, RegistrationError, nearest

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Names:
    """One namespace of factories."""

    def __init__(self, noun: str, plural: str, built_in: str = "") -> None:
        self.noun, self.plural = noun, plural  # entry points are looked for in the group "hookline.<plural>"
        self._reference = built_in  # "module:attribute" of the table of built-ins, which loads on first use
        self._table: dict[str, str] | None = None
        self._added: dict[str, Any] = {}
        self._plugins: dict[str, Any] | None = None

    def add(self, name: str) -> Callable[[Factory], Factory]:
        """Decorator: register a class or function under a name that configs may use."""

        def register(factory: Factory) -> Factory:
            if name in self.built_in or name in self._added:
                raise RegistrationError(f"a {self.noun} named {name!r} is registered already; choose another name")
            self._added[name] = factory
            return factory

        return register

    def find(self, name: str) -> Any:
        """The factory of that name; a miss lists the choices, nearest first."""
        if name in self.built_in:
            return load_reference(self.built_in[name])
        if name in self._added:
            return self._added[name]
        if name in self.plugins:
            return self._load_plugin(name)
        raise HooklineError(f"there is no {self.noun} named {name!r}; {nearest(name, self.names(), 40)}")

    def _load_plugin(self, name: str) -> Any:
        point = self.plugins[name]
        try:
            return point.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RegistrationError(f"the entry point {name!r} ({point.value}) cannot be loaded: {why}") from error

    def __contains__(self, name: str) -> bool:
        return name in self.built_in or name in self._added or name in self.plugins

    def names(self) -> list[str]:
        """Every name a config may use, sorted."""
        return sorted({*self.built_in, *self._added, *self.plugins})

    def origin(self, name: str) -> str:
        """Where a name comes from: 'built-in', 'registered' or 'entry point'. Built-ins cannot be shadowed."""
        return "built-in" if name in self.built_in else "registered" if name in self._added else "entry point"

    @property
    def built_in(self) -> Mapping[str, str]:
        if self._table is None:
            self._table = dict(load_reference(self._reference)) if self._reference else {}
        return self._table

    @property
    def plugins(self) -> Mapping[str, Any]:
        if self._plugins is None:
            self._plugins = {point.name: point for point in entry_points(group=f"hookline.{self.plural}")}
        return self._plugins


def load_reference(reference: str) -> Any:
    """``"package.module:attribute"`` → the attribute."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


# The table of built-in hooks lies in hookline.hooks, which stands above this package: it is named here, not imported.
HOOKS = Names("hook", "hooks", "hookline.hooks:BUILT_IN")
MODELS = Names("model", "models", "hookline.jobs:MODELS")
DATA = Names("data", "data", "hookline.jobs:DATA")
SCHEDULERS = Names("scheduler", "schedulers", "hookline.jobs:SCHEDULERS")
OPTIMIZERS = Names("optimizer", "optimizers", "hookline.jobs:OPTIMIZERS")
LOSSES = Names("loss", "losses", "hookline.jobs:LOSSES")
TRAINERS = Names("trainer", "trainers", "hookline.build:TRAINERS")

register_hook = HOOKS.add
register_model = MODELS.add
register_data = DATA.add
register_scheduler = SCHEDULERS.add
register_optimizer = OPTIMIZERS.add
register_loss = LOSSES.add
register_trainer = TRAINERS.add
