"""How a run begins and ends: recorded before step 1, closed whatever happens, nothing hidden."""

import copy
import io
import json
import pdb
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
import yaml
from builders import make_batches
from small_config import config_with

from hookline import (
    ForwardHook,
    HooklineError,
    Trainer,
    TrainingHook,
    UpdateHook,
    load_config,
    trainer_from_config,
)
from hookline.errors import ConfigError, RecordError

make_trainer = partial(builders.make_trainer, record=True)
train = partial(builders.train, record=True)


def refuse(name: str) -> Any:
    """NaN and Infinity are no JSON."""
    raise AssertionError(f"{name} is not strict JSON")


def run_json(trainer: Trainer) -> dict[str, Any]:
    """Return the run's description as it is on disk now."""
    return json.loads((trainer.run_dir / "run.json").read_text(), parse_constant=refuse)


def lines(trainer: Trainer, file: str) -> list[dict[str, Any]]:
    """Return the records of one of the run's files."""
    return [json.loads(line, parse_constant=refuse) for line in (trainer.run_dir / file).read_text().splitlines()]


def kinds(trainer: Trainer) -> list[str]:
    """The kinds of the recorded events."""
    return [line["kind"] for line in lines(trainer, "events.jsonl")]


# ---- the record --------------------------------------------------------------------------------------------


@pytest.mark.req("000-28", "000-30", "000-34")
def test_the_record_is_written_before_the_first_step() -> None:
    """At on_train_start run.json has id, config hash, seed and every hook with its status, and no outcome yet."""
    trainer = make_trainer(seed=3)
    trainer.add_console_logging()
    trainer.disable_hook("console_log")
    seen: list[dict[str, Any]] = []
    trainer.on("train_start")(lambda trainer: seen.append(run_json(trainer)))
    trainer.train()
    (early,) = seen
    assert early["run_id"] == trainer.run_id == trainer.run_dir.name
    assert (early["seed"], early["outcome"]) == (3, None)
    assert len(early["config_hash"]) == 64
    assert {hook["name"]: hook["enabled"] for hook in early["hooks"]}["console_log"] is False
    assert {hook["name"] for hook in early["hooks"]} >= {"identity", "console_log"}


@pytest.mark.req("000-29")
def test_two_runs_differ_in_their_id() -> None:
    """Each run has its own id and directory, also with one trainer."""
    trainer = train()
    first = trainer.run_id
    trainer.fit(max_epochs=2)
    assert first and trainer.run_id and first != trainer.run_id
    assert len(list(Path("runs").iterdir())) == 2


@pytest.mark.req("000-33", "000-34")
def test_the_config_hash() -> None:
    """The same options give the same hash, any change another one; config.yaml says what was hashed."""
    hashes = []
    for options in ({"max_steps": 1}, {"max_steps": 1}, {"max_steps": 2}, {"max_steps": 1, "max_grad_norm": 1.0}):
        trainer = train(**options)
        hashes.append(run_json(trainer)["config_hash"])
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    written = yaml.safe_load((trainer.run_dir / "config.yaml").read_text())
    assert written["trainer"]["max_grad_norm"] == 1.0
    assert written["optimizers"][0]["class"] == "SGD"


@pytest.mark.req("000-33")
def test_the_config_hash_does_not_depend_on_the_order_of_keys() -> None:
    """The same config has one hash, with its keys in any order at every level; another value has another hash."""
    Path("run.yaml").write_text(config_with("{name: json_log, log_every_n_batches: 5, enabled: false}"))
    config, _ = load_config("run.yaml")

    def reverse(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reverse(value[key]) for key in reversed(value)}
        return [reverse(item) for item in value] if isinstance(value, list) else value

    changed = copy.deepcopy(config)
    changed["hooks"]["lifecycle"][0]["log_every_n_batches"] = 6
    hashes = []
    for variant in (config, reverse(config), changed):
        trainer = trainer_from_config(variant)
        trainer.train()
        hashes.append(run_json(trainer)["config_hash"])
    assert list(reverse(config)) != list(config)
    assert hashes[0] == hashes[1] != hashes[2]


def git(*arguments: str) -> str:
    """Run git here, with a name and no global settings."""
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *names, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.req("000-31")
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("dirty", [False, True])
def test_in_a_repository_the_commit_is_recorded(dirty: bool) -> None:
    """With the commit's hash, and whether tracked files differ from it."""
    git("init", "-q")
    Path("file.txt").write_text("one")
    git("add", "file.txt")
    git("commit", "-q", "-m", "first")
    if dirty:
        Path("file.txt").write_text("two")
    trainer = train()
    recorded = run_json(trainer)["git"]
    assert recorded["commit"] == git("rev-parse", "HEAD")
    assert recorded["dirty"] is dirty


@pytest.mark.req("000-32")
@pytest.mark.parametrize("git_installed", [True, False])
def test_outside_a_repository_a_placeholder_is_recorded(git_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where git is not installed."""
    if not git_installed:
        monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(Path.cwd().parent))
    trainer = train()
    assert run_json(trainer)["git"] == {"commit": "unknown", "dirty": None, "diff_hash": None}


def test_every_file_is_strict_json() -> None:
    """Also with losses, metrics and hook parameters that are NaN or infinite."""
    trainer = make_trainer(data=make_batches(2))
    trainer.add_json_logging(log_every_n_batches=1)

    @trainer.on("train_batch_end")
    def add(metrics: dict[str, Any], trainer: Trainer) -> None:
        metrics["nan"], metrics["inf"] = float("nan"), torch.tensor(float("-inf"))
        trainer.loss_fn = lambda output, target: output.sum() * float("nan")

    trainer.train()
    run_json(trainer)
    assert lines(trainer, "metrics.jsonl") and lines(trainer, "events.jsonl") and lines(trainer, "log.jsonl")
    assert "NaN" in [line.get("train/loss") for line in lines(trainer, "metrics.jsonl")]


@pytest.mark.req("004-22")
def test_what_hooks_log_lands_on_the_same_step() -> None:
    """A hook's number is in the line of the step in which it was logged, beside the loss."""
    trainer = make_trainer(data=make_batches(3))
    trainer.on("step_end")(lambda ctx, trainer: trainer.log("mine", ctx.step * 10))
    trainer.train()
    by_step = {line["step"]: line for line in lines(trainer, "metrics.jsonl") if "mine" in line}
    assert {step: line["mine"] for step, line in by_step.items()} == {1: 10, 2: 20, 3: 30}
    assert all("train/loss" in line for line in by_step.values())


def test_an_output_directory_that_cannot_be_made() -> None:
    """A file in the way is an error before anything has run, and the trainer can be used afterwards."""
    Path("blocked").write_text("a file")
    trainer = make_trainer(output_dir="blocked")
    received: list[str] = []
    trainer.on("train_start")(lambda: received.append("start"))
    with pytest.raises(RecordError, match="cannot make the run's directory in blocked"):
        trainer.train()
    assert received == [] and not trainer.running
    trainer.options.output_dir = "free"
    trainer.train()
    assert received == ["start"]


# ---- the end -----------------------------------------------------------------------------------------------


@pytest.mark.req("001-42", "004-20")
def test_a_completed_run() -> None:
    """The outcome, the counters and the hooks' costs are in run.json, and the state says completed."""
    trainer = make_trainer(data=make_batches(3), count_tokens=lambda batch: 5)
    seen: list[str] = []
    trainer.on("train_batch_end", name="during")(lambda state: seen.append(state["status"]))
    trainer.on("train_end", name="after")(lambda state: seen.append(state["status"]))
    state = trainer.train()
    run = run_json(trainer)
    assert (run["outcome"], run["reason"]) == ("completed", None)
    assert run["counters"] | {"seconds": 0} == {
        "step": 3, "epoch": 0, "batches": 3, "tokens_seen": 15, "seconds": 0, "skipped_steps": 0,
        "failed_saves": 0, "non_finite_losses": 0, "hook_failures": 0,
    }  # fmt: skip
    assert seen == ["training"] * 3 + ["completed"]
    assert state["status"] == "completed"
    assert {row["hook"] for row in run["costs"]} >= {"during", "after"}


@pytest.mark.req("001-42", "002-69")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ValueError("broken"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(3), "interrupted")],
    ids=repr,
)
def test_a_run_that_fails(error: BaseException, outcome: str) -> None:
    """Whatever ended it goes through unchanged, the status is 'error' and the record is closed with the reason."""

    def step(model: Any, batch: Any) -> Any:
        raise error

    trainer = make_trainer(step_fn=step)
    seen: list[Any] = []
    trainer.on("exception", name="listens")(lambda exception, state: seen.append((exception, state["status"])))
    trainer.on("train_end", name="ends")(lambda state, reason: seen.append((reason, state["status"])))
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    assert seen == [(error, "error"), (reason, "error")]
    run = run_json(trainer)
    assert (run["outcome"], run["reason"]) == (outcome, reason)
    assert kinds(trainer) == ["exception"]
    assert not trainer.running


@pytest.mark.req("002-69")
@pytest.mark.hooks_fail(raises=RuntimeError)
def test_closing_events_reach_every_hook() -> None:
    """Exceptions of hooks while a run is closing become notes on what ended it; the other hooks get the event."""
    trainer = make_trainer()
    received: list[str] = []

    class Bad(TrainingHook):
        on_error = "raise"

        def on_step_end(self) -> None:
            raise ValueError("the original")

        def on_exception(self) -> None:
            raise RuntimeError("again")

        def on_train_end(self) -> None:
            raise RuntimeError("and again")

    class Good(TrainingHook):
        def on_exception(self, exception: BaseException) -> None:
            received.append(str(exception))

        def on_train_end(self) -> None:
            received.append("end")

        def close(self) -> None:
            received.append("closed")

    trainer.add_hook(Bad())
    trainer.add_hook(Good())
    with pytest.raises(ValueError, match="the original") as raised:
        trainer.train()
    assert received == ["the original", "end", "closed"]
    notes = "\n".join(raised.value.__notes__)
    assert "raised by hook 'bad' in on_step_end, step 1" in notes
    assert "hook 'bad' then failed in on_exception: RuntimeError: again" in notes
    assert "hook 'bad' then failed in on_train_end: RuntimeError: and again" in notes
    assert run_json(trainer)["counters"]["hook_failures"] == 3


def test_a_failure_before_the_first_step_closes_the_record() -> None:
    """A checkpoint that is not there ends the run in order: recorded, closed, and the trainer is free again."""
    Path("nothing").mkdir()
    trainer = make_trainer(init_from="nothing")
    received: list[str] = []
    trainer.on("exception", name="listens")(lambda: received.append("exception"))
    trainer.on("train_end", name="ends")(lambda: received.append("end"))
    with pytest.raises(HooklineError, match="nothing has no checkpoint"):
        trainer.train()
    assert received == ["exception", "end"]
    assert run_json(trainer)["outcome"] == "failed"
    assert not trainer.running
    trainer.options.init_from = None
    assert trainer.train()["status"] == "completed"


def test_old_gradients_are_not_used() -> None:
    """Gradients that a failed run or a manual backward left behind do not enter the first step."""
    clean, dirty = make_trainer(data=make_batches(1)), make_trainer(data=make_batches(1))
    for param in dirty.model.parameters():
        param.grad = torch.full_like(param, 100.0)
    clean.train()
    dirty.train()
    assert all(map(torch.equal, clean.model.parameters(), dirty.model.parameters()))


# ---- failing hooks -----------------------------------------------------------------------------------------


@pytest.mark.req("000-37")
@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_a_hook_that_only_warns(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Three failures in a row are recorded one by one, then it is switched off; record and closing line say so."""
    trainer = make_trainer(data=make_batches(6), console=True)
    trainer.on("train_batch_end", name="flaky")(lambda: 1 / 0)
    trainer.train()
    assert kinds(trainer) == ["hook_failed"] * 3 + ["hook_disabled"]
    failed = lines(trainer, "events.jsonl")[0]
    assert (failed["hook"], failed["on"], failed["step"]) == ("flaky", "on_train_batch_end", 1)
    assert failed["error"] == "ZeroDivisionError: division by zero"
    run = run_json(trainer)
    assert run["counters"]["hook_failures"] == 3
    assert {hook["name"]: (hook["enabled"], hook["failures"]) for hook in run["hooks"]}["flaky"] == (False, 3)
    closing = capsys.readouterr().out.splitlines()[-2]
    assert closing.startswith("completed, look at this: 6 steps in ")
    assert "3 hook failures" in closing and "disabled: flaky" in closing
    assert sum("ZeroDivisionError" in (record.exc_text or str(record.exc_info)) for record in caplog.records) == 1


@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_a_row_of_failures_can_be_broken() -> None:
    """A hook that fails now and then is counted and never switched off."""
    trainer = make_trainer(data=make_batches(9))
    trainer.on("train_batch_end", name="now_and_then")(lambda step: 1 / (step % 3))
    trainer.train()
    assert kinds(trainer) == ["hook_failed"] * 3
    assert trainer.hooks.is_enabled("now_and_then")


@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_a_hook_that_is_disabled_at_once() -> None:
    """on_error='disable' needs one failure."""
    trainer = make_trainer()
    trainer.on("train_batch_end", name="once", on_error="disable")(lambda: 1 / 0)
    trainer.train()
    assert kinds(trainer) == ["hook_failed", "hook_disabled"]
    assert trainer.step == 4


@pytest.mark.parametrize("how", [{"on_error": "raise"}, {"debug": True}], ids=str)
def test_a_hook_that_ends_the_run(how: dict[str, Any]) -> None:
    """By its own policy or because the run debugs; the error is annotated, never replaced."""
    trainer = make_trainer(debug=how.get("debug", False))
    trainer.on("train_batch_end", name="fatal", on_error=how.get("on_error"))(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.train()
    assert raised.value.__notes__ == ["raised by hook 'fatal' in on_train_batch_end, step 1"]
    assert kinds(trainer) == ["hook_failed", "exception"]
    assert run_json(trainer)["outcome"] == "failed"


def at_the_end(method: str, error: BaseException) -> TrainingHook:
    """Make a hook that raises in on_train_end or in close."""

    def fail(self: Any) -> None:
        raise error

    return type("Last", (TrainingHook,), {method: fail})()


@pytest.mark.parametrize("method", ["on_train_end", "close"])
@pytest.mark.parametrize("how", [{"on_error": "raise"}, {"debug": True}], ids=str)
def test_a_hook_that_fails_at_the_end_fails_the_run(how: dict[str, Any], method: str) -> None:
    """After everything else was done: the other hooks are called and closed, and the record says that it failed."""
    trainer = make_trainer(debug=how.get("debug", False))
    received: list[str] = []

    class Other(TrainingHook):
        def on_train_end(self) -> None:
            received.append("end")

        def close(self) -> None:
            received.append("closed")

    trainer.add_hook(at_the_end(method, ValueError("too late")), on_error=how.get("on_error"))
    trainer.add_hook(Other())
    with pytest.raises(ValueError, match="too late") as raised:
        trainer.train()
    assert raised.value.__notes__ == [f"raised by hook 'last' in {method}, step 4"]
    assert received == ["end", "closed"]
    run = run_json(trainer)
    assert (run["outcome"], run["counters"]["hook_failures"], run["counters"]["step"]) == ("failed", 1, 4)
    assert run["reason"] == f"ValueError: too late; raised by hook 'last' in {method}, step 4"
    assert kinds(trainer) == ["hook_failed", "exception"]
    assert not trainer.running and trainer.status == "error"


@pytest.mark.parametrize("policy", ["warn", "raise"])
@pytest.mark.hooks_fail(raises=ValueError)
def test_a_hook_that_cannot_be_set_up_for_another_run(policy: str) -> None:
    """Its policy decides; a run that fails is recorded as failed, and the trainer is free for the next."""

    class Once(TrainingHook):
        times = 0

        def setup(self) -> None:
            self.times += 1
            if self.times == 2:
                raise ValueError("only once")

    trainer = make_trainer()
    trainer.add_hook(Once(), on_error=policy)
    trainer.train()
    if policy == "raise":
        with pytest.raises(ValueError, match="only once"):
            trainer.fit(max_epochs=2)
    else:
        trainer.fit(max_epochs=2)
    assert run_json(trainer)["outcome"] == ("failed" if policy == "raise" else "completed")
    failed = lines(trainer, "events.jsonl")[0]
    assert (failed["kind"], failed["hook"], failed["on"]) == ("hook_failed", "once", "setup")
    assert not trainer.running
    assert trainer.fit(max_epochs=3)["status"] == "completed"


@pytest.mark.parametrize("method", ["on_train_end", "close"])
def test_an_interruption_at_the_end_is_recorded(method: str) -> None:
    """Ctrl-C in on_train_end or in close is the run's outcome."""
    trainer = make_trainer(at_the_end(method, KeyboardInterrupt("now")))
    with pytest.raises(KeyboardInterrupt, match="now"):
        trainer.train()
    assert run_json(trainer)["outcome"] == "interrupted"


def test_hooks_are_set_up_again_before_a_second_run_is_refused() -> None:
    """A hook that gets the closing events of a run was set up for it."""
    calls: list[str] = []

    class Follows(TrainingHook):
        def setup(self) -> None:
            calls.append("setup")

        def close(self) -> None:
            calls.append("close")

        def on_train_end(self) -> None:
            calls.append("end")

    trainer = make_trainer(Follows())
    loader = trainer.train_loaders["train"]
    trainer.fit({"a": loader, "b": loader})
    trainer.on("train_batch_start", name="counts", every="2 batches of a")(lambda: None)
    with pytest.raises(ConfigError, match="no training loader is named 'a'"):
        trainer.fit({"x": loader, "y": loader}, max_epochs=2)
    assert calls == ["setup", "end", "close"] * 2


def test_an_interruption_in_on_exception_leaves_a_closed_run() -> None:
    """The run ends as it failed, with on_train_end and its record; the interruption leaves `fit`."""
    reasons: list[str] = []

    def fail(model: Any, batch: Any) -> Any:
        raise ValueError("boom")

    def interrupt() -> None:
        raise KeyboardInterrupt("now")

    trainer = make_trainer(step_fn=fail)
    trainer.on("exception", name="interrupts")(interrupt)
    trainer.on("train_end", name="listens")(lambda reason: reasons.append(reason))
    with pytest.raises(KeyboardInterrupt, match="now"):
        trainer.train()
    assert reasons == ["ValueError: boom"] and not trainer.running
    assert run_json(trainer)["outcome"] == "failed"


def test_an_interruption_at_the_end_of_a_run_with_bad_weights_is_recorded() -> None:
    """It is the interruption that ended the run; without it the outcome is that of the weights."""
    for outcome, hooks in (("interrupted", [at_the_end("on_train_end", KeyboardInterrupt("now"))]), ("non_finite", [])):
        trainer = make_trainer(*hooks)
        trainer.on("after_optimizer_step", name="spoil")(lambda model: model[0].bias.data.fill_(torch.nan))
        with suppress(KeyboardInterrupt):
            trainer.train()
        assert run_json(trainer)["outcome"] == outcome


@pytest.mark.parametrize("method", ["on_train_end", "close"])
def test_a_failure_at_the_end_does_not_replace_a_signal(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """The process still ends with the signal's status; the failure is logged and in the record."""
    trainer = make_trainer()
    trainer.add_hook(at_the_end(method, ValueError("too late")), on_error="raise")
    trainer.on("after_backward")(lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 143
    run = run_json(trainer)
    assert (run["outcome"], run["reason"], run["counters"]["hook_failures"]) == ("interrupted", "SIGTERM", 1)
    assert "while the run was ending: ValueError: too late" in caplog.text


@pytest.mark.parametrize("event", ["train_start", "train_batch_end", "step_end", "train_end"])
def test_the_stop_iteration_of_a_hook_is_recorded(event: str) -> None:
    """The loop is a generator, which Python leaves with a RuntimeError; the record has what the hook raised."""
    trainer = make_trainer()

    @trainer.on(event, name="fatal", on_error="raise")
    def stop() -> None:
        next(iter(()))

    with pytest.raises(RuntimeError) as raised:
        trainer.train()
    cause = raised.value.__cause__
    assert isinstance(cause, StopIteration)
    assert cause.__notes__[0].startswith(f"raised by hook 'fatal' in on_{event}, step ")
    assert str(run_json(trainer)["reason"]).startswith("StopIteration; raised by hook 'fatal' in on_")


def test_a_manual_step_raises_stop_iteration_as_it_is() -> None:
    """Also where the training code raises it."""

    def step(model: Any, batch: Any) -> Any:
        return next(iter(batch))

    with pytest.raises(StopIteration):
        make_trainer(step_fn=step).training_step([])


@pytest.mark.hooks_fail(raises=ValueError)
def test_an_exception_without_a_text_is_recorded() -> None:
    """It is handled by the policy, and named by its class in events.jsonl and run.json."""

    class Unprintable(ValueError):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail() -> None:
        raise Unprintable

    trainer = make_trainer()
    trainer.on("step_end", name="warns")(fail)
    trainer.train()
    assert kinds(trainer) == ["hook_failed"] * 3 + ["hook_disabled"]
    assert lines(trainer, "events.jsonl")[0]["error"].startswith("Unprintable: (its message cannot be shown")
    trainer = make_trainer()
    trainer.on("step_end", name="raises", on_error="raise")(fail)
    with pytest.raises(Unprintable):
        trainer.train()
    assert run_json(trainer)["reason"].startswith("Unprintable: (its message cannot be shown")


# ---- the debugger ----------------------------------------------------------------------------------------


def quits(self: Any = None, *args: Any) -> None:
    """Open a debugger and quit it."""
    breakpoint()


QUITTING = {
    "lifecycle": type("Quits", (TrainingHook,), {"on_train_batch_end": lambda self: quits()}),
    "forward": type("Quits", (ForwardHook,), {"on_forward": lambda self: quits()}),
    "update": type("Quits", (UpdateHook,), {"on_update": lambda self, grads: quits()}),
    "closing": type("Quits", (TrainingHook,), {"on_train_end": lambda self: quits()}),
}


@pytest.mark.req("002-86")
@pytest.mark.parametrize("policy", ["warn", "disable", "raise"])
@pytest.mark.parametrize("kind", QUITTING)
def test_quitting_the_debugger_in_a_hook_ends_the_run(kind: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In hooks of every kind and under every policy, as Ctrl-C would; it is not a failure of the hook."""
    monkeypatch.setattr(sys, "breakpointhook", pdb_that_quits)
    trainer = make_trainer()
    trainer.add_hook(QUITTING[kind](), on_error=policy)
    with pytest.raises(KeyboardInterrupt, match="quit in the debugger in hook 'quits'") as raised:
        trainer.train()
    assert trainer.step == (4 if kind == "closing" else 1)
    run = run_json(trainer)
    assert (run["outcome"], run["counters"]["hook_failures"]) == ("interrupted", 0)
    assert run["reason"] == f"KeyboardInterrupt: {raised.value}"
    assert trainer.hooks.is_enabled("quits")


@pytest.mark.req("002-86")
def test_quitting_the_debugger_in_the_training_code_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that a user quits was interrupted, and did not fail."""
    monkeypatch.setattr(sys, "breakpointhook", pdb_that_quits)
    trainer = make_trainer(step_fn=lambda model, batch: quits())
    with pytest.raises(KeyboardInterrupt, match="quit in the debugger"):
        trainer.train()
    assert run_json(trainer)["outcome"] == "interrupted"


def pdb_that_quits() -> None:
    """Open pdb in the caller's frame, where its user types q."""
    pdb.Pdb(stdin=io.StringIO("q\n"), stdout=io.StringIO(), nosigint=True).set_trace(sys._getframe(1))


# ---- the two lines on the console --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "1 epoch of 4 batches on cpu (pass max_epochs or max_steps to train longer)"),
        ({"max_epochs": 2}, "2 epochs of 4 batches on cpu → "),
        ({"max_steps": 2}, "2 steps on cpu → "),
        ({"max_steps": 2, "max_epochs": 3}, "2 steps or 3 epochs of 4 batches on cpu → "),
    ],
    ids=str,
)
def test_the_opening_line(options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Says how long the run will be, what was assumed, and where it goes."""
    trainer = train(console=True, **options)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"run {trainer.run_id}: ")
    assert said in first
    assert first.endswith(f"runs/{trainer.run_id}")


def test_the_closing_line_of_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    """Says who stopped the run first, and why."""
    trainer = make_trainer(console=True)
    trainer.on("step_end", name="bored")(lambda trainer: trainer.request_stop("nothing new", by="bored"))
    trainer.on("step_end", name="tired")(lambda trainer: trainer.request_stop("too late", by="tired"))
    trainer.train()
    assert capsys.readouterr().out.splitlines()[-2].startswith("stopped (by bored: nothing new), healthy: 1 step in ")


def test_the_closing_line_has_the_duration_as_everything_else_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes and seconds from a minute on."""
    trainer = make_trainer(console=True)
    clock = iter([0.0])
    monkeypatch.setattr("hookline.run.progress.monotonic", lambda: next(clock, 134.0))
    trainer.fit(max_steps=1)
    assert capsys.readouterr().out.splitlines()[-2] == "completed, healthy: 1 step in 2 m 14 s"


# ---- seeds -------------------------------------------------------------------------------------------------


def test_a_seed_makes_two_runs_the_same() -> None:
    """The seed decides where the random streams stand when the run begins, whatever was drawn before."""
    drawn: list[tuple[float, float]] = []
    for seed in (11, 11, 12):
        trainer = make_trainer(seed=seed, record=False, step_fn=drawing_step(drawn))
        torch.rand(7)
        trainer.fit(max_steps=1)
    assert drawn[0] == drawn[1] != drawn[2]


def drawing_step(drawn: list[tuple[float, float]]) -> Any:
    """A step that notes what it drew."""

    def step(model: Any, batch: Any) -> Any:
        drawn.append((torch.rand(1).item(), random.random()))
        return model(batch[0]).sum()

    return step


def test_deterministic_algorithms_are_used() -> None:
    """deterministic=True tells torch, before the first step and until the run has ended."""
    before = torch.are_deterministic_algorithms_enabled()
    seen: list[bool] = []
    trainer = make_trainer(deterministic=True)
    trainer.on("train_start")(lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
    try:
        trainer.train()
        assert seen == [True] and torch.are_deterministic_algorithms_enabled() == before
    finally:
        torch.use_deterministic_algorithms(before)


def test_an_unknown_neighbour_in_the_order_is_reported_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt neighbour changes the order of training in silence otherwise."""
    trainer = make_trainer(record=False)
    trainer.add_hook("scale", factor=0.5)
    trainer.add_hook("clip_norm", max_norm=1.0, before="scle")
    trainer.train()
    (told,) = [line for line in caplog.messages if "is ordered by" in line]
    assert told.startswith("'clip_norm' is ordered by 'scle', which is not registered; did you mean 'scale'")


@pytest.mark.parametrize("fails", [True, False])
def test_the_closing_line_has_nothing_that_a_terminal_would_obey(
    fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It quotes the exception or the reason that has ended the run."""
    text = "enough\x1b]0;title\x07"

    def end(trainer: Any) -> None:
        if fails:
            raise ValueError(text)
        trainer.request_stop(text)

    trainer = make_trainer(console=True)
    trainer.on("step_end", name="end", on_error="raise")(end)
    with suppress(ValueError):
        trainer.train()
    printed = capsys.readouterr().out
    assert "enough\\x1b]0;title\\x07" in printed and printed.replace("\n", "").isprintable()


def test_the_hook_that_ended_a_run_is_in_its_closing_line(capsys: pytest.CaptureFixture[str]) -> None:
    """And in the record, with event and step."""
    trainer = make_trainer(console=True)
    trainer.on("step_end", name="bad", on_error="raise")(lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    told = "ZeroDivisionError: division by zero; raised by hook 'bad' in on_step_end, step 1"
    assert f"failed ({told})" in capsys.readouterr().out
    assert run_json(trainer)["reason"] == told


class Interrupted:
    """A sink in which the user presses Ctrl-C while the record is closed."""

    closing = False

    def write_metrics(self, rows: Any) -> None:
        if self.closing:
            raise KeyboardInterrupt

    def write_layers(self, rows: Any) -> None: ...

    def write_events(self, rows: Any) -> None: ...


def test_random_streams_are_not_protected_after_a_record_that_could_not_be_closed() -> None:
    """Outside of a run a hook draws from torch's stream, however the last run ended."""
    trainer, sink = make_trainer(), Interrupted()
    trainer.record.add_sink(sink)

    @trainer.on("train_end")
    def close(trainer: Trainer) -> None:
        trainer.log("mine", 1.0)
        sink.closing = True

    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    sink.closing = False
    trainer.on("step_end")(lambda: torch.rand(1))
    before = torch.get_rng_state()
    trainer.training_step(make_batches(1)[0])
    assert not torch.equal(torch.get_rng_state(), before)


def test_hooks_that_were_closed_with_a_run_do_not_fire_until_the_next() -> None:
    """A capture would otherwise keep storing states that nothing reads and no budget counts."""
    trainer = make_trainer(record=False, max_epochs=1)
    trainer.hooks.register_capture_hook("*", "kept")
    seen: list[int] = []
    trainer.on("train_end", name="look")(lambda trainer: seen.append(len(trainer.hooks.get_captured_states("kept"))))
    trainer.train()
    trainer.model(torch.ones(4, 3))
    assert len(trainer.hooks.captures) == 0
    trainer.options.max_epochs = 2
    trainer.train()
    assert seen == [12, 12]


def test_a_hook_that_has_nothing_to_close_still_fires() -> None:
    """A validation after the run, for one."""
    trainer = make_trainer(record=False)
    phases: list[str] = []
    trainer.on("forward", name="listens")(lambda name, phase: phases.append(phase) if name == "0" else None)
    trainer.train()
    trainer.validate(make_batches(3))
    assert len(phases) == 7


def test_a_run_can_start_where_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record is elsewhere, and is printed as a whole path."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    make_trainer(record=False).train()  # torch itself reads the directory, once
    gone.rmdir()
    trainer = train(output_dir=str(tmp_path), console=True)
    assert run_json(trainer)["outcome"] == "completed"
    assert f" → {trainer.run_dir}\n" in capsys.readouterr().out
