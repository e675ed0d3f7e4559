"""Secrets in every place where a run can meet them: none appears in the run's directory or on standard output."""

import base64
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.record.redaction import redact_text


def secret(number: int) -> str:
    """Return a random text without a known shape."""
    return hashlib.sha256(str(number).encode()).hexdigest()[:24]


PLANTED = {
    name: secret(number)
    for number, name in enumerate((
        # in the config file
        "api_key", "password in a mapping", "list of secrets", "hf_token", "database URL", "query token", "signed URL",
        "webhook URL", "Slack webhook URL", "authorization header", "private key", "around a reference",
        "data's password", "comment in the config",
        # by their shape alone, under innocent keys
        "GitHub", "OpenAI", "AWS", "Slack", "Google", "JSON web token", "Stripe", "Telegram",
        "Databricks", "Vault", "Shopify", "DigitalOcean",
        # from the environment
        "referenced", "referenced in part", "referenced by the data", "never referenced",
        # on the command line
        "override of a password", "override with a URL", "override with a token",
        # what code does with them
        "hook's own words", "hook data", "state", "note", "reason of the end", "git remote", "metric's name",
    ))
}  # fmt: skip
SHAPES = {
    "GitHub": "ghp_{}", "OpenAI": "sk-proj-{}", "AWS": "AKIA{}", "Slack": "xoxb-{}", "Google": "AIza{}",
    "JSON web token": "eyJhbGciOi.{}", "Stripe": "sk_live_{}", "Telegram": "123456789:AAAAAAAAAAA{}",
    "Databricks": "dapi01234567{}", "Vault": "hvs.{}", "Shopify": "shpat_{}", "DigitalOcean": "dop_v1_{}",
}  # fmt: skip
P = PLANTED

PARTS = '''
import base64
import os
from types import SimpleNamespace
import torch
from hookline import TrainingHook, register_data, register_hook, register_model

@register_model("line")
def line():
    return torch.nn.Linear(4, 1)

class Batches:
    """Fails in the middle of a run, and says too much."""
    def __init__(self, token): self.token = token
    def __len__(self): return 8
    def __iter__(self):
        for index in range(8):
            if index == 7:
                raise ConnectionError(f"the server refused {self.token} and " + os.environ["REASON_PASSWORD"])
            x = torch.randn(2, 4)
            yield (x / 0 if index == 4 else x), torch.randn(2, 1)

@register_data("served")
def served(password, url, token):
    return SimpleNamespace(train=Batches(token))

@register_hook("careless")
class Careless(TrainingHook):
    """Has secrets of all kinds, and tells them wherever it can."""
    def __init__(self, **given): self.given = given
    def on_train_start(self, trainer, state):
        trainer.hook_data["careless"] = {"login": os.environ["GIVEN_1"]}
        state["session_password"] = os.environ["GIVEN_2"]
        encoded = base64.b64encode(("me:" + self.given["plain"]).encode()).decode()
        trainer.log("accuracy of " + os.environ["METRIC_TOKEN"], 1.0)
        trainer.note("encoded", basic=encoded, shouted=self.given["plain"].upper())
        trainer.note("logged_in", login={"password": os.environ["GIVEN_3"]}, with_it=self.given["plain"])
    def on_step_end(self, step, trainer):
        if step == 2:
            raise PermissionError(f"401 for {self.given['plain']}, {self.given['api_key']}, {self.given['partly']}")
        if step == 3:
            raise PermissionError("cannot log in with password=" + os.environ["GIVEN_4"] + " any more")
'''
CONFIG = f"""
# the password was {P["comment in the config"]} before
model: line
data: {{name: served, password: {P["data's password"]}, url: "file:///tmp", token: "${{env:SERVED}}"}}
loss: mse
optimizer: {{name: sgd, lr: 0.001}}
trainer: {{max_epochs: 1, seed: 1}}
hooks:
  lifecycle:
    - name: careless
      api_key: {P["api_key"]}
      login: {{credentials: {{user: me, words: {P["password in a mapping"]}}}}}
      secrets: [{P["list of secrets"]}, 3]
      hf_token: hf_{P["hf_token"]}
      database: postgres://me:{P["database URL"]}@db.example.org/runs
      endpoint: "https://example.org/?page=2&token={P["query token"]}"
      download: "https://bucket.example.org/x?X-Amz-Signature={P["signed URL"]}"
      target: https://discord.com/api/webhooks/1/{P["webhook URL"]}
      headers: {{Authorization: "Basic {P["authorization header"]}"}}
      certificate: |
        -----BEGIN RSA PRIVATE KEY-----
        {P["private key"]}
        -----END RSA PRIVATE KEY-----
      mixed: "https://me:{P["around a reference"]}@example.org/${{env:PLAIN}}"
      plain: "${{env:PLAIN}}"
      partly: "v1.${{env:PARTLY}}"
      password: to be overridden
      mirror: none
      label: none
      shapes: [{", ".join(f'"{shape.format(P[name])}"' for name, shape in SHAPES.items())}]
    - {{name: notify, webhook_url: "https://hooks.slack.com/services/T0/B0/{P["Slack webhook URL"]}", notify_on: []}}
    - {{name: json_log, log_every_n_batches: 1}}
    - {{name: checkpoint, save_every_n_steps: 2}}
    - {{name: nan_forensics, stop_run: false}}
    - console_log
"""
OVERRIDES = [
    f"hooks.careless.password={P['override of a password']}",
    f"hooks.careless.mirror=https://me:{P['override with a URL']}@example.org",
    f"hooks.careless.label=github_pat_{P['override with a token']}",
]
REMOTE = f"https://me:{P['git remote']}@example.org/x.git"
ENVIRONMENT = {
    "PLAIN": P["referenced"], "PARTLY": P["referenced in part"], "SERVED": P["referenced by the data"],
    "HF_TOKEN": P["never referenced"], "REASON_PASSWORD": P["reason of the end"],
    "METRIC_TOKEN": P["metric's name"],
    "GIVEN_1": P["hook data"], "GIVEN_2": P["state"], "GIVEN_3": P["note"], "GIVEN_4": P["hook's own words"],
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run training with all secrets until it fails; return its directory and what it printed."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "careless_parts.py").write_text(PARTS)
    (folder / "run.yaml").write_text(CONFIG)
    for words in (["init", "-q"], ["remote", "add", "origin", REMOTE]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "hookline", "train", "run.yaml", "--import", "careless_parts", *OVERRIDES],
        cwd=folder, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (run,) = (folder / "runs").iterdir()
    return run, done.stdout


def test_there_is_something_to_find(finished: tuple[Path, str]) -> None:
    """Controls: there are 30 different secrets or more, the run wrote every kind of file, and its failure is in it."""
    run, printed = finished
    assert len(set(PLANTED.values())) == len(PLANTED) >= 30
    given = "\n".join([CONFIG, REMOTE, *OVERRIDES, *ENVIRONMENT.values()])
    assert [name for name, text in PLANTED.items() if text not in given] == []
    written = {path.relative_to(run).parts[0] for path in run.rglob("*") if path.is_file()}
    assert written >= {"run.json", "config.yaml", "metrics.jsonl", "events.jsonl", "log.jsonl", "checkpoints"}
    assert any((run / "crashes").rglob("crash.json"))
    events = (run / "events.jsonl").read_text()
    assert "401 for ${env:PLAIN}, <redacted>, v1.${env:PARTLY}" in events
    assert "cannot log in with password=<redacted> any more" in events
    assert "the server refused ${env:SERVED} and <redacted>" in events
    assert "ConnectionError: the server refused ${env:SERVED}" in printed
    assert "logged_in" in events and "hooks.careless.password=<redacted>" in (run / "run.json").read_text()
    assert "session_password" in (run / "log.jsonl").read_text()


@pytest.mark.parametrize("name", PLANTED)
def test_a_secret_appears_nowhere(name: str, finished: tuple[Path, str]) -> None:
    """A secret is not in any file or file name of the run's directory, and not on standard output."""
    run, printed = finished
    wanted = PLANTED[name].encode()
    leaks = [str(path) for path in run.rglob("*") if path.is_file() and wanted in path.read_bytes()]
    leaks += [str(path) for path in run.rglob(f"*{PLANTED[name]}*")]
    assert leaks == []
    assert PLANTED[name] not in printed


def test_a_secret_appears_in_no_other_spelling(finished: tuple[Path, str]) -> None:
    """Its metric, its encoding for a header and its capital letters are recorded without it."""
    run, _ = finished
    assert '"accuracy of <redacted>":1.0' in (run / "metrics.jsonl").read_text()
    events = (run / "events.jsonl").read_text()
    assert '"shouted":"${env:PLAIN}"' in events
    assert P["referenced"].upper() not in events
    assert base64.b64encode(P["referenced"].encode()).decode()[:16] not in events
    assert base64.b64encode(b"me:" + P["referenced"].encode()).decode()[:16] not in events


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_recognised_in_a_sentence(name: str) -> None:
    """A token is recognised by its shape, in any text."""
    assert redact_text(f"used {SHAPES[name].format(PLANTED[name])} for it") == "used <redacted> for it"
