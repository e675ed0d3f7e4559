"""Schedules: parsed, printed, and due exactly when a brute-force oracle says so."""

import math
from typing import Any

import pytest
from clocks import UNITS, micro_batches, schedules
from hypothesis import given
from hypothesis import strategies as st

from hookline import Schedule
from hookline.core.schedule import Quantity, Reading
from hookline.errors import ConfigError

WHOLE = ("steps", "batches", "epochs")

readings = st.builds(
    Reading,
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 30).map(float),
)
advances = st.tuples(*[st.integers(0, 15)] * 5)


def marks_of(period: Quantity) -> list[float]:
    """The points at which a period is due, written out."""
    return [period.amount * count for count in range(1, 80)]


def met(points: list[float], unit: str, now: Reading, before: Reading) -> bool:
    """Discrete units are at a point; tokens and seconds have passed one since the last micro-batch."""
    here, there = getattr(now, unit), getattr(before, unit)
    if unit in WHOLE:
        return here in points
    return any(there < point <= here for point in points)


def oracle(schedule: Schedule, now: Reading, before: Reading) -> bool:
    """What `due` must answer, said in the plainest way."""
    if schedule.start and getattr(now, schedule.start.unit) < schedule.start.amount:
        return False
    if schedule.stop and getattr(now, schedule.stop.unit) > schedule.stop.amount:
        return False
    if schedule.every is None and not schedule.at:
        return True
    asked = [(marks_of(schedule.every), schedule.every.unit)] if schedule.every else []
    asked += [([point.amount], point.unit) for point in schedule.at]
    return any(met(points, unit, now, before) for points, unit in asked)


@given(schedules, readings, advances)
def test_due_agrees_with_a_slow_reference(schedule: Schedule, before: Reading, by: tuple[int, ...]) -> None:
    """Over random every/at/start/stop and random clocks, due agrees with the written-out points."""
    now = Reading(*(getattr(before, unit) + more for unit, more in zip(UNITS, by, strict=True)))
    assert schedule.due(now, before) == oracle(schedule, now, before)


@given(schedules, st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 5))
def test_wait_never_skips_a_due_micro_batch(
    schedule: Schedule, accumulate: int, epochs: list[int], tokens: int
) -> None:
    """Nothing becomes due while `wait` says it cannot, until an epoch begins."""
    run = micro_batches(accumulate, epochs, tokens)
    for index, now in enumerate(run):
        last = Reading() if index == 0 else run[index - 1]
        if schedule.due(now, last):
            continue
        for later in range(index + 1, min(index + 1 + schedule.wait(now), len(run))):
            if run[later].epochs != now.epochs:
                break
            assert not schedule.due(run[later], run[later - 1]), f"{schedule} at {run[later]}, asked at {now}"


def test_wait_is_worth_having() -> None:
    """A hook that is due every hundred steps is asked once in between, not a hundred times."""
    assert Schedule.parse(every=100).wait(Reading(steps=1, batches=1)) == 98
    assert Schedule.parse(at=[50]).wait(Reading(steps=10)) == 39
    assert Schedule.parse(every="10 s").wait(Reading(steps=1)) == 0


def test_every_ten_is_due_at_ten_and_twenty() -> None:
    """The default unit is optimizer steps, counted from 1; step 0 is never due."""
    schedule = Schedule.parse(every=10)
    assert [step for step in range(31) if schedule.due(Reading(steps=step), Reading(steps=step - 1))] == [10, 20, 30]


def test_start_and_stop_are_both_included() -> None:
    """Between a start and a stop, ends included, and with no period always."""
    schedule = Schedule.parse(start=3, stop=5)
    assert [step for step in range(9) if schedule.due(Reading(steps=step), Reading())] == [3, 4, 5]


@pytest.mark.parametrize(
    ("written", "amount", "unit"),
    [
        (10, 10, "steps"), ("10", 10, "steps"), ("10 steps", 10, "steps"), ("1 batch", 1, "batches"),
        ("2 epochs", 2, "epochs"), ("30 s", 30, "seconds"), ("2min", 120, "seconds"), ("1.5 h", 5400, "seconds"),
        ("1M tokens", 1e6, "tokens"), ("1.5k tokens", 1500, "tokens"), ("1_000 steps", 1000, "steps"),
        (" 5 Batches ", 5, "batches"), ("0.5 s", 0.5, "seconds"), (Quantity(3, "epochs"), 3, "epochs"),
    ],
)  # fmt: skip
def test_quantities_are_read_as_people_write_them(written: Any, amount: float, unit: str) -> None:
    """Integers are steps; words carry their unit; k, M and B multiply."""
    assert Quantity.parse(written) == Quantity(amount, unit)


@pytest.mark.parametrize(
    "written",
    [True, 1.5, None, "", "ten", "-1", -1, "10 parsecs", "1.5 steps", "0.5 epochs", "5 M tokens", "1e6", [], b"1"],
)
def test_what_is_no_quantity_is_rejected_with_its_path(written: Any) -> None:
    """The error names the key in the config and shows what would be right."""
    with pytest.raises(ConfigError, match=r"^console\.every: ") as caught:
        Quantity.parse(written, "console.every")
    assert caught.value.path == "console.every"


def test_an_unknown_unit_names_the_nearest() -> None:
    """A misspelt unit is reported apart from what is not a quantity at all."""
    with pytest.raises(ConfigError, match="'epoks' is not a unit; did you mean 'epochs'"):
        Schedule.parse(every="2 epoks")


@pytest.mark.parametrize("given_", [{"every": 0}, {"every": "0 s"}, {"at": 0}, {"at": [5, 0]}])
def test_what_is_never_due_is_rejected(given_: dict[str, Any]) -> None:
    """A schedule that cannot be met is a slip, found at registration."""
    with pytest.raises(ConfigError, match="never"):
        Schedule.parse(**given_)


@given(st.integers(1, 10**9) | st.sampled_from([0.5, 1.5, 0.25]), st.sampled_from(UNITS))
def test_a_printed_quantity_reads_back(amount: float, unit: str) -> None:
    """What is shown in the list of hooks can be written into a config."""
    if unit != "seconds":
        amount = math.ceil(amount)
    assert Quantity.parse(str(Quantity(amount, unit))) == Quantity(amount, unit)


def test_schedules_print_as_sentences() -> None:
    """Lists of hooks show when each is due, in words."""
    assert str(Schedule()) == "always"
    assert str(Schedule.parse(every=10, at=[3, "1 epoch"], start=2, stop="4 epochs")) == (
        "every 10 steps, at 3 steps, 1 epoch, from 2 steps, until 4 epochs"
    )
    assert str(Schedule.parse(at="1 batch")) == "at 1 batch"


@pytest.mark.parametrize(
    ("schedule", "always"),
    [
        (Schedule(), True), (Schedule.parse(every=1), True), (Schedule.parse(every="1 batch"), True),
        (Schedule.parse(every=2), False), (Schedule.parse(every=1, start=5), False), (Schedule.parse(at=1), False),
        (Schedule.parse(every="1 epoch"), False), (Schedule.parse(stop=3), False),
    ],
)  # fmt: skip
def test_always_is_reported_apart(schedule: Schedule, always: bool) -> None:
    """Only a schedule that nothing ever gates skips the question."""
    assert schedule.always is always


names = st.sampled_from("ab")
loader_quantities = st.builds(Quantity, st.integers(1, 5).map(float), st.just("batches"), names)
loader_schedules = st.builds(
    Schedule,
    every=st.none() | loader_quantities,
    at=st.lists(loader_quantities, max_size=2).map(tuple),
    start=st.none() | loader_quantities,
    stop=st.none() | loader_quantities,
)


def clocks(order: list[str]) -> list[Reading]:
    """The clock at every batch of loaders that come in this order."""
    return [
        Reading(index, index, 1, loader=order[index - 1], by_loader={name: order[:index].count(name) for name in "ab"})
        for index in range(1, len(order) + 1)
    ]


def met_by_loader(schedule: Schedule, now: Reading) -> bool:
    """What `due` must answer when only batches of loaders are counted, said in the plainest way."""
    if schedule.start and now.by_loader[schedule.start.loader] < schedule.start.amount:
        return False
    if schedule.stop and now.by_loader[schedule.stop.loader] > schedule.stop.amount:
        return False
    if schedule.every is None and not schedule.at:
        return True
    points = [(mark.loader, mark.amount) for mark in schedule.at]
    if schedule.every:
        points += [(schedule.every.loader, mark) for mark in marks_of(schedule.every)]
    return (now.loader, now.by_loader[now.loader]) in points


@given(loader_schedules, st.lists(names, min_size=1, max_size=30))
def test_batches_of_a_loader(schedule: Schedule, order: list[str]) -> None:
    """Due at batches of that loader only, by its own count; and `wait` never skips one."""
    run = clocks(order)
    for index, now in enumerate(run):
        last = run[index - 1] if index else Reading()
        assert schedule.due(now, last) == met_by_loader(schedule, now)
        if not schedule.due(now, last):
            for later in run[index + 1 : index + 1 + schedule.wait(now)]:
                assert not schedule.due(later, now)


def test_batches_of_a_loader_as_people_write_them() -> None:
    """Any name, printed as it is read; other units have no loader."""
    for written in ("100 batches of b", "1 batch of my books", "2k batches of 0"):
        quantity = Quantity.parse(written)
        assert quantity.unit == "batches" and Quantity.parse(str(quantity)) == quantity
    assert Quantity.parse("1 batch of my books").loader == "my books"
    assert Schedule.parse(every="3 batches of b", stop="9 batches of a").loaders == ["b", "a"]
    assert not Schedule.parse(every="1 batch of b").always
    with pytest.raises(ConfigError, match="a loader has batches, not epochs; write '10 batches of b'"):
        Quantity.parse("2 epochs of b")


@pytest.mark.parametrize("unit", ["tokens", "seconds"])
def test_a_point_that_is_met_exactly_is_due_once(unit: str) -> None:
    """It is not passed again by what follows."""
    schedule = Schedule.parse(at=f"100 {unit}")
    before, there, after = (Reading(**{unit: number}) for number in (90, 100, 110))
    assert schedule.due(there, before) and not schedule.due(after, there)
