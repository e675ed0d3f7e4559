"""Handle exceptions raised by hooks: apply the failure policy (its default is in registry.py), and report incidents.

Exceptions are annotated with the hook and the event, never replaced and never hidden. KeyboardInterrupt and
any other exception that is not an `Exception` end the run under every policy; so does quitting the debugger (BdbQuit).
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal

from hookline._console import logger
from hookline._words import nearest
from hookline.core.catalog import CATALOG, Event
from hookline.errors import ConfigError, HooklineError, MissingArgument, StopTraining, add_note, error_text, notes_of
from hookline.ranks import Ranks

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook
    from hookline.core.entry import Entry

Policy = Literal["warn", "disable", "raise"]
POLICIES: dict[Policy, str] = {
    "warn": "report once with traceback, count, disable after 3 failures in a row at one event",
    "disable": "report and disable at the first failure",
    "raise": "end the run",
}
STRIKES = 3
RESERVED_KEYS = ("step", "epoch", "time")
"""Fields of every record line, which hooks cannot add to metrics."""


@dataclass(frozen=True)
class Incident:
    """Something the run record stores about a hook: it failed, was disabled, was reverted, drew random numbers."""

    kind: str
    hook: str
    event: str
    step: int
    message: str
    error: BaseException | None = None


@dataclass
class FailureCount:
    """Count one hook's failures: all of them, and those in a row at each event."""

    total: int = 0
    in_a_row: dict[str, int] = field(default_factory=dict)

    def add(self, event: str) -> int:
        """Count one more failure, and return how many there were in a row at this event."""
        self.total += 1
        self.in_a_row[event] = self.in_a_row.get(event, 0) + 1
        return self.in_a_row[event]


def check_policy(value: str, path: str = "on_error") -> Policy:
    """Return a failure policy by name.

    Raises:
        ConfigError: If no policy has this name; the message lists the choices.
    """
    for policy in POLICIES:
        if value == policy:
            return policy
    raise ConfigError(path, f"{value!r} is not a failure policy; {nearest(str(value), POLICIES)}")


def raise_if_quit(error: BaseException, where: str) -> None:
    """Raise KeyboardInterrupt if an exception in user code means that the user quit the debugger there.

    All code that continues after an exception in user code calls this first.
    """
    if isinstance(error, BdbQuit):
        raise KeyboardInterrupt(f"quit in the debugger in {where}") from None


def first_failure(*calls: Callable[[], object]) -> BaseException | None:
    """Make all calls, whatever they raise, and return the first exception."""
    raised: BaseException | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:
            raised = error if raised is None else raised
    return raised


def argument_if_any(args: Any, name: str, default: Any) -> Any:
    """Return an event argument for a report; the default if the event has none or was fired without it."""
    try:
        return getattr(args, name, default)
    except MissingArgument:
        return default


def hook_notes(error: BaseException) -> list[str]:
    """Return the notes of an exception that say which hook raised it and where; none if no hook did."""
    return [note for note in notes_of(error) if note.startswith("raised by hook")]


def step_of(args: Any) -> int:
    """Return the step for a report; 0 if the event was fired manually without one."""
    return int(argument_if_any(args, "step", 0))


class FailureHandler:
    """Apply the failure policies of a registry's hooks, count failures and reverts, and report incidents."""

    def __init__(self, entries: Mapping[str, Entry], disable: Callable[[str], None]) -> None:
        self._entries, self._disable = entries, disable
        self._subscribers: list[Callable[[Incident], Any]] = []
        self.debug = False
        """Treat every hook's policy as 'raise'."""
        self.ranks = Ranks()
        self.current_step: Callable[[], int] = lambda: 0
        """Returns the run's step, for failures outside of events."""
        self.calling: dict[int, tuple[str, str] | None] = {}
        """The hook that each thread is calling, by the thread's id, and the event or the method."""
        self.around_method: Callable[[str, str], AbstractContextManager[None]] = lambda hook, method: nullcontext()
        """Returns the context in which a method of a hook runs that is not an event."""

    def subscribe(self, subscriber: Callable[[Incident], Any]) -> Callable[[], None]:
        """Call a function with every incident; returns a function that ends the subscription."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def report(self, incident: Incident, first: bool) -> None:
        """Pass an incident to the subscribers, and log it with its traceback if it is the `first` of its kind."""
        for subscriber in self._subscribers:
            subscriber(incident)
        if first:
            logger.warning(
                "hook %r, %s, step %d: %s", incident.hook, incident.event, incident.step, incident.message,
                exc_info=incident.error, of_rank=True,
            )  # fmt: skip

    def report_revert(self, hook: str, event: str, step: int, message: str) -> None:
        """Count a change that was reverted because it was not the hook's to make; report the first per event."""
        entry = self._entries.get(hook)
        if entry is not None:
            entry.overruled[event] = entry.overruled.get(event, 0) + 1
            if entry.overruled[event] == 1:
                self.report(Incident("overruled", hook, event, step, message), True)

    def handle(self, event: Event, hook: BoundHook, error: Exception, args: Any) -> Exception | None:
        """Apply a hook's failure policy to an exception it raised.

        Args:
            event: The event at which the hook was called.
            hook: The hook that raised.
            error: The exception; it is annotated with hook, event and step.
            args: The event's arguments.

        Returns:
            The exception if the run must end with it, once the other hooks have been called; None if it is handled.

        Raises:
            KeyboardInterrupt: If the user quit the debugger in the hook; the other hooks are not called.
        """
        step = step_of(args)
        if isinstance(error, StopTraining):
            request = argument_if_any(args, "request_stop", None)
            if request is None:
                return error  # The event was fired manually: only the loop's owner can stop it.
            request(error_text(error).partition(": ")[2] or "StopTraining", by=hook.hook)
            return None
        entry = self._entries.get(hook.hook)  # None if it was removed while it was running.
        original = argument_if_any(args, "exception", None) if event.closing else None
        return self.apply_policy(entry, hook.hook, event.name, error, step, original)

    def apply_policy(
        self,
        entry: Entry | None,
        hook: str,
        where: str,
        error: Exception,
        step: int | None = None,
        original: BaseException | None = None,
    ) -> Exception | None:
        """Apply a failure policy to an exception that a hook raised, at an event or in another of its methods.

        Args:
            entry: The hook's entry in the registry; None if it was removed.
            hook: The hook's name.
            where: The event or the method that raised.
            error: The exception; it is annotated with hook, event and step.
            step: The step; the run's current one unless given.
            original: The exception that is ending the run, if any: `error` becomes a note of it.

        Returns:
            The exception if the run must end with it; None if it is handled.

        Raises:
            KeyboardInterrupt: If `error` means that the user quit the debugger.
        """
        step = self.current_step() if step is None else step
        raise_if_quit(error, f"hook {hook!r}, {where}, step {step}")
        note = f"raised by hook {hook!r} in {where}, step {step}"
        several = self.ranks.world_size > 1
        note += f", rank {self.ranks.rank}" if several else ""
        add_note(error, note)
        incident = Incident("failed", hook, where, step, f"failed: {error_text(error)}", error)
        policy = "warn" if entry is None else entry.policy
        # The other ranks have done their part: they would wait for this rank, or the weights would differ.
        if self.debug or (entry and entry.must_not_differ(self.ranks)) or (several and where == "on_update"):
            policy = "raise"
        must_raise = (policy == "raise" or getattr(error, "always_raise", False)) and original is None
        strikes = 0 if entry is None else entry.failures.add(where)
        if entry is None or must_raise:
            self.report(incident, entry is None)
            return error if must_raise else None
        if where == "state_dict" and not entry.enabled and entry.failures.total > 1:
            return None  # it was reported; the state of a disabled hook is read at every checkpoint
        if original is not None and original is not error:
            add_note(original, f"hook {hook!r} then failed in {where}: {error_text(error)}")
        # In a method that is not an event, a hook fails for reasons other than those at its events.
        self.report(incident, entry.failures.total == 1 or (strikes == 1 and where not in CATALOG))
        is_switched_off = entry.policy == "disable" or strikes >= STRIKES
        if is_switched_off and self._entries.get(entry.name) is entry:  # Another thread may have removed it.
            with suppress(HooklineError):  # Another thread may remove it now.
                self._disable(entry.name)
            message = f"disabled after {strikes} failure{'s' if strikes > 1 else ''} in a row"
            self.report(Incident("disabled", entry.name, where, step, message), True)
        return None

    @contextmanager
    def call(self, hook: str, method: str) -> Iterator[None]:
        """Note which hook is being called while a block calls one of its methods that is not an event."""
        thread = get_ident()
        outer = self.calling.get(thread)
        self.calling[thread] = hook, method
        try:
            with self.around_method(hook, method):
                yield
        finally:
            self.calling[thread] = outer

    def call_method(self, entry: Entry, method: str, call: Callable[[], Any]) -> Any:
        """Call a method of a hook that is not an event, and return its result; None if its policy handled a failure."""
        try:
            with self.call(entry.name, method):
                return call()
        except Exception as error:
            if self.apply_policy(entry, entry.name, method, error) is not None:
                raise
            return None

    def state_of(self, entry: Entry, read: Callable[[], Any]) -> Any:
        """Return a state that a hook saves; if that fails, apply the hook's policy, and return None if handled."""
        state = self.call_method(entry, "state_dict", read)
        if state is not None:  # an update hook has a second state, which may be the one that fails
            entry.failures.in_a_row.pop("state_dict", None)
        return state

    def restore_metrics(self, event: Event, hook: BoundHook, args: Any, name: str, before: dict[str, Any]) -> None:
        """Undo changes a hook made to metrics that other hooks own; keep the keys it added.

        At the end of a validation a user's hook may also replace numbers, for the hooks after it and for the record.
        With several ranks it may not, because they decide by numbers that all of them have measured.

        Reserved keys ("step", "epoch", "time") are removed, because every record line already has them. Each revert is
        counted; the first one per hook and event is reported.

        Args:
            event: The event at which the hook was called.
            hook: The hook that changed the metrics.
            args: The event's arguments.
            name: The attribute of `args` that holds the metrics.
            before: The metrics before the hook was called.
        """
        metrics = getattr(args, name)
        for key in [key for key in metrics if key not in before and key in RESERVED_KEYS]:
            del metrics[key]
            message = f"added {key!r} to metrics, which every record already has; choose another name"
            self.report_revert(hook.hook, event.name, step_of(args), message)
        lost = [key for key, value in before.items() if key not in metrics or metrics[key] is not value]
        if event.name == "on_validation_end" and not hook.built_in and self.ranks.world_size == 1:
            for key in [key for key in lost if isinstance(metrics.get(key), (int, float))]:
                lost.remove(key)
                note = argument_if_any(args, "note_metric", None)
                if note is not None:
                    note(hook.hook, event.name, key, before[key], metrics[key])
        for key in lost:
            metrics[key] = before[key]
        if lost:
            what = ", ".join(repr(key) for key in lost)
            message = f"changed or removed {what} in metrics; the change was undone. Add your own keys instead"
            self.report_revert(hook.hook, event.name, step_of(args), message)
        if (mirror := getattr(type(args), "mirror_metrics", None)) is not None:
            mirror(args, name)
