"""`hookline schema`: print the JSON Schema of config files, which lets editors complete, explain and check them.

It is pydantic's schema of `RunConfig`, extended by what pydantic cannot know: which components and hooks are
registered, and the parameters of each. These are the parameters of a hook's constructor, or of a component's factory.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hookline._parameters import parameters_of, type_adapter, type_hint
from hookline.cli.arguments import IMPORT, argument
from hookline.cli.hooks import NOT_FOR_CONFIGS, first_sentence
from hookline.cli.output import CommandOutput
from hookline.config.factory import COMPONENTS
from hookline.config.schema import RunConfig
from hookline.core.plugins import HOOKS, METRICS, PluginTable
from hookline.record.json_lines import writing
from hookline.trainer.options import TrainerOptions

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NULL = {"type": "null"}
# How many values build.py passes to each kind of component by position, and which by name unless the config gives them.
PASSED_BY_BUILD: dict[str, tuple[int, tuple[str, ...]]] = {
    "model": (0, ("vocab_size",)), "optimizer": (1, ()), "scheduler": (1, ("total_steps", "T_max")),
}  # fmt: skip
REFERENCE = {"type": "string", "pattern": r"\$\{"}  # ${env:NAME} may stand for any value
DOTTED = {"type": "string", "pattern": r"\."}  # a class path, where the command line allows it

_NAMES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, NULL]}
_QUANTITY = {"type": ["integer", "string"], "description": "10, '10 batches', '2 epochs', '30 s' or '1M tokens'"}

ARGUMENTS = argument("--output", "FILE", "write it to this file") | IMPORT


def run(options: argparse.Namespace) -> int:
    """Print the schema, or write it to a file."""
    text = json.dumps(config_schema(), indent=2) + "\n"  # in ASCII, which every console and file can represent
    if options.output is None:
        CommandOutput().write(text)
        return 0
    with writing(Path(options.output)):
        Path(options.output).write_text(text, encoding="utf-8")
    CommandOutput().write(f"{options.output}\n")
    return 0


def config_schema() -> dict[str, Any]:
    """Return the schema of a config file, with the components and hooks that are registered now."""
    from hookline.config.hooks import FLAGS, KINDS  # imports torch

    schema = RunConfig.model_json_schema()
    definitions = schema["$defs"]
    del definitions["Component"]
    for key, names in COMPONENTS.items():
        entries = {name: _component_entry(key, name, names) for name in names.names()}
        required = key in schema["required"]
        schema["properties"][key] = _by_name(entries) if required else {"anyOf": [_by_name(entries), NULL]}
    metrics = _by_name({name: _metric_entry(name) for name in METRICS.names()})
    schema["properties"]["metrics"] = {"anyOf": [{"type": "array", "items": metrics}, NULL]}
    options = definitions["TrainerOptions"]["properties"]
    for option in fields(TrainerOptions):
        options[option.name] = {**_or_reference(options[option.name]), "description": option.metadata["about"]}
    definitions["Hook"] = _by_name({name: _hook_entry(name) for name in HOOKS.names()})
    hooks = definitions["HooksConfig"]
    hooks["description"] = hooks["description"].partition("\n")[0]
    listed = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Hook"}}, NULL]}
    hooks["properties"].update(dict.fromkeys(KINDS, listed))
    schema["properties"]["trackers"] = listed
    for name, key in FLAGS.values():
        if name in HOOKS:
            factory = _factory(HOOKS, name)
            hooks["properties"][key] = _mapping(factory, {**_parameters(factory), **options_of_hooks()})
    return {"$schema": DIALECT, **schema, "title": "A run of hookline"}


def options_of_hooks() -> dict[str, Any]:
    """Return the schemas of the options that every entry in a list of hooks takes, by key."""
    from hookline.core.failures import POLICIES  # imports torch

    policies = {"anyOf": [{"enum": list(POLICIES)}, REFERENCE, NULL], "description": "what happens when the hook fails"}
    number = {"type": "integer"}
    ranks = [{"enum": ["all", "zero", "local-zero"]}, number, {"type": "array", "items": number}, NULL]
    return {
        "enabled": {"type": "boolean", "description": "false registers it disabled"},
        **{key: {**_QUANTITY, "type": [*_QUANTITY["type"], "null"]} for key in ("every", "start", "stop")},
        "at": {"anyOf": [_QUANTITY, {"type": "array", "items": _QUANTITY}, NULL]},
        "before": {**_NAMES, "description": "names of hooks that run after it"},
        "after": {**_NAMES, "description": "names of hooks that run before it"},
        "on_error": policies,
        "ranks": {"anyOf": ranks},
    }


def _by_name(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of an entry: one of these, the bare name of one that needs no parameters, or a class path."""
    own_class = {"type": "object", "properties": {"name": {"anyOf": [DOTTED, REFERENCE]}}, "required": ["name"]}
    bare = [name for name, entry in entries.items() if entry["required"] == ["name"]]
    return {"anyOf": [*([{"enum": bare}] if bare else []), DOTTED, REFERENCE, *entries.values(), own_class]}


def _component_entry(key: str, name: str, names: PluginTable) -> dict[str, Any]:
    """Return the schema of a component. Types are left open, because many factories accept more than they say."""
    positional, provided = PASSED_BY_BUILD.get(key, (0, ()))
    factory = _factory(names, name)
    return _entry(factory, name, _defaults(factory, positional), positional, provided)


def _metric_entry(name: str) -> dict[str, Any]:
    """Return the schema of an entry in the list of metrics; a function's first two parameters are output and batch."""
    from hookline.trainer.metrics import PHASES  # imports torch

    factory = _factory(METRICS, name)
    positional = 0 if isinstance(factory, type) else 2
    phases = {"enum": list(PHASES)}
    properties = {
        "as": {"type": ["string", "null"], "description": "what it is recorded as"},
        "phases": {"anyOf": [phases, {"type": "array", "items": phases}, NULL], "description": "when it is measured"},
    }
    return _entry(factory, name, {**properties, **_defaults(factory, positional)}, positional)


def _hook_entry(name: str) -> dict[str, Any]:
    """Return the schema of an entry in a list of hooks: its name, its parameters, and the registry's options."""
    factory = _factory(HOOKS, name)
    properties = {"as": {"type": ["string", "null"], "description": "this instance's name"}}
    return _entry(factory, name, {**properties, **_parameters(factory), **options_of_hooks()})


def _entry(
    factory: Any, name: str, properties: dict[str, Any], positional: int = 0, provided: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the schema of an entry with a name; parameters that get their values elsewhere are not required."""
    parameters = _config_parameters(factory, positional)
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name not in provided
    ]
    return {**_mapping(factory, {"name": {"const": name}, **properties}), "required": ["name", *required]}


def _defaults(factory: Any, positional: int) -> dict[str, Any]:
    return {parameter.name: _default(parameter) for parameter in _config_parameters(factory, positional)}


def _mapping(factory: Any, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = parameters_of(factory)
    is_open = parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    closed = {} if is_open else {"additionalProperties": False}
    return {"type": "object", "description": first_sentence(factory), "properties": properties, **closed}


def _parameters(factory: Any) -> dict[str, Any]:
    """Return the type, bounds and default of each parameter, as far as JSON Schema can express them."""
    schemas = {}
    for parameter in _config_parameters(factory):
        try:
            annotated = parameter.annotation is not parameter.empty
            kind = type_adapter(type_hint(parameter, factory, bounds=True)).json_schema() if annotated else {}
        except Exception:  # pydantic raises several kinds of errors for types that it does not support
            kind = {}
        schemas[parameter.name] = {**(_or_reference(kind) if kind else kind), **_default(parameter)}
    return schemas


def _default(parameter: inspect.Parameter) -> dict[str, Any]:
    try:
        json.dumps(parameter.default, allow_nan=False)  # `empty`, the mark of a required one, is not JSON either
    except (TypeError, ValueError):
        return {}
    return {"default": parameter.default}


def _or_reference(kind: dict[str, Any]) -> dict[str, Any]:
    """Make a schema accept references, unless it already accepts any string."""
    about = {key: value for key, value in kind.items() if key in ("default", "title")}
    bare = {key: value for key, value in kind.items() if key not in about}
    kinds = bare.get("anyOf", [bare])
    return kind if {"type": "string"} in kinds else {**about, "anyOf": [*kinds, REFERENCE]}


def _config_parameters(factory: Any, skip: int = 0) -> list[inspect.Parameter]:
    """Return the parameters that a config can give, without the first few, which are passed by position."""
    spread = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [parameter for parameter in (parameters_of(factory) or {}).values() if parameter.kind not in spread]
    return [parameter for parameter in named[skip:] if parameter.name not in NOT_FOR_CONFIGS]


def _factory(names: PluginTable, name: str) -> Any:
    """Return the factory of a name, or None if it cannot be imported: one broken plugin must not hide the others."""
    try:
        return names.find(name)
    except Exception:  # Any error of a plugin's own code; `hookline hooks` prints it.
        return None
