"""Moved to hookline.config.hooks and hookline.config.factory, which lie above this package: resolved on first use."""

from importlib import import_module
from typing import Any

_MOVED = {
    "Gate": "factory:ImportPolicy",
    "HookSpec": "hooks:HookSpec",
    "OPTIONS": "hooks:OPTIONS",
    "RESERVED": "hooks:RESERVED",
    "find_hook": "hooks:find_hook",
    "hook_parameters": "hooks:hook_parameters",
    "hook_tree": "hooks:_hooks_section",
    "load_hooks": "hooks:load_hooks",
    "make_hook": "hooks:make_hook",
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(name)
    module, _, attribute = _MOVED[name].partition(":")
    return getattr(import_module(f"hookline.config.{module}"), attribute)


def read_hooks(config: Any, *, allow: tuple[str, ...] = (), from_file: bool = False) -> list[Any]:
    """Read specs as `HookRegistry.load` expects them until it calls `hookline.config.hooks.load_hooks`."""
    hooks: Any = import_module("hookline.config.hooks")
    specs: list[Any] = hooks.read_hook_specs(config, allow=allow, from_file=from_file)
    for spec in specs:
        spec.type_name = spec.target
        if spec.unused:
            try:
                hooks.make_hook(spec.target, spec.parameters)
            except hooks.RegistrationError as error:
                raise hooks.RegistrationError(f"{spec.path}: {error}") from error
    return [spec for spec in specs if not spec.unused and spec.origin != "default"]
