"""`hookline tail`: the last rows, new ones as they are written, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Captured, error_of, output_of
from records import close_record, start_record

from hookline.cli import main, tail
from hookline.record import Record

ESCAPE = "\x1b[31m\u202e"
LIVES = """
import sys, time
from hookline.record import Record
record = Record.on_disk("runs", config={}, seed=None, run_id="one")
record.start([])
record.log(1, 0, "train/loss", 0.5)
record.flush(wait=True)
print("ready", flush=True)
sys.stdin.read()
"""


def open_run(run_id: str = "one") -> Record:
    """Begin a run that logs one step."""
    record = start_record(run_id=run_id)
    log(record, 1)
    return record


def log(record: Record, step: int) -> None:
    """Write the loss of a step."""
    record.log(step, 0, "train/loss", 1 / step)
    record.flush(wait=True)


def between_polls(monkeypatch: pytest.MonkeyPatch, *actions: object) -> None:
    """Let something happen each time that the command waits; nothing is left to the clock."""
    left = list(actions)

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        action = left.pop(0)
        assert callable(action)
        action()

    monkeypatch.setattr(tail.time, "sleep", sleep)


def test_a_finished_run(capsys: Captured) -> None:
    """The last lines in the order of time, the outcome, and the end."""
    record = open_run()
    for step in range(2, 30):
        log(record, step)
    record.log(30, 0, "val/loss", float("nan"))
    record.log(30, 0, "lr", 0.1)
    record.log(30, 0, "loss", 2.0)
    record.flush(wait=True)
    record.event("note", 30, text=f"{ESCAPE}\nline", more=[1, 2])
    record.close("stopped", "stopped by me: enough", [], [], {})
    assert output_of(capsys, ["tail", "one", "--lines", "3"]).splitlines() == [
        "step      29  train/loss 0.03448",
        "step      30  loss 2  val/loss NaN",
        "step      30  note  text \\x1b[31m\\u202e line, more [1, 2]",
        "the run has ended, stopped: stopped by me: enough",
    ]
    assert main(["tail", "one", "--lines", "1", "--json"]) == 0
    rows = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("kind") for row in rows] == ["note", None]
    assert rows[1] == {"outcome": "stopped", "reason": "stopped by me: enough"}


def test_new_rows_are_printed_once_and_whole(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A torn line is waited for, and a truncated or replaced file is read from its beginning."""
    record = open_run()
    metrics = Path("runs/one/metrics.jsonl")

    def append(text: str) -> None:
        with metrics.open("a") as file:
            file.write(text)

    def replace() -> None:
        Path("new").write_text('{"step": 6, "train/loss": 6.0}\n' + " " * 4096 + "\n")
        Path("new").replace(metrics)

    between_polls(
        monkeypatch,
        lambda: append('{"step": 2, "train/lo'),
        lambda: append('ss": 2.0}\n'),
        lambda: append('torn{"x\n{"step": 3, "train/loss": 3.0}\n'),
        lambda: metrics.write_text('{"step": 5, "train/loss": 5.0}\n'),
        replace,
        lambda: None,
        lambda: close_record(record),
    )
    lines = output_of(capsys, ["tail", "one"]).splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1", "2", "3", "5", "6"]
    assert lines[-1] == "the run has ended, completed"


def test_rows_before_the_end_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """What is written between two looks is printed although the run has ended by then."""
    record = open_run()

    def end() -> None:
        log(record, 2)
        close_record(record)

    between_polls(monkeypatch, end)
    assert output_of(capsys, ["tail", "one"]).splitlines()[1].startswith("step       2")


def test_a_killed_run_is_noticed() -> None:
    """When its process dies, the command ends."""
    follow = [sys.executable, "-m", "hookline", "tail", "one"]
    with subprocess.Popen([sys.executable, "-c", LIVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"ready\n"
        with subprocess.Popen(follow, stdout=subprocess.PIPE) as follower:
            assert follower.stdout is not None and b"train/loss 0.5" in follower.stdout.readline()
            run.kill()
            run.wait()
            assert follower.stdout.read() == b"the run was killed\n"
        assert follower.returncode == 0


def test_ctrl_c_in_a_terminal_leaves_the_run() -> None:
    """In a terminal of 40 columns no line is wider, and Ctrl-C ends the command with status 0."""
    pty = pytest.importorskip("pty")
    record = open_run()
    record.event("note", 1, text="x" * 500)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "hookline", "tail", "one"]
    follower = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    while b"note" not in text or not text.endswith(b"\n"):
        text += os.read(ours, 4096)
    log(record, 2)
    while b"0.5" not in text:
        text += os.read(ours, 4096)
    follower.send_signal(signal.SIGINT)
    assert follower.wait() == 0
    os.close(ours)
    close_record(record)
    plain = text.decode().replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, plain)) <= 40 and any(line.endswith("…") for line in plain)


def test_what_is_not_a_run(capsys: Captured) -> None:
    """One line, and the status of wrong usage."""
    assert error_of(capsys, ["tail", "nowhere"]).startswith("hookline: error: nowhere: no run is in runs/")
