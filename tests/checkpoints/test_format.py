"""Test that state is restored exactly, or rejected with the path of the value that has no exact form."""

import copy
import json
import math
import os
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hookline.checkpoints.store import read_checkpoint, write_checkpoint
from hookline.errors import CheckpointError


def save(tree: Any, directory: Path | str) -> Path:
    """Write a checkpoint with one section."""
    return write_checkpoint(Path(directory), "x", {"s": tree}, {})


def round_trip(tree: Any) -> Any:
    """Write a checkpoint and read it again."""
    with TemporaryDirectory() as directory:
        return read_checkpoint(save(tree, directory))[0]["s"]


def stored_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in the file of a section, by name."""
    with TemporaryDirectory() as directory:
        return load_file(save(tree, directory) / "s.safetensors")


def bits(value: float) -> bytes:
    """Return a float's exact bytes."""
    return struct.pack(">d", value)


def same(first: Any, other: Any) -> bool:
    """Compare values and types, bit for bit, at every depth."""
    if type(first) is not type(other):
        return False
    if isinstance(first, float):
        return bits(first) == bits(other)
    if isinstance(first, dict):
        return [*map(repr, first)] == [*map(repr, other)] and all(same(first[key], other[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(other) and all(map(same, first, other))
    return bool(first == other)


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
    | st.sampled_from(["!", "!x", "v", -(2**63), 2**63, -0.0, 5e-324])
)  # fmt: skip
keys = st.text(st.characters()) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=15,
)


@settings(deadline=None)
@given(trees)
def test_any_tree_of_plain_values_comes_back(tree: Any) -> None:
    """Dicts with any keys, tuples, lists, floats, huge ints, bytes and text are the same in type and bits."""
    assert same(round_trip(tree), tree)


def test_huge_integers() -> None:
    """Integers with more digits than Python prints are valid values and keys."""
    tree = {10**5000: -(10**5000), 1: torch.ones(1)}
    assert round_trip(tree)[10**5000] == -(10**5000)
    assert "1" in stored_tensors(tree)


def test_a_nan_keeps_its_bits() -> None:
    """Even the payload of a NaN survives."""
    odd = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    assert bits(round_trip([odd])[0]) == bits(odd)


def test_halves_of_characters_stay_halves() -> None:
    """Two halves of a surrogate pair are not joined into one character."""
    assert round_trip({"a\ud83d": "\ud83d\ude00"}) == {"a\ud83d": "\ud83d\ude00"}


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Scalars, empty and ordinary tensors come back with dtype, shape and bits."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = round_trip({"t": tensor})["t"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(10.0)[3:7],
        torch.arange(10.0)[::2],
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([math.nan, math.inf]),
    ],
    ids=["transposed", "slice", "strided", "expanded", "conjugate", "channels-last", "parameter", "non-finite"],
)
def test_views_and_parameters(tensor: torch.Tensor) -> None:
    """A tensor's visible values are stored, whatever its layout in memory, and without its graph."""
    back = round_trip({"t": tensor})["t"]
    assert back.is_contiguous() and not back.requires_grad
    assert torch.allclose(back, tensor.detach(), equal_nan=True, rtol=0, atol=0)


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    """The same tensor, or the same memory seen the same way, is one entry and one object; other views are not."""
    weight = torch.randn(2, 3)
    tree = {"embed": weight, "head": weight.detach(), "flat": weight.view(-1), "copy": weight.clone()}
    assert set(stored_tensors(tree)) == {"embed", "flat", "copy"}
    back = round_trip(tree)
    assert back["embed"] is back["head"]
    assert back["embed"] is not back["copy"]
    assert torch.equal(back["flat"], weight.view(-1))


def test_tied_tensors_of_other_dtypes() -> None:
    """Tensors that are stored as bytes stay tied, too."""
    weight = torch.ones(2, dtype=torch.complex128)
    back = round_trip([weight, weight])
    assert back[0] is back[1]


def test_empty_tensors_are_not_tied_by_accident() -> None:
    """Tensors without memory keep their own dtype and shape, also beside empty arrays."""
    back = round_trip(
        {"a": torch.empty(0), "b": torch.empty(0, 2, dtype=torch.int8), "c": np.empty((0, 3)), "d": np.empty(0)}
    )
    assert (back["a"].dtype, back["b"].dtype, back["b"].shape) == (torch.float32, torch.int8, (0, 2))
    assert (back["c"].shape, back["d"].shape) == ((0, 3), (0,))


def test_names_are_readable_and_never_collide() -> None:
    """Tensors are named by their dotted paths; equal paths and the reserved name get a mark."""
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.ones(2), "m": [torch.ones(3)]}
    assert set(stored_tensors(tree)) == {"a.b", "a.b#2", "__metadata__#2", "m.0"}
    assert torch.equal(round_trip(tree)["a"]["b"], torch.ones(1))
    assert torch.equal(round_trip(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1), np.float64("nan"), np.int8(-3), np.bool_(True), np.datetime64("2020-01-01", "ns"),
        np.str_("ü"), np.str_(""), np.zeros((2, 3), dtype=">i4"), np.array(3.5), np.array(["a", "bc"]),
        np.empty((0, 2)),
        np.asfortranarray(np.arange(6).reshape(2, 3))[::-1], np.array([1 + 2j]), np.uint64(2**64 - 1),
    ],
    ids=repr,
)  # fmt: skip
def test_numpy_values(value: Any) -> None:
    """Arrays and scalars come back as NumPy's own, with dtype, shape and values; arrays can be written to."""
    back = round_trip({"x": value})["x"]
    assert type(back) is type(value)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert np.array_equal(back, value, equal_nan=value.dtype.kind in "fc")
    assert not isinstance(back, np.ndarray) or back.flags.writeable


def test_torch_values_other_than_tensors() -> None:
    """Sizes, dtypes and devices keep their types."""
    tree = [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.Size([])]
    back = round_trip(tree)
    assert back == tree
    assert type(back[0]) is torch.Size


def test_kinds_of_dict() -> None:
    """Ordered and default dicts become dicts with their order; counters stay counters."""
    filled = defaultdict(list, {2: [1], 1: [2]})
    assert round_trip(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert list(round_trip(filled).items()) == [(2, [1]), (1, [2])]
    assert type(round_trip(filled)) is dict
    assert type(round_trip(Counter({3: 2, "x": 1}))) is Counter
    assert same(round_trip({1: "a", "1": "b", 1.5: "c"}), {1: "a", "1": "b", 1.5: "c"})


def test_random_states() -> None:
    """The states of Python's, NumPy's and torch's generators are restored and continue with the same numbers."""
    generators = [np.random.default_rng(3).bit_generator.state, random.Random(3).getstate()]
    assert round_trip(generators) == generators
    state = np.random.RandomState(3).get_state()
    other = np.random.RandomState(4)
    other.set_state(round_trip(state))
    assert other.random() == np.random.RandomState(3).random()
    assert torch.equal(round_trip(torch.get_rng_state()), torch.get_rng_state())


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimizers_and_schedulers(make: Any) -> None:
    """Real optimizers and schedulers load what was decoded and continue bit for bit."""
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    before = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    back = copy.deepcopy(round_trip(before))
    assert back["scheduler"] == before["scheduler"]
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(back["model"])
    restored = make(twin.parameters(), lr=9.0)
    restored.load_state_dict(back["optimizer"])
    for parameters, stepper in ((model, optimizer), (twin, restored)):
        stepper.zero_grad()
        parameters(torch.ones(1, 3)).sum().backward()
        stepper.step()
    assert torch.equal(model.weight, twin.weight)


class Mode(Enum):
    """An enum."""

    FAST = 1


class Odd(torch.Tensor):
    """A tensor subclass."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"cannot save a\.0: an object cannot be saved exactly"),
        ({1, 2}, r"a\.0: a set cannot be saved exactly"),
        (len, r"a\.0: a builtin_function_or_method"),
        (Mode.FAST, r"a\.0: a .*Mode.* save its \.value"),
        (1j, r"a\.0: a complex"),
        (bytearray(b"x"), r"a\.0: a bytearray"),
        ({"b": {3: object()}}, r"a\.0\.b\.3: an object"),
        ({Mode.FAST: 1}, r"a\.0\.\(key\): a .*Mode.*as keys"),
        ({(1, object()): 1}, r"a\.0\.\(key\)\.1: an object"),
        (np.array([object()]), r"a\.0: a numpy\.ndarray"),
        (np.zeros(2, dtype=[("x", "i4")]), r"a\.0: a numpy\.ndarray"),
        (torch.zeros(2).to_sparse(), r"a\.0: its layout is torch\.sparse_coo"),
        (torch.zeros(2, device="meta"), r"a\.0: it is on the meta device"),
        (torch.zeros(2).as_subclass(Odd), r"a\.0: Odd is a tensor subclass"),
    ],
)
def test_what_has_no_exact_form_raises(value: Any, message: str, tmp_path: Path) -> None:
    """The error names the dotted path, the type and the remedy."""
    with pytest.raises(CheckpointError, match=message):
        save({"a": [value]}, tmp_path)


def test_cycles_and_bottomless_nesting(tmp_path: Path) -> None:
    """A structure that contains itself or never ends is an error, not a crash; shared parts are fine."""
    items: list[Any] = []
    items.append(items)
    with pytest.raises(CheckpointError, match="it contains itself"):
        save(items, tmp_path)
    deep: list[Any] = []
    for _ in range(49):
        deep = [deep]
    assert round_trip(deep) == deep
    with pytest.raises(CheckpointError, match=r"cannot save 0\.0\.0\.0\.…: the state is nested deeper than 50 levels"):
        save([deep], tmp_path)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested deeper than 50 levels; flatten it"):
        save(deep, tmp_path)
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_a_namedtuple_keeps_its_names() -> None:
    """Batches are read by field name; the class is a new one, because a file imports nothing."""
    Pair = namedtuple("Pair", "x y")
    loaded = round_trip({"batch": [Pair(torch.ones(2), (1, Pair(2, 3)))]})["batch"][0]
    assert torch.equal(loaded.x, torch.ones(2)) and loaded.y[1].y == 3 and type(loaded).__name__ == "Pair"


def test_a_reused_address_ties_nothing() -> None:
    """The memory of a temporary tensor may be reused by the next one; the two are still stored separately."""

    class Fresh(dict[str, Any]):
        def items(self) -> Any:
            return ((str(index), torch.full((8, 2), float(index)).t()) for index in range(50))

    tensors = stored_tensors(Fresh({str(index): None for index in range(50)}))
    assert len(tensors) == 50
    assert all(float(tensor[0, 0]) == float(name) for name, tensor in tensors.items())


# ---- safetensors files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_what_was_written(dtype: torch.dtype) -> None:
    """Matrices, scalars and empty tensors, with names that JSON must escape; dtypes it does not have are bytes."""
    tensors = {'a "quoted" ü': torch.arange(6).reshape(2, 3).to(dtype), "one": torch.ones((), dtype=dtype),
               "none": torch.zeros(0, 4, dtype=dtype), "turned": torch.arange(6).view(2, 3).t().to(dtype)}  # fmt: skip
    loaded = stored_tensors(tensors)
    assert set(loaded) == set(tensors)
    if dtype.is_complex or dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64):
        tensors = {name: tensor.contiguous().reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype


def test_mixed_widths_are_aligned(tmp_path: Path) -> None:
    """Odd numbers of bytes do not push a wide tensor off its boundary: the widest come first."""
    tensors = {"bytes": torch.ones(3, dtype=torch.uint8), "half": torch.ones(5, dtype=torch.bfloat16),
               "wide": torch.ones(2, dtype=torch.float64), "word": torch.ones(1, dtype=torch.int32)}  # fmt: skip
    data = (save(tensors, tmp_path) / "s.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert {name: entry["data_offsets"] for name, entry in entries.items()} == {
        "wide": [0, 16], "word": [16, 20], "half": [20, 30], "bytes": [30, 33],
    }  # fmt: skip


def test_memory_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is written from its own memory, because a copy of a large model may not fit."""
    written: list[int] = []
    write = os.write

    def watch(fd: int, data: memoryview) -> int:
        written.append(np.frombuffer(data, np.uint8).ctypes.data)
        return write(fd, data)

    monkeypatch.setattr(os, "write", watch)
    save({"x": (tensor := torch.ones(1000))}, tmp_path)
    assert tensor.data_ptr() in written
