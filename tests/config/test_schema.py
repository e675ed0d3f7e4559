"""What a config may contain, and how wrong configs are reported."""

from dataclasses import fields
from typing import Any

import pytest

from hookline import HooklineError, HookRegistry, HooksConfig, RunConfig, TrainerConfig
from hookline.config.hooks import FLAGS, KEYS, read_hook_specs
from hookline.config.references import Resolved
from hookline.config.schema import as_run_config, as_trainer_config
from hookline.errors import ConfigError, got, shown
from hookline.trainer.options import TrainerOptions

LEAST: dict[str, Any] = {"model": "char_gpt", "data": "stdlib_text", "optimizer": {"name": "sgd", "lr": 0.1}}

BEGIN = "; `hookline example` prints a whole config to start from"


def refusal(make: Any, *args: Any, **values: Any) -> ConfigError:
    """Return the error that a wrong config raises."""
    with pytest.raises(ConfigError) as caught:
        make(*args, **values)
    return caught.value


@pytest.mark.req("002-07")
def test_hooks_config_has_the_loader_s_keys() -> None:
    """HooksConfig has exactly the keys that the registry reads."""
    assert sorted(HooksConfig.model_fields) == sorted(KEYS)


def test_a_missing_update_list_means_the_identity_hook() -> None:
    """A config without an `update` list still gets the identity hook; one with a list does not."""
    assert "identity" in HookRegistry(HooksConfig(lifecycle=["console_log"]))
    assert "identity" not in HookRegistry(HooksConfig(update=[{"name": "clip_norm", "max_norm": 1.0}]))


def test_a_null_parameter_survives() -> None:
    """`save_every_n_epochs: null` reaches the hook's constructor as None."""
    config = HooksConfig(lifecycle=[{"name": "checkpoint", "save_every_n_epochs": None}])
    assert read_hook_specs(config)[0].parameters == {"save_every_n_epochs": None}


def test_flags_become_hooks() -> None:
    """The flags of the flat form register hooks with their parameters."""
    registry = HookRegistry(HooksConfig(enable_logging_hook=True, logging_config={"log_every_n_batches": 7}))
    assert registry.get("console_log").log_every_n_batches == 7


SWITCHED = {  # each switch of the flat form with the seed's parameters, and the entry that says the same
    "enable_logging_hook": ({"log_every_n_batches": 7}, "console_log"),
    "enable_model_checkpoint_hook": ({"save_top_k": 3, "monitor": "val/loss", "mode": "min"}, "checkpoint"),
    "enable_early_stopping_hook": ({"patience": 10, "min_delta": 0.0001, "on_error": "raise"}, "early_stopping"),
    "enable_lr_monitor": ({"log_momentum": True, "frequency": "epoch"}, "lr_monitor"),
    "enable_gradient_monitor": ({"log_frequency": 100, "percentiles": [10, 50, 90]}, "gradient_monitor"),
}


@pytest.mark.req("002-19", "002-27", "002-35")
@pytest.mark.parametrize("switch", SWITCHED)
def test_both_forms_make_the_same_hook(switch: str) -> None:
    """A flag with its parameters and an entry in a list give the same hook, with the same options and parameters."""
    parameters, name = SWITCHED[switch]
    flat = HookRegistry(HooksConfig(**{switch: True, FLAGS[switch][1]: parameters}))
    listed = HookRegistry(HooksConfig(lifecycle=[{"name": name, **parameters}]))
    first, second = flat.entry(name), listed.entry(name)
    assert type(first.hook) is type(second.hook)
    assert (first.policy, first.schedule, first.parameters) == (second.policy, second.schedule, second.parameters)


def test_every_flag_of_the_seed_exists() -> None:
    """The flags that the registry reads are those of the seed, and each belongs to a hook."""
    assert set(SWITCHED) == set(FLAGS)
    registry = HookRegistry(HooksConfig(**dict.fromkeys(FLAGS, True)))
    assert {name for name, _ in FLAGS.values()} <= set(registry)


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
        ({"trainer": 3}, "trainer", "expected a mapping, got 3 (int)"),
        ({"model": {"width": 3}}, "model.name", "missing"),
        ({"model": 3}, "model", "expected a mapping"),
        ({"hooks": {"update": "clip_norm"}}, "hooks.update", "list"),
        ({"hooks": {"enable_lr_monitor": "yes"}}, "hooks.enable_lr_monitor", "boolean"),
        ({7: 1}, "7", "a word"),
    ],
)
def test_a_wrong_run_config_names_the_path(values: dict[Any, Any], path: str, words: str) -> None:
    """The path is complete at any depth."""
    error = refusal(as_run_config, {**LEAST, **values})
    assert error.path == path
    assert words in error.problem


def test_several_problems_are_all_named() -> None:
    """One problem is described in full, and the paths of the others are listed, five at most."""
    wrong = str(refusal(as_run_config, {"scheduler": 4, "model": 3, "data": "d"}))
    assert wrong.startswith("model: expected") and wrong.endswith("(also missing: optimizer) (also wrong: scheduler)")
    many = str(refusal(as_run_config, {**LEAST, **{f"key_{number}": 1 for number in range(9)}}))
    assert many.endswith("(also wrong: key_1, key_2, key_3, key_4, key_5 and 3 more)")


def test_a_key_one_level_too_high_or_too_low_names_its_place() -> None:
    """A trainer option at the top level, or a component under `trainer`, is reported with its right place."""
    wrong = str(refusal(as_run_config, {**LEAST, "max_steps": 5}))
    assert wrong == "max_steps: unknown key; did you mean 'trainer.max_steps'?"
    wrong = str(refusal(as_run_config, {**LEAST, "trainer": {"optimizer": "sgd"}}))
    assert wrong == "trainer.optimizer: unknown key; did you mean 'optimizer'?"
    wrong = str(refusal(as_run_config, {**LEAST, "trainer": {"max_step": 5}}))
    assert wrong.startswith("trainer.max_step: unknown key; did you mean 'max_steps'? Valid: ")


def test_a_misspelt_key_comes_before_the_one_it_leaves_missing() -> None:
    """For 'optimiser', the message has the right spelling, and does not only say that 'optimizer' is missing."""
    wrong = str(refusal(as_run_config, {"model": "m", "data": "d", "optimiser": "sgd"}))
    assert wrong.startswith("optimiser: unknown key; did you mean 'optimizer'") and "(also missing: optimizer)" in wrong


def test_missing_keys_are_named_together() -> None:
    """Keys that are missing from one mapping are reported together."""
    error = refusal(as_run_config, {"trainer": {"max_steps": 3}})
    assert (error.path, str(error)) == ("", f"model, data and optimizer are missing{BEGIN}")
    error = refusal(as_run_config, {"scheduler": 4, "model": "m"})
    assert str(error) == f"data and optimizer are missing (also wrong: scheduler){BEGIN}"
    assert str(refusal(as_run_config, {"model": "m", "data": "d"})) == f"optimizer: is missing{BEGIN}"


def test_a_config_that_is_not_a_mapping_is_refused() -> None:
    """The error lists the keys that were expected."""
    assert "model, data, optimizer" in str(refusal(as_run_config, [1]))
    assert "TrainerConfig" in str(refusal(as_trainer_config, [1]))


def test_run_config_reads_names_and_parameters() -> None:
    """A bare name is short for a mapping; everything but the name is a parameter."""
    run = as_run_config(LEAST)
    assert (run.model.name, run.model.parameters) == ("char_gpt", {})
    assert run.optimizer.parameters == {"lr": 0.1}
    assert run.scheduler is None
    assert run.debug is False
    assert as_run_config(run) is run


def test_run_config_can_be_written_and_read_again() -> None:
    """`as_mapping` gives values from which an equal config can be made."""
    run = as_run_config({**LEAST, "trainer": {"max_steps": 5}, "hooks": {"update": []}})
    assert run.as_mapping()["hooks"] == {"update": []}
    assert as_run_config(run.as_mapping()) == run


@pytest.mark.req("002-49")
def test_as_trainer_config_takes_every_form() -> None:
    """A TrainerConfig, a HooksConfig, a RunConfig, options, dicts of either kind and None are accepted."""
    hooks = HooksConfig(update=["identity"])
    whole = TrainerConfig(max_steps=2, hooks=hooks)
    assert as_trainer_config(whole) is whole
    assert as_trainer_config(hooks).hooks == hooks
    assert as_trainer_config({"update": ["identity"]}).hooks == hooks
    assert as_trainer_config({"max_steps": 2, "hooks": {"update": ["identity"]}}) == whole
    assert as_trainer_config(RunConfig(**LEAST, trainer={"max_steps": 2}, hooks=hooks)) == whole
    assert as_trainer_config(TrainerOptions(max_steps=2)).max_steps == 2
    assert as_trainer_config(None) == as_trainer_config({}) == TrainerConfig()


def test_an_unknown_dict_names_the_nearest_key() -> None:
    """The keys of a dict that is neither kind are compared with the keys of both."""
    assert "did you mean 'enable_logging_hook'" in str(refusal(as_trainer_config, {"enable_loging_hook": True}))
    assert "did you mean 'max_steps'" in str(refusal(as_trainer_config, {"max_stesp": 1}))


def test_the_outermost_class_reports_the_path() -> None:
    """A wrong value of the hooks' class is reported with its path in the whole config."""
    error = refusal(RunConfig, **LEAST, hooks={"update": ["identity", 3]})
    assert error.path == "hooks.update.1"
    assert error.__cause__ is None


def test_a_long_value_is_cut_short() -> None:
    """An error message stays readable whatever the value."""
    assert shown("x" * 500) == f"'{'x' * 56}… (str)"


def test_a_resolved_secret_is_shown_as_its_reference() -> None:
    """The value of an environment variable never appears in an error message, at any depth of a list or dict."""
    secret = Resolved("hunter2", "${env:PASSWORD}")
    assert got(secret) == "which ${env:PASSWORD} does not hold"
    assert got([secret, {"key": (secret, 1)}]) == "got ['${env:PASSWORD}', {'key': ('${env:PASSWORD}', 1)}] (list)"
