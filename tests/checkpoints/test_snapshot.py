"""Test snapshots: later changes of the state do not reach them, and they are written as the state would be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hookline.checkpoints.saves import HostMemory
from hookline.checkpoints.store import read_checkpoint, write_checkpoint
from hookline.errors import CheckpointError


def make_state() -> dict[str, Any]:
    """Make tied, transposed, half-precision, complex, empty and 0-dim tensors, a list and an array."""
    weight = torch.randn(4, 3)
    return {
        "model": {"weight": weight, "tied": weight, "transposed": weight.t(), "half": torch.ones(2).bfloat16()},
        "hooks": {"losses": [1.0, 2.0], "array": np.arange(3), "count": {"n": 1}, "empty": torch.empty(0)},
        "odd": {"complex": torch.ones(2, dtype=torch.complex64), "step": torch.tensor(7)},
    }


def change(state: dict[str, Any]) -> None:
    """Change the state in place, as training does."""
    for tensor in (*state["model"].values(), *state["odd"].values()):
        tensor.zero_()
    state["hooks"]["losses"].append(3.0)
    state["hooks"]["array"] += 1
    state["hooks"]["count"]["n"] = 2


def files_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_snapshot_is_written_as_the_state_was(tmp_path: Path) -> None:
    """Byte for byte, although every value changed in between; tied tensors stay tied."""
    state = make_state()
    direct = write_checkpoint(tmp_path / "direct", "x", state, {"step": 1})
    snapshot = HostMemory().snapshot(state)
    change(state)
    copied = write_checkpoint(tmp_path / "copied", "x", snapshot, {"step": 1})
    assert files_in(copied) == files_in(direct)
    model = read_checkpoint(copied)[0]["model"]
    assert model["weight"] is model["tied"]
    assert files_in(write_checkpoint(tmp_path / "changed", "x", state, {"step": 1})) != files_in(direct)


def test_memory_is_reused() -> None:
    """A second snapshot uses the buffers of the first; what no longer fits gets new memory, the rest is released."""
    memory, state = HostMemory(), {"model": {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}}
    first = memory.snapshot(state)["model"].tensors
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    state["model"] = {"a": torch.ones(3), "b": torch.ones(4)}
    second = memory.snapshot(state)["model"].tensors
    assert second["a"].data_ptr() == places["a"]
    assert [tensor.tolist() for tensor in second.values()] == [[1.0] * 3, [1.0] * 4]
    assert [name for _, name in memory._buffers] == ["a", "b"]


def test_equal_names_in_two_sections_do_not_collide() -> None:
    """Each section has its own buffers."""
    copies = HostMemory().snapshot({"model": {"x": torch.zeros(2)}, "hooks": {"x": torch.ones(2)}})
    assert copies["model"].tensors["x"].sum() == 0 and copies["hooks"].tensors["x"].sum() == 2


def test_what_cannot_be_saved_raises_at_once() -> None:
    """With the section and the path of the value, before anything is written."""
    with pytest.raises(
        CheckpointError, match=r"section 'hooks': cannot save mine.value: a set cannot be saved exactly"
    ):
        HostMemory().snapshot({"hooks": {"mine": {"value": {1, 2}}}})


def test_no_memory_is_a_failed_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing memory is a CheckpointError, so that `on_save_error: warn` covers it."""

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("can't allocate memory: you tried to allocate 1 PB")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CheckpointError, match="cannot copy the state to the host's memory: can't allocate"):
        HostMemory().snapshot({"model": {"x": torch.ones(2)}})


def test_a_checkpoint_may_mix_snapshots_and_live_sections(tmp_path: Path) -> None:
    """A section that is already encoded is written as it is."""
    snapshot = HostMemory().snapshot({"model": {"x": torch.ones(2)}})
    sections, _ = read_checkpoint(write_checkpoint(tmp_path, "x", {**snapshot, "loop": (1, 2)}, {}))
    assert sections["loop"] == (1, 2) and sections["model"]["x"].tolist() == [1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_device_tensors() -> None:
    """It lies in pinned memory and is complete before the next kernel writes to the source."""
    source = torch.zeros(1 << 22, device="cuda")
    source += 1
    copy = HostMemory().snapshot({"model": {"x": source}})["model"].tensors["x"]
    source.zero_()
    assert copy.is_pinned() and copy.device.type == "cpu"
    assert bool((copy == 1).all())
