"""What happens when a hook misbehaves: it fails, asks for a stop, or changes what is not its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hookline.errors import HooklineError, StopTraining
from hookline.events.catalog import Event
from hookline.events.dispatch import Bound, Cost
from hookline.events.moment import HandMoment, known, known_step
from hookline.events.policy import STRIKES, Incident, annotate, must_raise, report
from hookline.registry.entry import Entry

RESERVED = ("step", "epoch", "time")  # fields of every record


class Desk:
    """Treats incidents by the hooks' policies, counts them, and tells whoever keeps the record."""

    def __init__(
        self, entries: Mapping[str, Entry], changed: Callable[[], None], switch_off: Callable[[str], None]
    ) -> None:
        self._entries, self._changed, self._switch_off = entries, changed, switch_off
        self._listeners: list[Callable[[Incident], Any]] = []
        self.debug = False  # every hook's policy is 'raise'
        self.rank = 0
        self.arguments: dict[str, Cost] = {}  # what reading each lazy argument cost

    def argument_cost(self, attribute: str) -> Cost:
        """The account of one lazy argument."""
        return self.arguments.setdefault(attribute, Cost())

    def watch(self, listener: Callable[[Incident], Any]) -> Callable[[], None]:
        """Hear of failures, switched-off hooks and stops; returns a function that ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def report(self, incident: Incident, first: bool) -> None:
        """Tell whoever listens; the console hears the first of its kind."""
        report(incident, first, self._listeners)

    def overruled(self, hook: str, event: str, step: int, message: str) -> None:
        """A hook changed what is not its own and it was undone: counted always, reported once per hook and event."""
        entry = self._entries.get(hook)
        if entry is not None:
            entry.overruled[event] = entry.overruled.get(event, 0) + 1
            if entry.overruled[event] == 1:
                self.report(Incident("overruled", hook, event, step, message), True)

    def failed(self, event: Event, bound: Bound, error: Exception, moment: Any) -> Exception | None:
        """Treat a hook's exception by its policy; returns what must be raised once the other hooks have been called."""
        entry = self._entries.get(bound.hook)
        step = known_step(moment)
        if isinstance(error, StopTraining):
            return self._stop(bound.hook, event, error, moment)
        annotate(error, bound.hook, event.name, step, self.rank)
        kind, message = "failed", f"failed: {type(error).__name__}: {error}"
        if entry is None:  # removed while it was running
            self.report(Incident(kind, bound.hook, event.name, step, message, error), True)
            return error if must_raise(error, "raise" if self.debug else "warn") and not event.closing else None
        strikes = entry.failures.add(event.name)
        if must_raise(error, "raise" if self.debug else entry.policy) and not event.closing:
            self.report(Incident(kind, bound.hook, event.name, step, message, error), False)
            return error
        if event.closing and (original := known(moment, "exception", None)) not in (None, error):
            original.add_note(f"hook {bound.hook!r} then failed in {event.name}: {error!r}")
        self.report(Incident(kind, bound.hook, event.name, step, message, error), entry.failures.total == 1)
        if entry.policy == "disable" or strikes >= STRIKES:
            self._strike_out(entry, event, step, strikes)
        elif strikes == 1:
            self._changed()  # from now on a success must be noticed, to break the row
        return None

    def _strike_out(self, entry: Entry, event: Event, step: int, strikes: int) -> None:
        if self._entries.get(entry.name) is not entry:
            return  # another thread has removed it since
        with suppress(HooklineError):  # or does so now
            self._switch_off(entry.name)
        message = f"switched off after {strikes} failure{'s' if strikes > 1 else ''} in a row"
        self.report(Incident("disabled", entry.name, event.name, step, message), True)

    def _stop(self, hook: str, event: Event, error: StopTraining, moment: Any) -> Exception | None:
        request = getattr(moment, "request_stop", None) if not isinstance(moment, HandMoment) else None
        if request is None:
            return error  # nobody here can stop the loop but its owner
        request(str(error) or "StopTraining", by=hook)
        return None

    def recovered(self, event: Event, bound: Bound) -> None:
        """A hook that had failed at this event succeeded: its row of failures is broken."""
        entry = self._entries.get(bound.hook)
        if entry is not None and entry.failures.in_a_row.pop(event.name, 0):
            self._changed()

    def settle(self, event: Event, bound: Bound, moment: Any, name: str, before: dict[str, Any]) -> dict[str, Any]:
        """A hook changed the event's metrics: keep what it added, undo what it did to others' keys, and say so."""
        metrics = getattr(moment, name)
        for key in [key for key in metrics if key not in before and key in RESERVED]:
            del metrics[key]
            message = f"added {key!r} to metrics, which every record has already; choose another name"
            self.overruled(bound.hook, event.name, known_step(moment), message)
        lost = [key for key, value in before.items() if key not in metrics or metrics[key] is not value]
        for key in lost:
            metrics[key] = before[key]
        if lost:
            what = ", ".join(repr(key) for key in lost)
            message = f"changed or removed {what} in metrics; put back. Add keys of your own instead"
            self.overruled(bound.hook, event.name, known_step(moment), message)
        if (mirror := getattr(type(moment), "mirror_metrics", None)) is not None:
            mirror(moment, name)
        return dict(metrics)
