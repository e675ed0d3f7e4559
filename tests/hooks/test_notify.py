"""The webhook gets the requested messages, training is unaffected, and the URL stays secret."""

import copy
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import make_batches
from run_control import PlainRun
from small_config import config_with

from hookline import (
    HooklineError,
    HooksConfig,
    NotifyHook,
    TrainingHook,
    load_config,
    register_hook,
    trainer_from_config,
)
from hookline.cli import main
from hookline.errors import ConfigError, RegistrationError
from hookline.hooks import notify
from hookline.record import read_events
from hookline.record.redaction import SecretValues, add_secret_url, redact_text

from .conftest import Server, ok, send, silent, status

Edit = Callable[[int, torch.Tensor], torch.Tensor]
EVERYTHING = ["training_end", "best_model", "exception", "early_stop", "hook_failure", "heartbeat"]


OPTIONS = {"lr": 0.05, "val_dataloader": make_batches(2), "record": True}
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


@pytest.mark.req("002-77", "002-05")
def test_best_models_and_the_end_are_reported(server: Server) -> None:
    """Every improvement of the monitored metric, and the end with the best value, in Slack's JSON."""
    trainer = train(NotifyHook(server.url, notify_on=["training_end", "best_model"]), max_epochs=2)
    assert all(set(message) == {"text"} for message in server.received)
    first, second, end = server.texts
    assert first.startswith(f"[{trainer.run_id} on ") and "new best model: val/loss " in first
    assert "at step 4, epoch 0" in first and "(before: " not in first
    assert "(before: " in second and "at step 8, epoch 1" in second
    assert "ended: completed after step 8; best val/loss " in end
    assert read_events(trainer.run_dir)[-1] | {"time": 0} == {
        "time": 0, "kind": "notified", "step": 8, "by": "notify", "sent": 3, "failed": 0, "dropped": 0, "unsent": 0,
    }  # fmt: skip


def test_a_trial_run_sends_nothing(server: Server) -> None:
    """A trial run sends nothing; the same hook in a run afterwards does."""
    train(hook := NotifyHook(server.url, EVERYTHING, heartbeat="1 batches"), fast_dev_run=2)
    assert server.texts == []
    train(hook, max_epochs=1)
    assert any("new best model" in text for text in server.texts) and "ended: completed" in server.texts[-1]


def test_only_improvements_are_reported(server: Server) -> None:
    """In the direction of `mode`; NaN does not improve."""
    hook = NotifyHook(server.url, ["best_model"], monitor="val/accuracy", mode="max")
    run = PlainRun()
    for value in (0.5, 0.4, float("nan"), 0.5, 0.6):
        hook.on_validation_end(run, {"val/accuracy": value}, step=1, epoch=0)
    hook.close()
    assert [text.partition("val/accuracy ")[2] for text in server.texts] == [
        "0.5 at step 1, epoch 0",
        "0.6 (before: 0.5) at step 1, epoch 0",
    ]


def test_a_missing_metric_is_named_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """With the metrics that do exist, nearest first."""
    train(NotifyHook(server.url, monitor="val/los", mode="min"), max_epochs=2)
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["hook 'notify': metric 'val/los' was not measured; did you mean 'val/loss'? Valid: val/loss"]


def test_the_metric_may_be_spelled_eval(server: Server) -> None:
    """`eval/loss` is `val/loss`, as everywhere."""
    train(NotifyHook(server.url, monitor="eval/loss"))
    assert "new best model: eval/loss " in server.texts[0]


def test_a_validation_outside_of_a_run_is_not_reported(server: Server) -> None:
    """trainer.validate() before or after the run posts nothing and moves no best value."""
    hook = NotifyHook(server.url, ["best_model"])
    make_trainer(hook).validate()
    hook.close()
    assert server.texts == [] and hook.best == float("inf")


def test_a_second_run_has_its_own_best(server: Server) -> None:
    """A hook that is used by another run does not compare with the first."""
    train(hook := NotifyHook(server.url, ["best_model"]))
    hook.best = -1.0  # better than the next run will ever be
    train(hook)
    assert len(server.texts) == 2 and "(before: " not in server.texts[1]


@pytest.mark.parametrize("topics", [EVERYTHING, ["exception"], ["training_end"]], ids=str)
def test_an_exception_is_reported_once(server: Server, topics: list[str]) -> None:
    """As an exception if notify_on contains that, otherwise as the end; the exception itself is raised unchanged."""
    trainer = make_trainer(NotifyHook(server.url, topics), val_dataloader=None)
    trainer.on("step_end", name="bomb", on_error="raise")(lambda step: 1 / 0 if step == 2 else None)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    of_the_hook = [text for text in server.texts if "hook 'bomb'" in text and "raised by hook" not in text]
    messages = [text for text in server.texts if "ZeroDivisionError" in text and text not in of_the_hook]
    assert len(messages) == 1
    assert ("failed at step 2: ZeroDivisionError: division by zero" in messages[0]) == ("exception" in topics)


def test_an_early_stop_is_reported_with_its_reason(server: Server) -> None:
    """As the one message about the run's end."""
    trainer = make_trainer(NotifyHook(server.url, ["training_end", "early_stop"]))
    trainer.on("step_end", name="patience")(lambda trainer, step: trainer.request_stop("no better") if step == 2 else 0)
    trainer.train()
    assert len(server.texts) == 1
    assert server.texts[0].endswith("stopped by patience: no better after step 2")


def test_without_early_stop_in_the_list_a_stop_is_an_end(server: Server) -> None:
    """`training_end` reports every end; `early_stop` alone does not report a normal one."""
    train(NotifyHook(server.url, ["early_stop"]))
    assert server.texts == []
    trainer = make_trainer(NotifyHook(server.url, ["training_end"]))
    trainer.on("step_end", name="patience")(lambda trainer: trainer.request_stop("enough"))
    trainer.train()
    assert "ended: stopped by patience: enough after step 1" in server.texts[0]


class Fragile(TrainingHook):
    """Fails at every step."""

    def on_step_end(self) -> None:
        raise OSError("disk full")


@pytest.mark.hooks_fail(raises=OSError)
def test_failing_hooks_are_reported_once_each(server: Server) -> None:
    """The first failure of a hook at an event, and that it was switched off; not every repetition."""
    trainer = train(NotifyHook(server.url, ["hook_failure"]), Fragile(), data=make_batches(8))
    assert [text.partition("] ")[2] for text in server.texts] == [
        "hook 'fragile' in on_step_end, step 1: failed: OSError: disk full",
        "hook 'fragile' in on_step_end, step 3: disabled after 3 failures in a row",
    ]
    trainer.remove_hook("notify")
    trainer.train()
    assert len(server.texts) == 2  # a hook that was removed reports nothing


def test_heartbeats_come_on_their_schedule(server: Server) -> None:
    """With step, epoch and loss, which is read only then."""
    train(NotifyHook(server.url, ["heartbeat"], heartbeat="3 steps"), data=make_batches(7))
    assert [text.partition("] ")[2].partition(", loss")[0] for text in server.texts] == [
        "alive at step 3 of 7, epoch 0",
        "alive at step 6 of 7, epoch 0",
    ]


def test_it_listens_only_to_what_it_reports(server: Server) -> None:
    """Without heartbeat and best_model the hook listens to no inner event, so it costs steps nothing."""
    trainer = make_trainer(NotifyHook(server.url, ["training_end"]))
    listeners = trainer.hooks.entry("notify").listeners
    assert sorted(listeners) == ["on_exception", "on_train_end", "on_train_start"]


@pytest.mark.parametrize("answer", [silent, status(500), status(404)], ids=["slow", "broken", "gone"])
def test_a_bad_server_neither_blocks_nor_fails_training(server: Server, answer: Any, caplog: Any) -> None:
    """Training does not wait for it, its result is the same bit for bit; the trouble is warned of and recorded."""
    server.then = answer
    alone = train(data=make_batches(20))
    longer = 3600.0  # than a test may take: a run that waited for the server would not end
    hook = NotifyHook(
        server.url, EVERYTHING, heartbeat="1 steps", timeout=longer, retries=1, backoff=longer, queue=5, wait_at_end=0.3
    )
    trainer = make_trainer(hook, data=make_batches(20))
    assert trainer.train()["status"] == "completed"
    assert all(map(torch.equal, alone.model.parameters(), trainer.model.parameters()))
    [counts] = [event for event in read_events(trainer.run_dir) if event["kind"] == "notified"]
    assert counts["failed"] + counts["unsent"] + counts["dropped"] >= 20
    assert any("not delivered" in line or "were not sent" in line for line in caplog.messages)
    assert trainer.hooks.entry("notify").failures.total == 0


def test_no_thread_outlives_the_run(server: Server) -> None:
    """Once everything is delivered, the thread is gone."""
    before = set(threading.enumerate())
    train(NotifyHook(server.url))
    assert server.texts
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("hookline")] == []


@pytest.mark.hooks_fail(raises=OSError)
def test_a_second_run_is_reported_too(server: Server) -> None:
    """A hook that was closed with its first run serves the next one."""
    trainer = train(NotifyHook(server.url, ["training_end", "hook_failure"]))
    trainer.add_hook(Fragile())
    trainer.fit(max_epochs=2)
    assert len([text for text in server.texts if "ended: completed" in text]) == 2
    assert any("disk full" in text for text in server.texts)


def written_by(run: Path) -> str:
    """Everything a run has written, as one text."""
    return "\n".join(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())


def test_the_url_is_in_no_record(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """No part of its path reaches the disk or the log, whether it is given in code or a delivery fails."""
    server.then = status(404)
    caplog.set_level(logging.DEBUG)
    trainer = train(NotifyHook(server.url, EVERYTHING))
    trainer.save_checkpoint()
    text = written_by(trainer.run_dir)
    assert "notification_failed" in text and '"webhook_url": "<redacted>"' in text
    assert "SECRETPART" not in text + caplog.text


@pytest.mark.hooks_fail(raises=OSError)
def test_the_url_is_removed_from_arguments_and_errors(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has neither the command line's URL nor that of an error message."""
    monkeypatch.setattr("sys.argv", ["train.py", f"hooks.lifecycle=[{{webhook_url: {server.url}}}]", server.url])
    trainer = make_trainer(NotifyHook(server.url, []))
    secret = "/services/T000/SECRETPART"
    trainer.on("step_end", name="bad")(lambda: (_ for _ in ()).throw(OSError(f"{server.url}, url: {secret}")))
    trainer.train()
    text = written_by(trainer.run_dir)
    assert "OSError" in text and "train.py" in text and "SECRETPART" not in text


def test_a_config_keeps_the_reference(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a config file the record has `${env:SLACK_URL}` wherever the URL would stand."""
    monkeypatch.setenv("SLACK_URL", server.url)
    hook = '{name: notify, webhook_url: "${env:SLACK_URL}", notify_on: [training_end]}'
    Path("run.yaml").write_text(config_with(hook), encoding="utf-8")
    config, from_file = load_config("run.yaml")
    trainer = trainer_from_config(config, from_file=from_file, device="cpu")
    trainer.train()
    text = written_by(trainer.run_dir)
    assert "SECRETPART" not in text and text.count("${env:SLACK_URL}") >= 2
    assert len(server.texts) == 1


def test_a_config_cannot_allow_hosts() -> None:
    """A config file must not make a run talk to machines behind a firewall."""
    entry = {"name": "notify", "webhook_url": "https://127.0.0.1/x", "allow_hosts": ["127.0.0.1"]}
    with pytest.raises(RegistrationError, match="NotifyHook has no parameter 'allow_hosts'"):
        make_trainer(hooks=HooksConfig(lifecycle=[entry]))


class Unprintable:
    """A value that an error message cannot show."""

    def __repr__(self) -> str:
        raise ValueError("this value has no text")


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"notify_on": ["best_modle"]}, "notify_on: invalid value 'best_modle'; did you mean 'best_model'"),
        ({"notify_on": 3}, "notify_on: expected one of training_end, .*, or a list of these .*, got 3"),
        ({"mode": "maximum"}, "mode: invalid value 'maximum'; did you mean 'max'"),
        ({"timeout": 0}, "timeout: expected a finite number, at least 0.01"),
        ({"timeout": float("inf")}, "timeout: expected a finite number, at least 0.01 and at most 3600, got inf"),
        ({"queue": 0}, "queue: expected an integer of at least 1"),
        ({"retries": [1]}, "retries: expected an integer"),
        ({"retries": 1.5}, "retries: expected an integer"),
        ({"monitor": ["val/loss"]}, "monitor: expected a non-empty string"),
        ({"notify_on": "heartbeat", "heartbeat": "often"}, "heartbeat: 'often' is not a schedule"),
        ({"webhook_url": "http://example.org/SECRETPART"}, "http would send its secret unencrypted"),
        ({"backoff": 10**400}, "backoff: expected a finite number, at least 0 and at most 3600, got 10000"),
        ({"mode": Unprintable()}, "mode: expected one of min, max, got a value that cannot be shown"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_invalid_parameters_are_rejected_without_showing_the_url(parameters: dict[str, Any], complaint: str) -> None:
    """Also when the hook is made by name, where errors usually repeat the parameters."""
    given = {"name": "notify", "webhook_url": "https://example.org/SECRETPART", **parameters}
    with pytest.raises(HooklineError, match=complaint) as caught:
        make_trainer(hooks=HooksConfig(lifecycle=[given]))
    assert "SECRETPART" not in str(caught.value)


def test_secrets_in_messages_are_removed_and_markup_is_escaped(server: Server) -> None:
    """A token in an exception's text is not sent, and Slack's markup is escaped."""
    hook = NotifyHook(server.url)
    hook.tell("see <!channel> & https://me:pw@host/x, api_key=abcdef " + "x" * 5000)
    hook.close()
    assert "see &lt;!channel&gt; &amp; &lt;redacted&gt; api_key=&lt;redacted&gt;" in server.texts[0].replace(",", "")
    assert len(server.texts[0]) < 3100


def test_the_best_value_is_saved_with_the_run(server: Server) -> None:
    """A resumed run does not announce an old best again."""
    trainer = train(NotifyHook(server.url, ["best_model"]))
    trainer.save_checkpoint()
    second = make_trainer(again := NotifyHook(server.url, ["best_model"]))
    second.load_checkpoint(trainer.run_dir)
    assert again.best == trainer.hooks.get("notify").best < 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"notify_on": None},
            r"^notify\.notify_on: expected one of training_end, .*, or a list of these \(\[\] for none\), got None",
        ),
        ({"notify_on": 3}, r"^notify\.notify_on: expected one of training_end, .*, got 3"),
        ({"notify_on": "heartbeat", "heartbeat": "often"}, r"^notify: heartbeat: 'often' is not a schedule; write"),
        ({"heartbeat": "1 hr"}, r"^notify: heartbeat: .*'hr' is not a unit"),
        ({"notify_on": "heartbeat", "heartbeat": None}, r"^notify: heartbeat: None is not a schedule; write 10, "),
        ({"notify_on": "heartbeat", "heartbeat": 0}, r"^notify: heartbeat: 0 is never due; to disable it, omit"),
    ],
    ids=str,
)
def test_an_invalid_parameter_is_named(given: dict[str, Any], message: str) -> None:
    """The error says which it is, what was given, and what would be right."""
    with pytest.raises((ConfigError, RegistrationError), match=message):
        NotifyHook("https://relay.example.org/services/T0", **given)


def test_a_copy_has_its_own_queue(server: Server) -> None:
    """Made in the middle of a run, it has the same parameters, and sends for another run."""

    class Mine(NotifyHook):
        def __init__(self, url: str, words: list[str]) -> None:
            super().__init__(url, notify_on=["best_model", "training_end"], wait_at_end=5)
            self.words = words

    hook, twins = Mine(server.url, ["a"]), []
    trainer = make_trainer(hook, max_epochs=2)
    trainer.on("epoch_start", name="copy")(lambda: twins.append(copy.deepcopy(hook)))
    trainer.train()
    twin = twins[-1]
    assert type(twin) is Mine and twin.words == ["a"] and twin.words is not hook.words
    assert (twin.webhook_url, twin.notify_on, twin.wait_at_end) == (server.url, hook.notify_on, 5)
    assert twin.on_step_end is None and twin.registered_name == "notify"
    sent = len(server.texts)
    train(twin)
    assert len(server.texts) == sent + 2


# ---- the queue -------------------------------------------------------------------------------------------------------


def said(server: Server) -> list[str]:
    """The messages that arrived, without the run's name."""
    return [text.partition("] ")[2] for text in server.texts]


def wait_for(condition: Any) -> None:
    """Wait until a condition holds."""
    while not condition():
        time.sleep(0.005)


def blocked(server: Server) -> threading.Event:
    """Let the server answer its next message only when an event is set."""
    free = threading.Event()
    server.answers.append(lambda request: (free.wait(), ok(request)))
    return free


def test_messages_go_out_in_order(server: Server) -> None:
    """The first message is sent first, and closing waits for the last one."""
    notes = send(NotifyHook(server.url), "0", "1", "2", "3", "4")
    assert said(server) == ["0", "1", "2", "3", "4"]
    assert notes == [{"kind": "notified", "by": "notify", "sent": 5, "failed": 0, "dropped": 0, "unsent": 0}]


def test_a_full_queue_drops_the_oldest_and_counts_it(server: Server) -> None:
    """The newest messages are kept, and `tell` never waits."""
    free, hook, run = blocked(server), NotifyHook(server.url, queue=2), PlainRun()
    hook.on_train_start(run)
    hook.tell("first")
    wait_for(lambda: server.texts)
    for text in ("a", "b", "c"):
        hook.tell(text)
    free.set()  # until now the server has answered nothing
    hook.close()
    assert said(server) == ["first", "b", "c"]
    assert run.notes[0]["dropped"] == 1 and run.notes[0]["sent"] == 3


def times_of_attempts(server: Server, *answers: Any, **options: Any) -> list[float]:
    """Send one message that gets these answers, and return the pauses between the attempts."""
    times: list[float] = []
    for answer in answers:
        server.answers.append(lambda request, answer=answer: (times.append(time.monotonic()), answer(request)))
    hook = NotifyHook(server.url, **options)
    hook.tell("x")
    wait_for(lambda: len(times) == len(answers))
    hook.close()
    return [after - before for before, after in pairwise(times)]


def test_failures_are_tried_again_with_growing_pauses(server: Server) -> None:
    """Each pause is twice the one before, and success ends it."""
    pauses = times_of_attempts(server, *[status(503)] * 3, ok, retries=3, backoff=0.02)
    assert [pause >= least for pause, least in zip(pauses, (0.02, 0.04, 0.08), strict=True)] == [True] * 3
    assert len(server.received) == 4


def test_retry_after_is_respected(server: Server) -> None:
    """Retry-After is longer than the pause that would have been made."""
    [pause] = times_of_attempts(server, status(429, Retry_After="1"), ok, backoff=0.001)
    assert pause >= 1


@pytest.mark.parametrize(("code", "attempts"), [(503, 3), (403, 1)], ids=["busy", "refused"])
def test_undeliverable_messages_are_given_up_and_reported(server: Server, code: int, attempts: int) -> None:
    """After the last attempt, or at once if another would not help; the next message is tried as well."""
    server.then = status(code)
    *failures, counts = send(NotifyHook(server.url, retries=2, backoff=0.001), "x", "y")
    assert said(server) == ["x"] * attempts + ["y"] * attempts
    assert [note["why"] for note in failures] == [f"127.0.0.1: HTTP {code}"] * 2 and counts["failed"] == 2


def test_closing_does_not_wait_for_pauses(server: Server) -> None:
    """The last attempts are made at once, so that the end of a run does not wait for pauses."""
    server.answers = [status(503)] * 2
    hook = NotifyHook(server.url, retries=2, backoff=3600, wait_at_end=3600)
    hook.tell("x")
    wait_for(lambda: server.texts)
    hook.close()
    assert said(server) == ["x"] * 3


def test_closing_is_limited_in_time_and_says_what_is_left(server: Server) -> None:
    """A server that never answers does not keep the run from ending; the next run's messages are sent."""
    free, hook = blocked(server), NotifyHook(server.url, wait_at_end=0.1, timeout=3600)
    assert send(hook, "stuck", "behind it")[-1]["unsent"] == 2
    hook.wait_at_end = 60.0
    assert send(hook, "later")[-1]["sent"] == 1
    free.set()
    assert said(server) == ["stuck", "later"]


def test_a_record_that_cannot_be_written_does_not_end_the_thread(server: Server) -> None:
    """Whatever goes wrong around one message, the next one is tried."""

    class Full(PlainRun):
        def __init__(self) -> None:
            super().__init__()
            self.note = lambda kind, **fields: failures.append(kind) or 1 / 0

    failures: list[str] = []
    server.answers = [status(404)]
    hook = NotifyHook(server.url)
    hook.on_train_start(Full())
    hook.tell("x")
    hook.tell("y")
    with pytest.raises(ZeroDivisionError):
        hook.close()
    assert failures == ["notification_failed", "notified"] and said(server) == ["x", "y"]
    assert send(hook, "z")[-1]["sent"] == 1  # the next run is not affected


def test_without_messages_there_is_no_thread(server: Server) -> None:
    """A run without messages has no extra thread."""
    hook, before = NotifyHook(server.url, []), threading.active_count()
    hook.on_train_start(PlainRun())
    assert threading.active_count() == before


def test_a_message_after_the_close_is_dropped(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """It starts no thread, which nothing would end, and is warned of; the next run sends again."""
    hook = NotifyHook(server.url)
    send(hook, "in time")
    hook.tell("late")
    assert not any(thread.name == "hookline-outbox" for thread in threading.enumerate())
    assert "arrived after the end of the run and was dropped" in caplog.text
    send(hook, "next run")
    assert said(server) == ["in time", "next run"]


def test_closing_in_another_thread_does_not_break_a_message(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks may fail, and be reported, in a thread that outlives the run."""
    hook, began = NotifyHook(server.url), threading.Event()
    closing = threading.Thread(target=lambda: (began.wait(), hook.close()))
    make = notify.BackgroundQueue

    def make_slowly(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        began.set()
        time.sleep(0.05)  # the other thread closes the hook now, or waits until the message is queued
        return made

    monkeypatch.setattr(notify, "BackgroundQueue", make_slowly)
    closing.start()
    hook.tell("at the last moment")
    closing.join()
    assert said(server) == ["at the last moment"]


# ---- parts of the URL ------------------------------------------------------------------------------------------------


TOKEN = "q8Xw2Zr5Tn1Lk7Vb3Mc9Pd4s"
QUOTING_CONFIG = config_with('{name: quoting, password: "${env:RELAY_PASSWORD}", on_error: raise}')


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
def test_parts_of_the_url_are_redacted(said: str, written: str) -> None:
    """The path without its slash or its query, and the long token in it; a short part may be an everyday word."""
    add_secret_url(f"https://relay.example.org/services/T01/B02/{TOKEN}?key=value123")
    assert redact_text(said) == written


class Quoting(TrainingHook):
    """Fails with its password in the message."""

    def __init__(self, password: str) -> None:
        self.password = password

    def on_train_start(self) -> None:
        raise ConnectionError(f"login with {self.password} refused")


@pytest.mark.parametrize("more", [[], ["--debug"]], ids=str)
def test_a_failed_command_does_not_print_a_secret(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message of an exception, and its traceback under --debug, show the reference instead of the secret."""
    register_hook("quoting")(Quoting)
    monkeypatch.setenv("RELAY_PASSWORD", "correct-horse-battery")
    (tmp_path / "run.yaml").write_text(QUOTING_CONFIG, encoding="utf-8")
    status = main(["train", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "runs"), *more])
    printed = capsys.readouterr()
    assert status == 1 and "login with ${env:RELAY_PASSWORD} refused" in printed.err
    assert "correct-horse-battery" not in printed.err + printed.out
