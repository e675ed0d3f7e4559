"""One loader, a list or a dict of loaders, as one stream of (index, name, batch)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """The batches of one epoch, loader after loader. A single loader is iterated over as it is: it costs no frame.

    `enter` is told index and name of a loader when its first batch comes. Without a known length it looks one batch
    ahead, but only if somebody needs to know the `last` one (`look_ahead`): reading ahead moves the random streams of a
    dataset that draws.
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        limit: int | None,
        look_ahead: bool,
        enter: Callable[[int, str], None],
    ) -> None:
        self.length = epoch_length(loaders)
        if limit is not None:
            self.length = limit if self.length is None else min(limit, self.length)
        self.last = False  # known by looking ahead
        self.given = 0  # batches passed over by skip()
        self._loaders, self._enter = loaders, enter
        self._look_ahead = look_ahead and self.length is None
        self._under_way: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._under_way is None:
            self._under_way = self._looking_ahead(self._begin()) if self._look_ahead else self._begin()
        return self._under_way

    def skip(self, count: int) -> None:
        """Pass over the batches that an earlier attempt has trained on; the loaders read them all the same."""
        batches = iter(self)
        for _ in range(count):
            next(batches, None)
        self.given = count

    def refuse_empty(self) -> None:
        """No batch came."""
        raise TrainingError(f"the training loader gave no batches{_why_empty(self._loaders)}")

    def _begin(self) -> Iterator[Any]:
        # All begin here, so that what shuffling draws from the random streams does not depend on the batches before.
        begun = [(name, iter(loader)) for name, loader in self._loaders.items()]
        if len(begun) == 1:
            self._enter(0, begun[0][0])
            return begun[0][1]
        return self._one_after_another(begun)

    def _one_after_another(self, begun: list[tuple[str, Iterator[Any]]]) -> Iterator[Any]:
        for index, (name, batches) in enumerate(begun):
            for batch in batches:
                self._enter(index, name)
                yield batch

    def _looking_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        nothing = object()
        held = next(batches, nothing)
        while held is not nothing:
            following = next(batches, nothing)
            self.last = following is nothing
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
