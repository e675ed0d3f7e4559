"""A terminal that a rewritten line shares with everybody who prints."""

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


def test_it_is_told_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lines in one go, too; what is no terminal is left alone."""
    terminal = at_terminal(monkeypatch)
    told: list[str] = []
    shared = TerminalWatcher(lambda: told.append(terminal.getvalue()))
    shared.start()
    sys.stdout.write("one")
    sys.stdout.writelines(["two", "three"])
    print("elsewhere", file=sys.stderr)
    assert told == ["", "one"]
    assert sys.stdout.isatty() and terminal.getvalue() == "onetwothree"
    shared.stop()
    assert sys.stdout is terminal


def test_a_stream_that_somebody_else_replaced_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing twice wraps once; leaving touches only what is ours."""
    terminal = at_terminal(monkeypatch)
    shared = TerminalWatcher(lambda: None)
    shared.start()
    shared.start()
    assert isinstance(sys.stdout, StreamProxy) and sys.stdout.stream is terminal
    theirs = sys.stdout = io.StringIO()
    shared.stop()
    assert sys.stdout is theirs


def test_a_process_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under pythonw: there is nothing to share."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    TerminalWatcher(lambda: None).start()
    assert sys.stdout is None


def test_a_stream_of_somebody_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that copies to a file, say: its `write` returns nothing, and its neighbour is closed."""

    class Tee(Terminal):
        def write(self, text: str) -> None:  # type: ignore[override]
            super().write(text)

    tee, closed = Tee(), io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", tee)
    monkeypatch.setattr(sys, "stderr", closed)
    shared = TerminalWatcher(lambda: None)
    shared.start()
    print("heard")
    shared.stop()
    assert tee.getvalue() == "heard\n" and sys.stdout is tee and sys.stderr is closed


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_runs_that_overlap_may_end_in_any_order(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last is over, the stream is the process's own again."""
    terminal = at_terminal(monkeypatch)
    told: list[int] = []
    runs = [TerminalWatcher(partial(told.append, number)) for number in range(3)]
    for run in runs:
        run.start()
    runs[order[0]].stop()
    print("two are told")
    assert set(told) == set(order[1:])
    for number in order[1:]:
        runs[number].stop()
    assert sys.stdout is terminal
