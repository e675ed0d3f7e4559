"""The outbox never blocks, and loses nothing that could have been delivered."""

import threading
import time
from typing import Any

import pytest

from hookline.hooks.notify import Outbox
from hookline.hooks.webhook import DeliveryError


class Line:
    """Replaces a server: rejects the first messages, then accepts them."""

    def __init__(self, refusals: int = 0, try_again: bool = True, wait: float = 0.0) -> None:
        self.refusals, self.try_again, self.wait = refusals, try_again, wait
        self.attempts: list[bytes] = []
        self.times: list[float] = []

    def __call__(self, message: bytes) -> None:
        self.attempts.append(message)
        self.times.append(time.monotonic())
        if len(self.attempts) <= self.refusals:
            raise DeliveryError("busy", self.try_again, self.wait)


def wait_for(condition: Any) -> None:
    """Wait until a condition holds, for at most 30 seconds."""
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    assert condition()


def test_messages_go_out_in_order() -> None:
    """All that was put in comes out, first in first out, before the outbox is closed."""
    line = Line()
    outbox = Outbox(line)
    for number in range(5):
        outbox.put(b"%d" % number)
    assert outbox.close(5) == 0
    assert line.attempts == [b"0", b"1", b"2", b"3", b"4"]
    assert (outbox.sent, outbox.failed, outbox.dropped) == (5, 0, 0)


def test_a_full_outbox_drops_the_oldest_and_counts_it() -> None:
    """The newest messages are kept, and `put` never waits."""
    stuck, free = threading.Event(), threading.Event()
    sent: list[bytes] = []

    def send(message: bytes) -> None:
        sent.append(message)
        stuck.set()
        free.wait(5)

    outbox = Outbox(send, limit=2)
    outbox.put(b"first")
    assert stuck.wait(2)
    began = time.monotonic()
    for message in (b"a", b"b", b"c"):
        outbox.put(message)
    assert time.monotonic() - began < 0.1
    free.set()
    assert outbox.close(5) == 0
    assert sent == [b"first", b"b", b"c"]
    assert outbox.dropped == 1


def test_failures_are_tried_again_with_growing_pauses() -> None:
    """Each pause is twice the one before, and success ends it."""
    line = Line(refusals=3)
    outbox = Outbox(line, retries=3, backoff=0.02)
    outbox.put(b"x")
    wait_for(lambda: outbox.sent == 1)
    pauses = [after - before for before, after in zip(line.times, line.times[1:], strict=False)]
    assert [pause >= least for pause, least in zip(pauses, (0.02, 0.04, 0.08), strict=True)] == [True] * 3
    assert outbox.failed == 0


@pytest.mark.parametrize(("line", "attempts"), [(Line(9), 3), (Line(9, try_again=False), 1)], ids=["busy", "refused"])
def test_undeliverable_messages_are_given_up_and_reported(line: Line, attempts: int) -> None:
    """After the last attempt, or at once when another would not help; the next message gets its own chance."""
    failures: list[str] = []
    outbox = Outbox(line, retries=2, backoff=0.001, on_failure=failures.append)
    outbox.put(b"x")
    outbox.put(b"y")
    assert outbox.close(5) == 0
    assert line.attempts == [b"x"] * attempts + [b"y"] * attempts
    assert failures == ["busy", "busy"] and outbox.failed == 2


def test_retry_after_is_respected() -> None:
    """Retry-After is longer than the pause that would have been made."""
    line = Line(refusals=1, wait=0.1)
    outbox = Outbox(line, backoff=0.001)
    outbox.put(b"x")
    wait_for(lambda: outbox.sent == 1)
    assert line.times[1] - line.times[0] >= 0.1


def test_closing_does_not_wait_for_pauses() -> None:
    """The last attempts are made at once, so that the end of a run does not wait for pauses."""
    line = Line(refusals=2)
    outbox = Outbox(line, retries=2, backoff=30)
    outbox.put(b"x")
    wait_for(lambda: line.attempts)
    began = time.monotonic()
    assert outbox.close(5) == 0
    assert time.monotonic() - began < 1
    assert outbox.sent == 1


def test_closing_is_limited_in_time_and_says_what_is_left() -> None:
    """A server that never answers does not keep the run from ending; afterwards the outbox serves again."""
    free = threading.Event()
    sent: list[bytes] = []

    def send(message: bytes) -> None:
        if message == b"stuck":
            free.wait(5)
        sent.append(message)

    outbox = Outbox(send)
    outbox.put(b"stuck")
    outbox.put(b"behind it")
    began = time.monotonic()
    assert outbox.close(0.1) == 2
    assert time.monotonic() - began < 1
    outbox.put(b"later")
    assert outbox.close(5) == 0
    free.set()
    assert sent[0] == b"later" and b"behind it" not in sent


def test_a_fault_in_sending_does_not_end_the_thread() -> None:
    """An unexpected error is counted and reported by its type, and the next message is sent."""
    failures: list[str] = []
    sent: list[bytes] = []

    def send(message: bytes) -> None:
        if not failures:
            raise ValueError("with something secret in it")
        sent.append(message)

    outbox = Outbox(send, on_failure=failures.append)
    outbox.put(b"x")
    outbox.put(b"y")
    assert outbox.close(5) == 0
    assert failures == ["ValueError while sending"] and sent == [b"y"]


def test_a_failing_callback_does_not_end_the_thread() -> None:
    """Whatever goes wrong around one message, the next one is tried."""
    failures: list[str] = []

    def listen(why: str) -> None:
        failures.append(why)
        raise OSError("the callback fails")

    outbox = Outbox(lambda message: None, retries=1.5, on_failure=listen)  # type: ignore[arg-type]
    outbox.put(b"x")
    outbox.put(b"y")
    assert outbox.close(5) == 0
    assert failures == ["TypeError while sending"] * 2 and outbox.failed == 2


def test_without_messages_there_is_no_thread() -> None:
    """A run without messages has no extra thread."""
    before = threading.active_count()
    outbox = Outbox(lambda message: None)
    assert threading.active_count() == before
    assert outbox.close(0) == 0
