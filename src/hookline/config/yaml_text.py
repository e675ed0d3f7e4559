"""YAML from strangers: plain values only, bounded in size, every key once."""

from __future__ import annotations

import re
from typing import Any

import yaml

from hookline.config.plain_values import MAX_DEPTH, MAX_NODES
from hookline.errors import ConfigError

MAX_DIGITS = 100  # of a number: `1:1:1:…`, which YAML counts in sixties, takes quadratic time

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _PlainLoader(yaml.SafeLoader):
    """`yaml.safe_load`'s loader, which also takes 5e-3 for a number, as everybody who writes it means.

    While it reads, and not when it has read all, it refuses tags and what is too deep or too large.
    """

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where, self._depth, self._nodes = where, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read one value, and those inside it."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it open
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise self._refusal(event, f"is nested deeper than {MAX_DEPTH} levels")
        if self._nodes > MAX_NODES:
            raise self._refusal(event, f"holds more than {MAX_NODES} values")
        if (tag := getattr(event, "tag", None)) is not None:
            problem = f"the tag {_short_tag(tag)!r} is refused: a config holds plain values and can create no objects"
            raise self._refusal(event, f"{problem}; drop the tag, and name a registered component instead")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def _refusal(self, event: Any, problem: str) -> ConfigError:
        return ConfigError(self._where, f"line {event.start_mark.line + 1}: {problem}")


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML document; `where` begins every error message.

    Duplicate keys, long numbers and the size with all aliases written out are checked before anything is made.
    """
    try:
        loader = _PlainLoader(text, where)
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
    except (ValueError, OverflowError) as error:  # 2001-13-45, or "\\UFFFFFFFF"
        raise ConfigError(where, f"holds a date, number or character that does not exist: {error}") from None


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
    if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
        raise ConfigError(where, f"line {node.start_mark.line + 1}: a number has more than {MAX_DIGITS} digits")
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
