"""Keeps hooks from moving training's random streams, and gives those that draw streams of their own.

Looking before and after every call of every hook would cost more than the hooks. So there is one look around an event.
If somebody drew, training's streams are put back, and from then on that event is watched hook by hook until it is known
who it was. That hook then draws from persistent streams of its own: merely rewinding would make it draw the same number
for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hookline.events.catalog import Event
from hookline.events.dispatch import Bound
from hookline.events.policy import Incident
from hookline.events.streams import OwnStreams, Seen, Streams, Watch, isolates

Told = Callable[[Incident, bool], None]


class Guard:
    """Watches the users' hooks of one registry while a run is on; our own are known not to draw."""

    def __init__(self, tell: Told, changed: Callable[[], None]) -> None:
        self._tell, self._changed = tell, changed
        self._streams: Streams | None = None
        self._seed = 0
        self._step: Callable[[], int] = lambda: 0
        self._suspects: set[str] = set()  # events at which somebody drew, and it is not known who
        self._own: dict[str, OwnStreams] = {}

    def begin(self, seed: int, step: Callable[[], int], cuda_devices: Iterable[int] = ()) -> None:
        """A run begins: its streams, also on these devices, are to be kept as they are. `step` says where it is."""
        self._streams, self._seed, self._step = Streams(cuda_devices), seed, step
        self._changed()

    def end(self) -> None:
        """The run is over."""
        self._streams = None
        self._changed()

    def dress(self, event: Event, bound: Sequence[Bound]) -> list[Bound]:
        """The listeners as they shall be called: on their own streams, or watched one by one."""
        return list(bound) if self._streams is None else [self._dressed(event, item, bound) for item in bound]

    def watch(self, event: Event, bound: Sequence[Bound]) -> Watch | None:
        """One look before and after the whole event, where there is somebody to watch and that is enough."""
        watched = [item.hook for item in bound if self._protects_from(item)]
        if self._streams is None or not watched or self._one_by_one(event, bound):
            return None
        return Watch(self._streams, lambda seen: self._somebody_drew(event, watched, seen))

    def _dressed(self, event: Event, item: Bound, bound: Sequence[Bound]) -> Bound:
        assert self._streams is not None
        call = item.listener.call
        if item.hook in self._own:
            call = self._own[item.hook].lend_to(call)
        elif self._protects_from(item) and self._one_by_one(event, bound):
            call = self._streams.guard(call, lambda seen: self._somebody_drew(event, [item.hook], seen))
        else:
            return item
        return replace(item, listener=replace(item.listener, call=call))

    def _one_by_one(self, event: Event, bound: Sequence[Bound]) -> bool:
        """Whether one look at the whole event would not tell, or would undo what a hook may do."""
        return event.name in self._suspects or not all(isolates(item.owner) for item in bound)

    def _protects_from(self, item: Bound) -> bool:
        return not item.built_in and isolates(item.owner) and item.hook not in self._own

    def _somebody_drew(self, event: Event, among: Sequence[str], seen: Seen) -> None:
        """Put training's streams back; the hook that drew gets its own if it is known, else is looked for."""
        assert self._streams is not None
        moved = ", ".join(self._streams.put_back(seen))
        if len(among) > 1:
            self._suspects.add(event.name)
        else:
            (hook,) = among
            self._own[hook] = OwnStreams(self._streams, self._seed, hook)
            message = (
                f"drew from training's random streams or seeded them ({moved}); they were put back, and from now on it "
                "has streams of its own. A hook that shall seed training says isolate_rng = False"
            )
            self._tell(Incident("drew", hook, event.name, self._step(), message), True)
        self._changed()

    # ---- saved with the run --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Whose streams stand where."""
        return {
            "suspects": sorted(self._suspects),
            "hooks": {name: own.state_dict() for name, own in self._own.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        streams = self._streams or Streams()
        self._suspects = set(saved["suspects"])
        self._own = {}
        for name, state in saved["hooks"].items():
            self._own[name] = OwnStreams(streams, self._seed, name)
            self._own[name].load_state_dict(state)
        self._changed()
