"""Register what a configuration lists; replaced by `hookline.config.hooks.load_hooks`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hookline.core.entry import as_names
from hookline.core.handle import Handle
from hookline.core.registry import HookRegistry
from hookline.errors import RegistrationError
from hookline.registry.loading import HookSpec, hook_tree, make_hook, read_hooks


def load_hooks(
    registry: HookRegistry, config: Any, *, allow: Iterable[str] = (), from_file: bool = False
) -> list[Handle]:
    """Register every hook of a configuration, or none if one of them is not valid."""
    specs = read_hooks(config, allow=as_names(allow), from_file=from_file)
    handles: list[Handle] = []
    try:
        for spec in specs:
            handles.append(_load_one(registry, spec))
    except Exception:
        for handle in handles:
            handle.remove()
        raise
    if "update" not in hook_tree(config) and not registry.entries("update"):
        handles.append(registry.register("identity", origin="default"))
    return handles


def _load_one(registry: HookRegistry, spec: HookSpec) -> Handle:
    try:
        made = make_hook(spec.target, spec.parameters)
        handle = registry.register(made, spec.name, origin=spec.origin, **spec.options)
    except RegistrationError as error:
        raise RegistrationError(f"{spec.path}: {error}") from error
    entry = registry.entry(handle)
    entry.parameters.update(spec.parameters)
    if spec.kind and spec.kind not in entry.kinds:
        kinds = " and ".join(entry.kinds)
        handle.remove()
        raise RegistrationError(
            f"{spec.path}: {spec.type_name!r} is a {kinds} hook; list it under `{kinds.split()[0]}:`"
        )
    return handle
