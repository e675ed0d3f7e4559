"""Secrets that are known by where they came from."""

import gc

import pytest

from hookline.errors import SHORTEST_HIDDEN
from hookline.record.description import known_secrets
from hookline.record.known_secrets import KnownSecrets, without_known
from hookline.record.redaction import redact, redact_text, secrets_in


class Resolved(str):
    """A value that came from a reference."""

    reference = "${env:KEY}"


def test_a_secret_is_taken_out_of_every_text() -> None:
    """Alone, inside a word, in a message and in a leaf of an event; each with its own replacement."""
    known = KnownSecrets()
    known.learn([("correct-horse", "${env:HORSE}"), ("battery-staple", "<redacted>")])
    assert redact_text("401 for xcorrect-horsex") == "401 for x${env:HORSE}x"
    assert redact({"error": ["it was battery-staple"]}) == {"error": ["it was <redacted>"]}


def test_the_longest_goes_first() -> None:
    """A secret that holds another is not left half."""
    known = KnownSecrets()
    known.learn([("12345678", "<a>"), ("12345678-abc", "<b>")])
    assert without_known("12345678-abc and 12345678") == "<b> and <a>"


def test_they_are_forgotten_with_their_holder() -> None:
    """What one run knows is nothing to the next."""
    known = KnownSecrets()
    known.learn([("only-for-now", "<gone>")])
    assert without_known("only-for-now") == "<gone>"
    del known
    gc.collect()
    assert without_known("only-for-now") == "only-for-now"


def test_short_texts_are_left() -> None:
    """They would be found in many an innocent word."""
    known = KnownSecrets()
    known.learn([("x" * (SHORTEST_HIDDEN - 1), "<redacted>")])
    assert without_known("x" * SHORTEST_HIDDEN) == "x" * SHORTEST_HIDDEN


def test_what_a_config_tells() -> None:
    """Values of references and under secrets' names, however deep; paths and references as such are none."""
    config = {
        "plain": "nothing to hide",
        "password": "hunter2hunter2",
        "hooks": [{"credentials": {"user": ["somebody-else"]}, "url": Resolved("from-the-environment")}],
        "token": "${env:TOKEN}",
        "secret_file": "/run/secrets/token",
        "out": Resolved("/data/somewhere"),
    }
    assert dict(secrets_in(config)) == {
        "hunter2hunter2": "<redacted>",
        "somebody-else": "<redacted>",
        "from-the-environment": "${env:KEY}",
    }


def test_the_environment_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable whose name is a secret's need not be referenced to be kept out."""
    monkeypatch.setenv("SOME_API_KEY", "value-of-the-variable")
    known = known_secrets({})
    assert redact_text("sent value-of-the-variable") == "sent <redacted>"
    assert known.instead["value-of-the-variable"] == "<redacted>"


def test_the_text_around_a_reference() -> None:
    """It is shown when it is harmless, and not when it holds a secret itself."""

    class Around(Resolved):
        reference = "https://me:pw@host/${env:KEY}"

    class Harmless(Resolved):
        reference = "https://host/${env:KEY}/x"

    assert redact({"a": Harmless("https://host/k/x")}) == {"a": "https://host/${env:KEY}/x"}
    assert "pw" not in str(redact({"a": Around("https://me:pw@host/k"), "token": Around("https://me:pw@host/k")}))
