"""The configuration of a run as hooks get it: a dict of plain values, whose keys are attributes, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

from hookline._words import nearest


class ConfigView(dict[str, Any]):
    """The values of a config, to be read as ``config.checkpoint.dir`` and as ``config["checkpoint"]["dir"]``.

    It is a copy: to change an option, change it before the trainer is created.
    """

    def __getattribute__(self, name: str) -> Any:
        # A key comes before a method of the same name: `config.hooks.update` is the list of update hooks.
        if not name.startswith("_") and name in self:
            value = self[name]
            return ConfigView(value) if type(value) is dict else value
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the config has no {name!r}; {nearest(name, self)}")

    def _refuse(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"the config is read-only; {name!r} can be set before the trainer is created")

    __setattr__ = __setitem__ = _refuse

    def __reduce__(self) -> tuple[type[ConfigView], tuple[dict[str, Any]]]:
        """Copy and pickle through the constructor, because items cannot be set."""
        return ConfigView, (dict(self),)


def view_of(config: Any, checkpoint_dir: str | None) -> Any:
    """Return the `config` for hooks: a view with ``checkpoint.dir``, or an object of your own class unchanged."""
    values = _plain(config)
    if not isinstance(values, dict):
        return config
    section = values.get("checkpoint", {})
    if isinstance(section, Mapping):  # a config may have a section of this name, with its own `dir`
        values = {**values, "checkpoint": {"dir": checkpoint_dir, **section}}
    return ConfigView(values)


def _plain(value: Any) -> Any:
    """Return a mapping, or an object that lists its values, as a dict with dicts in it; anything else as it is."""
    for method in ("as_mapping", "model_dump"):
        if callable(as_dict := getattr(value, method, None)):
            return as_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value
