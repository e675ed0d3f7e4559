"""Writes to a terminal are noticed before they happen."""

import io
import sys
from functools import partial

import pytest

from hookline.hooks.terminal import StreamProxy, TerminalWatcher


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard output, as a terminal; standard error is none."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return stream


def test_it_is_called_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before `writelines`; streams that are not terminals are left alone."""
    terminal = at_terminal(monkeypatch)
    calls: list[str] = []
    watcher = TerminalWatcher(lambda: calls.append(terminal.getvalue()))
    watcher.start()
    sys.stdout.write("one")
    sys.stdout.writelines(["two", "three"])
    print("elsewhere", file=sys.stderr)
    assert calls == ["", "one"]
    assert sys.stdout.isatty() and terminal.getvalue() == "onetwothree"
    watcher.stop()
    assert sys.stdout is terminal


def test_a_stream_that_was_replaced_since_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting twice wraps once; stopping restores only what this object replaced."""
    terminal = at_terminal(monkeypatch)
    watcher = TerminalWatcher(lambda: None)
    watcher.start()
    watcher.start()
    assert isinstance(sys.stdout, StreamProxy) and sys.stdout.stream is terminal
    theirs = sys.stdout = io.StringIO()
    watcher.stop()
    assert sys.stdout is theirs


def test_a_process_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under pythonw: there is nothing to watch."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    TerminalWatcher(lambda: None).start()
    assert sys.stdout is None


def test_a_custom_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that copies to a file, say: its `write` returns nothing, and its neighbour is closed."""

    class Tee(Terminal):
        def write(self, text: str) -> None:  # type: ignore[override]
            super().write(text)

    tee, closed = Tee(), io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", tee)
    monkeypatch.setattr(sys, "stderr", closed)
    watcher = TerminalWatcher(lambda: None)
    watcher.start()
    print("printed")
    watcher.stop()
    assert tee.getvalue() == "printed\n" and sys.stdout is tee and sys.stderr is closed


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_runs_that_overlap_may_end_in_any_order(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last is over, the stream is restored."""
    terminal = at_terminal(monkeypatch)
    calls: list[int] = []
    runs = [TerminalWatcher(partial(calls.append, number)) for number in range(3)]
    for run in runs:
        run.start()
    runs[order[0]].stop()
    print("two are called")
    assert set(calls) == set(order[1:])
    for number in order[1:]:
        runs[number].stop()
    assert sys.stdout is terminal
