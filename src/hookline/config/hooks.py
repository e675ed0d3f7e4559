"""From the hook lists of a config to registered hooks, in two steps.

`read_hook_specs` checks every name, key and option of the config before anything is imported; `register_specs` makes
the hooks and registers them. A config may list hooks by kind (``forward:``, ``update:``, ``lifecycle:``, each entry a
name and its parameters), or use the flat form with ``enable_…`` flags and ``hook_classes``; both lead to the same list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline._parameters import MADE_FROM_FILE, check, names, parameters_of
from hookline._words import nearest
from hookline.config.factory import Factory, ImportPolicy, find_factory
from hookline.core.base import UpdateHook, hook_attribute, is_built_in
from hookline.core.catalog import CATALOG
from hookline.core.entry import OPTIONS, DerivedName, parse_ranks
from hookline.core.failures import check_policy
from hookline.core.plugins import HOOKS
from hookline.core.schedule import Schedule
from hookline.errors import ConfigError, RegistrationError, got, with_article

if TYPE_CHECKING:
    from hookline.config.schema import HooksConfig

KINDS = ("lifecycle", "forward", "update")
RESERVED = ("name", "as", *OPTIONS)
FLAGS = {  # document 002's switches: flag -> built-in hook and the key of its parameters
    "enable_logging_hook": ("console_log", "logging_config"),
    "enable_gradient_monitor": ("gradient_monitor", "gradient_monitor_config"),
    "enable_model_checkpoint_hook": ("checkpoint", "model_checkpoint_config"),
    "enable_early_stopping_hook": ("early_stopping", "early_stopping_config"),
    "enable_lr_monitor": ("lr_monitor", "lr_monitor_config"),
}


@dataclass
class HookSpec:
    """One hook of a config, checked and ready to be created."""

    path: str  # the place in the config
    target: str  # a registered name, or a dotted path that may be imported
    name: str | None = None
    kind: str | None = None
    origin: str = "config"
    options: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    from_file: bool = False
    unused: bool = False  # a flag is off: the parameters are checked, and no hook is registered


# ---- reading -------------------------------------------------------------------------------------------------------


def read_hook_specs(config: Any, *, allow: Iterable[str] = (), from_file: bool = False) -> list[HookSpec]:
    """Read every hook that a config lists, in order, without importing or making any.

    Without an `update:` list, the last one is the identity hook, which is registered if no other update hook is.

    Args:
        config: A mapping, a `HooksConfig`, or a whole config with a section `hooks`.
        allow: Prefixes under which a config from a file may name dotted paths.
        from_file: Whether the config comes from a file; results of `load_config` are marked already.

    Raises:
        ConfigError: If a key, a name or an option is wrong.
    """
    default = HookSpec("hooks.update", "identity", origin="default")
    if config == {}:  # without a hooks config, a trainer need not import pydantic, which takes 0.2 s
        return [default]
    from hookline.config.schema import as_hooks_config

    section = config.get("hooks") if isinstance(config, Mapping) else None
    policy = ImportPolicy(allow, from_file or is_from_file(config) or is_from_file(section))
    hooks = as_hooks_config(config)
    specs = [spec for kind in KINDS for spec in _listed(getattr(hooks, kind) or (), kind, policy, f"hooks.{kind}")]
    specs += _listed(_trackers(config), "lifecycle", policy, "trackers")
    specs += [*_by_class(hooks, policy), *_by_flag(hooks)]
    return specs if hooks.update is not None else [*specs, default]


def is_from_file(config: Any) -> bool:
    """Return True if a config is marked as read from a file."""
    return getattr(config, "from_file", False) is True


def _trackers(config: Any) -> Sequence[str | Mapping[str, Any]]:
    """Return the trackers of a whole config; those of a mapping are checked here."""
    given = config.get("trackers") if isinstance(config, Mapping) else getattr(config, "trackers", None)
    if given is not None and not isinstance(given, (list, tuple)):
        raise ConfigError("trackers", f"expected a list of names, or of mappings with `name:`, {got(given)}")
    return given or ()


def _listed(
    entries: Sequence[str | Mapping[str, Any]], kind: str, policy: ImportPolicy, place: str
) -> Iterator[HookSpec]:
    """Yield the hooks of a list; `place` is its path in the config."""
    for index, entry in enumerate(entries):
        path = f"{place}.{index}"
        given = {"name": entry} if isinstance(entry, str) else entry
        # A list of a HooksConfig may contain anything by now, because pydantic checked it earlier.
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            raise ConfigError(path, f"expected a hook's name or a mapping with `name:`, {got(entry)}")
        target, name = given["name"], given.get("as")
        # The name is printed, recorded and typed again in overrides.
        if name is not None and not (isinstance(name, str) and name.strip() and name.isprintable()):
            raise ConfigError(f"{path}.as", f"expected a name for this instance, {got(name)}")
        options, parameters = _split({key: given[key] for key in given if key not in ("name", "as")}, path)
        policy.check_name(target, HOOKS, f"{path}.name")
        yield HookSpec(path, target, name, kind, "config", options, parameters, policy.from_file)


def _by_class(hooks: HooksConfig, policy: ImportPolicy) -> Iterator[HookSpec]:
    """Yield the hooks of `hook_classes`.

    A key of `hook_configs` is the path of a class or, if only one class has it, the bare name.
    """
    paths, configs = hooks.hook_classes, hooks.hook_configs
    names = {dotted: dotted.rpartition(".")[2] for dotted in paths}
    for key in configs:
        path, matches = f"hooks.hook_configs.{key}", [dotted for dotted in names if key in (dotted, names[dotted])]
        if not matches:
            choices = names if "." in key else [*names, *names.values()]
            raise ConfigError(path, f"no such class in hook_classes; {nearest(key, choices)}")
        if len(matches) > 1 and key not in names:
            remedy = f"write its path: {' or '.join(matches)}"
            raise ConfigError(path, f"several classes in hook_classes have that name; {remedy}")
        if matches[0] in configs and key not in names:
            raise ConfigError(
                path, f"{matches[0]!r} is configured twice, by its name and by its path; keep one of the two"
            )
    for index, dotted in enumerate(paths):
        path, key = f"hooks.hook_classes.{index}", dotted if dotted in configs else names[dotted]
        policy.check_name(dotted, HOOKS, path)
        options, parameters = _split(configs.get(key, {}), f"hooks.hook_configs.{key}")
        where = f"{path} with hook_configs.{key}" if configs.get(key) else path
        yield HookSpec(where, dotted, options=options, parameters=parameters)


def _by_flag(hooks: HooksConfig) -> Iterator[HookSpec]:
    for flag, (name, key) in FLAGS.items():
        is_on = getattr(hooks, flag)
        options, parameters = _split(getattr(hooks, key), f"hooks.{key}")
        if parameters and flag not in hooks.model_fields_set:
            why = f"has no effect without {flag}; set it to true, or to false to keep the settings for later"
            raise ConfigError(f"hooks.{key}", why)
        if is_on or parameters:
            path = f"hooks.{key if parameters else flag}"
            yield HookSpec(path, name, None, None, "built-in", options, parameters, unused=not is_on)


def _split(given: Mapping[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split an entry into options of the registry, which are checked here, and parameters of the hook's constructor."""
    options = {key: given[key] for key in OPTIONS if key in given}
    check(options.get("enabled", True), bool, f"{path}.enabled")
    Schedule.parse(**{key: options.get(key) for key in ("every", "at", "start", "stop")}, path=path)
    if options.get("on_error") is not None:
        check_policy(options["on_error"], f"{path}.on_error")
    parse_ranks(options.get("ranks"), f"{path}.ranks")
    for key in ("before", "after"):
        if options.get(key) is not None:
            names(options[key], f"{path}.{key}")
    # Null counts as absent, as in `every: null` to override a default; the registry's own defaults apply.
    options = {key: value for key, value in options.items() if value is not None}
    return options, {key: value for key, value in given.items() if key not in OPTIONS}


# ---- making and registering ----------------------------------------------------------------------------------------


def load_hooks(registry: Any, config: Any, *, allow: Iterable[str] = (), from_file: bool = False) -> list[Any]:
    """Read a config and register its hooks; return their handles. `Registry.load` calls this."""
    if isinstance(config, str | Path):
        from hookline.config.load import load_config  # late: it imports pydantic
        from hookline.config.references import resolve_references

        written, from_file = load_config(config)
        config = resolve_references(written)
    return register_specs(registry, read_hook_specs(config, allow=allow, from_file=from_file))


def register_specs(registry: Any, specs: Iterable[HookSpec]) -> list[Any]:
    """Create all hooks and register them, or none if one of them fails. Return their handles."""
    handles: list[Any] = []
    try:
        for spec in specs:
            MADE_FROM_FILE.set(spec.from_file)
            # Another list or a hook of the user's code may have brought an update hook.
            if spec.origin == "default" and registry.entries("update"):
                continue
            try:
                options = dict(spec.options)
                hook = make_hook(spec.target, spec.parameters, options)  # Also checks unused hooks.
                if spec.unused:
                    continue
                # An instance gets the name of its registered type, unless its class or the object chose another.
                name = spec.name or (None if "." in spec.target else DerivedName(spec.target))
                handles.append(registry.register(hook, name, origin=spec.origin, **options))
            except RegistrationError as error:
                raise RegistrationError(f"{spec.path}: {error}") from error
            entry = registry.entry(handles[-1])
            entry.parameters.update(spec.parameters)  # as written: a reference stays a reference in the record
            if spec.kind and spec.kind not in entry.kinds:
                right = f"is {with_article(' and '.join(entry.kinds))} hook; list it under `{entry.kinds[0]}:`"
                raise RegistrationError(f"{spec.path}: {spec.target!r} {right}")
    except Exception:
        for handle in handles:
            handle.remove()
        raise
    finally:
        MADE_FROM_FILE.set(False)
    return handles


def make_hook(given: str | type, parameters: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """Make a hook from a class, a registered name or a dotted path.

    Args:
        given: The class, name or path.
        parameters: The parameters of the constructor.
        options: Options of the registration. Some built-in hooks also act at events without a schedule, so their
            constructors take `every`. It becomes the period of the hook's own schedule, and is removed if that has
            none.

    Raises:
        RegistrationError: If a parameter is wrong, a named hook cannot be created with them, or its constructor has a
            parameter with the name of an option.
    """
    try:
        function = find_factory(given, HOOKS) if isinstance(given, str) else given
        shared = [key for key in options if key in (parameters_of(function) or {})]
        bases = getattr(function, "__mro__", ())
        takes_every = "every" in shared and any(map(is_built_in, bases))  # a built-in hook or a subclass
        if hidden := [key for key in shared if key != "every" or not takes_every]:
            name = given if isinstance(given, str) else given.__name__
            problem = f"{name}: {hidden[0]!r} is an option of hooks, and its constructor has a parameter of this name"
            raise RegistrationError(f"{problem}; rename the parameter, or create the hook and register the object")
        if takes_every:
            for key in getattr(function, "every_aliases", ()):
                if key in parameters:
                    raise RegistrationError(f"pass either every or {key}, not both: they are names for one setting")
            parameters = {**parameters, "every": options.pop("every")}
        label = getattr(function, "__name__", "hook")
        factory = Factory("", given if isinstance(given, str) else label, function, parameters, label, OPTIONS)
        # A function that takes gradients is an update hook itself; any other function makes a hook.
        if inspect.isfunction(function) and "grads" in inspect.signature(function).parameters:
            return FunctionHook(function, factory.check(skip=CATALOG["on_update"].argument_names))
        if isinstance(given, str):
            made = factory.make()
        else:
            checked = factory.check()
    except ConfigError as error:
        raise RegistrationError(str(error)) from error
    if not isinstance(given, str):
        made = given(**checked)  # outside of the block: an exception from the user's class stays unchanged
    own_schedule = hook_attribute(made, "schedule")
    if takes_every and own_schedule is not None and own_schedule.every is not None:
        options["every"] = own_schedule.every
    return made


class FunctionHook(UpdateHook):
    """An update hook that calls a function with the arguments of `on_update` that it names.

    The function's other parameters come from the config. Attributes set on the function count like those of a class:
    `params`, `inplace`, `on_error`.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
        vars(self).update({"__name__": function.__name__, **vars(function)})
        self.on_update = partial(function, **parameters)  # type: ignore[method-assign]
