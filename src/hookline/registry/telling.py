"""What a registry can tell about its hooks: who hears an event and why in that order, and who is calling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType

from hookline.events.catalog import Event
from hookline.registry.entry import Entry
from hookline.registry.order import Place


def explanation(event: Event, places: Iterable[Place], entries: Mapping[str, Entry]) -> Iterator[str]:
    """A line about the event, then one for each hook that hears it, in their order."""
    yield f"{event.name}: {event.fires}; gradients: {event.gradients}"
    hearing = [place for place in places if place.name in entries and event.name in entries[place.name].listeners]
    for index, place in enumerate(hearing, 1):
        entry = entries[place.name]
        status = "" if entry.enabled else " [disabled]"
        when = f" ({entry.schedule})" if event.inner and not entry.schedule.always else ""
        named = ", ".join(event.arguments_of(entry.listeners[event.name].wanted)) or "nothing"
        yield f"  {index}. {place.name}{status}{when}: {place.why}; names {named}"
    if not hearing:
        yield "  nobody hears it"


def calling_hook(frame: FrameType | None, entries: Iterable[Entry]) -> str | None:
    """The hook that a call came from, found on the stack."""
    known = list(entries)
    owners = {id(entry.hook): entry.name for entry in known}
    codes = {getattr(entry.hook, "__code__", None): entry.name for entry in known}
    while frame is not None:
        name = owners.get(id(frame.f_locals.get("self"))) or codes.get(frame.f_code)
        if name is not None:
            return name
        frame = frame.f_back
    return None
