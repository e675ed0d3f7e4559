"""Parts of a webhook's URL are as secret as the whole of it, on disk and in what a command says at the end."""

from pathlib import Path

import pytest
from small_config import config_with

from hookline import TrainingHook
from hookline.cli import main
from hookline.core.plugins import HOOKS
from hookline.record.redaction import SecretValues, add_secret_url, redact_text

TOKEN = "q8Xw2Zr5Tn1Lk7Vb3Mc9Pd4s"
CONFIG = config_with('{name: quoting, password: "${env:RELAY_PASSWORD}", on_error: raise}')


@pytest.fixture
def fresh_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the secrets of each test."""
    monkeypatch.setattr("hookline.record.redaction.for_good", SecretValues())


@pytest.mark.parametrize(
    ("said", "written"),
    [
        (f"posting to services/T01/B02/{TOKEN}?key=value123", "posting to <redacted>"),
        (f"/services/T01/B02/{TOKEN} not found", "<redacted> not found"),
        (f"401 for {TOKEN}", "401 for <redacted>"),
        ("all services are well", "all services are well"),
    ],
)
@pytest.mark.usefixtures("fresh_secrets")
def test_a_part_that_is_quoted_is_taken_out(said: str, written: str) -> None:
    """The path without its slash or its query, and the long token in it; a short part may be an everyday word."""
    add_secret_url(f"https://relay.example.org/services/T01/B02/{TOKEN}?key=value123")
    assert redact_text(said) == written


class Quoting(TrainingHook):
    """Fails with its password in the message."""

    def __init__(self, password: str) -> None:
        self.password = password

    def on_train_start(self) -> None:
        raise ConnectionError(f"login with {self.password} refused")


@pytest.mark.parametrize("more", [[], ["--debug"]])
def test_a_failed_command_does_not_print_a_secret(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The closing words of an exception, and its traceback on request, show the reference in the secret's place."""
    monkeypatch.setattr(HOOKS, "_added", {**HOOKS._added, "quoting": Quoting})
    monkeypatch.setenv("RELAY_PASSWORD", "correct-horse-battery")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    status = main(["train", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "runs"), *more])
    printed = capsys.readouterr()
    assert status == 1 and "login with ${env:RELAY_PASSWORD} refused" in printed.err
    assert "correct-horse-battery" not in printed.err + printed.out
