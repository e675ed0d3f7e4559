"""Read values from untrusted configs: plain YAML, bounded in size and depth, every key once, printable text only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from hookline._limits import MAX_DEPTH, TOO_DEEP
from hookline.errors import ConfigError, shown

MAX_NODES = 10_000  # YAML takes half a second for this many; the longest real configs have a few hundred
MAX_KEY = 200  # characters
MAX_DIGITS = 100  # YAML takes quadratic time for long numbers in base 60, `1:1:1:…`.
MAX_INT = 2**63  # integers must fit into 64 bits; torch takes no larger ones either

_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE_TAG = "tag:yaml.org,2002:merge"

# A terminal obeys control characters, a file name cannot hold a NUL, and half a surrogate pair cannot be encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _PlainLoader(yaml.SafeLoader):
    """The loader of `yaml.safe_load`, with limits, without tags and aliases, and with 5e-3 read as a number.

    The limits are checked while the text is parsed, so that a hostile document never gets built in full. Without
    aliases, a document cannot expand to more values than it contains.
    """

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where, self._depth, self._nodes = where, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Parse one value and the values inside it."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it untyped
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise self._error(event, TOO_DEEP)
        if self._nodes > MAX_NODES:
            raise self._error(event, f"holds more than {MAX_NODES} values")
        if isinstance(event, yaml.AliasEvent):
            raise self._error(event, f"the alias '*{event.anchor}' is refused; write its value out")
        if (tag := getattr(event, "tag", None)) is not None:
            short = tag.replace("tag:yaml.org,2002:", "!!")
            problem = f"the tag {short!r} is refused: a config holds plain values and cannot create objects"
            raise self._error(event, f"{problem}; drop the tag, and name a registered component instead")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; a duplicate key raises an error."""
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if key.tag == _MERGE_TAG:
                raise self._error(key, "the merge key '<<' is refused; write its values out")
            if isinstance(key, yaml.ScalarNode):
                name = (key.tag, key.value)
                if name in lines:
                    raise self._error(key, f"the key {key.value!r} appears twice (first on line {lines[name]})")
                lines[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the text of a value."""
        text = super().construct_scalar(node)
        if node.tag in _NUMBER_TAGS and len(text) > MAX_DIGITS:
            raise self._error(node, f"a number has more than {MAX_DIGITS} digits")
        # JSON escapes a rare character as two halves, which belong together.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def _error(self, place: Any, problem: str) -> ConfigError:
        return ConfigError(self._where, f"line {place.start_mark.line + 1}: {problem}")


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML document, which may be JSON.

    Args:
        text: The document.
        where: The file or path that error messages begin with.

    Raises:
        ConfigError: If the text is not valid YAML, has tags, aliases or duplicate keys, or is too large or too deep.
    """
    try:
        return _PlainLoader(text, where).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(where, f"is not valid YAML: {problem}{place}") from None
    except (ValueError, OverflowError) as error:  # 2001-13-45, or "\\UFFFFFFFF"
        raise ConfigError(where, f"holds a date, number or character that does not exist: {error}") from None


def plain_copy(tree: Mapping[str, Any], where: str, mapping: type[dict[str, Any]] = dict) -> dict[str, Any]:
    """Copy a config tree, checking its keys and values.

    A value that is shared by several places is copied for each, so that an override changes only one place.

    Args:
        tree: The config.
        where: The source, named in the error if the tree is too large; other errors name the value's dotted path.
        mapping: The class of all mappings in the copy.

    Raises:
        ConfigError: If the tree is too large, or a key or value is not printable or out of range.
    """
    count = 0

    def copy(value: Any, path: tuple[str, ...]) -> Any:
        nonlocal count
        count += 1
        place = ".".join(path)
        if len(path) > MAX_DEPTH or count > MAX_NODES:
            raise ConfigError(where, f"is too large: more than {MAX_DEPTH} levels deep, or than {MAX_NODES} values")
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(place, f"expected a key that is a word, got {shown(key)}; put it in quotes")
                if not key.isprintable() or len(key) > MAX_KEY:
                    limits = f"keys have at most {MAX_KEY} characters, all printable"
                    raise ConfigError(place, f"invalid key: {shown(key)}; {limits}")
            return mapping({key: copy(item, (*path, key)) for key, item in value.items()})
        if isinstance(value, list | tuple):
            return [copy(item, (*path, str(index))) for index, item in enumerate(value)]
        if isinstance(value, str) and (control := _UNPRINTABLE.search(value)):
            raise ConfigError(
                place,
                f"contains {control[0]!r}; config strings may contain only printable characters, newlines and tabs",
            )
        if isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
            raise ConfigError(place, "is an integer with more than 64 bits")
        return value

    copied: dict[str, Any] = copy(tree, ())
    return copied
