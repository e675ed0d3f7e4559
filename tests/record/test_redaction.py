"""Test that no secret reaches the record or the log, and that ordinary settings stay readable."""

import dataclasses
import gc
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline import NotifyHook, Trainer, get_trainer
from hookline.record import Record

REDACTED = "<redacted>"
TOKEN = "q8Xw2Zr5Tn1Lk7Vb3Mc9Pd4s"
logger = logging.getLogger("hookline")


def redact(value: Any) -> Any:
    """Return a value as an event of a record has it."""
    record = Record.in_memory()
    record.event("happened", value=value)
    return record.events[-1]["value"]


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
    assert redact({key: "abc"}) == {key: REDACTED}


@pytest.mark.parametrize(
    "key",
    ["max_tokens", "tokens", "tokens_seen", "tokenizer", "pad_token", "eos_token", "pad_token_id", "token_dim", "key",
     "keys", "lr", "author", "secretary", "monkey", "keyboard", "passes", "num_key_value_heads", 3, None],
)  # fmt: skip
def test_names_that_only_look_like_secrets(key: Any) -> None:
    """A training config has many tokens and keys that are not secret."""
    assert redact({key: "abc"}) == {key: "abc"}


def test_references_are_kept() -> None:
    """A value that came from a reference becomes the reference, whatever its key."""
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
    """A URL with credentials is replaced, alone and inside a message."""
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
    assert redact(f"x=[{{name: notify, webhook_url: {url}}}]") == f"x=[{{name: notify, webhook_url: {REDACTED}}}]"
    assert redact("x=[{password: hunter2, lr: 1}]") == f"x=[{{password: {REDACTED}, lr: 1}}]"
    assert redact(f"webhook_url: {url}") == f"webhook_url: {REDACTED}"
    for plain in ("[{webhook_url: ${env:SLACK}, lr: 1}]", "token: expected a text", "a: https://example.org/x"):
        assert redact(plain) == plain


def test_a_secret_url_is_removed_from_every_text() -> None:
    """A URL, and its path where that is long enough to be nothing else, whatever the words around it."""
    NotifyHook("https://kept.example.org/T000/verysecret?x=1")
    NotifyHook("https://kept.example.org/x")
    said = "cannot post to https://kept.example.org/T000/verysecret?x=1: no route to /T000/verysecret?x=1 in /x"
    assert redact(said) == f"cannot post to {REDACTED}: no route to {REDACTED} in /x"
    assert redact({"note": "https://kept.example.org/x"}) == {"note": REDACTED}


def test_known_shapes_of_tokens() -> None:
    """A token is recognised by its shape, wherever it stands."""
    assert redact("used hf_abcdefghijklmnopqrstuvwx here") == f"used {REDACTED} here"
    assert redact("Bearer abcdefgh12345678") == REDACTED
    assert "abc" not in redact("Client(password='abc def')")
    assert redact("sent {'api_key': 'abc', 'lr': 1}") == f"sent {{'api_key': {REDACTED}, 'lr': 1}}"


@given((st.text("aA0-_. /,{}'\"") | st.text()).map(lambda text: text[:14]))
def test_a_short_word_has_no_shape_of_a_secret(text: str) -> None:
    """This is why short words are not searched, unless they may contain a name and a value: padded ones are."""
    plain = text.replace("=", "").replace(":", "")
    assert redact(plain + " " * 20) == plain + " " * 20 and redact(plain) == plain


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
    """What has the shape of a secret is hidden in keys, too, and no value is lost."""
    first, second = "hf_abcdefghijklmnopqrstuvwx", "https://hooks.slack.com/services/T0/B0/abc"
    assert redact({first: 1, second: [2], "gradients/largest_norm": 3}) == {
        REDACTED: 1, f"{REDACTED}#2": [2], "gradients/largest_norm": 3,
    }  # fmt: skip


def test_a_config_that_contains_itself() -> None:
    """The walk over a cycle ends, and its secrets stay hidden."""
    config: dict[str, Any] = {"password": "hunter2"}
    config["self"] = config
    assert "hunter2" not in str(redact(config))


@given(st.dictionaries(st.sampled_from(["password", "api_key", "hf_token"]), st.text("qz", min_size=5), min_size=1))
def test_no_secret_survives(secrets: dict[str, str]) -> None:
    """Whatever the secret, its text is not in the result."""
    shown = repr(redact({"outer": [secrets]}))
    assert not any(secret in shown for secret in secrets.values())


# ---- secrets known by their origin -----------------------------------------------------------------------------------


def test_a_secret_value_is_removed_from_every_text() -> None:
    """Alone, inside a word, in a message and in a leaf of an event; each with its own replacement."""
    record = Record.in_memory({"url": Resolved("correct-horse"), "password": "battery-staple"})
    assert redact("401 for xcorrect-horsex") == "401 for x${env:SLACK_URL}x"
    assert redact({"error": ["it was battery-staple"]}) == {"error": ["it was <redacted>"]}
    record.start([{"name": "mine", "api_key": "of-a-hook"}])
    assert redact("it was of-a-hook") == "it was <redacted>"


def test_the_longest_secret_is_replaced_first() -> None:
    """A secret that contains another is replaced as a whole."""
    record = Record.in_memory({"token": "12345678", "url": Resolved("12345678-abc")})
    assert redact("12345678-abc and 12345678") == "${env:SLACK_URL} and <redacted>"
    del record


def test_secrets_are_forgotten_with_their_run() -> None:
    """The secrets of one run do not affect the next."""
    record = Record.in_memory({"password": "only-for-now"})
    assert redact("only-for-now") == "<redacted>"
    del record
    gc.collect()
    assert redact("only-for-now") == "only-for-now"


def test_short_secrets_are_not_replaced() -> None:
    """They occur in ordinary words."""
    record = Record.in_memory({"password": "x" * 7})
    assert redact("x" * 8) == "x" * 8
    del record


def test_secrets_found_in_a_config() -> None:
    """Values of references and under secrets' names are found at any depth; paths and plain references are not."""
    record = Record.in_memory({
        "plain": "nothing to hide",
        "password": "hunter2hunter2",
        "hooks": [{"credentials": {"user": ["another-user"]}, "url": Resolved("from-the-environment")}],
        "token": "${env:TOKEN}",
        "secret_file": "/run/secrets/token",
        "out": Resolved("/data/somewhere"),
    })  # fmt: skip
    assert redact("hunter2hunter2, another-user, from-the-environment") == "<redacted>, <redacted>, ${env:SLACK_URL}"
    for plain in ("nothing to hide", "${env:TOKEN}", "in /run/secrets/token", "in /data/somewhere"):
        assert redact(plain) == plain
    del record


def test_secrets_found_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable with a secret's name is hidden even if the config does not refer to it."""
    monkeypatch.setenv("SOME_API_KEY", "value-of-the-variable")
    assert redact("sent value-of-the-variable") == "sent <redacted>"


def test_the_text_around_a_reference() -> None:
    """It is shown if it is harmless, and not if it contains another secret."""

    class Around(Resolved):
        reference = "https://me:pw@host/${env:KEY}"

    class Harmless(Resolved):
        reference = "https://host/${env:KEY}/x"

    assert redact({"a": Harmless("https://host/k/x")}) == {"a": "https://host/${env:KEY}/x"}
    assert "pw" not in str(redact({"a": Around("https://me:pw@host/k"), "token": Around("https://me:pw@host/k")}))


# ---- the log ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Collect what the log writes, formatted as on a console."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def make_trainer() -> Trainer:
    """Make a trainer of one step."""
    model = torch.nn.Linear(3, 1)
    data = [(torch.randn(4, 3), torch.randn(4, 1))]
    return get_trainer(
        "simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu",
        loss_fn=torch.nn.functional.mse_loss, record=False, console=False,
    )  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["one run", "a run inside another"])
def test_a_hook_that_quotes_a_secret_fails_without_it(
    nested: bool, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its message nor its traceback contains it, until the last run ended."""
    monkeypatch.setenv("SOME_API_KEY", TOKEN)
    trainer = make_trainer()

    def quotes() -> None:
        if nested:
            make_trainer().train()
        raise ConnectionError(f"401 for {TOKEN}")

    trainer.on("step_end", name="quotes")(quotes)
    trainer.train()
    text = written.getvalue()
    assert "ConnectionError: 401 for <redacted>" in text and "Traceback" in text and TOKEN not in text
    logger.warning("after the run: %s", TOKEN)
    assert written.getvalue().endswith(f"after the run: {TOKEN}\n")
