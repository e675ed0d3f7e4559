"""Generators are read where they lie, and nothing is missed: not a draw, not a spare normal."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from hookline.events import twisters
from hookline.events.twisters import NUMPY, PYTHON, TORCH, Asked, InPlace, Kind, Layout

KINDS = {"torch": TORCH, "python": PYTHON, "numpy": NUMPY}
np.random.seed(0)  # NumPy loads this part of itself on first use


def words(stream: Any) -> tuple[Any, ...]:
    """What is watched of a generator."""
    return tuple(word() if stream.read == "()" else word[0] for word in stream.words)


def held(stream: Any) -> bool:
    """Whether a normal is held in reserve."""
    return any(spare[0] for spare in stream.spares)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each of the three libraries."""
    return KINDS[request.param]


@pytest.fixture(params=[InPlace, Asked])
def stream_class(request: pytest.FixtureRequest) -> Any:
    """Both ways of getting at a generator."""
    return request.param


def test_all_three_can_be_read_in_place_here(kind: Kind) -> None:
    """On the versions that this release is tested with, the fast way is the one that is used."""
    assert twisters.can_be_read_in_place(kind)


def test_every_draw_moves_the_word(kind: Kind, stream_class: Any) -> None:
    """Also over the end of a block, where the position begins anew."""
    generator = kind.make(3)
    stream = stream_class(kind, generator)
    seen = set()
    for _ in range(650):
        seen.add(words(stream))
        kind.draw(generator, 1)
    assert len(seen) == 650


def test_a_copy_puts_back_uniforms_and_normals(kind: Kind, stream_class: Any) -> None:
    """With and without a spare normal held, what is drawn after a restore is what was drawn before."""
    for warm_up in (0, 1):
        generator = kind.make(4)
        stream = stream_class(kind, generator)
        for _ in range(warm_up):
            kind.draw_normal(generator)
        state = stream.copy()
        first = [kind.draw_normal(generator), *kind.draw(generator, 700), kind.draw_normal(generator)]
        stream.restore(state)
        again = [kind.draw_normal(generator), *kind.draw(generator, 700), kind.draw_normal(generator)]
        assert first == again


def test_a_spare_normal_is_seen(kind: Kind) -> None:
    """Every second normal comes out of the reserve, which the word does not tell."""
    generator = kind.make(5)
    stream = InPlace(kind, generator)
    assert not held(stream)
    kind.draw_normal(generator)
    word = words(stream)
    assert held(stream)
    kind.draw_normal(generator)
    assert words(stream) == word and not held(stream)


def test_a_saved_state_is_the_librarys_own(kind: Kind) -> None:
    """It can be read by the library, and comes back as what was copied."""
    generator = kind.make(6)
    kind.draw_normal(generator)
    stream = kind.stream(generator)
    saved = kind.portable(stream.copy())
    expected = kind.draw(generator, 20)
    other = kind.make(0)
    kind.put(other, saved)
    assert kind.draw(other, 20) == expected
    third = kind.make(0)
    kind.stream(third).restore(kind.from_portable(saved))
    assert kind.draw(third, 20) == expected


def test_where_the_layout_is_another_the_library_is_asked() -> None:
    """A layout that does not pass its trial is not used."""
    wrong = Kind(
        make=PYTHON.make,
        lies_at=lambda generator: Layout([id(generator)], [(id(generator) + 24, 8)]),
        draw=PYTHON.draw,
        draw_normal=PYTHON.draw_normal,
        get=PYTHON.get,
        put=PYTHON.put,
        spare_attribute="gauss_next",
    )
    assert isinstance(wrong.stream(random.Random(1)), Asked)
    broken = Kind(PYTHON.make, lambda generator: 1 / 0, PYTHON.draw, PYTHON.draw_normal, PYTHON.get, PYTHON.put)  # type: ignore[arg-type, return-value]
    assert isinstance(broken.stream(random.Random(1)), Asked)


def test_the_streams_in_use_are_the_global_ones() -> None:
    """Those that `torch.rand`, `random.random` and `numpy.random.rand` draw from."""
    draws = {"torch": lambda: torch.rand(1), "python": random.random, "numpy": np.random.rand}
    found = twisters.kinds_in_use()
    assert {name for name, _, _ in found} == set(draws)
    for name, kind, generator in found:
        stream = kind.stream(generator)
        before = words(stream)
        draws[name]()
        assert words(stream) != before
