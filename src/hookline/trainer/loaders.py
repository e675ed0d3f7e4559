"""One loader, a list or a dict of loaders, as one stream of (index, name, batch)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hookline.errors import TrainingError

Loaders = Any  # one iterable, a list of them or a dict of them


def named_loaders(loaders: Loaders, role: str) -> dict[str, Iterable[Any]]:
    """Every loader under a name: its key in a dict, its index in a list, else the role ('train', 'val')."""
    if loaders is None:
        return {}
    if isinstance(loaders, Mapping):
        found = {str(name): loader for name, loader in loaders.items()}
    elif isinstance(loaders, (list, tuple)) and loaders and not _is_batches(loaders):
        found = {str(index): loader for index, loader in enumerate(loaders)}
    else:
        found = {role: loaders}
    for name, loader in found.items():
        if not isinstance(loader, Iterable):
            raise TrainingError(f"{role} loader {name!r} is a {type(loader).__name__}, not something to iterate over")
        if _length(loader) == 0:
            raise TrainingError(f"{role} loader {name!r} is empty: it has no batches")
    return found


def _is_batches(loaders: Any) -> bool:
    """A plain list of batches (tensors, tuples, dicts) is one loader; a list of loaders is several."""
    first = loaders[0]
    return (
        isinstance(first, (tuple, Mapping))
        or hasattr(first, "shape")
        or (isinstance(first, list) and bool(first) and hasattr(first[0], "shape"))
    )


def epoch_length(loaders: Mapping[str, Iterable[Any]]) -> int | None:
    """Batches of one epoch; None when a loader does not know its length."""
    lengths = [_length(loader) for loader in loaders.values()]
    return None if any(length is None for length in lengths) else sum(length or 0 for length in lengths)


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


class EpochBatches:
    """The batches of one epoch, loader after loader; `last` tells that the batch just given was the epoch's last.

    Without a known length it looks one batch ahead, but only if somebody needs to know (`look_ahead`): reading ahead
    moves the random streams of a dataset that draws.
    """

    def __init__(self, loaders: Mapping[str, Iterable[Any]], limit: int | None, look_ahead: bool) -> None:
        self.length = epoch_length(loaders)
        if limit is not None:
            self.length = limit if self.length is None else min(limit, self.length)
        self._loaders = loaders
        self._look_ahead = look_ahead and self.length is None
        self._under_way: Iterator[tuple[int, str, Any]] | None = None
        self.last = False
        self.exhausted = False  # the loaders ended by themselves

    def __iter__(self) -> Iterator[tuple[int, str, Any]]:
        if self._under_way is not None:
            return self._under_way
        return self._looking_ahead() if self._look_ahead else self._counting()

    def skip(self, count: int) -> None:
        """Pass over the batches that an earlier attempt has trained on; the loaders read them all the same."""
        self._under_way = iter(self)
        for _ in range(count):
            next(self._under_way, None)

    def _counting(self) -> Iterator[tuple[int, str, Any]]:
        left = -1 if self.length is None else self.length
        # All begin here, so that what shuffling draws from the random streams does not depend on the batches before.
        begun = [(name, iter(loader)) for name, loader in self._loaders.items()]
        for index, (name, batches) in enumerate(begun):
            for batch in batches:
                left -= 1
                self.last = left == 0
                yield index, name, batch
                if left == 0:
                    return
        if left == (-1 if self.length is None else self.length):
            raise TrainingError(f"the training loader gave no batches{_why_empty(self._loaders)}")
        self.exhausted = True

    def _looking_ahead(self) -> Iterator[tuple[int, str, Any]]:
        source = self._counting()
        held = next(source, None)
        while held is not None:
            following = next(source, None)
            self.last = following is None
            yield held
            held = following


def generators_of(loaders: Mapping[str, Iterable[Any]]) -> list[torch.Generator]:
    """The random generators that loaders and their samplers own, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders.values():
        for owner in (loader, getattr(loader, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def restore_generators(loaders: Mapping[str, Iterable[Any]], states: list[torch.Tensor]) -> None:
    """Put the loaders' own generators back to where they were."""
    for generator, state in zip(generators_of(loaders), states, strict=False):
        generator.set_state(state)


def _why_empty(loaders: Mapping[str, Iterable[Any]]) -> str:
    if any(isinstance(loader, Iterator) for loader in loaders.values()):
        return ": it is an iterator, which can be read only once; give a list or a DataLoader"
    return ": check the dataset and the sampler"
