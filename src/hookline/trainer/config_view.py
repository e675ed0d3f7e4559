"""The configuration of a run as hooks get it: read-only, with attributes and as a mapping of plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hookline.errors import nearest


class ConfigView(Mapping[str, Any]):
    """A config to be read as an object, ``config.checkpoint.dir``, and as a mapping, ``config["checkpoint"]["dir"]``.

    Args:
        source: The config: a mapping, or an object whose attributes are its values.
        more: Values that the run adds to it, by key.
    """

    def __init__(self, source: Any, more: Mapping[str, Any] | None = None) -> None:
        vars(self).update(_source=source, _more=more or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Copying and pickling ask for special methods before there is a source.
            raise AttributeError(name)
        values = {**self._source, **self._more} if isinstance(self._source, Mapping) else self._more
        if name in values:
            return ConfigView(values[name]) if isinstance(values[name], Mapping) else values[name]
        if hasattr(self._source, name) and not isinstance(self._source, Mapping):
            return getattr(self._source, name)
        raise AttributeError(f"the config has no {name!r}; {nearest(name, self)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the config is read-only; {name!r} can be set before the trainer is made")

    def __getitem__(self, key: str) -> Any:
        return {**plain(self._source), **self._more}[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**plain(self._source), **self._more})

    def __len__(self) -> int:
        return len({**plain(self._source), **self._more})

    def __reduce__(self) -> tuple[type[ConfigView], tuple[dict[str, Any]]]:
        """Copy and pickle the values, without the run."""
        return ConfigView, (dict(self),)

    def __eq__(self, other: object) -> bool:
        return self._source == (other._source if isinstance(other, ConfigView) else other) or super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # As of other mappings.

    def __repr__(self) -> str:
        return f"ConfigView({dict(self)!r})"


def plain(value: Any) -> Any:
    """Return a config object as a dict, with dicts for the objects in it."""
    for method in ("as_mapping", "model_dump"):
        if callable(own := getattr(value, method, None)):
            return own()
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value
