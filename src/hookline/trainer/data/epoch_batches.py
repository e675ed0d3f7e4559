"""Iterate over the batches of one epoch, from its start or from the position that a checkpoint saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from hookline.errors import CheckpointError
from hookline.trainer.data.loader_state import (
    has_state,
    iterate_from,
    loader_states,
    preserve_parts,
    raise_shorter_loader,
    restore_loader_states,
    restore_start,
    start_state,
)
from hookline.trainer.data.loaders import (
    TrainLoaders,
    known_length,
    raise_no_batches,
    smallest,
    trusted_length,
)
from hookline.trainer.rng import preserve_rng, restore_rng, rng_state

OnLoader = Callable[[int, str], None]  # index and name of the loader that the next batch comes from
_NOTHING = object()


def epoch_batches(
    loaders: TrainLoaders, look_ahead: bool, on_loader: OnLoader, epoch: int
) -> SequentialBatches | MixedBatches:
    """Return the batches of one epoch, to be started or resumed.

    Args:
        loaders: The training loaders and how they are mixed.
        look_ahead: Whether the last batch must be recognised when it is given.
        on_loader: Called with index and name of the loader that batches come from; with several, before each batch.
        epoch: The epoch's number, which seeds a weighted schedule.
    """
    if len(loaders) > 1 and not loaders.schedule.sequential:
        return MixedBatches(loaders, on_loader, epoch)
    return SequentialBatches(loaders, look_ahead, on_loader)


class _EpochBatches:
    """What both kinds have: where an epoch ends, and the checks of a saved position."""

    length: int | None  # the batches of the epoch, if that is certain

    def __init__(self, loaders: TrainLoaders, on_loader: OnLoader) -> None:
        self.last = False  # whether the batch given last is known to be the epoch's last
        self.offset = 0  # the batches before the position that the epoch was resumed at
        self._loaders, self._limit = loaders, loaders.limit
        self._names, self._on_loader = list(loaders), on_loader

    def _check_schedule(self, position: Mapping[str, Any], kind: str) -> None:
        """Raise CheckpointError if the position was saved under another schedule."""
        before = position.get("schedule", "sequential")
        if before != kind:
            raise CheckpointError(
                f"the run was inside an epoch with loader_schedule={before!r}, which is {kind!r} now: resume with the "
                "same schedule, or from a checkpoint between two epochs"
            )

    def _check_limit(self, count: int) -> None:
        """Raise CheckpointError if the saved position lies after the epoch's present end."""
        if self._limit is not None and count > self._limit:
            raise CheckpointError(
                f"the run had read {count} batches of an epoch, and epochs are cut off after {self._limit} now "
                "(limit_train_batches, overfit_batches or fast_dev_run): raise that limit, or resume from a checkpoint "
                "between two epochs"
            )


class SequentialBatches(_EpochBatches):
    """Read one loader after another. A single loader is iterated over directly, without a generator around it.

    Where a length cannot be trusted, one batch is read ahead to recognise the last one: always if `look_ahead` is set,
    else from the last batch that len() promised, because there may be more.
    """

    def __init__(self, loaders: TrainLoaders, look_ahead: bool, on_loader: OnLoader) -> None:
        super().__init__(loaders, on_loader)
        trusted = all(trusted_length(loader) is not None for loader in loaders.values())
        lengths = [None if has_state(loader) else known_length(loader) for loader in loaders.values()]
        known = [length for length in lengths if length is not None]
        self._trusted, self._look_ahead = trusted, look_ahead and not trusted
        self.length = smallest(sum(known) if trusted else None, self._limit)
        self._promised: int | None = None  # what the loaders say together, if that decides where the epoch ends
        is_cut = self.length is not None and sum(known) >= self.length
        if not self._look_ahead and not is_cut and len(known) == len(lengths):
            self._promised = sum(known)
        self._position: dict[str, Any] = {}
        self._enter(0)

    def start(self) -> Iterator[Any]:
        """Start the epoch with the first loader."""
        return self._read(self._start_loader(0, before=0))

    def resume(self, position: Mapping[str, Any], count: int) -> Iterator[Any]:
        """Continue after `count` batches, at a saved position; random streams keep their states."""
        self._check_schedule(position, "sequential")
        name, before, states = position["loader"], position["before"], position.get("states", {})
        if name not in self._names:
            raise CheckpointError(f"the run was inside the loader {name!r}; now there are {', '.join(self._names)}")
        self._enter(self._names.index(name))
        self.offset, self._position = count, dict(position)
        if self._trusted:
            rest = [known_length(self._loaders[other]) or 0 for other in self._names[self._index :]]
            self.length = smallest(before + sum(rest), self._limit)
        if self._promised is not None:  # the length of a sampler may change from epoch to epoch
            self._promised = position.get("promised", self._promised)
        if not self._look_ahead:
            self._position.pop("states", None)  # `position` reads the loader's state when it is asked for
        with preserve_rng():
            restore_start(self._loader, position["beginning"])
            restore_loader_states(self._loader, states)
            skip = 0 if states else count - before
            batches = iterate_from(name, self._loader[name], skip)
            self._check_limit(count)
            if self._is_ahead and skip and "ahead" in position:
                restore_rng(position["ahead"])
            return self._read(batches)

    @property
    def start_position(self) -> dict[str, Any]:
        """The position when the epoch starts; no loader has a state of its own yet."""
        return dict(self._position)

    @property
    def position(self) -> dict[str, Any]:
        """The current loader, the state it was started with, and its own state_dict if it has one."""
        states = {} if self._look_ahead else loader_states(self._loader)
        return {"states": states, **self._position}

    def end_states(self) -> dict[str, Any]:
        """Return the state_dicts of the loaders that have one, after the end of the epoch.

        Nothing if the epoch was cut off: such a loader's state says that it is inside the epoch, but the next epoch
        starts without it.
        """
        return loader_states(self._loaders) if self.length is None else {}

    @property
    def _is_ahead(self) -> bool:
        """Whether the batch after the resumed position had been read already."""
        return self._look_ahead or (self._promised is not None and self.offset >= self._promised)

    def _enter(self, index: int) -> str:
        """Make a loader the one that batches come from, and return its name."""
        name = self._names[index]
        self._index, self._loader = index, {name: self._loaders[name]}
        return name

    def _report_loader(self) -> None:
        self._on_loader(self._index, self._names[self._index])

    def _start_loader(self, index: int, before: int) -> Iterator[Any]:
        """Start a loader and note the states that decide its order first."""
        name = self._enter(index)
        self._position = {"loader": name, "before": before, "beginning": start_state(self._loader)}
        if self._promised is not None:
            self._position["promised"] = self._promised
        return iter(self._loader[name])

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        several = len(self._names) > 1
        if several:
            batches = self._chain(batches)
        if self._is_ahead:
            return self._read_ahead(batches, next(batches, _NOTHING))
        if self._promised is not None:
            return self._read_promised(batches, self._promised)
        if not several:
            self._report_loader()
        return batches

    def _chain(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Read the loaders one after another."""
        count, each = self.offset, self._loaders.each
        while True:
            if each is not None:
                batches = islice(batches, each - (count - self._position["before"]))
            for batch in batches:
                count += 1
                if not self._look_ahead and self._promised is None:
                    self._report_loader()
                yield batch
            if count == self._position["before"]:  # an iterator in its second epoch: other loaders would hide it
                raise_no_batches("training", *next(iter(self._loader.items())))
            if self._index + 1 == len(self._names):
                return
            batches = self._start_loader(self._index + 1, count)

    def _read_promised(self, batches: Iterator[Any], promised: int) -> Iterator[Any]:
        """Read without looking ahead up to the last promised batch, and look ahead from there on."""
        for _ in range(self.offset + 1, promised):
            if (batch := next(batches, _NOTHING)) is _NOTHING:
                return
            self._report_loader()
            yield batch
        yield from self._read_ahead(batches, next(batches, _NOTHING))

    def _read_ahead(self, batches: Iterator[Any], batch: Any) -> Iterator[Any]:
        while batch is not _NOTHING:
            self._report_loader()
            # Reading ahead moves the streams of a dataset that draws: a resumed run must read it from here, too.
            self._position.update(ahead=rng_state(), states=loader_states(self._loader))
            following = next(batches, _NOTHING)
            self.last = following is _NOTHING
            yield batch
            batch = following


class MixedLoader:
    """One loader of a mixture, which starts again after its end. After each batch it knows whether there is another.

    Where its length cannot be trusted, one batch is read ahead for that.
    """

    def __init__(self, name: str, loader: Iterable[Any], idle_states: dict[str, Any]) -> None:
        self.name, self.ended = name, False  # ended: it has been read to its end at least once
        self._loader, self._idle_states = {name: loader}, idle_states
        self._length = trusted_length(loader)
        self._inside = False  # whether a pass over the loader has started and not ended
        self._count = 0  # batches given in this pass
        self._batches: Iterator[Any] = iter(())
        self._following: Any = _NOTHING  # read ahead
        self._position: dict[str, Any] = {}

    def next(self) -> Any:
        """Return the next batch; starts another pass after the end of one."""
        if not self._inside:
            self._start()
        batch = self._following if self._length is None else next(self._batches, _NOTHING)
        if batch is _NOTHING:
            raise_no_batches("training", self.name, self._loader[self.name])
        self._count += 1
        if self._length is None:
            self._read_ahead()
        if self._at_end():
            self.ended, self._inside = True, False
            self._idle_states[self.name] = loader_states(self._loader)
        return batch

    def _start(self) -> None:
        """Start a pass; the loader's own state and what decides its order are noted first."""
        self.idle_state()
        self._inside, self._count, self._position = True, 0, {"beginning": start_state(self._loader)}
        self._batches = iter(self._loader[self.name])
        if self._length is None:
            self._read_ahead()

    def _at_end(self) -> bool:
        return self._following is _NOTHING if self._length is None else self._count == self._length

    def _read_ahead(self) -> None:
        # This moves the streams of a dataset that draws: a resumed run must read it from here, too.
        self._position.update(ahead=rng_state(), states=loader_states(self._loader))
        self._following = next(self._batches, _NOTHING)

    def idle_state(self) -> dict[str, Any]:
        """Return the loader's own state as it was when the loader was last between two passes.

        A loader that an epoch left inside its data says now that it is still there, but it will start again.
        """
        return self._idle_states.setdefault(self.name, loader_states(self._loader))  # type: ignore[no-any-return]

    @property
    def position(self) -> dict[str, Any]:
        """How far the current pass is, and the state it was started with."""
        inside = self._position if self._inside else {}
        return {"given": self._count, "ended": self.ended, "between": self.idle_state(), **inside}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue at a saved position; the caller restores training's random streams."""
        self._count, self.ended, self._inside = position["given"], position["ended"], "beginning" in position
        self._idle_states[self.name] = position["between"]
        if not self._inside:
            restore_loader_states(self._loader, position["between"])
            return
        states = position.get("states", {})
        restore_start(self._loader, position["beginning"])
        restore_loader_states(self._loader, states)
        self._position = {"beginning": position["beginning"]}
        self._batches = iterate_from(self.name, self._loader[self.name], 0 if states else self._count)
        if self._length is None:
            if "ahead" in position:  # not if the loader was a list when the position was saved
                restore_rng(position["ahead"])
            self._read_ahead()
        if self._at_end():  # there was another batch, or the pass would have ended
            raise_shorter_loader(self.name, self._loader[self.name], self._count, self._count)

    def close(self) -> None:
        """Release the loader's iterator."""
        self._batches, self._following = iter(()), _NOTHING


class MixedBatches(_EpochBatches):
    """Mix several loaders by a schedule. The last batch is recognised without reading another."""

    def __init__(self, loaders: TrainLoaders, on_loader: OnLoader, epoch: int) -> None:
        super().__init__(loaders, on_loader)
        self.length = loaders.limit  # otherwise the schedule says where the epoch ends
        self._schedule = loaders.schedule
        self._order = self._schedule.order(self._names, epoch)
        self._following = 0  # the loader that the next batch comes from
        self._members = [MixedLoader(name, loader, loaders.idle_states) for name, loader in loaders.items()]

    def start(self) -> Iterator[Any]:
        """Start the epoch; each loader starts with its first batch."""
        self._following = self._order.next()
        return self._mix()

    def resume(self, position: Mapping[str, Any], count: int) -> Iterator[Any]:
        """Continue after `count` batches, at a saved position; random streams keep their states."""
        self._check_schedule(position, self._schedule.kind)
        if list(position["loaders"]) != self._names:
            raise CheckpointError(
                f"the run was mixing the loaders {', '.join(position['loaders'])}; now there are "
                f"{', '.join(self._names)}: resume with the same loaders, or from a checkpoint between two epochs"
            )
        with preserve_rng(), preserve_parts(self._loaders, self._loaders, (torch.Generator,)):
            for member in self._members:
                member.resume(position["loaders"][member.name])
        self._check_limit(count)
        self._order.restore(position["turns"])
        self._following, self.offset = position["turn"], count
        return self._mix()

    @property
    def position(self) -> dict[str, Any]:
        """The loader that comes next, and the position of every loader."""
        return {
            "schedule": self._schedule.kind,
            "turn": self._following,
            "turns": self._order.state(),
            "loaders": {member.name: member.position for member in self._members},
        }

    start_position = position

    def end_states(self) -> dict[str, Any]:
        """Return the loaders' own states as they were between two passes."""
        return {name: state for member in self._members for name, state in member.idle_state().items()}

    def _mix(self) -> Iterator[Any]:
        try:
            while not self.last:
                member = self._members[self._following]
                batch = member.next()
                self._on_loader(self._following, member.name)
                self._following = self._order.next()
                self.last = self._schedule.is_over([member.ended for member in self._members], self._following)
                yield batch
        finally:  # also when a run stops inside the epoch: workers left to the garbage collector take seconds to end
            for member in self._members:
                member.close()
