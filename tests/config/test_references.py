"""References to environment variables."""

import copy
from typing import Any

import pytest
import yaml

from hookline import Trainer, TrainingHook, register_hook, trainer_from_config
from hookline.errors import ConfigError

WRITTEN: dict[str, Any] = {
    "model": {"name": "torch.nn.Linear", "in_features": "${env:N}", "out_features": 1},
    "data": {"name": "stdlib_text", "max_bytes": 60_000},
    "optimizer": {"name": "${env:KIND}", "lr": 0.1},
    "trainer": {"max_steps": "${env:N}", "output_dir": "runs-${env:N}", "console": False},
    "hooks": {
        "lifecycle": [{"name": "sender", "url": "https://h/${env:TOKEN}", "plain": ["a", {"b": "${env:TOKEN}"}]}]
    },
}


class Sender(TrainingHook):
    """Keeps what a config gives it."""

    def __init__(self, url: str, plain: list[Any]) -> None:
        self.url, self.plain = url, plain

    def on_train_end(self) -> None: ...


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set some variables, and register the hook."""
    monkeypatch.setattr("hookline.config.references._references", {})  # later tests may print the same words
    monkeypatch.setenv("TOKEN", "s3cretpart")
    monkeypatch.setenv("N", "5")
    monkeypatch.setenv("KIND", "sgd")
    register_hook("sender")(Sender)


def recorded(trainer: Trainer) -> Any:
    """Start a run that ends at once, and return the config in its record."""
    with pytest.raises(Exception, match=r"Linear\.forward"):  # the data does not fit the model
        trainer.train()
    assert "s3cret" not in "".join(path.read_text() for path in trainer.run_dir.iterdir() if path.is_file())
    return yaml.safe_load((trainer.run_dir / "config.yaml").read_text(encoding="utf-8"))


def test_references_are_resolved_everywhere() -> None:
    """References in strings, lists and mappings are replaced in a copy of the config."""
    written = copy.deepcopy(WRITTEN)
    trainer = trainer_from_config(written)
    sender = trainer.hooks.get("sender")
    assert (sender.url, sender.plain) == ("https://h/s3cretpart", ["a", {"b": "s3cretpart"}])
    assert (trainer.options.max_steps, trainer.options.output_dir) == (5, "runs-5")
    assert written == WRITTEN


def test_references_are_restored_for_the_record() -> None:
    """The recorded config has the references, also where the factory got a number; of the trainer, all values."""
    config = recorded(trainer_from_config(WRITTEN))
    assert {key: config[key] for key in ("model", "optimizer", "hooks")} == {
        key: WRITTEN[key] for key in ("model", "optimizer", "hooks")
    }
    assert [config["trainer"][key] for key in ("max_steps", "output_dir", "accumulate")] == [5, "runs-5", 1]


def test_a_copy_keeps_its_reference() -> None:
    """A copy of a resolved string is still known as the value of a reference."""
    url = copy.deepcopy(trainer_from_config(WRITTEN).hooks.get("sender").url)
    assert (url, url.reference) == ("https://h/s3cretpart", "https://h/${env:TOKEN}")


def test_a_missing_variable_is_named_with_its_path() -> None:
    """The error names the path, the variable that is not set, and the nearest one that is."""
    with pytest.raises(ConfigError) as caught:
        trainer_from_config({**WRITTEN, "hooks": {"lifecycle": [{"name": "sender", "url": "${env:TOKN}"}]}})
    assert caught.value.path == "hooks.lifecycle.0.url"
    assert caught.value.problem == "the environment variable 'TOKN' is not set; did you mean 'TOKEN'?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${file:/etc}", r"\$\{file:/etc\} is not a reference; write \$\{env:NAME\}"),
        ("${env:N", "starts a reference that is never closed, or that contains another"),
        ("${env:${env:N}}", "starts a reference that is never closed, or that contains another"),
    ],
)
def test_malformed_references_are_refused(text: str, message: str) -> None:
    """A malformed reference is an error, and not taken as text."""
    with pytest.raises(ConfigError, match=rf"^optimizer\.lr: .*{message}"):
        trainer_from_config({**WRITTEN, "optimizer": {"name": "sgd", "lr": text}})
