"""One loader, a list or a dict of loaders, as one stream of (index, name, batch)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hookline.errors import CheckpointError, ConfigError, TrainingError
from hookline.trainer.options import TrainerOptions
from hookline.trainer.positions import (
    back_to_beginning,
    begin_after,
    beginning_of,
    has_state,
    own_states,
    restore_own_states,
)
from hookline.trainer.rng import restore_rng, rng_state, rng_untouched, seed_everything
from hookline.trainer.sampler import ResumableSampler
from hookline.trainer.turns import Mixing

Loaders = Any  # one iterable, a list of them or a dict of them
NOTHING = object()
_COUNTING_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    ResumableSampler,
)  # these give as many indices as they say


def named_loaders(loaders: Loaders, role: str) -> dict[str, Iterable[Any]]:
    """Every loader under a name: its key in a dict, its index in a list, else the role ('train', 'val')."""
    if loaders is None:
        return {}
    if isinstance(loaders, Mapping):
        found = _by_text(loaders, role)
    elif isinstance(loaders, (list, tuple)) and loaders and not _is_batches(loaders):
        found = {str(index): loader for index, loader in enumerate(loaders)}
    else:
        found = {role: loaders}
    for name, loader in found.items():
        if not isinstance(loader, Iterable):
            raise TrainingError(f"{role} loader {name!r} is a {type(loader).__name__}, not something to iterate over")
        if known_length(loader) == 0:
            raise TrainingError(f"{role} loader {name!r} is empty: it has no batches")
    return found


def _by_text(loaders: Mapping[Any, Any], role: str) -> dict[str, Any]:
    """Loaders go by texts: two keys of one text would be one loader, and the other lost."""
    keys: dict[str, Any] = {}
    for key in loaders:
        if str(key) in keys:
            both = f"the keys {keys[str(key)]!r} and {key!r}"
            raise ConfigError(f"{role} loaders", f"{both} are the same name as text; give each loader its own")
        keys[str(key)] = key
    return {name: loaders[key] for name, key in keys.items()}


def _is_batches(loaders: Any) -> bool:
    """A plain list of batches (tensors, tuples, dicts) is one loader; a list of loaders is several."""
    first = loaders[0]
    return (
        isinstance(first, (tuple, Mapping))
        or hasattr(first, "shape")
        or (isinstance(first, list) and bool(first) and hasattr(first[0], "shape"))
    )


class TrainLoaders(dict[str, Iterable[Any]]):
    """Loaders to train on, and what an epoch of them is: how they take turns, and how many batches at most.

    `limit` is for all together, `each` for every one of those that come one after the other.
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        mixing: Mixing,
        limit: int | None = None,
        each: int | None = None,
    ) -> None:
        super().__init__(loaders)
        self.mixing, self.limit, self.each = mixing, limit, each
        self.between: dict[str, Any] = {}  # what loaders that can said of themselves when last between two passes


def to_train_on(loaders: Loaders, options: TrainerOptions) -> TrainLoaders:
    """Loaders by name that take turns as the options say, with an epoch cut short if they say so."""
    found = TrainLoaders(named_loaders(loaders, "train"), Mixing.of(options), each=options.fast_dev_run or None)
    if found:
        found.mixing.check(found)
        if options.fast_dev_run and not found.mixing.one_after_another:  # drawn turns might leave one out
            found.mixing = replace(found.mixing, schedule="round_robin", weights=None)
        limit = smaller(_limit_of(found, options.limit_train_batches), _overfit(found, options.overfit_batches))
        found.limit = smaller(limit, _tried(found, options.fast_dev_run))
    return found


def _limit_of(loaders: TrainLoaders, limit: int | float | None) -> int | None:
    """A count, or a share of an epoch as a count."""
    if not isinstance(limit, float):
        return limit
    length = epoch_length(loaders)
    if length is None:
        why = "a loader does not know its length" if loaders.mixing.schedule != "weighted" else "turns are drawn"
        raise TrainingError(f"limit_train_batches={limit}: {why}; give a whole number")
    return max(1, int(limit * length))


def _overfit(loaders: TrainLoaders, count: int) -> int | None:
    """Batches of an epoch when so many of each loader are held; 0 for all."""
    held = [min(known_length(loader) or count, count) for loader in loaders.values()]
    return loaders.mixing.length(held) if count else None


def _tried(loaders: TrainLoaders, count: int) -> int | None:
    """Batches of an epoch that tries so many of each loader; a short one that takes turns begins again."""
    return _overfit(loaders, count) if loaders.mixing.one_after_another else count * len(loaders) or None


def held(loaders: Mapping[str, Iterable[Any]], count: int, seed: int | None) -> dict[str, Iterable[Any]]:
    """The first batches of each loader, read once: the same ones in every epoch and, shuffled or not, every attempt."""
    with rng_untouched():
        seed_everything(seed or 0)
        return {name: list(islice(loader, count)) for name, loader in loaders.items()}


def epoch_length(loaders: Mapping[str, Iterable[Any]]) -> int | None:
    """Batches of one epoch; None when a loader does not know its length."""
    mixing, limit = (loaders.mixing, loaders.limit) if isinstance(loaders, TrainLoaders) else (Mixing(), None)
    return smaller(mixing.length([known_length(loader) for loader in loaders.values()]), limit)


def smaller(one: int | None, other: int | None) -> int | None:
    """The smaller of two limits, either of which may be missing."""
    return min((limit for limit in (one, other) if limit is not None), default=None)


def known_length(loader: Iterable[Any]) -> int | None:
    """A loader's own word for it, if it has one."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # some datasets have the method, but nothing to say
        return None


def gives_what_it_says(loader: Iterable[Any]) -> bool:
    """Whether its length can be relied on: a list's, or a DataLoader's that counts its own indices."""
    if isinstance(loader, DataLoader):
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        inner = getattr(sampler, "sampler", sampler)
        plain = type(loader).__len__ is DataLoader.__len__ and type(loader).__iter__ is DataLoader.__iter__
        return plain and type(inner) in _COUNTING_SAMPLERS and type(sampler) in (type(inner), BatchSampler)
    return isinstance(loader, Sequence)


class EpochBatches:
    """The batches of one epoch, loader after loader. A single loader is iterated over as it is: it costs no frame.

    `enter` is told index and name of the loader that batches come from; of several, before each batch. Where the length
    is unknown or only promised it looks one batch ahead, but only if somebody needs to know the `last` one
    (`look_ahead`). Else a promised length is believed up to its last batch, from which on it looks ahead: there may be
    more. `position` says where in the epoch the loaders are, and `go_on` enters it there.
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        look_ahead: bool,
        enter: Callable[[int, str], None],
    ) -> None:
        self.last = False  # known by looking ahead
        self.given = 0  # batches that came before the position that the epoch was entered at
        self._loaders, self._enter = list(loaders.items()), enter
        self._limit, self._each = getattr(loaders, "limit", None), getattr(loaders, "each", None)
        self.length = smaller(self._certain_length(0, before=0), self._limit)
        self._look_ahead = look_ahead and not all(gives_what_it_says(loader) for loader in loaders.values())
        self._promised = None if self._look_ahead else self._promised_length()
        self._position: dict[str, Any] = {}
        self._at = 0  # the loader that the last batch came from
        self._under_way: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._under_way is None:
            self.begin()
        assert self._under_way is not None
        return self._under_way

    def begin(self) -> None:
        """Begin the epoch, with the first loader."""
        self._under_way = self._reading(self._begin_loader(0, before=0))

    def go_on(self, position: Mapping[str, Any], count: int) -> None:
        """Enter the epoch behind so many batches, where an earlier attempt was; random streams stay as they are."""
        self.check_schedule(position, "sequential")
        self._at, self.given, self._position = self._index(position["loader"]), count, dict(position)
        self.length = smaller(self._certain_length(self._at, position["before"]), self._limit)
        if self._promised is not None:  # a sampler's length may change from epoch to epoch
            self._promised = position.get("promised", self._promised)
        if not self._look_ahead:
            del self._position["states"]  # where it says that it is will change with every batch
        loader = dict([self._loaders[self._at]])
        with rng_untouched():
            back_to_beginning(loader, position["beginning"])
            restore_own_states(loader, position["states"])
            inside = 0 if position["states"] else count - position["before"]
            batches = begin_after(position["loader"], loader[position["loader"]], inside)
            self.check_limit(count)
            if self._is_ahead and inside and "ahead" in position:
                restore_rng(position["ahead"])
            self._under_way = self._reading(batches)

    @property
    def position(self) -> dict[str, Any]:
        """The loader under way, how it began, and where it says that it is, if it can."""
        states = {} if self._look_ahead else own_states(dict([self._loaders[self._at]]))
        return {"states": states, **self._position}

    def states_after(self) -> dict[str, Any]:
        """What the loaders say of themselves when the epoch is over."""
        # One that was left before its end says that it is inside the epoch; the next one begins without asking it.
        return own_states(dict(self._loaders)) if self.length is None else {}

    def close(self) -> None:
        """Let go of the loaders' iterators: workers that are left to the garbage collector take seconds to end."""
        self._under_way = None

    def refuse_empty(self) -> None:
        """No batch came."""
        raise TrainingError(f"the training loader gave no batches{why_empty(dict(self._loaders))}")

    def check_schedule(self, position: Mapping[str, Any], now: str) -> None:
        """Half an epoch under one schedule says nothing about the other half under another."""
        before = position.get("schedule", "sequential")
        if before != now:
            raise CheckpointError(
                f"the run was inside an epoch with loader_schedule={before!r}, which is {now!r} now: go on with the "
                "same, or from a checkpoint between two epochs"
            )

    def check_limit(self, count: int) -> None:
        """An epoch cannot be entered behind its end."""
        if self._limit is not None and count > self._limit:
            raise CheckpointError(
                f"the run stood behind batch {count} of an epoch, and epochs are cut off after {self._limit} now "
                "(limit_train_batches, overfit_batches or fast_dev_run): raise that, or go on from a checkpoint "
                "between two epochs"
            )

    def _certain_length(self, index: int, before: int) -> int | None:
        """Batches of the epoch if so many came before this loader; None where a loader's word is not enough."""
        # One that says where it is must be read to its end, or it will say that it is still inside the epoch.
        if any(has_state(loader) or not gives_what_it_says(loader) for _, loader in self._loaders):
            return None
        return before + sum(known_length(loader) or 0 for _, loader in self._loaders[index:])

    def _promised_length(self) -> int | None:
        """What the loaders say together, if that is not certain, and the epoch is not cut off before it."""
        lengths = [None if has_state(loader) else known_length(loader) for _, loader in self._loaders]
        known = [length for length in lengths if length is not None]
        certain = self.length is not None and sum(known) >= self.length
        return None if certain or len(known) < len(lengths) else sum(known)

    @property
    def _is_ahead(self) -> bool:
        """Whether, where the epoch was entered, the next batch had been read already."""
        return self._look_ahead or (self._promised is not None and self.given >= self._promised)

    def _index(self, name: str) -> int:
        names = [known for known, _ in self._loaders]
        if name not in names:
            raise CheckpointError(f"the run was inside the loader {name!r}; now there are {', '.join(names)}")
        return names.index(name)

    def _begin_loader(self, index: int, before: int) -> Iterator[Any]:
        """Begin a loader when its turn comes; what it may draw for its order is noted first."""
        name, loader = self._loaders[index]
        self._at = index
        self._position = {"loader": name, "before": before, "beginning": beginning_of({name: loader})}
        if self._promised is not None:
            self._position["promised"] = self._promised
        return iter(loader)

    def _reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        several = len(self._loaders) > 1
        if several:
            batches = self._one_after_another(batches)
        if self._is_ahead:
            return self._looking_ahead(batches, next(batches, NOTHING))
        if self._promised is not None:
            return self._believing(batches, self._promised)
        if not several:
            self._enter(self._at, self._loaders[self._at][0])
        return batches

    def _one_after_another(self, batches: Iterator[Any]) -> Iterator[Any]:
        given = self.given
        while True:
            if self._each is not None:
                batches = islice(batches, self._each - (given - self._position["before"]))
            for batch in batches:
                given += 1
                if not self._look_ahead and self._promised is None:
                    self._enter(self._at, self._loaders[self._at][0])
                yield batch
            if given == self._position["before"]:  # an iterator in its second epoch, say: the others would hide it
                refuse_loader_without_batches("training", *self._loaders[self._at])
            if self._at + 1 == len(self._loaders):
                return
            batches = self._begin_loader(self._at + 1, given)

    def _believing(self, batches: Iterator[Any], promised: int) -> Iterator[Any]:
        """As they come up to the last one that was promised; from there on, whether there is another is looked up."""
        for _ in range(self.given + 1, promised):
            if (batch := next(batches, NOTHING)) is NOTHING:
                return
            self._enter(self._at, self._loaders[self._at][0])
            yield batch
        yield from self._looking_ahead(batches, next(batches, NOTHING))

    def _looking_ahead(self, batches: Iterator[Any], held: Any) -> Iterator[Any]:
        while held is not NOTHING:
            self._enter(self._at, self._loaders[self._at][0])
            under_way = dict([self._loaders[self._at]])
            # Reading ahead moves the streams of a dataset that draws: a run that goes on must read it from here, too.
            self._position.update(ahead=rng_state(), states=own_states(under_way))
            following = next(batches, NOTHING)
            self.last = following is NOTHING
            yield held
            held = following


def refuse_loader_without_batches(role: str, name: str, loader: Iterable[Any]) -> NoReturn:
    """One loader of several gave nothing."""
    raise TrainingError(f"the {role} loader {name!r} gave no batch{why_empty({name: loader})}")


def why_empty(loaders: Mapping[str, Iterable[Any]]) -> str:
    """The likely reason why loaders gave nothing, as the end of a sentence."""
    if any(isinstance(loader, Iterator) for loader in loaders.values()):
        return ": it is an iterator, which can be read only once; give a list or a DataLoader"
    return ": check the dataset and the sampler"
