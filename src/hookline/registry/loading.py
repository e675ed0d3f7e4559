"""From a configuration to hooks.

Two forms lead to the same list: lists by kind (``forward:``, ``update:``, ``lifecycle:``, each entry a name and its
parameters) and the flat form with ``enable_…`` flags and ``hook_classes``. Nothing is imported before every name and
path in the config has been checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from hookline.errors import ConfigError, HooklineError, RegistrationError, got, nearest, written
from hookline.events.catalog import CATALOG
from hookline.events.policy import check_policy
from hookline.events.schedule import Schedule
from hookline.registry.functions import FunctionHook, is_update_function
from hookline.registry.loading_references import as_expected, expected_kinds, written_kind
from hookline.registry.names import HOOKS

KINDS = ("lifecycle", "forward", "update")
OPTIONS = ("enabled", "every", "at", "start", "stop", "before", "after", "on_error", "ranks")
RESERVED = ("name", "as", *OPTIONS)
FLAGS = {  # seed 002's switches: flag -> built-in hook and the key of its parameters
    "enable_logging_hook": ("console_log", "logging_config"),
    "enable_gradient_monitor": ("gradient_monitor", "gradient_monitor_config"),
    "enable_model_checkpoint_hook": ("checkpoint", "model_checkpoint_config"),
    "enable_early_stopping_hook": ("early_stopping", "early_stopping_config"),
    "enable_lr_monitor": ("lr_monitor", "lr_monitor_config"),
}
OWN_PARTS = "one of your own must be registered first: import its module (on the command line: --import MODULE)"
KEYS = (*KINDS, *FLAGS, *(key for _, key in FLAGS.values()), "hook_classes", "hook_configs")


@dataclass
class HookSpec:
    """One hook of a config, checked and ready to be made."""

    path: str  # where in the config
    type_name: str
    target: Any  # a factory, or a dotted path that may be imported
    name: str | None = None
    kind: str | None = None
    origin: str = "config"
    options: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)


def read_hooks(config: Any, *, allow: tuple[str, ...] = (), from_file: bool = False) -> list[HookSpec]:
    """Every hook that a configuration names, in order. Wrong keys, types and names are one clear error each."""
    tree = hook_tree(config)
    gate = Gate(allow, from_file or is_from_file(config) or is_from_file(tree))
    specs = [spec for kind in KINDS for spec in _listed(tree.get(kind), kind, gate)]
    specs += [*_by_class(tree, gate), *_by_flag(tree)]
    return specs


def is_from_file(config: Any) -> bool:
    """Whether a configuration says that it was read from a file."""
    return getattr(config, "from_file", False) is True


def hook_tree(config: Any) -> Mapping[str, Any]:
    """The part of a configuration that is about hooks, as a mapping whose keys are known."""
    tree = config.model_dump(exclude_none=True) if hasattr(config, "model_dump") else config
    if not isinstance(tree, Mapping):
        raise ConfigError("hooks", f"expected a mapping with {', '.join(KINDS)}, {got(tree)}")
    if "hooks" in tree:
        return hook_tree(tree["hooks"] or {})
    for key in tree:
        if key not in KEYS:
            raise ConfigError(f"hooks.{key}", f"unknown key; {nearest(str(key), KEYS, 40)}")
    return tree


@dataclass(frozen=True)
class Gate:
    """Which dotted paths may be imported: all in code, in a file only those under an allowed prefix."""

    allow: tuple[str, ...]
    from_file: bool

    def check(self, dotted: str, path: str) -> str:
        if not all(part.isidentifier() for part in dotted.split(".")):
            raise ConfigError(path, f"{dotted!r} is no dotted path")
        if self.from_file and not any(dotted == prefix or dotted.startswith(f"{prefix}.") for prefix in self.allow):
            raise ConfigError(
                path,
                f"{dotted!r} is not allowed: a config file names registered hooks; to import from a package of yours, "
                f"allow it in code (allow=[…]) or on the command line (--allow {dotted.split('.')[0]})",
            )
        return dotted


def _listed(entries: Any, kind: str, gate: Gate) -> Iterator[HookSpec]:
    if entries is None:
        return
    if not isinstance(entries, (list, tuple)):
        raise ConfigError(f"hooks.{kind}", f"expected a list of hooks, {got(entries)}")
    for index, entry in enumerate(entries):
        yield _one(entry, kind, f"hooks.{kind}.{index}", gate)


def _one(entry: Any, kind: str, path: str, gate: Gate) -> HookSpec:
    given = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ConfigError(path, f"expected a hook's name or a mapping with `name:`, {got(entry)}")
    type_name = given["name"]
    _check_instance_name(given.get("as"), f"{path}.as")
    options, parameters = _sorted_out(given, RESERVED, path)
    return HookSpec(
        path=path,
        type_name=type_name,
        target=_target(type_name, f"{path}.name", gate),
        name=given.get("as"),
        kind=kind,
        options=options,
        parameters=parameters,
    )


def _check_instance_name(name: Any, path: str) -> None:
    """A name is printed, recorded and typed again in overrides."""
    if name is not None and not (isinstance(name, str) and name.strip() and name.isprintable()):
        raise ConfigError(path, f"expected a name for this instance, {got(name)}")


def _sorted_out(
    given: Mapping[str, Any], reserved: tuple[str, ...], path: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What belongs to the registry, and what goes to the hook's constructor."""
    options = {key: given[key] for key in OPTIONS if key in given}
    _check_options(options, path)
    options = {key: value for key, value in options.items() if value is not None}
    return options, {str(key): value for key, value in given.items() if key not in reserved}


def _check_options(options: Mapping[str, Any], path: str) -> None:
    """Refuse a switch, a schedule or a policy that means nothing here, where its path is known."""
    if not isinstance(options.get("enabled", True), bool):
        raise ConfigError(f"{path}.enabled", f"expected true or false, {got(options['enabled'])}")
    Schedule.parse(**{key: options.get(key) for key in ("every", "at", "start", "stop")}, path=path)
    if options.get("on_error") is not None:
        check_policy(options["on_error"], f"{path}.on_error")
    _check_one_or_more(options.get("ranks"), int, "a rank", f"{path}.ranks")
    for key in ("before", "after"):
        _check_one_or_more(options.get(key), str, "a hook's name", f"{path}.{key}")


def _check_one_or_more(given: Any, kind: type, what: str, path: str) -> None:
    """Refuse what is neither one of a kind nor a list of them: a hook on the rank "0" would run nowhere."""
    listed = given if isinstance(given, (list, tuple, set, frozenset)) else [given]
    if given is not None and not all(isinstance(one, kind) and not isinstance(one, bool) for one in listed):
        raise ConfigError(path, f"expected {what} or a list of them, {got(given)}")


def _by_class(tree: Mapping[str, Any], gate: Gate) -> Iterator[HookSpec]:
    paths, configs = tree.get("hook_classes") or [], _mapping(tree.get("hook_configs"), "hooks.hook_configs")
    _check_classes(paths)
    for key in configs:
        _check_config_key(str(key), paths, configs)
    for index, dotted in enumerate(paths):
        path, key = f"hooks.hook_classes.{index}", dotted if dotted in configs else _bare(dotted)
        target = _target(dotted, path, gate)
        given = _mapping(configs.get(key), f"hooks.hook_configs.{key}")
        options, parameters = _sorted_out(given, OPTIONS, f"hooks.hook_configs.{key}")
        where = f"{path} with hook_configs.{key}" if given else path
        yield HookSpec(where, dotted, target, options=options, parameters=parameters)


def _check_classes(paths: Any) -> None:
    """Refuse what is no list of class paths, and a class that is there twice: here it can get no other name."""
    if not isinstance(paths, (list, tuple)):
        raise ConfigError("hooks.hook_classes", f"expected a list of class paths, {got(paths)}")
    for index, dotted in enumerate(paths):
        path = f"hooks.hook_classes.{index}"
        if not isinstance(dotted, str):
            raise ConfigError(path, f"expected a class path, {got(dotted)}")
        if (first := paths.index(dotted)) < index:
            remedy = f"for two of them, list each by kind with a name: {{name: {dotted}, as: …}}"
            raise ConfigError(path, f"{dotted!r} is there already, at hooks.hook_classes.{first}; {remedy}")


def _check_config_key(key: str, paths: list[str], configs: Mapping[str, Any]) -> None:
    """A key of `hook_configs` stands for one class: by its path, or by its bare name where that is enough."""
    meant = [dotted for dotted in paths if key in (dotted, _bare(dotted))]
    path, listed = f"hooks.hook_configs.{key}", "hook_classes"
    if not meant:
        there = [*paths, *map(_bare, paths)] if "." not in key else paths
        raise ConfigError(path, f"no such class in {listed}; {nearest(key, there)}")
    if len(meant) > 1 and key not in paths:
        raise ConfigError(path, f"several classes in {listed} have that name; write its path: {' or '.join(meant)}")
    if key not in paths and meant[0] in configs:
        raise ConfigError(path, f"{meant[0]!r} has its parameters there under its path, too; keep one of the two")


def _bare(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _mapping(given: Any, path: str) -> Mapping[str, Any]:
    """Parameters by name, or none."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(path, f"expected a mapping, {got(given)}")
    return given or {}


def _by_flag(tree: Mapping[str, Any]) -> Iterator[HookSpec]:
    for flag, (name, key) in FLAGS.items():
        options, parameters = _sorted_out(_mapping(tree.get(key), f"hooks.{key}"), OPTIONS, f"hooks.{key}")
        if tree.get(flag) not in (None, True, False):
            raise ConfigError(f"hooks.{flag}", f"expected true or false, {got(tree[flag])}")
        if not tree.get(flag):
            _check_unused(name, parameters, f"hooks.{key}")
            continue
        if name not in HOOKS:
            raise ConfigError(f"hooks.{flag}", f"there is no hook {name!r} yet; {nearest(name, HOOKS.names())}")
        path = f"hooks.{key if parameters else flag}"
        yield HookSpec(path, name, name, origin="built-in", options=options, parameters=parameters)


def _check_unused(name: str, parameters: Mapping[str, Any], path: str) -> None:
    """The parameters of a hook that is switched off make none, but a slip in them is told all the same."""
    if parameters and name in HOOKS:
        try:
            make_hook(name, parameters)
        except RegistrationError as error:
            raise RegistrationError(f"{path}: {error}") from error


def _target(name: str, path: str, gate: Gate) -> str:
    if name in HOOKS:
        return name
    if "." in name:
        return gate.check(name, path)
    raise ConfigError(path, f"there is no hook named {name!r}; {nearest(name, HOOKS.names(), 40)}; {OWN_PARTS}")


def make_hook(given: Any, parameters: Mapping[str, Any]) -> Any:
    """An object stays as it is; a class, a name or a dotted path is made with its parameters."""
    if isinstance(given, str):
        return _make_by_name(given, parameters)
    if isinstance(given, type):
        return given(**_checked_parameters(given, parameters))
    for key in parameters:
        raise RegistrationError(f"{key!r} is no option of a hook; {nearest(key, OPTIONS)}")
    return given


def _make_by_name(name: str, parameters: Mapping[str, Any]) -> Any:
    """A hook that is named rather than handed over: what its constructor cannot digest is told with the parameters."""
    factory = find_hook(name)
    if is_update_function(factory):
        told = CATALOG["on_update"].argument_names
        return FunctionHook(factory, _checked_parameters(factory, parameters, told))
    checked = _checked_parameters(factory, parameters)
    try:
        return factory(**checked)
    except RegistrationError:
        raise
    except (HooklineError, TypeError, ValueError) as error:
        given = ", ".join(f"{key}={written(value)}" for key, value in parameters.items()) or "its defaults"
        raise RegistrationError(f"{name} cannot be made with {given}: {error}") from error


def find_hook(name: str) -> Any:
    """The class or factory that a name or a dotted path stands for."""
    return HOOKS.find(name) if name in HOOKS or "." not in name else import_dotted(name)


def import_dotted(dotted: str) -> Any:
    """Import ``package.module.Class``. What it finds must be defined under that package, and be callable."""
    module_name, _, attribute = dotted.rpartition(".")
    try:
        module = import_module(module_name)
    except ImportError as error:
        hint = where_to_look(error, module_name)
        raise RegistrationError(f"{dotted!r}: cannot import {module_name!r} ({error}){hint}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise RegistrationError(f"{dotted!r}: {module_name} has no {attribute!r}; {nearest(attribute, vars(module))}")
    home = getattr(found, "__module__", None) or ""  # None for what is bound to an object, as random.random is
    if not callable(found) or home.split(".")[0] != dotted.split(".")[0]:
        kind = type(found).__name__
        raise RegistrationError(f"{dotted!r} is not a hook class of that package (it is {kind} from {home!r})")
    return found


def where_to_look(error: Exception, module: str) -> str:
    """For a module that was not found, where it may lie; nothing for one that failed while it was imported."""
    if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
        return ""
    return f"; a `hookline` command looks in the current directory ({Path.cwd()}), then among installed packages"


def _checked_parameters(factory: Any, parameters: Mapping[str, Any], told: Iterable[str] = ()) -> dict[str, Any]:
    """The parameters as the factory takes them; what is wrong is said before Python's own TypeError says it.

    What the factory is `told` at each call is no parameter.
    """
    try:
        signature = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return dict(parameters)
    known = {name: parameter for name, parameter in signature.items() if name not in told}
    name = getattr(factory, "__name__", "hook")
    read = {key: _read(name, value, known[key]) if key in known else value for key, value in parameters.items()}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return read
    for key in parameters:
        if key not in known:
            raise RegistrationError(f"{name} has no parameter {key!r}; {nearest(key, [*known, *OPTIONS], 40)}")
        _refuse_text(name, read[key], known[key])
    for key, parameter in known.items():
        spread = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        required = parameter.default is inspect.Parameter.empty and not spread
        if required and key not in parameters:
            raise RegistrationError(f"{name} needs the parameter {key!r}")
    return read


def _read(name: str, value: Any, parameter: inspect.Parameter) -> Any:
    try:
        return as_expected(value, parameter)
    except ValueError as error:
        raise RegistrationError(f"{name}.{parameter.name}: {error}, {got(value)}") from None


def _refuse_text(name: str, value: Any, parameter: inspect.Parameter) -> None:
    """A word where the constructor's annotation has numbers only would fail much later, in the middle of a run."""
    annotated = parameter.annotation is not parameter.empty
    if isinstance(value, str) and annotated and expected_kinds(parameter) <= {"int", "float", "None"}:
        expected = f"expected {written_kind(parameter)}"
        raise RegistrationError(f"{name}.{parameter.name}: {expected}, {got(value)}")


def hook_parameters(hook: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A hook's parameters for the record: its constructor's, as the instance holds them."""
    try:
        names = list(inspect.signature(type(hook)).parameters)
    except (TypeError, ValueError):
        return dict(given)
    missing = object()
    held = {name: getattr(hook, name, missing) for name in names if name != "name"}
    return {**{name: value for name, value in held.items() if value is not missing}, **given}
