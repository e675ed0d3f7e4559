"""Look up the names that a config may use: in the tables of built-ins, among decorated factories and entry points.

Each name has a factory: a built-in (a string ``"module:attribute"``, imported on first use), one registered with a
decorator, or an entry point of an installed package. A config file can name nothing else. A name has one source: an
entry point never replaces a built-in, and a name that several packages offer cannot be used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import CodeType
from typing import Any, TypeVar

from hookline._console import logger
from hookline._words import nearest
from hookline.core.provided import PROVIDED
from hookline.errors import HooklineError, RegistrationError, error_text, got

Factory = TypeVar("Factory", bound=Callable[..., Any])


class PluginTable:
    """The factories of one kind of thing, by name."""

    def __init__(self, noun: str, plural: str) -> None:
        self.noun, self.plural = noun, plural  # Entry points are in the group "hookline.<plural>".
        self._added: dict[str, Any] = {}

    def add(self, name: str) -> Callable[[Factory], Factory]:
        """Return a decorator that registers a class or function under a name that configs may use."""

        def register(factory: Factory) -> Factory:
            defined_again = name in self._added and is_redefinition(factory, self._added[name])
            if (name in self.built_in or name in self._added) and not defined_again:
                raise RegistrationError(f"the {self.noun} {name!r} is registered already; choose another name")
            if defined_again:
                logger.warning("%s %r: replaced, because it was defined again", self.noun, name)
            self._added[name] = factory
            return factory

        return register

    def find(self, name: str) -> Any:
        """Return the factory of a name.

        Raises:
            HooklineError: If there is none; the message suggests the nearest names.
            RegistrationError: If several packages offer the name, or the one that does cannot be loaded.
        """
        if name in self.built_in:
            return load_reference(self.built_in[name])
        if refused := self.refused(name):
            raise RegistrationError(refused)
        if name in self._added:
            return self._added[name]
        if name not in self.plugins:
            raise HooklineError(self.unknown(name))
        (point,) = self.plugins[name]
        label = f"the {self.noun} {name!r} of {package_of(point)} ({point.value})"
        try:
            factory = point.load()
        except (Exception, SystemExit) as error:  # A module that ends the process would end `hookline hooks`, too.
            raise RegistrationError(f"{label} cannot be loaded: {error_text(error)}") from error
        if not callable(factory):
            raise RegistrationError(f"{label} is not a class or function, {got(factory)}")
        return factory

    def unknown(self, name: str) -> str:
        """Say that a config cannot use a name, and which names it can use."""
        if self.noun == "hook":  # A command only knows the modules that it imports.
            see = "`hookline hooks --import MODULE`" if self._added else "`hookline hooks`"
        else:
            see = "" if self._added or self.plugins else "`hookline help components`"
        return f"there is no {self.noun} named {name!r}; {nearest(name, self.names(), see)}"

    def name_of(self, factory: Any) -> str | None:
        """Return the name under which a decorator registered a class or function; None if none did."""
        return next((name for name, added in self._added.items() if added is factory), None)

    def __contains__(self, name: str) -> bool:
        return name in self.built_in or name in self._added or name in self.plugins

    def names(self) -> list[str]:
        """Return every name a config may use, sorted."""
        return sorted({*self.built_in, *self._added, *self.plugins})

    def origin(self, name: str) -> str:
        """Return 'built-in', 'registered' or the package that offers the name, with its version."""
        return "built-in" if name in self.built_in else " and ".join(self._sources(name))

    def refused(self, name: str) -> str:
        """Return why packages that offer a name are not used; "" if they are, or if there are none."""
        sources = self._sources(name)
        if name in self.built_in and sources:
            packages = " and ".join(sources)
            return f"the {self.noun} {name!r} of {packages} is refused: a package cannot replace a built-in"
        if len(sources) > 1:
            listed = ", ".join(sources)
            return f"the {self.noun} {name!r} has several sources ({listed}); rename or uninstall all but one"
        return ""

    def _sources(self, name: str) -> list[str]:
        """Return the packages that offer a name, besides Hookline itself."""
        points, added = self.plugins.get(name, []), self._added.get(name)
        # A package may also register its offers with a decorator.
        packages = {point.value.partition(":")[0].partition(".")[0] for point in points}
        is_own = str(getattr(added, "__module__", "")).partition(".")[0] in packages
        registered = ["registered"] if added is not None and not is_own else []
        return [*registered, *sorted(map(package_of, points))]

    @cached_property
    def built_in(self) -> Mapping[str, str]:
        """The references of the built-ins."""
        return dict(load_reference(PROVIDED[self.plural]))

    @cached_property
    def plugins(self) -> Mapping[str, list[EntryPoint]]:
        """The entry points of installed packages by name; more than one if several packages offer a name."""
        points: dict[str, list[EntryPoint]] = {}
        for point in entry_points_of_packages():
            if point.group == f"hookline.{self.plural}":
                points.setdefault(point.name, []).append(point)
        return points


def package_of(point: EntryPoint) -> str:
    """Return the package of an entry point and its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"


def entry_points_of_packages() -> list[EntryPoint]:
    """Return what installed packages offer in groups that begin with "hookline."."""
    try:
        installed = entry_points()
        groups = [group for group in sorted(installed.groups) if group.startswith("hookline.")]
        return [point for group in groups for point in installed.select(group=group)]
    except Exception as error:  # One package with a damaged file of entry points breaks no run.
        logger.warning("plugins are unavailable, because the installed packages cannot be read: %s", error_text(error))
        return []


def unread_entry_points() -> list[EntryPoint]:
    """Return the entry points of groups that resemble Hookline's but are not among them."""
    groups = [f"hookline.{table.plural}" for table in TABLES]
    return [point for point in entry_points_of_packages() if point.group not in groups]


def load_reference(reference: str) -> Any:
    """Import what ``"package.module:attribute"`` refers to."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


def is_redefinition(new: Any, old: Any) -> bool:
    """Return whether a class or function is `old`, defined again, as in a notebook whose cell is run a second time.

    It then has the same module and qualified name, and code that was compiled again. Two functions that a factory
    returns, or two passes of a loop, share their code: these are two definitions. So are two on different lines of one
    file. An edited cell of a notebook is another file; there, `_` does not name the same function, and a lambda never
    has a name.
    """
    if isinstance(new, type) is not isinstance(old, type) or _place(new) != _place(old) or None in _place(new):
        return False
    if new.__name__ == "<lambda>":
        return False
    new_code, old_code = _code(new), _code(old)
    if not new_code or not old_code or not {id(code) for code in new_code}.isdisjoint(map(id, old_code)):
        return False
    (new_file, new_line), (old_file, old_line) = _first_line(new_code), _first_line(old_code)
    return new_line == old_line if new_file == old_file else new.__name__ != "_"


def identity(definition: Any) -> tuple[Hashable, frozenset[int]]:
    """Return where a class or function is defined, and its code; a redefinition has the first and not the second."""
    return _place(definition), frozenset(map(id, _code(definition)))


def _place(definition: Any) -> tuple[Any, Any]:
    return getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)


def _code(definition: Any) -> list[CodeType]:
    """Return the code objects that a definition consists of."""
    bodies = vars(definition).values() if isinstance(definition, type) else [definition]
    codes: list[CodeType] = []
    for body in bodies:
        code = getattr(inspect.unwrap(getattr(body, "__func__", body)), "__code__", None)
        # A class may hold functions that were defined elsewhere, and those that a dataclass generates.
        if isinstance(code, CodeType) and code.co_qualname.startswith(definition.__qualname__):
            codes.append(code)
    return codes


def _first_line(codes: list[CodeType]) -> tuple[str, int]:
    return min((code.co_filename, code.co_firstlineno) for code in codes)


HOOKS = PluginTable("hook", "hooks")
MODELS = PluginTable("model", "models")
DATA = PluginTable("data", "data")
SCHEDULERS = PluginTable("scheduler", "schedulers")
OPTIMIZERS = PluginTable("optimizer", "optimizers")
LOSSES = PluginTable("loss", "losses")
METRICS = PluginTable("metric", "metrics")
TRAINERS = PluginTable("trainer", "trainers")
TABLES = (HOOKS, MODELS, DATA, SCHEDULERS, OPTIMIZERS, LOSSES, METRICS, TRAINERS)

register_hook = HOOKS.add
register_model = MODELS.add
register_data = DATA.add
register_scheduler = SCHEDULERS.add
register_optimizer = OPTIMIZERS.add
register_loss = LOSSES.add
register_metric = METRICS.add
register_trainer = TRAINERS.add
