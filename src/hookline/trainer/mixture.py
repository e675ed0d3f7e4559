"""Several loaders that take turns, as one stream of batches that can be left and entered anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hookline.errors import CheckpointError
from hookline.trainer.loaders import (
    NOTHING,
    EpochBatches,
    TrainLoaders,
    gives_what_it_says,
    known_length,
    refuse_loader_without_batches,
)
from hookline.trainer.positions import (
    back_to_beginning,
    begin_after,
    beginning_of,
    generators_untouched,
    has_state,
    own_states,
    refuse_shorter_loader,
    restore_own_states,
)
from hookline.trainer.rng import restore_rng, rng_state, rng_untouched


def batches_of_epoch(
    loaders: Mapping[str, Iterable[Any]], look_ahead: bool, enter: Callable[[int, str], None], epoch: int
) -> EpochBatches:
    """An epoch of the loaders: one after the other, or taking turns if they were told to."""
    if isinstance(loaders, TrainLoaders) and len(loaders) > 1 and not loaders.mixing.one_after_another:
        return MixedBatches(loaders, enter, epoch)
    return EpochBatches(loaders, look_ahead, enter)


class MixedLoader:
    """One loader of a mixture. After each batch it knows whether there is another.

    Where its length cannot be relied on, it is read one batch ahead for that.
    """

    def __init__(self, name: str, loader: Iterable[Any], between: dict[str, Any]) -> None:
        self.name, self.ended = name, False  # ended: it has been read to its end, once or more often
        self._loader, self._between = {name: loader}, between
        self._length = known_length(loader) if gives_what_it_says(loader) and not has_state(loader) else None
        self._inside = False  # a pass is under way
        self._given = 0  # batches of that pass
        self._batches: Iterator[Any] = iter(())  # what is left of it
        self._following: Any = NOTHING  # read ahead
        self._position: dict[str, Any] = {}

    def take(self) -> Any:
        """The next batch; a loader that has come to its end begins again."""
        if not self._inside:
            self._begin()
        batch = self._following if self._length is None else next(self._batches, NOTHING)
        if batch is NOTHING:
            refuse_loader_without_batches("training", self.name, self._loader[self.name])
        self._given += 1
        if self._length is None:
            self._read_ahead()
        if self._given == self._length or (self._length is None and self._following is NOTHING):
            self.ended, self._inside = True, False
            self._between[self.name] = own_states(self._loader)
        return batch

    def _begin(self) -> None:
        """Another pass; what the loader says of itself and what it may draw for its order are noted first."""
        self.between()
        self._inside, self._given, self._position = True, 0, {"beginning": beginning_of(self._loader)}
        self._batches = iter(self._loader[self.name])
        if self._length is None:
            self._read_ahead()

    def _read_ahead(self) -> None:
        # This moves the streams of a dataset that draws: a run that goes on must read it from here, too.
        self._position.update(ahead=rng_state(), states=own_states(self._loader))
        self._following = next(self._batches, NOTHING)

    def between(self) -> dict[str, Any]:
        """What the loader says of itself between two passes. One that an epoch left inside its data says now that it
        is still there, but will begin again: what counts is what it said last."""
        return self._between.setdefault(self.name, own_states(self._loader))  # type: ignore[no-any-return]

    @property
    def position(self) -> dict[str, Any]:
        """How the pass under way began and how far it is, if one is."""
        where = self._position if self._inside else {}
        return {"given": self._given, "ended": self.ended, "between": self.between(), **where}

    def go_on(self, position: Mapping[str, Any]) -> None:
        """Be where an earlier attempt was; training's random streams are the caller's to put back."""
        self._given, self.ended, self._inside = position["given"], position["ended"], "beginning" in position
        self._between[self.name] = position["between"]
        if not self._inside:
            restore_own_states(self._loader, position["between"])
            return
        states = position.get("states", {})
        back_to_beginning(self._loader, position["beginning"])
        restore_own_states(self._loader, states)
        self._position = {"beginning": position["beginning"]}
        self._batches = begin_after(self.name, self._loader[self.name], 0 if states else self._given)
        if self._length is None:
            if "ahead" in position:  # not if it was a list then, say
                restore_rng(position["ahead"])
            self._read_ahead()
        if self._given == self._length or (self._length is None and self._following is NOTHING):
            # Between two batches of a pass, there was another one.
            refuse_shorter_loader(self.name, self._loader[self.name], self._given, self._given)

    def close(self) -> None:
        """Let go of its batches."""
        self._batches, self._following = iter(()), NOTHING


class MixedBatches(EpochBatches):
    """The batches of one epoch of loaders that take turns. It knows the `last` one without asking for another."""

    def __init__(self, loaders: TrainLoaders, enter: Callable[[int, str], None], epoch: int) -> None:
        super().__init__(loaders, look_ahead=False, enter=enter)
        self.length = loaders.limit  # otherwise the turns say where it ends
        self._mixing = loaders.mixing
        self._turns = self._mixing.turns(list(loaders), epoch)
        self._turn = 0  # the loader that the next batch comes from
        self._members = [MixedLoader(name, loader, loaders.between) for name, loader in loaders.items()]

    def begin(self) -> None:
        """Begin the epoch; each loader begins when its turn comes."""
        self._turn = self._turns.take()
        self._under_way = self._taking_turns()

    def go_on(self, position: Mapping[str, Any], count: int) -> None:
        """Enter the epoch behind so many batches, where an earlier attempt was; random streams stay as they are."""
        self.check_schedule(position, self._mixing.schedule)
        names, now = list(position["loaders"]), [member.name for member in self._members]
        if names != now:
            raise CheckpointError(
                f"the run was mixing the loaders {', '.join(names)}; now there are {', '.join(now)}: "
                "go on with the same, or from a checkpoint between two epochs"
            )
        with rng_untouched(), generators_untouched(dict(self._loaders)):
            for member in self._members:
                member.go_on(position["loaders"][member.name])
        self.check_limit(count)
        self._turns.go_on(position["turns"])
        self._turn, self.given = position["turn"], count
        self._under_way = self._taking_turns()

    @property
    def position(self) -> dict[str, Any]:
        """Whose turn it is, and where each loader is."""
        return {
            "schedule": self._mixing.schedule,
            "turn": self._turn,
            "turns": self._turns.state(),
            "loaders": {member.name: member.position for member in self._members},
        }

    def states_after(self) -> dict[str, Any]:
        """What the loaders say of themselves between two passes."""
        return {name: state for member in self._members for name, state in member.between().items()}

    def close(self) -> None:
        """Let go of all loaders."""
        super().close()
        for member in self._members:
            member.close()

    def _taking_turns(self) -> Iterator[Any]:
        while not self.last:
            member = self._members[self._turn]
            batch = member.take()
            self._enter(self._turn, member.name)
            self._turn = self._turns.take()
            self.last = self._mixing.is_over([member.ended for member in self._members], self._turn)
            yield batch
        self.close()
