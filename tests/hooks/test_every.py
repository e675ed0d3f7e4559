"""One word says how often a hook works, `every`; the other words that some hooks know are aliases of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import (
    CheckpointHook,
    ConsoleLogHook,
    EarlyStopping,
    HooklineError,
    HookRegistry,
    JSONLogHook,
    LearningRateMonitor,
    NotifyHook,
    Trainer,
    get_trainer,
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


@pytest.mark.parametrize(("name", "alias", "every"), CASES)
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
    with pytest.raises(HooklineError, match=rf"give every or ({words}), not both: they say the same"):
        HookRegistry({"lifecycle": [{"name": name, **alias, "every": every}]})
    if name != "lr_monitor" or alias["frequency"] == "epoch":  # "step" is its default
        with pytest.raises(HooklineError, match=r"every: give every or .*, not both"):
            factory(every=every, **alias)


@pytest.mark.parametrize(
    ("name", "every", "message"),
    [
        ("throughput", "2 epochs", "every: '2 epochs': count in steps"),
        ("early_stopping", "30 s", "every: '30 s': count in steps or epochs"),
        ("early_stopping", "2 epochs", "checks are made at the end of each epoch or at steps"),
        ("lr_monitor", "2 epochs", "rates are recorded at the start of each epoch or at steps"),
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


@pytest.mark.parametrize(
    ("hook", "remedy"),
    [
        (CheckpointHook(), '; write CheckpointHook(every="100 steps")'),
        (EarlyStopping(), '; write EarlyStopping(every="100 steps")'),
        (LearningRateMonitor(frequency="epoch"), '; write LearningRateMonitor(every="100 steps")'),
        (NotifyHook("https://example.org/x"), ""),
        (HOOKS.find("sample_text")(), ""),
    ],
)
def test_a_period_without_effect_is_refused(hook: Any, remedy: str) -> None:
    """A built-in object works at the events that it was made for; a schedule counts for those inside steps."""
    with pytest.raises(RegistrationError) as refused:
        HookRegistry().register(hook, every=100)
    where = f"this {type(hook).__name__} is called at no event inside steps"
    assert str(refused.value) == f"every 100 steps has no effect: {where}{remedy}"


@pytest.mark.parametrize(
    ("hook", "options"), [("sample_text", {"every": 100}), ("checkpoint", {"every": "2 epochs", "start": 5})]
)
def test_a_config_with_a_schedule_without_effect_is_refused(hook: str, options: dict[str, Any]) -> None:
    """The error names the place in the config."""
    with pytest.raises(RegistrationError, match=r"^hooks\.lifecycle\.0: .* has no effect"):
        HookRegistry({"lifecycle": [{"name": hook, **options}]})


def make_trainer(folder: Path) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    data = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": torch.nn.functional.mse_loss, "console": False, "output_dir": str(folder)}
    return get_trainer("simple", model, data, optimizer, "cpu", max_epochs=2, **options)


def test_a_run_follows_it(tmp_path: Path) -> None:
    """Checkpoints at steps and no longer at epochs, reports of the throughput and lines of the log."""
    trainer = make_trainer(tmp_path)
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
