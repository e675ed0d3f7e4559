"""One word says how often a hook works, `every`; the other words that some hooks know are aliases of it."""

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
from builders import make_batches, make_trainer

from hookline import (
    CheckpointHook,
    ConsoleLogHook,
    EarlyStopping,
    HooklineError,
    HookRegistry,
    JSONLogHook,
    LearningRateMonitor,
    NotifyHook,
    Schedule,
    TrainerConfig,
)
from hookline.core.plugins import HOOKS
from hookline.errors import RegistrationError
from hookline.record import read_metrics

ALIASES: dict[str, list[tuple[dict[str, Any], int | str]]] = {
    "console_log": [({"log_every_n_batches": 5}, "5 batches")],
    "json_log": [({"log_every_n_batches": 5}, "5 batches")],
    "gradient_monitor": [({"log_frequency": 5}, 5), ({"log_frequency": "30 s"}, "30 s")],
    "throughput": [({"log_every_n_steps": 5}, 5)],
    "lr_monitor": [({"frequency": "epoch"}, "1 epoch"), ({"frequency": "step"}, 1)],
    "checkpoint": [
        ({"save_every_n_epochs": 2}, "2 epochs"),
        ({"save_every_n_epochs": None, "save_every_n_steps": 5}, 5),
        ({"save_every_n_epochs": None, "save_every": "30 min"}, "30 min"),
    ],
    "early_stopping": [
        ({"monitor": "train/loss", "check_every_n_steps": 5}, 5),
        ({"check_on_train_epoch_end": True}, "1 epoch"),
    ],
}
CASES = [(name, *case) for name, cases in ALIASES.items() for case in cases]


def behaviour(registry: HookRegistry, name: str) -> Any:
    """Return what decides how often a hook works: its schedule, its events and what it counts itself."""
    entry = registry.entry(name)
    counts = ("save_every_n_epochs", "frequency", "log_every_n_steps", "check_on_train_epoch_end")
    return str(entry.schedule), sorted(entry.listeners), [getattr(entry.hook, key, None) for key in counts]


@pytest.mark.parametrize(("name", "alias", "every"), CASES, ids=str)
def test_every_says_the_same_as_the_other_words(name: str, alias: dict[str, Any], every: int | str) -> None:
    """In the constructor, at registration by name and in a config; with its alias it is refused."""
    factory, rest = HOOKS.find(name), {key: alias[key] for key in alias if key == "monitor"}
    expected, code, objects = HookRegistry(), HookRegistry(), HookRegistry()
    expected.register(name, **alias)
    code.register(name, every=every, **rest)
    objects.register(factory(every=every, **rest))
    config = HookRegistry({"lifecycle": [{"name": name, **rest, "every": every}]})
    for registry in (code, objects, config):
        assert behaviour(registry, name) in (
            behaviour(expected, name),
            ("every 1 step", *behaviour(expected, name)[1:]),
        )
    words = "|".join(key for key in alias if key not in rest)
    with pytest.raises(HooklineError, match=rf"pass either every or ({words}), not both"):
        HookRegistry({"lifecycle": [{"name": name, **alias, "every": every}]})
    if name != "lr_monitor" or alias["frequency"] == "epoch":  # "step" is its default
        with pytest.raises(HooklineError, match=r"every: pass either every or .*, not both"):
            factory(every=every, **alias)


@pytest.mark.parametrize(
    ("name", "every", "message"),
    [
        ("throughput", "2 epochs", "every: '2 epochs': count in steps"),
        ("early_stopping", "30 s", "every: '30 s': count in steps or epochs"),
        ("early_stopping", "2 epochs", "checks run at the end of each epoch or at steps"),
        ("lr_monitor", "2 epochs", "learning rates are recorded at the start of each epoch or at steps"),
        ("console_log", 0, "0 is never due"),
        ("checkpoint", "often", "'often' is not a schedule"),
    ],
)
def test_a_period_that_a_hook_cannot_keep_is_refused(name: str, every: Any, message: str) -> None:
    """With the units that it can count in."""
    with pytest.raises(HooklineError, match=message):
        HOOKS.find(name)(every=every)
    with pytest.raises(HooklineError, match=message):
        HookRegistry().register(name, every=every)


NOT_AT_STEPS = "; check_every_n_steps: is for metrics of training, such as train/loss; val/loss comes with a validation"
NOT_AT_EPOCHS = "; every: '2 epochs': {} or at steps"


@pytest.mark.parametrize(
    ("make", "parameters", "every", "reason"),
    [
        (CheckpointHook, {}, 100, None),
        (CheckpointHook, {"monitor": "val/loss", "save_top_k": 2}, "2 epochs", None),
        (EarlyStopping, {"monitor": "train/loss"}, 100, None),
        (EarlyStopping, {}, "1 epoch", None),
        (EarlyStopping, {}, 100, NOT_AT_STEPS),
        (EarlyStopping, {}, "2 epochs", NOT_AT_EPOCHS.format("checks run at the end of each epoch")),
        (LearningRateMonitor, {"frequency": "epoch"}, 100, None),
        (LearningRateMonitor, {"frequency": "epoch"}, "2 epochs",
         NOT_AT_EPOCHS.format("learning rates are recorded at the start of each epoch")),
        (NotifyHook, {"webhook_url": "https://example.org/x"}, 100, "; leave the schedule out"),
        (HOOKS.find("sample_text"), {}, 100, "; leave the schedule out"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:40]),
)  # fmt: skip
def test_a_period_without_effect_is_refused(make: Any, parameters: Any, every: Any, reason: str | None) -> None:
    """A built-in object has the events that it was made for; the error proposes a constructor only if it works."""
    hook = make(**parameters)
    with pytest.raises(RegistrationError) as refused:
        HookRegistry().register(hook, every=every)
    message = str(refused.value)
    where = f"{type(hook).__name__} listens to no event inside steps"
    if reason is not None:
        assert message.endswith(f" has no effect: this {where}{reason}")
        return
    proposed = re.search(rf"{where}; pass every='(.*)' to {type(hook).__name__} instead$", message)
    assert proposed, message
    others = {name: value for name, value in parameters.items() if name not in make.every_aliases}
    HookRegistry().register(make(**others, every=proposed[1]))


@pytest.mark.parametrize("every", ["often", "3 stps", "2 tokens of b", "2 steps of b"])
@pytest.mark.parametrize(
    ("give", "valid"),
    [
        (lambda every: Schedule.parse(every=every), "steps|batches|epochs|tokens|seconds|minutes|hours"),
        (lambda every: HookRegistry().register("early_stopping", monitor="train/loss", every=every), "steps"),
        (lambda every: EarlyStopping(warmup=every), "steps|epochs"),
        (lambda every: HookRegistry().register("throughput", every=every), "steps"),
        (lambda every: LearningRateMonitor(every=every), "steps"),
        (lambda every: TrainerConfig(validate_every=every), "steps|epochs"),
    ],
    ids=["schedule", "early_stopping", "warmup", "throughput", "lr_monitor", "validate_every"],
)
def test_what_an_error_about_a_period_proposes_is_accepted(
    give: Callable[[Any], object], valid: str, every: str
) -> None:
    """The examples of periods, and the units, are those that this parameter takes."""
    with pytest.raises(HooklineError) as refused:
        give(every)
    remedy = str(refused.value).rpartition("; ")[2]
    if "write" in remedy:
        proposed = [ast.literal_eval(value) for value in re.findall(r"'[^']*'|\d+", remedy)]
    else:
        proposed = [f"5 {unit}" for unit in re.findall(valid, remedy)]
    assert proposed, str(refused.value)
    for value in proposed:
        give(value)


@pytest.mark.parametrize(
    ("hook", "options"), [("sample_text", {"every": 100}), ("checkpoint", {"every": "2 epochs", "start": 5})], ids=str
)
def test_a_config_with_a_schedule_without_effect_is_refused(hook: str, options: dict[str, Any]) -> None:
    """The error names the place in the config."""
    with pytest.raises(RegistrationError, match=r"^hooks\.lifecycle\.0: .* has no effect"):
        HookRegistry({"lifecycle": [{"name": hook, **options}]})


def test_a_run_follows_it() -> None:
    """Checkpoints at steps and no longer at epochs, reports of the throughput and lines of the log."""
    trainer = make_trainer(data=make_batches(6), max_epochs=2, record=True)
    saved: list[int] = []
    trainer.on("checkpoint_save")(lambda step: saved.append(step))
    trainer.add_checkpointing(every=5)
    trainer.add_json_logging(every="4 batches")
    trainer.add_hook("throughput", every=3)
    trainer.add_console_logging(every=6)
    trainer.train()
    assert saved == [5, 10]
    steps = [line["step"] for line in read_metrics(trainer.run_dir) if "throughput/steps_per_s" in line]
    assert steps == [3, 6, 9, 12]


def test_start_and_stop_limit_it() -> None:
    """The period that a constructor took counts from a start to a stop, as any other."""
    registry = HookRegistry()
    registry.register("json_log", every=10, start=100, stop=200)
    assert str(registry.entry("json_log").schedule) == "every 10 steps, from 100 steps, until 200 steps"
    assert str(ConsoleLogHook(every="30 s").schedule) == "every 30 seconds"
    assert JSONLogHook(7).log_every_n_batches == 7 and CheckpointHook().save_every_n_epochs == 1
