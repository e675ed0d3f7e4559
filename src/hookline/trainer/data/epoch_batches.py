"""Iterate over the batches of one epoch, from its start or from the position that a checkpoint saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from hookline.errors import CheckpointError
from hookline.run.rng import preserve_rng, restore_rng, rng_state
from hookline.trainer.data.loader_state import (
    has_state,
    iterate_from,
    known_length,
    loader_states,
    preserve_parts,
    raise_shorter_loader,
    restore_loader_states,
    restore_start,
    shared_sampler,
    start_state,
)
from hookline.trainer.data.loaders import TrainLoaders, epoch_length, raise_no_batches, smallest, trusted_length

OnLoader = Callable[[int, str], None]  # index and name of the loader that the next batch comes from
_NOTHING, _UNREAD = object(), object()


class _EpochBatches:
    """The batches of one epoch, to be started or resumed: where it ends, and the checks of a saved position.

    Args:
        loaders: The training loaders and how they are mixed.
        on_loader: Called with index and name of the loader that batches come from; with several, before each batch.
        world_size: The number of ranks, each of which reads other batches.
    """

    length: int | None  # the batches of the epoch, if that is certain

    def __init__(self, loaders: TrainLoaders, on_loader: OnLoader, world_size: int) -> None:
        # With one process, a position contains nothing about ranks.
        self._ranks = {"world_size": world_size} if world_size > 1 else {}
        self.last = False  # whether the batch given last is known to be the epoch's last
        self.offset = 0  # the batches before the position that the epoch was resumed at
        self._loaders, self._names, self._on_loader = loaders, list(loaders), on_loader
        self._schedule = loaders.kind if loaders.mixed else "sequential"

    def check(self, position: Mapping[str, Any], count: int) -> None:
        """Raise CheckpointError if `resume` cannot continue there, as far as that can be known without reading."""
        before, limit = position.get("schedule", "sequential"), self._loaders.limit
        if before != self._schedule:
            raise CheckpointError(
                f"the run was inside an epoch with loader_schedule={before!r}, which is {self._schedule!r} now: resume "
                "with the same schedule, or from a checkpoint between two epochs"
            )
        self._check_loaders(position)
        if limit is not None and count > limit:
            raise CheckpointError(
                f"the run had read {count} batches of an epoch, and epochs are cut off after {limit} now "
                "(limit_train_batches, overfit_batches or fast_dev_run): raise that limit, or resume from a checkpoint "
                "between two epochs"
            )

    def _check_loaders(self, position: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _check_ranks(self, position: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the position was saved by a different number of ranks, which read other batches."""
        then, now = (ranks.get("world_size", 1) for ranks in (position, self._ranks))
        if then != now:
            raise CheckpointError(
                f"the run was inside an epoch with {then} process{'es' * (then > 1)}, and now with {now}, whose "
                "loaders give other batches: use DataLoader(…, sampler=ResumableSampler(data)) as the only loader, "
                f"which any number of processes can continue, or resume with {then}, or from a checkpoint between two "
                "epochs"
            )


class SequentialBatches(_EpochBatches):
    """Read one loader after another. A single one with a certain length is iterated over without a generator around it.

    No batch is read before the loop asks for it, so that datasets and samplers draw random numbers in the order of a
    plain loop. Where a length cannot be trusted, the end of an epoch is known when it is reached.
    """

    def __init__(self, loaders: TrainLoaders, on_loader: OnLoader, epoch: int, world_size: int) -> None:
        super().__init__(loaders, on_loader, world_size)
        self._trusted = all(trusted_length(loader) is not None for loader in loaders.values())
        # The end of the epoch according to len(), which may be wrong.
        self._promised = loaders.total(
            None if has_state(loader) else known_length(loader) for loader in loaders.values()
        )
        self.length = smallest(self._promised if self._trusted else None, self._loaders.limit)
        # The state_dicts of loaders that this epoch has not reached; None if they are to be read when a checkpoint
        # needs them. Before an epoch has read every loader to its end, there is nothing to save.
        self._idle_states: Mapping[str, Any] | None = None if epoch > 0 and self.length is None else {}
        self._position: dict[str, Any] = {}
        self._before_peek: dict[str, Any] | None = None  # the position, while the next batch has been read already
        self._rest: Iterator[Any] = iter(())
        self._following: Any = _UNREAD
        self._index = 0  # The index of the loader that batches come from.

    def _check_loaders(self, position: Mapping[str, Any]) -> None:
        name = position["loader"]
        if name not in self._names:
            raise CheckpointError(f"the run was inside the loader {name!r}; now there are {', '.join(self._names)}")
        if shared_sampler(self._loaders[name]) is None:
            self._check_ranks(position)

    def start(self) -> Iterator[Any]:
        """Start the epoch with the first loader."""
        return self._read(self._start_loader(0, before=0))

    def resume(self, position: Mapping[str, Any], count: int) -> Iterator[Any]:
        """Continue after `count` batches, at a saved position; random streams keep their states."""
        self.check(position, count)
        name, before, states = position["loader"], position["before"], position["states"]
        start, loader = position.get("start", 0), self._loaders[name]
        self._index, self.offset, self._idle_states = self._names.index(name), count, states
        if (sampler := shared_sampler(loader)) is not None:
            before_by_ranks = position.get("world_size", 1)
            size = position.get("batch_size", loader.batch_size)  # type: ignore[attr-defined]
            if (before_by_ranks, size) != (sampler.world_size, loader.batch_size):  # type: ignore[attr-defined]
                # The rest of the order is read as batches that are independent of the earlier ones.
                start, before = start + (count - before) * size * before_by_ranks, count
            sampler.start_at(start)  # the loader's length now counts only the rest
        self._position = self._describe(name, before, position["beginning"], start)
        if self._trusted:
            left = [known_length(self._loaders[other]) or 0 for other in self._names[self._index :]]
            self.length = smallest(before + sum(left), self._loaders.limit)
        with preserve_rng():
            restore_start({name: loader}, position["beginning"])
            restore_loader_states(self._loaders, states)
            return self._read(iterate_from(name, loader, 0 if name in states else count - before, start))

    @property
    def position(self) -> dict[str, Any]:
        """The current loader, the state it was started with, and the state_dicts of all that were read before."""
        if self._before_peek is not None:
            return self._before_peek
        entered = {name: self._loaders[name] for name in self._names[: self._index + 1]}
        if self._idle_states is None:
            idle = {name: loader for name, loader in self._loaders.items() if name not in entered}
            with preserve_rng():  # some loaders start an iterator to return their state
                self._idle_states = loader_states(idle)
        return {**self._position, "states": {**self._idle_states, **loader_states(entered)}}

    @property
    def expected(self) -> int | None:
        """The number of batches of the epoch, at least according to len(); None if it is unknown."""
        return epoch_length(self._loaders) if self.length is None else self.length

    def end_states(self) -> dict[str, Any]:
        """Return the state_dicts of the loaders that have one, after the end of the epoch.

        Returns nothing if the epoch was cut off: the loader's state says that it is inside the epoch, but the next
        epoch starts without it.
        """
        return loader_states(self._loaders) if self.length is None else {}

    def has_more(self, count: int) -> bool:
        """Return whether the epoch has more than `count` batches; where that is not certain, read the next one.

        The loop asks after the backward pass of a micro-batch that does not complete its window. There a plain loop
        would read the next batch, too.
        """
        if self._trusted or count == self.length:
            return count != self.length
        if self._following is _UNREAD:
            self._before_peek = self.position
            self._following = next(self._rest, _NOTHING)
            self.last = self._following is _NOTHING
        return not self.last

    def stop(self, count: int) -> None:
        """Find out whether a run that stops after `count` batches stops at the end of the epoch, according to len()."""
        if self._promised is not None and count >= self._promised:
            with preserve_rng():  # a run that continues reads the batch again
                self.has_more(count)

    def _start_loader(self, index: int, before: int) -> Iterator[Any]:
        """Start a loader and note the states that decide its order first."""
        self._index, name = index, self._names[index]
        self._position = self._describe(name, before, start_state({name: self._loaders[name]}))
        return iter(self._loaders[name])

    def _describe(self, name: str, before: int, beginning: dict[str, Any], start: int = 0) -> dict[str, Any]:
        """Return the position of a pass over a loader that begins.

        Args:
            name: The loader.
            before: The batches of the epoch before the pass.
            beginning: The state it is started with.
            start: The indices of its sampler's order before the pass, if it continues one of other batches.
        """
        position = {"loader": name, "before": before, "beginning": beginning, **self._ranks}
        if shared_sampler(loader := self._loaders[name]) is not None:
            position |= {"batch_size": loader.batch_size}  # type: ignore[attr-defined]
        return position | ({"start": start} if start else {})

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        if len(self._names) > 1:
            batches = self._chain(batches)
        elif self._trusted:
            self._on_loader(self._index, self._names[self._index])
            return batches
        return self._hand_out(batches)

    def _chain(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Read the loaders one after another."""
        count, each = self.offset, self._loaders.each
        while True:
            if each is not None:
                batches = islice(batches, each - (count - self._position["before"]))
            for batch in batches:
                count += 1
                yield batch
            if count == self._position["before"]:  # an iterator in its second epoch; other loaders would hide this
                name = self._names[self._index]
                raise_no_batches("training", name, self._loaders[name])
            if self._index + 1 == len(self._names):
                return
            batches = self._start_loader(self._index + 1, count)

    def _hand_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Report the loader of each batch, and let `has_more` read the next one."""
        self._rest = batches
        try:
            while True:
                if (batch := self._following) is _UNREAD:
                    batch = next(batches, _NOTHING)
                if batch is _NOTHING:
                    return
                self._following, self._before_peek = _UNREAD, None
                self._on_loader(self._index, self._names[self._index])
                yield batch
        finally:  # A run may stop inside the epoch, so nothing may keep the workers of a loader alive.
            self._rest = iter(())


class MixedLoader:
    """One loader of a mixture, which starts again after its end."""

    def __init__(self, name: str, loader: Iterable[Any], idle_states: dict[str, Any]) -> None:
        self.name = name
        self._ended = False  # it has been read to its end at least once
        self._loader, self._idle_states = {name: loader}, idle_states
        self._length = trusted_length(loader)
        self._inside = False  # whether a pass over the loader has started and is not known to have ended
        self._count = 0  # batches given in this pass
        self._batches: Iterator[Any] = iter(())
        self._following: Any = _UNREAD
        self._position: dict[str, Any] = {}

    def next(self) -> Any:
        """Return the next batch; starts another pass after the end of one."""
        batch = self._take() if self._inside else _NOTHING
        if batch is _NOTHING:
            if self._inside:
                self._end_pass()
            self._start()
            batch = self._take()
        if batch is _NOTHING:
            raise_no_batches("training", self.name, self._loader[self.name])
        self._count += 1
        if self._count == self._length:
            self._end_pass()
        return batch

    def has_ended(self, may_read: bool) -> bool:
        """Return whether the loader is known to have been read to its end.

        Args:
            may_read: Whether to read the next batch to know it, where its length cannot be trusted.
        """
        if self._inside and not self._ended and self._length is None:
            if self._following is _UNREAD and may_read:
                self._read_ahead()
            if self._following is _NOTHING:
                self._end_pass()
        return self._ended

    def _take(self) -> Any:
        batch, self._following = self._following, _UNREAD
        return next(self._batches, _NOTHING) if batch is _UNREAD else batch

    def _start(self) -> None:
        """Start a pass; the loader's own state and what decides its order are noted first."""
        self.idle_state()
        self._inside, self._count, self._position = True, 0, {"beginning": start_state(self._loader)}
        self._batches = iter(self._loader[self.name])

    def _end_pass(self) -> None:
        self._ended, self._inside, self._following = True, False, _UNREAD
        self._idle_states[self.name] = loader_states(self._loader)

    def _read_ahead(self) -> None:
        # This advances the streams that a dataset draws from, so a resumed run must read it from here, too.
        self._position.update(ahead=rng_state(), states=loader_states(self._loader))
        self._following = next(self._batches, _NOTHING)

    def idle_state(self) -> dict[str, Any]:
        """Return the loader's own state as it was when the loader was last between two passes.

        A loader that an epoch left inside its data reports this position, but it will start again.
        """
        return self._idle_states.setdefault(self.name, loader_states(self._loader))  # type: ignore[no-any-return]

    @property
    def position(self) -> dict[str, Any]:
        """The progress of the current pass, and the state with which it was started."""
        position = {"given": self._count, "ended": self._ended, "between": self.idle_state()}
        if not self._inside:
            return position
        if self._following is not _UNREAD:
            return {**position, **self._position}
        return {**position, "beginning": self._position["beginning"], "states": loader_states(self._loader)}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue at a saved position; the caller restores training's random streams."""
        self._count, self._ended, self._inside = position["given"], position["ended"], "beginning" in position
        self._idle_states[self.name] = position["between"]
        if not self._inside:
            restore_loader_states(self._loader, position["between"])
            return
        states = position["states"]
        restore_start(self._loader, position["beginning"])
        restore_loader_states(self._loader, states)
        self._position = {"beginning": position["beginning"]}
        self._batches = iterate_from(self.name, self._loader[self.name], 0 if states else self._count)
        if "ahead" in position:
            restore_rng(position["ahead"])
            self._read_ahead()
        if self._count == self._length or self._following is _NOTHING:  # there was another batch
            raise_shorter_loader(self.name, self._loader[self.name], self._count, self._count)

    def close(self) -> None:
        """Release the loader's iterator."""
        self._batches = iter(())


class MixedBatches(_EpochBatches):
    """Mix several loaders by a schedule.

    Before each batch, it checks whether the epoch is over. If it cannot trust the length of a loader, it may have to
    read that loader's next batch for this. The batch is kept until the loader's turn.
    """

    def __init__(self, loaders: TrainLoaders, on_loader: OnLoader, epoch: int, world_size: int) -> None:
        super().__init__(loaders, on_loader, world_size)
        self.length = loaders.limit  # otherwise the schedule says where the epoch ends
        self._order = loaders.order(epoch)
        self._following = 0  # the loader that the next batch comes from
        self._members = [MixedLoader(name, loader, loaders.idle_states) for name, loader in loaders.items()]

    def _check_loaders(self, position: Mapping[str, Any]) -> None:
        self._check_ranks(position)
        if list(position["loaders"]) != self._names:
            raise CheckpointError(
                f"the run was mixing the loaders {', '.join(position['loaders'])}; now there are "
                f"{', '.join(self._names)}: resume with the same loaders, or from a checkpoint between two epochs"
            )

    def start(self) -> Iterator[Any]:
        """Start the epoch; each loader starts with its first batch."""
        self._following = self._order.next()
        return self._mix()

    def resume(self, position: Mapping[str, Any], count: int) -> Iterator[Any]:
        """Continue after `count` batches, at a saved position; random streams keep their states."""
        self.check(position, count)
        with preserve_rng(), preserve_parts(self._loaders, self._loaders, (torch.Generator,)):
            for member in self._members:
                member.resume(position["loaders"][member.name])
        self._order.restore(position["turns"])
        self._following, self.offset = position["turn"], count
        return self._mix()

    @property
    def position(self) -> dict[str, Any]:
        """The loader that comes next, and the position of every loader."""
        return {
            **self._ranks,
            "schedule": self._schedule,
            "turn": self._following,
            "turns": self._order.state(),
            "loaders": {member.name: member.position for member in self._members},
        }

    def end_states(self) -> dict[str, Any]:
        """Return the loaders' own states as they were between two passes."""
        return {name: state for member in self._members for name, state in member.idle_state().items()}

    def has_more(self, count: int) -> bool:
        """Return whether the epoch has more than `count` batches; reads ahead if that is the only way to know."""
        self.last = self.last or self._is_over(may_read=True)
        return not self.last and count != self.length

    def stop(self, count: int) -> None:
        """Find out whether a run that stops after `count` batches stops at the end of the epoch."""
        with preserve_rng():
            self.has_more(count)

    def _is_over(self, may_read: bool) -> bool:
        """Return whether the epoch is over, as `loader_end` says; the loader that comes next is asked first."""
        if not self._members[self._following].has_ended(may_read):
            return False
        return self._loaders.end == "shortest" or all(member.has_ended(may_read) for member in self._members)

    def _mix(self) -> Iterator[Any]:
        try:
            while not self.last and not self._is_over(may_read=True):
                member = self._members[self._following]
                batch = member.next()
                self._on_loader(self._following, member.name)
                self._following = self._order.next()
                self.last = self._is_over(may_read=False)
                yield batch
        finally:  # A run may stop inside the epoch: workers left to the garbage collector take seconds to end.
            for member in self._members:
                member.close()
