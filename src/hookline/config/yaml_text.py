"""YAML from strangers: plain values only, bounded in size, every key once."""

from __future__ import annotations

import re
from typing import Any

import yaml

from hookline.errors import ConfigError

MAX_DEPTH = 50
MAX_NODES = 100_000


class _PlainLoader(yaml.SafeLoader):
    """`yaml.safe_load`'s loader, which also takes 5e-3 for a number, as everybody who writes it means."""


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML document; `where` begins every error message.

    Checked on the way, each before the next step may be expensive: depth and tags while parsing, duplicate keys and
    the size with all aliases written out before anything is made.
    """
    try:
        _check_events(text, where)
        loader = _PlainLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _expanded(node, where, {}, set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError(where, f"is no valid YAML: {_one_line(error)}") from None


def _check_events(text: str, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_PlainLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(where, f"is nested deeper than {MAX_DEPTH} levels (line {event.start_mark.line + 1})")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ConfigError(
                where,
                f"line {event.start_mark.line + 1}: the tag {_short_tag(tag)!r} is refused: a config holds plain "
                "values and can create no objects; drop the tag, and name a registered component instead",
            )


def _short_tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


def _expanded(node: yaml.Node, where: str, sizes: dict[int, int], above: set[int]) -> int:
    """How many nodes there are below this one when every alias is written out; each node is visited once."""
    if id(node) in sizes:
        return sizes[id(node)]
    if id(node) in above:
        raise ConfigError(where, f"line {node.start_mark.line + 1}: a value contains itself")
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, where)
    above.add(id(node))
    size = 1 + sum(_expanded(child, where, sizes, above) for child in _children(node))
    above.discard(id(node))
    if size > MAX_NODES:
        raise ConfigError(where, f"holds more than {MAX_NODES} values once its aliases are written out")
    sizes[id(node)] = size
    return size


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_keys(node: yaml.MappingNode, where: str) -> None:
    seen: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line, name = key.start_mark.line + 1, (key.tag, key.value)
        if name in seen:
            raise ConfigError(where, f"line {line}: the key {key.value!r} is there twice (first in line {seen[name]})")
        seen[name] = line


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{' '.join(problem.split())}{f' (line {mark.line + 1}, column {mark.column + 1})' if mark else ''}"
