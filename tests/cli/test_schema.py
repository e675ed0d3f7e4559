"""The JSON Schema accepts configs that load, and rejects those that do not."""

import json
import re
from contextlib import nullcontext
from importlib.resources import as_file, files
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

import pytest
from commands import error_of, output_of

from hookline import HooklineError, HooksConfig, RunConfig, load_config, register_hook, trainer_from_config
from hookline.cli import main
from hookline.core.plugins import HOOKS

LEAST: dict[str, Any] = {"model": "char_gpt", "data": "stdlib_text", "optimizer": {"name": "sgd", "lr": 0.1}}
TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def is_type(value: Any, name: str) -> bool:
    """Return True if a value has a JSON type; True is not a number in JSON."""
    kinds = TYPES[name]
    return isinstance(value, kinds) and not (isinstance(value, bool) and name != "boolean")


def fits(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    """Validate a value; supports as much of JSON Schema as the schema of a config uses."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    names = schema.get("type", [])
    checks = [
        not names or any(is_type(value, name) for name in ([names] if isinstance(names, str) else names)),
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
        "anyOf" not in schema or any(fits(value, choice, root) for choice in schema["anyOf"]),
        not isinstance(value, (int, float)) or within_bounds(value, schema),
        "minLength" not in schema or not isinstance(value, str) or len(value) >= schema["minLength"],
        "pattern" not in schema or (isinstance(value, str) and re.search(schema["pattern"], value) is not None),
        "items" not in schema or not isinstance(value, list) or all(fits(v, schema["items"], root) for v in value),
        not isinstance(value, dict) or mapping_fits(value, schema, root),
    ]
    return all(checks)


def within_bounds(value: float, schema: Any) -> bool:
    """Return True if a number is within the bounds of a schema."""
    bounds = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le, "exclusiveMaximum": lt}
    return all(holds(value, schema[key]) for key, holds in bounds.items() if key in schema)


def mapping_fits(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    known = all(fits(value[key], properties[key], root) for key in value if key in properties)
    unknown = [value[key] for key in value if key not in properties]
    spare = not unknown if more is False else more is True or all(fits(item, more, root) for item in unknown)
    return known and spare and all(key in value for key in schema.get("required", ()))


def written_schema(path: Path) -> dict[str, Any]:
    """Write the schema to a file, and return its content."""
    assert main(["schema", "--output", str(path)]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the schema of configs with the built-in parts."""
    return written_schema(tmp_path_factory.mktemp("schema") / "schema.json")


def test_the_schema_is_printed_or_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The schema is printed, or written to a file whose name is printed; a file that cannot be written is one line."""
    printed = output_of(capsys, ["schema"])
    assert json.loads(printed)["$schema"].startswith("https://json-schema.org/")
    assert main(["schema", "--output", "schema.json"]) == 0
    assert Path("schema.json").read_text(encoding="utf-8") == printed
    assert "cannot write no/such/schema.json" in error_of(capsys, ["schema", "--output", "no/such/schema.json"])


def test_the_default_job_fits(schema: dict[str, Any]) -> None:
    """The schema accepts the default config."""
    with as_file(files("hookline.demo") / "default.yaml") as default:
        assert fits(load_config(default)[0], schema, schema)


@pytest.mark.parametrize(
    "hooks",
    [
        {"lifecycle": ["console_log", {"name": "early_stopping", "as": "patient", "patience": 5, "every": "2 epochs"}]},
        {"lifecycle": [{"name": "checkpoint", "save_top_k": 3, "monitor": "val/loss", "save_every_n_epochs": None}]},
        {"update": [{"name": "clip_norm", "max_norm": "${env:NORM}"}], "forward": None},
        {"lifecycle": ["mypackage.hooks.Mine", {"name": "mypackage.hooks.Mine", "anything": 3}]},
        {"enable_early_stopping_hook": True, "early_stopping_config": {"patience": 3, "on_error": "raise"}},
        {"hook_classes": ["mypackage.hooks.Mine"], "hook_configs": {"Mine": {"threshold": 5.0}}},
        {"lifecycle": [{"name": "nan_forensics", "stop_run": False}, {"name": "loss_spike", "stop": "3 epochs"}]},
    ],
    ids=str,
)
def test_right_hooks_fit(hooks: dict[str, Any], schema: dict[str, Any]) -> None:
    """The schema accepts names, parameters, the registry's options, references and class paths."""
    assert fits({**LEAST, "hooks": hooks}, schema, schema)


@pytest.mark.parametrize(
    "option", [{"max_steps": "${env:STEPS}"}, {"console": "${env:TALK}"}, {"precision": "${env:PRECISION}"}], ids=str
)
def test_options_may_be_references(
    option: dict[str, Any], schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference to the environment is valid in the place of a number, a bool or a word, as in loading."""
    for name, value in (("STEPS", "7"), ("TALK", "false"), ("PRECISION", "bf16")):
        monkeypatch.setenv(name, value)
    assert fits({**LEAST, "trainer": option}, schema, schema)
    (name,) = option
    options = trainer_from_config({**SMALL, "trainer": {"record": False, **option}}).options
    assert getattr(options, name) in (7, False, "bf16")
    assert "default" in schema["$defs"]["TrainerOptions"]["properties"][name]


@pytest.mark.parametrize(
    "change",
    [
        {"hooks": {"lifecycle": ["consol_log"]}},
        {"hooks": {"lifecycle": [{"name": "loss_spike", "stop": True}]}},
        {"trainer": {"max_steps": "seven"}},
        {"hooks": {"lifecycle": [{"name": "early_stopping", "patients": 5}]}},
        {"hooks": {"lifecycle": [{"name": "early_stopping", "patience": "five"}]}},
        {"hooks": {"lifecycle": [{"name": "early_stopping", "mode": "lowest"}]}},
        {"hooks": {"lifecycle": [{"name": "early_stopping", "on_error": "explode"}]}},
        {"hooks": {"update": [{"name": "clip_norm"}]}},
        {"hooks": {"model_checkpoint_config": {"save_topk": 3}}},
        {"hooks": {"enable_lr_monitor": "yes"}},
        {"trainer": {"max_stesp": 3}},
        {"trainer": {"precision": "fp8"}},
        {"model": "no_such_model"},
        {"model": {"width": 3}},
        {"modell": "char_gpt"},
    ],
    ids=str,
)
def test_wrong_configs_do_not_fit(change: dict[str, Any], schema: dict[str, Any]) -> None:
    """The schema rejects what loading rejects."""
    assert fits(LEAST, schema, schema)
    assert not fits({**LEAST, **change}, schema, schema)


SMALL: dict[str, Any] = {
    "model": {"name": "char_gpt", "context": 16, "width": 8, "heads": 2, "layers": 1},
    "data": {"name": "stdlib_text", "context": 16, "batch_size": 2, "max_bytes": 60_000},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "trainer": {"max_steps": 1, "console": False, "record": False},
}
SENT = "https://relay.example.org/services/T0"


def listed(*entries: Any, kind: str = "lifecycle") -> dict[str, Any]:
    """Return a config with these hooks."""
    return {"hooks": {kind: list(entries)}}


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"optimizer": "adamw"}, True),
        ({"optimizer": {"name": "adamw", "betas": [0.9, 0.95], "foreach": None}}, True),
        ({"optimizer": {"name": "adamw", "lr": "${env:LR}"}}, True),
        ({"optimizer": {"name": "torch.optim.NAdam", "lr": 0.1}}, True),
        ({"optimizer": {"name": "${env:OPTIMIZER}", "lr": 0.1}}, True),
        ({"optimizer": {"name": "adamw", "learning_rate": 0.1}}, False),
        ({"optimizer": {"name": "sgd", "betas": [0.9, 0.95]}}, False),
        ({"optimizer": {"name": "sgd", "params": []}}, False),
        ({"scheduler": None}, True),
        ({"scheduler": "cosine"}, True),  # it gets the length of the run
        ({"scheduler": {"name": "cosine", "T_max": 5, "eta_min": 0.01}}, True),
        ({"scheduler": {"name": "warmup_cosine", "warmup_steps": 0}}, True),
        ({"scheduler": {"name": "step", "step_size": "${env:STEPS}"}}, True),
        ({"scheduler": "warmup_cosine"}, False),
        ({"scheduler": "step"}, False),
        ({"scheduler": {"name": "step", "gamma": 0.1}}, False),
        ({"scheduler": {"name": "multistep", "milestone": [1]}}, False),
        ({"model": {**SMALL["model"], "widht": 8}}, False),
        ({"model": {**SMALL["model"], "vocab_size": 200}}, True),
        ({"data": {**SMALL["data"], "batchsize": 8}}, False),
        ({"loss": {"name": "cross_entropy", "label_smoothing": 0.1}}, True),
        ({"loss": {"name": "cross_entropy", "smoothing": 0.1}}, False),
        (listed("clip_norm", kind="update"), False),
        (listed({"name": "clip_norm"}, kind="update"), False),
        (listed({"name": "clip_norm", "max_norm": "${env:LR}"}, kind="update"), True),
        (listed("notify"), False),
        (listed({"name": "notify", "notify_on": []}), False),
        (listed({"name": "notify", "webhook_url": SENT, "notify_on": ["training_end"], "heartbeat": "1 h"}), True),
        (listed({"name": "notify", "webhook_url": SENT, "notify_on": "heartbeat", "heartbeat": 500}), True),
        (listed({"name": "notify", "webhook_url": SENT, "notify_on": None}), False),
        (listed({"name": "notify", "webhook_url": SENT, "notify_on": 3}), False),
        (listed({"name": "notify", "webhook_url": SENT, "notify_on": "heartbeat", "heartbeat": 0.5}), False),
        (listed("${env:HOOK}"), True),
        (listed({"name": "${env:HOOK}", "costs": False}), True),
        (listed({"name": "console_log", "as": None, "every": None, "before": None, "on_error": None}), True),
        (listed({"name": "console_log", "at": None, "ranks": None, "after": None, "start": None, "stop": None}), True),
        (listed({"name": "console_log", "on_error": "${env:POLICY}"}), True),
        (listed({"name": "console_log", "enabled": None}), False),
        (listed({"name": "console_log", "enabled": "yes"}), False),
        (listed({"name": "console_log", "ranks": "0"}), False),
        (listed({"name": "stall_watchdog", "seconds": "long"}), False),
        (listed({"name": "early_stopping", "patience": 0}), True),
        (listed({"name": "early_stopping", "patience": -1}), False),
        (listed({"name": "early_stopping", "monitor": ""}), False),
        (listed({"name": "early_stopping", "check_every_n_steps": None}), True),
        (listed({"name": "ema", "decay": 1.5}), False),
        (listed({"name": "profiler", "first_step": [1, 5]}), True),
        (listed({"name": "profiler", "first_step": [0, 5]}), False),
        (listed({"name": "notify", "webhook_url": SENT, "notify_on": ["trianing_end"]}), False),
        (listed({"name": "gradient_monitor", "percentiles": [10, 101]}), False),
        (listed({"name": "tensorboard", "timeout": 5, "layers": "all", "every": 10}), True),
        (listed({"name": "tensorboard", "timeout": -1}), False),
        (listed({"name": "tensorboard", "layers": "some"}), False),
        (listed({"name": "tensorboard", "queue": 5}), False),
        (listed({"name": "mlflow", "queue_mb": -5}), False),
        (listed({"name": "clip_norm", "max_norm": 0}, kind="update"), False),
        (listed({"name": "monitor", "percentiles": [5.0, 50]}, kind="forward"), True),
    ],
    ids=str,
)
def test_the_schema_and_the_run_agree(
    change: dict[str, Any], right: bool, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the schema rejects is refused by loading, and what it accepts can be built."""
    for name, value in (
        ("LR", "0.1"), ("STEPS", "3"), ("OPTIMIZER", "sgd"), ("HOOK", "console_log"), ("POLICY", "raise"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    config = {**SMALL, **change}
    assert fits(config, schema, schema) is right
    with nullcontext() if right else pytest.raises(HooklineError):
        trainer_from_config(config)


def test_nothing_is_left_out(schema: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The schema has every key of a config, every option with its help, every hook, and the registry's options."""
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert set(schema["$defs"]["HooksConfig"]["properties"]) == set(HooksConfig.model_fields)
    assert all("description" in option for option in schema["$defs"]["TrainerOptions"]["properties"].values())
    choices = schema["$defs"]["Hook"]["anyOf"]
    entries = [choice for choice in choices if "const" in choice.get("properties", {}).get("name", {})]
    assert [entry["properties"]["name"]["const"] for entry in entries] == HOOKS.names()
    assert all(entry["description"] for entry in entries)
    _, _, words = " ".join(output_of(capsys, ["hooks"]).split()).partition("every entry also takes ")
    reserved = words.partition(" in a config")[0].split(", ")
    assert len(reserved) > 5 and all(key in entry["properties"] for key in reserved for entry in entries)


def test_registered_hooks_are_in_the_schema(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A registered hook is in the schema with its parameters; one that cannot be imported does not hide the others."""
    monkeypatch.setattr(HOOKS, "built_in", {**HOOKS.built_in, "broken": "hookline.no_such_module:Hook"})

    @register_hook("shout")
    def shout(word: str, times: int = 2, **more: Any) -> object:
        """Says a word."""
        return object()

    schema = written_schema(tmp_path / "schema.json")
    assert fits({**LEAST, "hooks": {"lifecycle": [{"name": "shout", "word": "hey", "other": 1}]}}, schema, schema)
    assert not fits({**LEAST, "hooks": {"lifecycle": [{"name": "shout", "times": 1}]}}, schema, schema)
    assert fits({**LEAST, "hooks": {"lifecycle": ["broken", "console_log"]}}, schema, schema)
