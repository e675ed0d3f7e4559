"""No secret reaches the record, and ordinary settings stay readable."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.record import redaction
from hookline.record.redaction import REDACTED, is_secret_key, keep_secret, redact, redact_text


class Resolved(str):
    """A value that a config loader took from the environment."""

    reference = "${env:SLACK_URL}"


@dataclasses.dataclass
class Login:
    """A dataclass with a secret in it."""

    user: str
    password: str


@pytest.mark.parametrize(
    "key",
    ["token", "hf_token", "authToken", "API_KEY", "apiKey", "apikey", "x-api-key", "password", "db_passwd", "secret",
     "client_secret", "aws_secret_access_key", "webhook", "slack_webhook_url", "credentials", "Authorization",
     "private_key", "ssh-key", "hooks.slack.token", "--wandb-api-key"],
)  # fmt: skip
def test_names_of_secrets(key: str) -> None:
    """These names hide their values, in any spelling."""
    assert is_secret_key(key)
    assert redact({key: "abc"}) == {key: REDACTED}


@pytest.mark.parametrize(
    "key",
    ["max_tokens", "tokens", "tokens_seen", "tokenizer", "pad_token", "eos_token", "pad_token_id", "token_dim", "key",
     "keys", "lr", "author", "secretary", "monkey", "keyboard", "passes", "num_key_value_heads", 3, None],
)  # fmt: skip
def test_names_that_only_look_like_secrets(key: Any) -> None:
    """A training config is full of tokens and keys that are no secrets."""
    assert redact({key: "abc"}) == {key: "abc"}


def test_references_are_kept() -> None:
    """A value that came from a reference is written as the reference, whatever its key."""
    config = {
        "url": Resolved("https://hooks.slack.com/services/T/B/x"),
        "token": Resolved("abc"),
        "api_key": "${env:K}",
    }
    assert redact(config) == {"url": "${env:SLACK_URL}", "token": "${env:SLACK_URL}", "api_key": "${env:K}"}
    assert type(redact(config)["url"]) is str


@pytest.mark.parametrize(
    "url",
    ["https://me:pw@host/x", "postgres://u:p@db:5432/n", "https://host/?token=a", "https://h/p?X-Amz-Signature=0123456789abcdef0123",
     "https://hooks.slack.com/services/T0/B0/abc", "https://discord.com/api/webhooks/1/abc", "https://h/#access_token=abc"],
)  # fmt: skip
def test_urls_with_credentials(url: str) -> None:
    """A URL that lets somebody in is replaced, alone and inside a message."""
    assert redact(url) == REDACTED
    assert redact(f"cannot reach {url} now") == f"cannot reach {REDACTED} now"


@pytest.mark.parametrize(
    "url", ["https://example.org/data?page=2&lang=en", "file:///data/x.txt", "tcp://localhost:29500"]
)
def test_urls_without_credentials(url: str) -> None:
    """A URL that anyone may see stays."""
    assert redact(url) == url


def test_command_lines() -> None:
    """A secret is hidden as a flag's value, as an assignment and as an override."""
    argv = ["train", "--token", "abc", "--api-key=xyz", "hooks.slack.webhook=https://x.y", "--lr", "0.1", "a.lr=2"]
    expected = ["train", "--token", REDACTED, f"--api-key={REDACTED}", f"hooks.slack.webhook={REDACTED}", "--lr", "0.1", "a.lr=2"]  # fmt: skip  # noqa: E501
    assert redact(argv) == expected
    assert redact(["--token", "--verbose", "x"]) == ["--token", "--verbose", "x"]


def test_yaml_on_a_command_line() -> None:
    """A pair inside braces needs no quotes; before a URL it needs no braces; plain words after a colon stay."""
    url = "https://relay.example.org/T000/verysecret"
    assert redact_text(f"x=[{{name: notify, webhook_url: {url}}}]") == f"x=[{{name: notify, webhook_url: {REDACTED}}}]"
    assert redact_text("x=[{password: hunter2, lr: 1}]") == f"x=[{{password: {REDACTED}, lr: 1}}]"
    assert redact_text(f"webhook_url: {url}") == f"webhook_url: {REDACTED}"
    for plain in ("[{webhook_url: ${env:SLACK}, lr: 1}]", "token: expected a text", "a: https://example.org/x"):
        assert redact_text(plain) == plain


def test_what_is_kept_secret_is_in_no_text() -> None:
    """A URL, and its path where that is long enough to be nothing else, whatever the words around it."""
    keep_secret("https://kept.example.org/T000/verysecret?x=1")
    keep_secret("https://kept.example.org/x")
    said = "cannot post to https://kept.example.org/T000/verysecret?x=1: no route to /T000/verysecret?x=1 in /x"
    assert redact_text(said) == f"cannot post to {REDACTED}: no route to {REDACTED} in /x"
    assert redact({"note": "https://kept.example.org/x"}) == {"note": REDACTED}


def test_known_shapes_of_tokens() -> None:
    """A token is recognised by its shape, wherever it stands."""
    assert redact_text("used hf_abcdefghijklmnopqrstuvwx here") == f"used {REDACTED} here"
    assert redact_text("Bearer abcdefgh12345678") == REDACTED
    assert "abc" not in redact_text("Client(password='abc def')")
    assert redact_text("sent {'api_key': 'abc', 'lr': 1}") == f"sent {{'api_key': {REDACTED}, 'lr': 1}}"


@given((st.text("aA0-_. /,{}'\"") | st.text()).map(lambda text: text[: redaction._SHORTEST_TOKEN - 1]))
def test_a_short_word_has_no_shape_of_a_secret(text: str) -> None:
    """Which is why it is not looked at closely, unless a name and a value may be in it."""
    patterns = redaction._URL, redaction._ASSIGNMENT, redaction._YAML_PAIR, redaction._KNOWN_TOKEN
    plain = text.replace("=", "").replace(":", "")
    assert not any(pattern.search(plain) for pattern in patterns)


def test_structures_are_walked() -> None:
    """Secrets are found in nested dicts, lists, tuples, sets and dataclasses; None and booleans hold none."""
    config = {
        "a": [{"password": "x"}, (Login("me", "pw"),)],
        "credentials": {"user": "me", "key": ["k"]},
        "token": None,
        "use_token": True,
        "urls": {"https://u:p@h"},
    }
    assert redact(config) == {
        "a": [{"password": REDACTED}, [{"user": "me", "password": REDACTED}]],
        "credentials": {"user": REDACTED, "key": REDACTED},
        "token": None,
        "use_token": True,
        "urls": [REDACTED],
    }


def test_secrets_in_keys() -> None:
    """What has the shape of a secret is hidden there, too, and no value is lost for it."""
    first, second = "hf_abcdefghijklmnopqrstuvwx", "https://hooks.slack.com/services/T0/B0/abc"
    assert redact({first: 1, second: [2], "gradients/largest_norm": 3}) == {
        REDACTED: 1, f"{REDACTED}#2": [2], "gradients/largest_norm": 3,
    }  # fmt: skip


def test_a_config_that_contains_itself() -> None:
    """A cycle ends, and its secrets stay hidden."""
    config: dict[str, Any] = {"password": "hunter2"}
    config["self"] = config
    assert "hunter2" not in str(redact(config))


@given(st.dictionaries(st.sampled_from(["password", "api_key", "hf_token"]), st.text("qz", min_size=5), min_size=1))
def test_no_secret_survives(secrets: dict[str, str]) -> None:
    """Whatever the secret, its text is not in the result."""
    shown = repr(redact({"outer": [secrets]}))
    assert not any(secret in shown for secret in secrets.values())
