"""The generators that training draws from, read where they lie in memory.

Asking a generator for its state costs 2 µs (torch), 15 (Python) or 50 (NumPy), too much for every event. All three are
Mersenne twisters: their position and one word of their state lie side by side, 8 bytes that change with every draw and
cost 0.05 µs to read. Where they lie is not promised by anybody, so it is found and tried out on generators of our own;
where that fails, the generator is asked as usual, and nothing but time is lost.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

WORDS = 624 * 4  # bytes of a Mersenne twister's state
HEADER = object.__basicsize__  # of every Python object
TRIAL = 0x1234567890ABCDEF  # a seed that is easy to find again


class Stream(Protocol):
    """One generator: seen to move, copied, put back."""

    read: str
    """What stands behind a word to read it: an index, or the brackets of a call."""

    @property
    def words(self) -> Sequence[Any]:
        """Read, they together differ after every draw, but for a normal that was held in reserve."""

    @property
    def spares(self) -> Sequence[Any]:
        """The first item of each is true while a normal is held in reserve, whose use moves no word."""

    def copy(self) -> Any:
        """The whole state, spare normal included."""

    def restore(self, state: Any) -> None:
        """Put such a state back."""

    def is_at(self, state: Any) -> bool:
        """Whether the state is this one."""


class Layout(NamedTuple):
    """Where a generator lies: 8 bytes to watch, all it consists of (address, size), flags of normals in reserve."""

    watched: Sequence[int]
    regions: Sequence[tuple[int, int]]
    spares: Sequence[int] = ()


class Kind:
    """What differs between torch, Python and NumPy: where a generator lies, and how it is asked."""

    def __init__(
        self,
        make: Callable[[int], Any],
        lies_at: Callable[[Any], Layout],
        draw: Callable[[Any, int], list[float]],
        draw_normal: Callable[[Any], float],
        get: Callable[[Any], Any],
        put: Callable[[Any, Any], Any],
        spare_attribute: str | None = None,
    ) -> None:
        self.make, self.lies_at, self.draw, self.draw_normal = make, lies_at, draw, draw_normal
        self.get, self.put, self.spare_attribute = get, put, spare_attribute

    def stream(self, generator: Any) -> Stream:
        """The generator as a stream, in place if that can be relied on."""
        return InPlace(self, generator) if can_be_read_in_place(self) else Asked(self, generator)

    def own(self, seed: int) -> Any:
        """The state of a new generator with this seed, as the streams of this kind copy it."""
        return self.stream(self.make(seed)).copy()

    def portable(self, state: Any) -> Any:
        """A copied state as the library's own functions give it, fit to be saved."""
        private = self.make(0)
        self.stream(private).restore(state)
        return self.get(private)

    def from_portable(self, state: Any) -> Any:
        """A saved state as the streams of this kind copy it."""
        private = self.make(0)
        self.put(private, state)
        return self.stream(private).copy()


class InPlace:
    """A generator read and written where it lies."""

    read = "[0]"

    def __init__(self, kind: Kind, generator: Any) -> None:
        layout = kind.lies_at(generator)
        self.words = [_memory(address, 8).cast("Q") for address in layout.watched]
        self._generator, self._attribute = generator, kind.spare_attribute
        self._regions = [(ctypes.c_char * size).from_address(address) for address, size in layout.regions]
        self.spares: list[Any] = [_memory(address, 1) for address in layout.spares]
        if self._attribute is not None:
            self.spares.append(_Attribute(generator, self._attribute))

    def copy(self) -> Any:
        """The bytes it consists of."""
        spare = None if self._attribute is None else getattr(self._generator, self._attribute)
        return [region.raw for region in self._regions], spare

    def restore(self, state: Any) -> None:
        """Write them back."""
        for region, raw in zip(self._regions, state[0], strict=True):
            region.raw = raw
        if self._attribute is not None:
            setattr(self._generator, self._attribute, state[1])

    def is_at(self, state: Any) -> bool:
        """Byte for byte."""
        return bool(self.copy() == state)


class _Attribute:
    """A spare that is kept in an attribute, read as one that is kept in memory."""

    __slots__ = ("generator", "name")

    def __init__(self, generator: Any, name: str) -> None:
        self.generator, self.name = generator, name

    def __getitem__(self, index: int) -> bool:
        return getattr(self.generator, self.name) is not None


class Asked:
    """A generator asked for its state through the library's own functions."""

    read = "()"

    def __init__(self, kind: Kind, generator: Any) -> None:
        self._kind, self._generator = kind, generator
        self.words = [lambda: _printed(self.copy())]
        self.spares: list[Any] = []  # the state that is asked for shows them

    def copy(self) -> Any:
        """What the library says."""
        return self._kind.get(self._generator)

    def restore(self, state: Any) -> None:
        """Tell the library."""
        self._kind.put(self._generator, state)

    def is_at(self, state: Any) -> bool:
        """As printed."""
        return _printed(self.copy()) == _printed(state)


@cache
def can_be_read_in_place(kind: Kind) -> bool:
    """Try it out on generators of our own: every draw is seen, and bytes copied over make a twin."""
    try:
        one, two = kind.make(TRIAL), kind.make(TRIAL + 1)
        return _every_draw_is_seen(kind, one) and _copies_make_twins(kind, one, two)
    except Exception:
        return False


def _every_draw_is_seen(kind: Kind, generator: Any) -> bool:
    stream, seen = InPlace(kind, generator), set()
    for _ in range(700):  # more than a twister has words
        seen.add(tuple(word[0] for word in stream.words))
        kind.draw(generator, 1)
    holds: list[bool] = []
    for _ in range(3):
        holds.append(any(spare[0] for spare in stream.spares))
        kind.draw_normal(generator)
    return len(seen) == 700 and holds == [False, True, False]


def _copies_make_twins(kind: Kind, one: Any, two: Any) -> bool:
    for normals in (0, 1):
        for _ in range(normals):
            kind.draw_normal(one)
        InPlace(kind, two).restore(InPlace(kind, one).copy())
        if _printed(kind.get(one)) != _printed(kind.get(two)):
            return False
        if kind.draw_normal(one) != kind.draw_normal(two) or kind.draw(one, 700) != kind.draw(two, 700):
            return False
    return True


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _printed(state: Any) -> str:
    """A state in a form that compares."""
    return repr(_plain(state))


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, (tuple, list)):
        return [_plain(item) for item in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


# ---- torch -----------------------------------------------------------------------------------------------------------


@cache
def _torch_seed_offset() -> int:
    """Where the seed lies in a generator's body; position and state follow it."""
    trial = torch.Generator()
    trial.manual_seed(TRIAL)
    offset = ctypes.string_at(_torch_body(trial), 256).find(struct.pack("<Q", TRIAL))
    if offset < 0:
        raise LookupError("torch keeps its seed elsewhere")
    return offset


def _torch_body(generator: torch.Generator) -> int:
    return int(ctypes.c_uint64.from_address(id(generator) + HEADER).value)


def _torch_lies_at(generator: torch.Generator) -> Layout:
    """seed 8, left 4, seeded 4, next 4, state; then, aligned, a spare float with its flag and a spare double."""
    start = _torch_body(generator) + _torch_seed_offset()
    spare_float = start + 8 + 4 + 4 + 4 + WORDS + 4
    return Layout([start + 16], [(start, spare_float + 17 - start)], [spare_float + 4, spare_float + 16])


def _torch_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


TORCH = Kind(
    make=_torch_generator,
    lies_at=_torch_lies_at,
    draw=lambda generator, count: torch.rand(count, generator=generator).tolist(),
    draw_normal=lambda generator: torch.randn(1, generator=generator, dtype=torch.double).item(),
    get=lambda generator: generator.get_state(),
    put=lambda generator, state: generator.set_state(state),
)

# ---- Python ----------------------------------------------------------------------------------------------------------


def _python_lies_at(generator: random.Random) -> Layout:
    """Position, then state, whose first word is the same for every seed: hence the two words after it."""
    start = id(generator) + HEADER
    return Layout([start, start + 8], [(start, 4 + WORDS)])


PYTHON = Kind(
    make=random.Random,
    lies_at=_python_lies_at,
    draw=lambda generator, count: [generator.random() for _ in range(count)],
    draw_normal=lambda generator: generator.gauss(0.0, 1.0),
    get=lambda generator: generator.getstate(),
    put=lambda generator, state: generator.setstate(_tuples(state)),
    spare_attribute="gauss_next",
)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def _numpy() -> Any:
    return sys.modules["numpy"].random


@cache
def _numpy_spare_offset() -> int:
    """Where a generator keeps its spare normal: a flag, and 8 bytes further the number."""
    trial = _numpy().RandomState(1)
    trial.standard_normal()
    body = ctypes.string_at(id(trial), type(trial).__basicsize__)
    return body.index(struct.pack("<d", trial.get_state()[4])) - 8


def _numpy_lies_at(generator: Any) -> Layout:
    """State, then position; the spare normal lies with the generator itself."""
    state = int(generator._bit_generator.ctypes.state_address)
    spare = id(generator) + _numpy_spare_offset()
    return Layout([state + WORDS - 4], [(state, WORDS + 4), (spare, 16)], [spare])


NUMPY = Kind(
    make=lambda seed: _numpy().RandomState(seed % 2**32),
    lies_at=_numpy_lies_at,
    draw=lambda generator, count: [generator.random_sample() for _ in range(count)],
    draw_normal=lambda generator: generator.standard_normal(),
    get=lambda generator: generator.get_state(),
    put=lambda generator, state: generator.set_state(tuple(state)),
)


# ---- CUDA ------------------------------------------------------------------------------------------------------------


class CudaStream:
    """A CUDA device's default generator: it counts its draws, and says so cheaply."""

    read = "()"

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.words = [generator.initial_seed, generator.get_offset]
        self.spares: list[Any] = []  # a device keeps none

    def copy(self) -> Any:
        """Seed and offset, as torch gives them."""
        return self._generator.get_state()

    def restore(self, state: Any) -> None:
        """Put them back."""
        self._generator.set_state(state)

    def is_at(self, state: Any) -> bool:
        """A few bytes, compared on the host, where they lie."""
        return torch.equal(self._generator.get_state(), state)


def kinds_in_use() -> Sequence[tuple[str, Kind, Any]]:
    """Name, kind and generator of every stream on the host that training may draw from now."""
    found: list[tuple[str, Kind, Any]] = [
        ("torch", TORCH, torch.default_generator),
        ("python", PYTHON, random._inst),
    ]
    if "numpy.random" in sys.modules:
        found.append(("numpy", NUMPY, _numpy().mtrand._rand))
    return found
