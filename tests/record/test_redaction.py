"""Test that no secret reaches the record or the log, and that ordinary settings stay readable."""

import base64
import dataclasses
import gc
import html
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
import torch
from builders import make_batches, make_trainer
from hypothesis import given
from hypothesis import strategies as st
from records import start_record

from hookline import NotifyHook, read_layers, read_metrics
from hookline.ranks import Ranks
from hookline.record import Record
from hookline.record.across_ranks import SharedRecord

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
    assert redact("used hf_abcdefghijklm4opqrstuvwx here") == f"used {REDACTED} here"
    assert redact("Bearer abcdefgh12345678") == REDACTED
    assert "abc" not in redact("Client(password='abc def')")
    assert redact("sent {'api_key': 'abc', 'lr': 1}") == f"sent {{'api_key': {REDACTED}, 'lr': 1}}"


LONG = "q8Xw2Zr5Tn1Lk7Vb3Mc9Pd4sq8Xw2Zr5Tn1Lk7Vb3Mc9Pd4s"
HEX = "0123456789abcdef" * 4
LETTERS = "QwErTyUiOpAsDfGhJkLzXcVbNmQwErTyUiOpAsDf"


@pytest.mark.parametrize(
    "token",
    [
        f"dapi{HEX[:32]}", f"dapi{HEX[:32]}-2", f"hvs.{LONG}", f"hvb.{LONG}", f"shpat_{HEX[:32]}",
        f"shpss_{HEX[:32]}", f"dop_v1_{HEX}", f"hf_{LONG[:34]}", f"HF_{LONG[:34]}", f"api_org_{LONG[:34]}",
        f"sk-proj-{LONG}", f"sk-ant-api03-{LONG}-{LONG}AA", f"gsk_{LONG}", f"xai-{LONG}", f"pplx-{LONG}",
        f"nvapi-{LONG}", f"r8_{LONG[:37]}", f"lsv2_pt_{HEX[:32]}_0123456789", f"pcsk_{LONG}", f"tskey-auth-{LONG}",
        f"ghp_{LONG[:36]}", f"github_pat_{LONG[:22]}_{LONG}", f"glpat-{LONG[:20]}", f"gldt-{LONG[:20]}",
        f"npm_{LONG[:36]}", f"pypi-AgE{LONG}", f"dckr_pat_{LONG[:27]}",
        f"xoxb-123456789012-1234567890123-{LONG[:24]}", f"xapp-1-A0-1-{HEX}", f"glsa_{LONG[:32]}_01234567",
        f"dp.pt.{LONG[:43]}", f"pscale_tkn_{LONG[:43]}", f"lin_api_{LONG[:40]}", f"sntrys_{LONG}",
        f"sk_live_{LONG[:24]}", f"whsec_{LONG[:32]}", f"xkeysib-{HEX}-{LONG[:16]}", "AKIAIOSFODNN7EXAMPLE",
        "ASIAIOSFODNN7EXAMPLE", f"AIza{LONG[:35]}", f"ya29.{LONG}", f"GOCSPX-{LONG[:28]}",
        f"SG.{LONG[:22]}.{LONG[:43]}", f"eyJhbGciOiJIUzI1NiJ9.{LONG}.{LONG}", f"SK{HEX[:32]}", f"key-{HEX[:32]}",
        f"{HEX[:32]}-us12", f"{LONG[:14]}.atlasv1.{LONG}", f"ATATT3x{LONG}", f"abc8Q~{LONG[:34]}",
        f"pat{LONG[:14]}.{HEX}", f"123456789:{LONG[:35]}", f"M{LONG[:23]}.{LONG[:6]}.{LONG[:27]}",
        f"acme_live_{LONG[:24]}", f"acme_pat_{LONG[:24]}",
        # of letters alone, as all of Hugging Face are, or with a separator every few letters
        f"hf_{LETTERS[:34]}", f"api_org_{LETTERS[:34]}", f"ghp_{LETTERS[:36]}", f"npm_{LETTERS[:36]}",
        f"glpat-{LETTERS[:20]}", f"sk_live_{LETTERS[:24]}", f"dckr_pat_{LETTERS[:27]}", f"github_pat_{LETTERS[:22]}",
        f"xoxb-123456789012-1234567890123-{LETTERS[:24]}", "glpat-aB3_dE6-gH9_jK2-mN5p", "gldt-aB3_dE6-gH9_jK2-mN5p",
        "dckr_pat_aB3_dE6-gH9_jK2-mN5pQr8_tU4", "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",
    ],
)  # fmt: skip
def test_tokens_of_vendors(token: str) -> None:
    """A token is replaced in a sentence, in quotes, as a part of a name and of a path, and as a key."""
    for around in ("used {} for it", "'{}'", "x={},", "accuracy/{}/top1", "/data/{}"):
        assert redact(around.format(token)) == around.format(REDACTED)
    assert redact({token: 1}) == {REDACTED: 1}


@pytest.mark.parametrize(
    "header", [
        "x-api-key: abcdefgh", "X-Api-Key:abc", "x-goog-api-key: abc", "Ocp-Apim-Subscription-Key: abc",
        "Private-Token: abc", "X-Vault-Token: abc", "Authorization: Basic abc", "authorization:abc",
        "Proxy-Authorization: Basic abc", "Set-Cookie: id=abc",
    ],
)  # fmt: skip
def test_headers(header: str) -> None:
    """The value of a header that authenticates is replaced in any text."""
    assert "abc" not in redact(f"sent {header}")


def test_pairs_in_a_sentence() -> None:
    """After a secret's name and a colon, a quoted or random-looking text is a value; a word belongs to a sentence."""
    assert redact("api_key: 'abc' is wrong") == f"api_key: {REDACTED} is wrong"
    assert redact(f"password: {TOKEN} is wrong") == f"password: {REDACTED} is wrong"
    assert redact("password: must not be empty") == "password: must not be empty"


@pytest.mark.parametrize(
    "name",
    [
        "train/loss", "gradients/final_norm", "transformer.h.11.attn.c_attn.weight",
        "model.layers.31.self_attn.q_proj.lora_A.default.weight", "val/accuracy_top5",
        "sk-learn-pipeline-gradient-boosting", "hf_bert_base_uncased_finetuned_sst2",
        "hf_RobertaForSequenceClassification", "hf_transformer_layers_output_projection",
        "npm_run_build_wall_clock_seconds", "glrt-detector-false-alarm-rate", "ghs_exchange_rate_forecast_error_usd",
        "sk_test_accuracy_logistic_regression",
        "asia_temperature_forecast_mse", "ASIA_PACIFIC_TEMPERATURE_2020",
        "key-value-cache-hit-rate", "npm_packages_installed_per_second", "pypi-mirror-download-seconds-per-file",
        "tokens_per_second", "token:accuracy1", "tokens: 12000000", "20261115-092219-8k69kgy6",
        "0123456789abcdef0123456789abcdef01234567", f"commit {HEX}", "d41d8cd98f00b204e9800998ecf8427e",
        "/home/me/runs/20261115-092219-8k69kgy6/checkpoints/step-00000042/model.safetensors",
        r"C:\Users\me\data\train_2024.parquet", "s3://bucket/datasets/imagenet-1k/train-00001-of-01024.tar",
        "https://huggingface.co/bert-base-uncased", "sg.utility.function.name.of.mine", "float32 (8, 4) on cpu",
        "step 45: loss 12.5 is 10 times the median", "eyes/left/keypoint_confidence",
        "test_live_stream_frames_per_second", "2024-11-15T09:22:19.123+00:00", "550e8400-e29b-41d4-a716-446655440000",
        "torch.nn.modules.linear.NonDynamicallyQuantizableLinear",
    ],
)  # fmt: skip
def test_ordinary_names_stay(name: str) -> None:
    """Names of metrics and modules, hashes, ids, times and paths are no secrets, alone and in a sentence."""
    assert redact(name) == name
    assert redact(f"wrote {name} at last") == f"wrote {name} at last"
    assert redact({name: 1}) == {name: 1}


KNOWN = "pa55 wörd/with+all?kinds&of=signs"


@pytest.mark.parametrize("secret", ["hunter2hunter2", "k3y-with-dashes", KNOWN, "12345678"])
@pytest.mark.parametrize("before", ["", "u", "me", "you", "user:"])
def test_a_known_secret_in_another_spelling(secret: str, before: str) -> None:
    """Upper and lower case, base64 anywhere in a longer text, percent-encoding, hex, a repr, JSON and HTML show it."""
    record = Record.in_memory({"password": secret})
    data, ends = secret.encode(), (b"", b"x", b"xy", b"xyz")
    encoded = [base64.b64encode(before.encode() + data + end).decode().rstrip("=") for end in ends]
    encoded += [text.replace("+", "-").replace("/", "_") for text in encoded]
    spelled = [
        secret.upper(), secret.lower(), secret.title(), data.hex(), data.hex().upper(), repr(secret)[1:-1],
        json.dumps(secret)[1:-1], quote(secret), quote(secret, safe=""), quote_plus(secret), quote(secret).lower(),
        "".join(f"%{byte:02x}" for byte in data), quote(quote(secret)), quote(quote(secret, safe="")),
        html.escape(secret), json.dumps(secret)[1:-1].replace("&", "\\u0026"),
    ]  # fmt: skip
    for text in spelled:
        assert redact(f"sent {text} away") == f"sent {REDACTED} away"
    for text in encoded:  # only what encodes the text before and after it may be left
        left = redact(f"sent {text} away").removeprefix("sent ").removesuffix(" away")
        assert REDACTED in left and len(left) - len(REDACTED) <= (len(before) + 3) * 4 // 3, text
    assert redact("an ordinary sentence, aHVudGVy, %20 and 6e7465") == "an ordinary sentence, aHVudGVy, %20 and 6e7465"
    del record


@pytest.mark.parametrize(
    "part", ["x", "a-", "a.", "a_b-c ", "sk-", "eyJ", "hf_a", "a=", "a:", "://", "?", "%41", "-----BEGIN "]
)
def test_long_texts_are_read_once(part: str) -> None:
    """A message of a megabyte, such as an exception that quotes a file, is read in a moment instead of hours."""
    redact(part * (1_000_000 // len(part)))


def test_names_of_metrics_layers_and_events(tmp_path: Path) -> None:
    """They are written without secrets; two that are alike then are numbered, and ordinary ones are as given."""
    record = start_record(tmp_path, config={"password": "hunter2hunter2"})
    secrets = ["hunter2hunter2", f"hf_{LONG}", f"hf_{LONG[::-1]}"]
    for name in (*secrets, "train/loss"):
        record.log(1, 0, f"accuracy of {name}", 1.0)
    record.log_layers("norms of hunter2hunter2", 1, secrets, ["mean"], torch.ones(3, 1))
    record.event("met hunter2hunter2", hunter2hunter2=3)
    record.close("completed", None, [], [{"hook": "hunter2hunter2", "seconds": 1.0}], {})
    (row,) = read_metrics(record.path)
    expected = [
        f"accuracy of {REDACTED}",
        f"accuracy of {REDACTED}#2",
        f"accuracy of {REDACTED}#3",
        "accuracy of train/loss",
    ]
    assert list(row)[3:] == expected
    series = read_layers(record.path)[f"norms of {REDACTED}"]
    assert series.names == (REDACTED, f"{REDACTED}#2", f"{REDACTED}#3")
    for path in record.path.iterdir():
        assert not [text for text in secrets if text in path.read_text()]


def test_a_secret_that_is_known_later_is_removed_from_names_seen_before() -> None:
    """Names are read once; a run that knows more secrets reads them again."""
    plain = Record.in_memory()
    rows = []
    for _ in range(2):
        plain.log(1, 0, "loss of hunter2hunter2", 1.0)
        plain.flush()
        rows.append(list(plain.metrics[-1])[3])
        other = Record.in_memory({"password": "hunter2hunter2"})
    assert rows == ["loss of hunter2hunter2", f"loss of {REDACTED}"]
    del other


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
    first, second = "hf_abcdefghijklm4opqrstuvwx", "https://hooks.slack.com/services/T0/B0/abc"
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


@pytest.mark.parametrize("nested", [False, True], ids=["one run", "a run inside another"])
@pytest.mark.hooks_fail(raises=ConnectionError)
def test_a_hook_that_quotes_a_secret_fails_without_it(
    nested: bool, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its message nor its traceback contains it, until the last run ended."""
    monkeypatch.setenv("SOME_API_KEY", TOKEN)
    trainer = make_trainer(data=make_batches(1))

    def quotes() -> None:
        if nested:
            make_trainer(data=make_batches(1)).train()
        raise ConnectionError(f"401 for {TOKEN}")

    trainer.on("step_end", name="quotes")(quotes)
    trainer.train()
    text = written.getvalue()
    assert "ConnectionError: 401 for <redacted>" in text and "Traceback" in text and TOKEN not in text
    logger.warning("after the run: %s", TOKEN)
    assert written.getvalue().endswith(f"after the run: {TOKEN}\n")


def test_a_password_of_the_config_stays_out_of_the_record_of_several_ranks() -> None:
    """Only the config tells that these words are a secret; the record of all ranks is made from one that knows it."""
    password = "correct horse battery"
    record = SharedRecord(Record.in_memory({"data": {"password": password}}), Ranks())
    record.event("exception", 1, error=f"login failed for {password}")
    assert [event["error"] for event in record.events] == ["login failed for <redacted>"]
