"""Costs: scaled up from samples, dear ones first, what never ran left out."""

import time

from hookline.core.base import TrainingHook, UpdateHook
from hookline.core.costs import Cost, cost_table, inner_seconds
from hookline.core.entry import Entry, find_listeners
from hookline.core.registry import HookRegistry
from hookline.core.schedule import Schedule


class Watch(TrainingHook):
    """A lifecycle hook."""

    def on_step_end(self) -> None: ...


class Link(UpdateHook):
    """An update hook."""

    def on_update(self, grads: object) -> None: ...


def entry(name: str, hook: object, inner: Cost, outer: Cost) -> Entry:
    """A hook with these accounts."""
    listeners = find_listeners(hook)
    return Entry(name, hook, 1, listeners, False, "warn", Schedule(), inner_cost=inner, outer_cost=outer)


def cost(ns: int, calls: int) -> Cost:
    """An account."""
    found = Cost()
    found.ns, found.calls = ns, calls
    return found


def test_costs_are_listed_by_hook_most_expensive_first() -> None:
    """An expensive outer event is seen at the top."""
    registry = HookRegistry()
    registry.register(lambda: None, "cheap", event="epoch_end")
    registry.register(lambda: time.sleep(0.01), "dear", event="epoch_end")
    registry.on_epoch_end()
    rows = registry.costs()
    assert [row["hook"] for row in rows] == ["dear", "cheap"] and rows[0]["seconds"] >= 0.01
    assert [row["calls"] for row in rows] == [1, 1]


def test_samples_stand_for_more_than_themselves() -> None:
    """Time inside steps is scaled, by the hook's own scale, and time outside is not."""
    watch = entry("watch", Watch(), cost(1_000_000, 2), cost(5_000_000, 1))
    other = entry("other", Watch(), cost(1_000_000, 2), cost(0, 0))
    scale = {"watch": 16.0, "other": 1.0}.__getitem__
    assert inner_seconds([watch, other], scale) == {"watch": 0.016, "other": 0.001}
    rows = cost_table([other, watch], {}, scale)
    assert [(row["hook"], row["calls"], round(row["seconds"], 6)) for row in rows] == [
        ("watch", 33, 0.021), ("other", 2, 0.001),
    ]  # fmt: skip


def test_dear_arguments_have_rows_of_their_own() -> None:
    """Reading a value that costs is listed beside the hooks; reading a free one is no news."""
    arguments = {"loss": cost(2_000_000, 7), "step": cost(90_000, 1000)}
    (row,) = cost_table([], arguments, lambda name: 1.0)
    assert row == {"hook": "reading loss", "kind": "argument", "calls": 7, "seconds": 0.002}


def test_a_link_that_never_ran_is_not_listed() -> None:
    """The default update hook costs nothing and says nothing; a watcher that heard nothing is still listed."""
    link, watch = entry("link", Link(), Cost(), Cost()), entry("watch", Watch(), Cost(), Cost())
    assert [row["hook"] for row in cost_table([link, watch], {}, lambda name: 1.0)] == ["watch"]
