"""`hookline schema`: the JSON Schema of config files, with which editors complete, explain and check them.

It is pydantic's schema of `RunConfig`, told what pydantic cannot know: which parts and hooks are registered, and what
each of them takes and needs. The parameters are those of a hook's constructor, or of a part's factory.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from hookline.cli.hooks import NOT_FOR_CONFIGS, first_sentence
from hookline.config.schemas import RunConfig
from hookline.errors import HooklineError
from hookline.events.policy import POLICIES
from hookline.registry.loading import FLAGS, KINDS
from hookline.registry.names import DATA, HOOKS, LOSSES, MODELS, OPTIMIZERS, SCHEDULERS, Names
from hookline.trainer.options import TrainerOptions

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NONE = {"type": "null"}
# How many values each kind of part is given by position, and which by name unless the config gives them: see build.py.
GIVEN: dict[str, tuple[int, tuple[str, ...]]] = {
    "model": (0, ("vocab_size",)), "optimizer": (1, ()), "scheduler": (1, ("total_steps", "T_max")),
}  # fmt: skip
PARTS = {"model": MODELS, "data": DATA, "optimizer": OPTIMIZERS, "scheduler": SCHEDULERS, "loss": LOSSES}
REFERENCE = {"type": "string", "pattern": r"\$\{"}  # ${env:NAME} may stand for any value
DOTTED = {"type": "string", "pattern": r"\."}  # a class path, where the command line allows it

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, NONE]}
_QUANTITY = {"type": ["integer", "string"], "description": "10, '10 batches', '2 epochs', '30 s' or '1M tokens'"}
OPTIONS_OF_HOOKS: dict[str, Any] = {
    "enabled": {"type": "boolean", "description": "false lists it switched off"},
    **{key: {**_QUANTITY, "type": [*_QUANTITY["type"], "null"]} for key in ("every", "start", "stop")},
    "at": {"anyOf": [_QUANTITY, {"type": "array", "items": _QUANTITY}, NONE]},
    "before": {**_TEXTS, "description": "names of hooks that run after it"},
    "after": {**_TEXTS, "description": "names of hooks that run before it"},
    "on_error": {
        "anyOf": [{"enum": list(POLICIES)}, REFERENCE, NONE],
        "description": "what a failure of the hook does",
    },
    "ranks": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}, NONE]},
}


def run(options: argparse.Namespace) -> int:
    """Print the schema, or write it to a file."""
    text = json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"
    if options.output is None:
        print(text, end="")
        return 0
    try:
        Path(options.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise HooklineError(f"cannot write {options.output}: {error.strerror}; choose another file") from error
    print(options.output)
    return 0


def config_schema() -> dict[str, Any]:
    """The schema of a config file, for what is registered now."""
    schema = RunConfig.model_json_schema()
    definitions = schema["$defs"]
    del definitions["Component"]
    for key, names in PARTS.items():
        needed = key in schema["required"]
        schema["properties"][key] = _part(key, names) if needed else {"anyOf": [_part(key, names), NONE]}
    options = definitions["TrainerOptions"]["properties"]
    for option in fields(TrainerOptions):
        options[option.name] = {**_or_reference(options[option.name]), "description": option.metadata["about"]}
    _describe_hooks(definitions)
    return {"$schema": DIALECT, **schema, "title": "A run of hookline"}


def _part(key: str, names: Names) -> dict[str, Any]:
    """A part by its name alone, if it needs nothing else, or a mapping with `name` and its parameters."""
    return _by_name(
        {name: _part_entry(name, _factory(names, name), *GIVEN.get(key, (0, ()))) for name in names.names()}
    )


def _part_entry(name: str, factory: Any, taken: int, offered: tuple[str, ...]) -> dict[str, Any]:
    """Types are left open: whatever the factory can be made with is right, and many take more than they say."""
    own = [one for one in list(_written_down(factory))[taken:] if one.name != "name"]
    properties = {"name": {"const": name}, **{one.name: _default(one) for one in own}}
    needed = [one.name for one in own if one.default is one.empty and one.name not in offered]
    return {**_mapping(factory, properties), "required": ["name", *needed]}


def _by_name(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One of these entries; bare, the name of one that needs no more; or a class of one's own with anything."""
    own_class = {"type": "object", "properties": {"name": {"anyOf": [DOTTED, REFERENCE]}}, "required": ["name"]}
    bare = [name for name, entry in entries.items() if entry["required"] == ["name"]]
    return {"anyOf": [*([{"enum": bare}] if bare else []), DOTTED, REFERENCE, *entries.values(), own_class]}


def _describe_hooks(definitions: dict[str, Any]) -> None:
    """Lists hold known hooks with their parameters; a switch's parameters are those of its hook."""
    definitions["Hook"] = _by_name({name: _hook_entry(name, _factory(HOOKS, name)) for name in HOOKS.names()})
    listed = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Hook"}}, NONE]}
    hooks = definitions["HooksConfig"]
    hooks["description"] = hooks["description"].partition("\n")[0]
    hooks["properties"].update(dict.fromkeys(KINDS, listed))
    for name, key in FLAGS.values():
        if name in HOOKS:
            factory = _factory(HOOKS, name)
            hooks["properties"][key] = _mapping(factory, {**_parameters(factory), **OPTIONS_OF_HOOKS})


def _hook_entry(name: str, factory: Any) -> dict[str, Any]:
    """An entry of a list: the hook's type, its parameters, and what the registry takes."""
    own = {"name": {"const": name}, "as": {"type": ["string", "null"], "description": "this instance's name"}}
    mapping = _mapping(factory, {**own, **_parameters(factory), **OPTIONS_OF_HOOKS})
    needed = [one.name for one in _for_configs(factory) if one.default is one.empty]
    return {**mapping, "required": ["name", *needed]}


def _mapping(factory: Any, properties: dict[str, Any]) -> dict[str, Any]:
    closed = {} if _takes_anything(factory) else {"additionalProperties": False}
    return {"type": "object", "description": first_sentence(factory), "properties": properties, **closed}


def _parameters(factory: Any) -> dict[str, Any]:
    hints = _hints(factory)
    return {parameter.name: _parameter(parameter, hints) for parameter in _for_configs(factory)}


def _parameter(parameter: inspect.Parameter, hints: dict[str, Any]) -> dict[str, Any]:
    """Its type and default, as far as JSON can say; one of another type may be anything."""
    try:
        kind = TypeAdapter(hints[parameter.name]).json_schema()
    except Exception:  # pydantic raises several kinds of error for types that are not its own
        kind = {}
    return {**(_or_reference(kind) if kind else kind), **_default(parameter)}


def _default(parameter: inspect.Parameter) -> dict[str, Any]:
    known = parameter.default is not parameter.empty and _is_plain(parameter.default)
    return {"default": parameter.default} if known else {}


def _or_reference(kind: dict[str, Any]) -> dict[str, Any]:
    """The same, or a reference that stands for it; what may be any text may be one already."""
    about = {key: value for key, value in kind.items() if key in ("default", "title")}
    bare = {key: value for key, value in kind.items() if key not in about}
    kinds = bare.get("anyOf", [bare])
    return kind if {"type": "string"} in kinds else {**about, "anyOf": [*kinds, REFERENCE]}


def _for_configs(factory: Any) -> Iterator[inspect.Parameter]:
    """The parameters that a hook's entry can give."""
    return (one for one in _written_down(factory) if one.name not in NOT_FOR_CONFIGS)


def _written_down(factory: Any) -> Iterator[inspect.Parameter]:
    """The parameters that have a name of their own."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return
    spread = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    yield from (one for one in parameters if one.kind not in spread)


def _takes_anything(factory: Any) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _factory(names: Names, name: str) -> Any:
    """What makes the hook or part; nothing for one that cannot be imported: it must not hide the others."""
    try:
        return names.find(name)
    except Exception:  # somebody else's module; `hookline hooks` says what is wrong with it
        return None


def _hints(factory: Any) -> dict[str, Any]:
    try:
        return get_type_hints(vars(factory).get("__init__", factory) if inspect.isclass(factory) else factory)
    except Exception:  # a name that only type checkers see
        return {}


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
