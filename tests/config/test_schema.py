"""What a config may contain, and how wrong configs are reported."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from hookline import (
    GenericTrainer,
    HooklineError,
    HookRegistry,
    HooksConfig,
    RunConfig,
    Trainer,
    TrainerConfig,
    trainer_from_config,
)
from hookline.errors import ConfigError
from hookline.trainer.options import TrainerOptions

LEAST: dict[str, Any] = {"model": "char_gpt", "data": "stdlib_text", "optimizer": {"name": "sgd", "lr": 0.1}}

BEGIN = "; `hookline example` prints a whole config to start from"


def refusal(make: Any, *args: Any, **values: Any) -> ConfigError:
    """Return the error that a wrong config raises."""
    with pytest.raises(ConfigError) as caught:
        make(*args, **values)
    return caught.value


def test_a_missing_update_list_means_the_identity_hook() -> None:
    """A config without an `update` list still gets the identity hook; one with a list does not."""
    assert "identity" in HookRegistry(HooksConfig(lifecycle=["console_log"]))
    assert "identity" not in HookRegistry(HooksConfig(update=[{"name": "clip_norm", "max_norm": 1.0}]))


def test_another_pydantic_model_may_hold_the_hooks() -> None:
    """A project's own schema may have a section `hooks`; a field that is None counts as absent."""

    class Hooks(BaseModel):
        lifecycle: list[str]
        update: list[str] | None = None

    class Project(BaseModel):
        hooks: Hooks

    for config in (Hooks(lifecycle=["console_log"]), Project(hooks=Hooks(lifecycle=["console_log"]))):
        assert list(HookRegistry(config)) == ["console_log", "identity"]


def test_an_object_in_a_list_of_the_config_is_refused() -> None:
    """A hook object is registered with the trainer; a config, also one that was changed, holds names and mappings."""
    config = HooksConfig(lifecycle=["console_log"])
    config.lifecycle.append(object())
    assert refusal(HookRegistry, config).path == "hooks.lifecycle.1"


def test_a_null_parameter_survives() -> None:
    """`save_every_n_epochs: null` reaches the hook's constructor as None."""
    registry = HookRegistry(HooksConfig(lifecycle=[{"name": "checkpoint", "save_every_n_epochs": None}]))
    assert registry.entry("checkpoint").parameters["save_every_n_epochs"] is None


SWITCHED = {  # each switch of the flat form, the key of its parameters with the seed's, and the hook
    "enable_logging_hook": ("logging_config", {"log_every_n_batches": 7}, "console_log"),
    "enable_model_checkpoint_hook": (
        "model_checkpoint_config", {"save_top_k": 3, "monitor": "val/loss", "mode": "min"}, "checkpoint",
    ),
    "enable_early_stopping_hook": (
        "early_stopping_config", {"patience": 10, "min_delta": 0.0001, "on_error": "raise"}, "early_stopping",
    ),
    "enable_lr_monitor": ("lr_monitor_config", {"log_momentum": True, "frequency": "epoch"}, "lr_monitor"),
    "enable_gradient_monitor": (
        "gradient_monitor_config", {"log_frequency": 100, "percentiles": [10, 50, 90]}, "gradient_monitor",
    ),
}  # fmt: skip


@pytest.mark.req("002-07", "002-19", "002-27", "002-35")
@pytest.mark.parametrize("switch", SWITCHED)
def test_both_forms_make_the_same_hook(switch: str) -> None:
    """A flag with its parameters and an entry in a list give the same hook, with the same options and parameters."""
    key, parameters, name = SWITCHED[switch]
    flat = HookRegistry(HooksConfig(**{switch: True, key: parameters}))
    listed = HookRegistry(HooksConfig(lifecycle=[{"name": name, **parameters}]))
    first, second = flat.entry(name), listed.entry(name)
    assert type(first.hook) is type(second.hook)
    assert (first.policy, first.schedule, first.parameters) == (second.policy, second.schedule, second.parameters)
    assert (first.origin, second.origin) == ("built-in", "config")


def test_every_flag_makes_a_hook() -> None:
    """Every field `enable_…` of HooksConfig is tested above; all of them together give all of these hooks."""
    flags = [key for key in HooksConfig.model_fields if key.startswith("enable_")]
    assert sorted(SWITCHED) == sorted(flags)
    registry = HookRegistry(HooksConfig(**dict.fromkeys(flags, True)))
    assert {name for _, _, name in SWITCHED.values()} <= set(registry)


def test_a_key_that_is_null_is_empty() -> None:
    """In code, a key of the hooks' config may be None; `update` is then a list without hooks."""
    nothing = dict.fromkeys(HooksConfig.model_fields)
    assert list(HookRegistry({**nothing, "lifecycle": ["console_log"]})) == ["console_log"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"enable_early_stoping_hook": True}, "did you mean 'enable_early_stopping_hook'"),
        ({"model_checkpoint_confg": {}}, "did you mean 'model_checkpoint_config'"),
        (
            {"enable_model_checkpoint_hook": True, "model_checkpoint_config": {"save_topk": 3}},
            "hooks.model_checkpoint_config: CheckpointHook has no parameter 'save_topk'; did you mean 'save_top_k'",
        ),
        (
            {"enable_lr_monitor": True, "lr_monitor_config": {"frequency": "epochs"}},
            "; did you mean 'epoch'",
        ),
    ],
    ids=str,
)
def test_a_mistake_in_the_flat_form_names_the_nearest(config: dict[str, Any], words: str) -> None:
    """A misspelt flag or parameter is reported with the nearest one, before training."""
    with pytest.raises(HooklineError) as caught:
        HookRegistry(HooksConfig(**config))
    assert words in str(caught.value)


def test_trainer_config_has_every_option() -> None:
    """TrainerConfig has the fields of TrainerOptions and `hooks`, and `options()` returns the former."""
    assert [item.name for item in fields(TrainerConfig)] == [*(item.name for item in fields(TrainerOptions)), "hooks"]
    assert TrainerConfig(max_steps=3, seed=1).options() == TrainerOptions(max_steps=3, seed=1)


@pytest.mark.parametrize(
    ("values", "path", "words"),
    [
        ({"max_stesp": 3}, "trainer.max_stesp", "did you mean 'max_steps'"),
        ({"max_steps": "many"}, "trainer.max_steps", "expected a valid integer, got 'many' (str)"),
        ({"max_steps": True}, "trainer.max_steps", "integer"),
        ({"precision": "fp8"}, "trainer.precision", "'fp32', 'bf16' or 'fp16'"),
        ({"validate_every": [1]}, "trainer.validate_every", "a valid integer or a valid string"),
        ({"accumulate": 0}, "trainer.accumulate", "at least 1"),
        ({"hooks": {"lifecyle": []}}, "hooks.lifecyle", "did you mean 'lifecycle'"),
        ({"hooks": {"lifecycle": ["a", 3]}}, "hooks.lifecycle.1", "got 3 (int)"),
    ],
)
def test_a_wrong_trainer_config_names_the_path(values: dict[str, Any], path: str, words: str) -> None:
    """The error has the dotted path, the bad value, and what would be right."""
    error = refusal(TrainerConfig, **values)
    assert error.path == path
    assert words in error.problem


@pytest.mark.parametrize(
    ("values", "path", "words"),
    [
        ({"trainr": {}}, "trainr", "did you mean 'trainer'"),
        ({"trainer": {"max_stesp": 3}}, "trainer.max_stesp", "did you mean 'max_steps'"),
        ({"trainer": {"seed": True}}, "trainer.seed", "got True (bool)"),
        ({"trainer": 3}, "trainer", "expected a mapping with max_epochs, max_steps, accumulate, …, got 3 (int)"),
        ({"hooks": ["ema"]}, "hooks", "expected a mapping with lifecycle, forward, update, …, got ['ema'] (list)"),
        ({"model": {"width": 3}}, "model.name", "missing"),
        ({"model": 3}, "model", "expected a mapping"),
        ({"hooks": {"update": "clip_norm"}}, "hooks.update", "list"),
        ({"hooks": {"enable_lr_monitor": "yes"}}, "hooks.enable_lr_monitor", "boolean"),
        ({7: 1}, "7", "a word"),
    ],
)
def test_a_wrong_run_config_names_the_path(values: dict[Any, Any], path: str, words: str) -> None:
    """The path is complete at any depth."""
    error = refusal(trainer_from_config, {**LEAST, **values})
    assert error.path == path
    assert words in error.problem


def test_several_problems_are_all_named() -> None:
    """One problem is described in full, and the paths of the others are listed, five at most."""
    wrong = str(refusal(trainer_from_config, {"scheduler": 4, "model": 3, "data": "d"}))
    assert wrong.startswith("model: expected") and wrong.endswith("(also missing: optimizer) (also wrong: scheduler)")
    many = str(refusal(trainer_from_config, {**LEAST, **{f"key_{number}": 1 for number in range(9)}}))
    assert many.endswith("(also wrong: key_1, key_2, key_3, key_4, key_5 and 3 more)")


def test_a_key_one_level_too_high_or_too_low_names_its_place() -> None:
    """A trainer option at the top level, or a component under `trainer`, is reported with its right place."""
    wrong = str(refusal(trainer_from_config, {**LEAST, "max_steps": 5}))
    assert wrong == "max_steps: unknown key; did you mean 'trainer.max_steps'?"
    wrong = str(refusal(trainer_from_config, {**LEAST, "trainer": {"optimizer": "sgd"}}))
    assert wrong == "trainer.optimizer: unknown key; did you mean 'optimizer'?"
    wrong = str(refusal(trainer_from_config, {**LEAST, "trainer": {"max_step": 5}}))
    assert wrong.startswith(
        "trainer.max_step: unknown key; did you mean 'max_steps'? `hookline help options` lists all "
    )


def test_a_misspelt_key_comes_before_the_one_it_leaves_missing() -> None:
    """For 'optimiser', the message has the right spelling, and does not only say that 'optimizer' is missing."""
    wrong = str(refusal(trainer_from_config, {"model": "m", "data": "d", "optimiser": "sgd"}))
    assert wrong.startswith("optimiser: unknown key; did you mean 'optimizer'") and "(also missing: optimizer)" in wrong


def test_missing_keys_are_named_together() -> None:
    """Keys that are missing from one mapping are reported together."""
    error = refusal(trainer_from_config, {"trainer": {"max_steps": 3}})
    assert (error.path, str(error)) == ("", f"model, data and optimizer are missing{BEGIN}")
    error = refusal(trainer_from_config, {"scheduler": 4, "model": "m"})
    assert str(error) == f"data and optimizer are missing (also wrong: scheduler){BEGIN}"
    assert str(refusal(trainer_from_config, {"model": "m", "data": "d"})) == f"optimizer: is missing{BEGIN}"


def test_a_config_that_is_not_a_mapping_is_refused() -> None:
    """The error lists the keys that were expected."""
    assert "model, data, optimizer" in str(refusal(trainer_from_config, [1]))
    assert "TrainerConfig" in str(refusal(generic, [1]))


def test_run_config_reads_names_and_parameters() -> None:
    """A bare name is short for a mapping; everything but the name is a parameter."""
    run = RunConfig(**LEAST)
    assert (run.model.name, run.model.parameters) == ("char_gpt", {})
    assert run.optimizer.parameters == {"lr": 0.1}
    assert run.scheduler is None
    assert run.debug is False


def test_run_config_can_be_written_and_read_again() -> None:
    """`as_mapping` gives values from which an equal config can be made."""
    run = RunConfig(**LEAST, trainer={"max_steps": 5}, hooks={"update": []})
    assert run.as_mapping()["hooks"] == {"update": []}
    assert RunConfig(**run.as_mapping()) == run


def generic(config: Any) -> Trainer:
    """Make a trainer of the smallest model with a config."""
    model = torch.nn.Linear(1, 1)
    return GenericTrainer(config, model, torch.optim.SGD(model.parameters()), device="cpu")


@pytest.mark.req("002-49")
def test_a_generic_trainer_takes_every_form_of_config() -> None:
    """A TrainerConfig, a HooksConfig, a RunConfig, options, dicts of either kind and None are accepted."""
    hooks = HooksConfig(update=["identity"])
    whole = TrainerConfig(max_steps=2, hooks=hooks)
    assert generic(whole).config is whole
    assert generic(hooks).config == generic({"update": ["identity"]}).config == TrainerConfig(hooks=hooks)
    assert generic({"max_steps": 2, "hooks": {"update": ["identity"]}}).config == whole
    assert generic(RunConfig(**LEAST, trainer={"max_steps": 2}, hooks=hooks)).config == whole
    assert generic(TrainerOptions(max_steps=2)).config.max_steps == 2
    assert generic(None).config == generic({}).config == TrainerConfig()


def test_an_unknown_dict_names_the_nearest_key() -> None:
    """The keys of a dict that is neither kind are compared with the keys of both."""
    assert "did you mean 'enable_logging_hook'" in str(refusal(generic, {"enable_loging_hook": True}))
    assert "did you mean 'max_steps'" in str(refusal(generic, {"max_stesp": 1}))


def test_the_outermost_class_reports_the_path() -> None:
    """A wrong value of the hooks' class is reported with its path in the whole config."""
    error = refusal(RunConfig, **LEAST, hooks={"update": ["identity", 3]})
    assert error.path == "hooks.update.1"
    assert error.__cause__ is None


def test_a_long_value_is_cut_short() -> None:
    """An error message stays readable whatever the value."""
    error = refusal(TrainerConfig, max_steps="x" * 500)
    assert error.problem == f"expected a valid integer, got '{'x' * 56}… (str)"


def test_a_secret_is_shown_as_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of an environment variable never appears in an error message, at any depth of a list or dict."""
    monkeypatch.setenv("PASSWORD", "hunter2")
    error = refusal(trainer_from_config, {**LEAST, "trainer": {"max_steps": "${env:PASSWORD}"}})
    assert error.problem == "expected a valid integer, which ${env:PASSWORD} does not hold"
    nested = ["${env:PASSWORD}", {"key": ["${env:PASSWORD}", 1]}]
    error = refusal(trainer_from_config, {**LEAST, "trainer": {"max_steps": nested}})
    assert error.problem.endswith("got ['${env:PASSWORD}', {'key': ['${env:PASSWORD}', 1]}] (list)")
