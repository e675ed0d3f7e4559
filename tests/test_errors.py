"""Errors say what was wrong and what would be right."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import (
    ClipNorm,
    EarlyStopping,
    GenericTrainer,
    HooklineError,
    HookRegistry,
    HookRunner,
    HooksConfig,
    Identity,
    LearningRateMonitor,
    ModelCheckpoint,
    SimpleTrainer,
    StopTraining,
    TrainerConfig,
    errors,
    get_trainer,
    load_config,
)
from hookline._words import _MEANINGS, nearest
from hookline.core.catalog import SPELLINGS
from hookline.core.entry import OPTIONS
from hookline.core.plugins import HOOKS, LOSSES, SCHEDULERS
from hookline.core.schedule import _UNITS
from hookline.errors import ConfigError, MetricMissing


def test_every_error_has_one_base_and_stopping_is_not_an_error() -> None:
    """`except HooklineError` catches all that is raised on purpose, and never a request to stop."""
    raised = {
        value for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception) and value is not StopTraining
    }  # fmt: skip
    assert len(raised) > 5 and all(issubclass(error, HooklineError) for error in raised)
    assert not issubclass(StopTraining, HooklineError)


def test_every_error_says_what_it_is_for() -> None:
    """Each class has its own docstring."""
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, Exception):
            assert value.__dict__.get("__doc__"), value


def test_a_config_error_leads_with_its_path() -> None:
    """The dotted path comes first, and both parts stay readable by programs."""
    error = ConfigError("hooks.x.every", "0 is never due")
    assert str(error) == "hooks.x.every: 0 is never due"
    assert (error.path, error.problem) == ("hooks.x.every", "0 is never due")
    assert str(ConfigError("", "empty")) == "empty"


def test_a_strict_monitors_error_insists() -> None:
    """These carry the mark that overrides a hook's policy, and no others."""
    marked = [value for value in vars(errors).values() if getattr(value, "always_raise", False)]
    assert marked == [errors.NothingMatches, MetricMissing, errors.LiveWrite, errors.RankError]


@pytest.mark.parametrize(
    ("name", "choices", "sentence"),
    [
        ("tarin", ["train", "epoch"], "did you mean 'train'? Valid: epoch, train"),
        ("zzz", ["train", "epoch"], "valid: epoch, train"),
        ("x", [], "there are none"),
        ("", ["a", "a"], "valid: a"),
    ],
)
def test_nearest_lists_the_choices(name: str, choices: list[str], sentence: str) -> None:
    """The nearest first, the rest sorted, each once; nothing is invented where nothing is close."""
    assert nearest(name, choices) == sentence


def test_of_many_names_the_nearest_are_given_and_where_to_find_the_others() -> None:
    """At most three that are near, and what lists them all; without such a page, how many there are."""
    many = [f"hook_{number:03d}" for number in range(100)]
    said = nearest("hook_0429", many, "`hookline hooks`")
    assert said == "did you mean 'hook_049' or 'hook_042' or 'hook_029'? `hookline hooks` lists all 100"
    assert nearest("hook_042", many).endswith("?")
    assert nearest("zzz", many, "`hookline help config`") == "`hookline help config` lists all 100"
    assert nearest("zzz", many) == "there are 100, such as hook_000, hook_001, hook_002"


@pytest.mark.parametrize(
    "cause",
    [
        lambda: HookRegistry().register("clip_nrm"),
        lambda: HookRegistry().register("clip_norm", max_nrm=1.0),
        lambda: HookRegistry().register(print, event="on_stepp_end"),
        lambda: HookRegistry().register(lambda los: None, event="on_step_end"),
        lambda: HookRunner([Identity()]).on_step_end(los=1.0),
        lambda: HooksConfig(enable_loging_hook=True),
        lambda: TrainerConfig(max_step=3),
        lambda: load_config({"trainer": {}}, ["trainer.max_step=3"]),
    ],
)
def test_a_message_about_an_unknown_name_does_not_list_dozens(cause: Callable[[], object]) -> None:
    """It has the nearest name, and says what lists the others."""
    with pytest.raises((HooklineError, TypeError), match=r"did you mean .*\? `hookline") as failed:
        cause()
    assert len(str(failed.value)) < 200


@pytest.mark.parametrize(
    ("noun", "expected"),
    [("update hook", "an update hook"), ("lifecycle hook", "a lifecycle hook"), ("UpdateHook", "an UpdateHook"),
     ("int", "an int"), ("UserDict", "a UserDict"), ("optimizer", "an optimizer")],
)  # fmt: skip
def test_nouns_get_their_article(noun: str, expected: str) -> None:
    """The kind of a hook, a type and a registered name are written as they are spoken."""
    assert errors.with_article(noun) == expected


OTHERS = [
    (["adam", "adamw", "sgd"], {"adamW": "adamw", "AdamW": "adamw", "SGD": "sgd"}),
    (["step", "loss", "model", "trainer"], {"pl_module": "model", "args": "trainer", "engine": "trainer"}),
    (["mse", "cross_entropy"], {"CrossEntropy": "cross_entropy", "MSELoss": "mse"}),
    (
        HOOKS.names(),
        {
            "EarlyStopping": "early_stopping", "ModelCheckpoint": "checkpoint", "LearningRateMonitor": "lr_monitor",
            "gradient_clip_val": "clip_norm", "EarlyStoppingCallback": "early_stopping",
            "TerminateOnNan": "nan_forensics",
            "StochasticWeightAveraging": "ema", "TQDMProgressBar": "console_log",
        },
    ),
    (
        [*SPELLINGS],
        {
            "on_validation_epoch_end": "on_validation_end", "on_evaluate": "on_validation_end",
            "on_fit_start": "on_train_start",
            "on_save_checkpoint": "on_checkpoint_save", "Events.EPOCH_COMPLETED": "on_epoch_end",
            "on_step_begin": "on_train_batch_start",
            "iteration_completed": "on_train_batch_end", "on_Batch_End": "on_batch_end",
            "on_train_epoch_end": "on_epoch_end", "on_test_epoch_end": "on_validation_end",
        },
    ),
    (["epochs", "steps", "tokens"], {"iterations": "steps", "Iters": "steps", "Epochs": "epochs"}),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "word", "ours"), [(c, w, o) for c, words in OTHERS for w, o in words.items()])
def test_words_of_other_libraries_are_understood(choices: list[str], word: str, ours: str) -> None:
    """Lightning's, Hugging Face's and Ignite's words, and other letters of our own."""
    assert nearest(word, choices, 100).startswith(f"did you mean {ours!r}? ")


LINEAR = torch.nn.Linear(1, 1)
BATCHES = [torch.ones(1, 1)]
OPTIMIZER = torch.optim.SGD(LINEAR.parameters(), lr=0.1)
SIMPLE: dict[str, Any] = {"model": LINEAR, "dataloader": BATCHES, "optimizer": OPTIMIZER, "device": "cpu"}
GENERIC: dict[str, Any] = {"config": {}, "model": LINEAR, "optimizers": OPTIMIZER, "device": "cpu"}
CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "SimpleTrainer": lambda **given: SimpleTrainer(**{**SIMPLE, **given}),
    "GenericTrainer": lambda **given: GenericTrainer(**{**GENERIC, **given}),
    "get_trainer simple": lambda **given: get_trainer("simple", **{**SIMPLE, **given}),
    "get_trainer generic": lambda **given: get_trainer("generic", **{**SIMPLE, **given}),
}


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("accumulate_grad_batches", "accumulate"), ("gradient_accumulation_steps", "accumulate"),
        ("val_loader", "val_loaders"), ("val_dataloaders", "val_loaders"), ("eval_dataset", "val_loaders"),
        ("train_loader", ("dataloader", "train_loaders", "dataloader", "dataloader")),
        ("gradient_clip_val", "max_grad_norm"), ("iterations", "max_steps"), ("num_train_epochs", "max_epochs"),
        ("callbacks", "hooks"), ("logger", "hooks"), ("trackers", "hooks"),
        ("criterion", "loss_fn"), ("lr_scheduler", "scheduler"), ("Max_Steps", "max_steps"),
        ("check_val_every_n_epoch", "validate_every"), ("step_fun", "step_fn"),
        ("learning_rate", ("optimizer", "optimizers", "optimizer", "optimizer")),
        ("resume_from_checkpoint", "fit(resume=…)"),
    ],
)  # fmt: skip
def test_keywords_of_trainers_are_suggested(word: str, ours: str | tuple[str | None, ...]) -> None:
    """Options and what else the constructors take; these differ in a few names."""
    for index, constructor in enumerate(CONSTRUCTORS.values()):
        expected = ours if isinstance(ours, str) else ours[index]
        question = f"did you mean '{expected}'?" if expected else "`hookline help "
        with pytest.raises(ConfigError, match=re.escape(f"trainer.{word}: unknown option; {question}")):
            constructor(**{word: 1})


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_suggested_keyword_is_one_that_the_constructor_takes(name: str) -> None:
    """Of every word that is understood, and of the keywords of the other constructors."""
    constructor = CONSTRUCTORS[name]
    words = {word for theirs in _MEANINGS.values() for word in theirs.split()}
    for word in sorted(words | {"train_loaders", "dataloader", "val_dataloader", "optimizers", "optimizer", "hooks"}):
        try:
            constructor(**{word: None})
        except ConfigError as refused:
            for suggested in re.findall(r"did you mean '(\w+)'|or '(\w+)'", str(refused)):
                try:
                    constructor(**{"".join(suggested): None})
                except HooklineError as other:  # its value may be wrong
                    assert "unknown option" not in str(other), f"{word}: {other}"
        except HooklineError:
            pass


@pytest.mark.parametrize("word", ["max_time", "limit_val_batches", "enable_model_summary", "barebones"])
def test_nothing_is_suggested_for_a_word_without_a_counterpart(word: str) -> None:
    """A name that only looks like it would mislead."""
    with pytest.raises(ConfigError) as refused:
        CONSTRUCTORS["SimpleTrainer"](**{word: 1})
    assert refused.value.problem.startswith("unknown option; `hookline help options` lists all ")


@pytest.mark.parametrize(
    ("make", "ours"),
    [
        (lambda: ModelCheckpoint(every_n_train_steps=5), "save_every_n_steps"),
        (lambda: ModelCheckpoint(dirpath="here"), "get_trainer(output_dir=…)"),
        (lambda: EarlyStopping(check_finite=True), "on_non_finite"),
        (lambda: LearningRateMonitor(logging_interval="step"), "frequency"),
        (lambda: ClipNorm(max_nrom=1.0), "max_norm"),
    ],
)
def test_keywords_of_built_in_hooks_are_suggested(make: Callable[[], object], ours: str) -> None:
    """Also where a hook is made in code, which raises a TypeError as any wrong keyword does."""
    with pytest.raises(TypeError, match=re.escape(f"; did you mean '{ours}'?")):
        make()


def test_everything_that_is_suggested_exists() -> None:
    """Each of our names in the table is the name of an option, a parameter, a hook, an event or a component."""
    names = {
        *SPELLINGS,
        *HOOKS.names(),
        *SCHEDULERS.names(),
        *LOSSES.names(),
        *inspect.signature(SimpleTrainer).parameters,
        *inspect.signature(GenericTrainer).parameters,
        *_UNITS,
        "run",
        "trainer",
        "loaders",
        "hookline run",
        *OPTIONS,
        "fit(resume=…)",
        "get_trainer(output_dir=…)",
        "loss",
        "lr",  # of every optimizer
    }
    for hook in HOOKS.names():
        names |= set(inspect.signature(HOOKS.find(hook)).parameters)
    assert {ours for words in _MEANINGS for ours in words.split()} <= names
