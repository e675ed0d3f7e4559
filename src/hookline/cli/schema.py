"""`hookline schema`: the JSON Schema of config files, with which editors complete, explain and check them.

It is pydantic's schema of `RunConfig`, told what pydantic cannot know: which parts and hooks are registered, and what
each of them takes. A hook's parameters are those of its constructor.
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
PARTS = {"model": MODELS, "data": DATA, "optimizer": OPTIMIZERS, "scheduler": SCHEDULERS, "loss": LOSSES}
REFERENCE = {"type": "string", "pattern": r"\$\{"}  # ${env:NAME} may stand for any value
DOTTED = {"type": "string", "pattern": r"\."}  # a class path, where the command line allows it

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_QUANTITY = {"type": ["integer", "string"], "description": "10, '10 batches', '2 epochs', '30 s' or '1M tokens'"}
OPTIONS_OF_HOOKS: dict[str, Any] = {
    "enabled": {"type": "boolean", "description": "false lists it switched off"},
    **dict.fromkeys(("every", "start", "stop"), _QUANTITY),
    "at": {"anyOf": [_QUANTITY, {"type": "array", "items": _QUANTITY}]},
    "before": {**_TEXTS, "description": "names of hooks that run after it"},
    "after": {**_TEXTS, "description": "names of hooks that run before it"},
    "on_error": {"enum": list(POLICIES), "description": "what a failure of the hook does"},
    "ranks": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
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
        schema["properties"][key] = _part(names) if needed else {"anyOf": [_part(names), {"type": "null"}]}
    options = definitions["TrainerOptions"]["properties"]
    for option in fields(TrainerOptions):
        options[option.name] = {**_or_reference(options[option.name]), "description": option.metadata["about"]}
    _describe_hooks(definitions)
    return {"$schema": DIALECT, **schema, "title": "A run of hookline"}


def _part(names: Names) -> dict[str, Any]:
    """A part by its name alone, or a mapping with `name`."""
    name = {"anyOf": [{"enum": names.names()}, DOTTED, REFERENCE]}
    return {"anyOf": [name, {"type": "object", "properties": {"name": name}, "required": ["name"]}]}


def _describe_hooks(definitions: dict[str, Any]) -> None:
    """Lists hold known hooks with their parameters; a switch's parameters are those of its hook."""
    own_class = {"type": "object", "properties": {"name": DOTTED}, "required": ["name"]}
    known = [_hook_entry(name) for name in HOOKS.names()]
    definitions["Hook"] = {"anyOf": [{"enum": HOOKS.names()}, DOTTED, *known, own_class]}
    listed = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Hook"}}, {"type": "null"}]}
    hooks = definitions["HooksConfig"]
    hooks["description"] = hooks["description"].partition("\n")[0]
    hooks["properties"].update(dict.fromkeys(KINDS, listed))
    for name, key in FLAGS.values():
        if name in HOOKS:
            hooks["properties"][key] = _mapping(name, {**_parameters(name), **OPTIONS_OF_HOOKS})


def _hook_entry(name: str) -> dict[str, Any]:
    """An entry of a list: the hook's type, its parameters, and what the registry takes."""
    own = {"name": {"const": name}, "as": {"type": "string", "description": "this instance's name"}}
    return {**_mapping(name, {**own, **_parameters(name), **OPTIONS_OF_HOOKS}), "required": ["name", *_required(name)]}


def _mapping(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    closed = {} if _takes_anything(name) else {"additionalProperties": False}
    return {"type": "object", "description": _about(name), "properties": properties, **closed}


def _parameters(name: str) -> dict[str, Any]:
    factory = _factory(name)
    hints = _hints(factory)
    return {parameter.name: _parameter(parameter, hints) for parameter in _written_down(factory)}


def _parameter(parameter: inspect.Parameter, hints: dict[str, Any]) -> dict[str, Any]:
    """Its type and default, as far as JSON can say; one of another type may be anything."""
    try:
        kind = TypeAdapter(hints[parameter.name]).json_schema()
    except Exception:  # pydantic raises several kinds of error for types that are not its own
        kind = {}
    kind = _or_reference(kind) if kind else kind
    if parameter.default is not parameter.empty and _is_plain(parameter.default):
        kind["default"] = parameter.default
    return kind


def _or_reference(kind: dict[str, Any]) -> dict[str, Any]:
    """The same, or a reference that stands for it; what may be any text may be one already."""
    about = {key: value for key, value in kind.items() if key in ("default", "title")}
    bare = {key: value for key, value in kind.items() if key not in about}
    kinds = bare.get("anyOf", [bare])
    return kind if {"type": "string"} in kinds else {**about, "anyOf": [*kinds, REFERENCE]}


def _required(name: str) -> list[str]:
    return [one.name for one in _written_down(_factory(name)) if one.default is one.empty]


def _written_down(factory: Any) -> Iterator[inspect.Parameter]:
    """The parameters that a config can give."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return
    spread = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    yield from (one for one in parameters if one.name not in NOT_FOR_CONFIGS and one.kind not in spread)


def _takes_anything(name: str) -> bool:
    try:
        parameters = inspect.signature(_factory(name)).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _factory(name: str) -> Any:
    """What makes the hook; nothing for one that cannot be imported: it must not hide the others."""
    try:
        return HOOKS.find(name)
    except Exception:  # somebody else's module; `hookline hooks` says what is wrong with it
        return None


def _hints(factory: Any) -> dict[str, Any]:
    try:
        return get_type_hints(vars(factory).get("__init__", factory) if inspect.isclass(factory) else factory)
    except Exception:  # a name that only type checkers see
        return {}


def _about(name: str) -> str:
    return first_sentence(_factory(name))


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
