"""Test checkpoints made to do harm: nothing is executed, nothing outside is read, and the error is clear."""

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from saved_checkpoints import list_checkpoints, verify_checkpoint

from hookline.checkpoints.store import newest_good, read_checkpoint, write_checkpoint
from hookline.errors import CheckpointError

FORBIDDEN = (
    "exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class",
)  # fmt: skip
_watching: list[list[str]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event.startswith(FORBIDDEN):
        _watching[-1].append(f"{event} {arguments[:1]}")


sys.addaudithook(_audit)


@contextmanager
def nothing_is_executed() -> Iterator[None]:
    """Fail if anything is imported, compiled, unpickled or started."""
    _watching.append([])
    try:
        yield
    finally:
        seen = _watching.pop()
    assert seen == []


class Bomb:
    """What a pickle could do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/hookline-was-here",)


def write_good(directory: Path) -> Path:
    state = {"model": {"w": torch.arange(6.0)}, "hooks": {"x": [1, 2]}, "odd": {"a": torch.zeros(2)}}
    return write_checkpoint(directory, "step-2", state, {"step": 2})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a good checkpoint."""
    return write_good(tmp_path)


def forge(path: Path) -> None:
    """Rewrite the manifest so that every hash is right."""
    files = {
        file.name: {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "bytes": file.stat().st_size}
        for file in sorted(path.iterdir())
        if file.name != "manifest.json"
    }
    write_manifest(path, files, {"step": 2})


def write_manifest(path: Path, files: Any, meta: Any) -> None:
    """Write a manifest as checkpoints have it."""
    text = json.dumps({"format": 1, "files": files, "meta": meta}, indent=1) + "\n"
    (path / "manifest.json").write_text(text)


def change_state(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change state.json and make the manifest agree."""
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    forge(path)


def refused(path: Path) -> str:
    """The error that reading gives; nothing else may happen on the way."""
    with nothing_is_executed(), pytest.raises(CheckpointError) as raised:
        read_checkpoint(path)
    return str(raised.value)


def test_the_audit_hook_notices() -> None:
    """The audit hook itself notices unpickling and importing."""
    with pytest.raises(AssertionError, match=r"pickle\.find_class"), nothing_is_executed():
        pickle.loads(pickle.dumps(Path))
    assert not _watching


@pytest.mark.parametrize("forged", [True, False])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "odd.safetensors", "extra.pt"])
def test_a_pickle_in_every_place(name: str, forged: bool, tmp_path: Path, path: Path) -> None:
    """Also where every hash has been made to agree."""
    (path / name).write_bytes(pickle.dumps(Bomb()))
    if forged and name != "manifest.json":
        forge(path)
    assert refused(path)
    newest = newest_good(tmp_path)[0]
    assert newest is None or newest.path == path  # whole by its manifest, perhaps, but it loads nothing
    assert not Path("/tmp/hookline-was-here").exists()


def test_a_torch_file_under_a_tensor_files_name(path: Path) -> None:
    """What `torch.save` writes is a pickle in a zip."""
    torch.save({"w": Bomb()}, path / "model.safetensors")
    forge(path)
    assert "model.safetensors" in refused(path)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_links_out_of_the_directory(name: str, tmp_path: Path) -> None:
    """A file that is a link is refused, whatever it leads to; a checkpoint that is one is not seen in a run."""
    path, outside = write_good(tmp_path / "run"), tmp_path / "outside"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    assert f"{name}: is a link or not a plain file" in refused(path)
    elsewhere = write_good(tmp_path / "elsewhere")
    (tmp_path / "run" / "step-9").symlink_to(elsewhere)
    assert [checkpoint.name for checkpoint in list_checkpoints(tmp_path / "run")] == ["step-2"]


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_pipe_does_not_hang(name: str, path: Path) -> None:
    """Reading from a pipe without a writer would block."""
    (path / name).unlink()
    os.mkfifo(path / name)
    assert f"{name}: is a link or not a plain file" in refused(path)


@pytest.mark.parametrize("section", ["../elsewhere/model", "/etc/model", "..", "a/b", "a\x00b", ""])
def test_sections_that_lead_out(section: str, tmp_path: Path) -> None:
    """A section's name becomes a file name and must not lead out of the directory."""
    path, outside = write_good(tmp_path), tmp_path / "elsewhere"
    outside.mkdir()
    save_file({"w": torch.ones(3)}, outside / "model.safetensors")
    change_state(path, lambda state: state["sections"].update({section: {"!": "tensor", "v": "w"}}))
    assert "is not a valid name" in refused(path)


def tensor_file(entries: dict[str, Any], data: bytes = b"") -> bytes:
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + data


HUGE = 2**40
TENSOR_FILES = {
    "shape": tensor_file({"w": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 24]}}, b"\x00" * 24),
    "overflow": tensor_file({"w": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}),
    "offsets": tensor_file({"w": {"dtype": "F32", "shape": [6], "data_offsets": [0, HUGE]}}),
    "negative": tensor_file({"w": {"dtype": "F32", "shape": [-6], "data_offsets": [0, 24]}}, b"\x00" * 24),
    "header length": (2**63).to_bytes(8, "little") + b"{}",
    "header is no json": (5).to_bytes(8, "little") + b"hello",
    "empty": b"",
}


@pytest.mark.parametrize("kind", TENSOR_FILES)
def test_tensor_files_that_promise_too_much(kind: str, path: Path) -> None:
    """Shapes and lengths are compared with the file's size before memory is allocated."""
    (path / "model.safetensors").write_bytes(TENSOR_FILES[kind])
    forge(path)
    assert "section 'model': cannot load" in refused(path)


def test_a_failure_to_decode_is_not_one_to_load(path: Path) -> None:
    """The error says that the state is damaged; NumPy's own error for this dtype is a SyntaxError."""
    change_state(path, lambda state: state["sections"].update(hooks={"!": "numpy", "v": "", "dtype": ","}))
    with pytest.raises(CheckpointError, match=r"section 'hooks': the saved state is damaged .*SyntaxError") as raised:
        read_checkpoint(path)
    assert "cannot load" not in str(raised.value)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


SKELETONS: dict[str, Any] = {
    "huge array": {"!": "ndarray", "dtype": "<f8", "shape": [HUGE], "v": "w"},
    "huge empty array": {"!": "ndarray", "dtype": "<f8", "shape": [HUGE, 0, HUGE], "v": "w"},
    "objects": {"!": "ndarray", "dtype": "|O", "shape": [3], "v": "w"},
    "huge text array": {"!": "ndarray", "dtype": "<U0", "shape": [HUGE], "v": "w"},
    "unknown kind": {"!": "python/object", "v": "os.system"},
    "a kind that is a list": {"!": ["tensor"], "v": "w"},
    "no value": {"!": "tensor"},
    "unknown tensor": {"!": "tensor", "v": "elsewhere"},
    "huge view": {"!": "tensor", "v": "w", "dtype": "float8_e4m3fn", "shape": [HUGE, HUGE]},
    "unknown dtype": {"!": "dtype", "v": "__class__"},
    "unknown device": {"!": "device", "v": "moon"},
    "a dict's keys": {"!": "dict", "v": [[{"!": "dict", "v": []}, 1]]},
    "a module's attribute as dtype": {"!": "dtype", "v": "nn"},
    "a module as dtype of a view": {"!": "tensor", "v": "w", "dtype": "os", "shape": []},
    "pairs of one": {"!": "dict", "v": [[1]]},
    "a list as key": {"!": "dict", "v": [[[], 1]]},
    "code as name": {"!": "namedtuple", "name": "a;b", "fields": ["x"], "v": [1]},
    "no tuple": {"!": "tuple", "v": 5},
    "no size": {"!": "size", "v": "x"},
    "short float": {"!": "float", "v": "00"},
    "short scalar": {"!": "numpy", "dtype": "<f4", "v": "00"},
    "number": {"!": "int", "v": "0x" + "g"},
    "bytes": {"!": "bytes", "v": "*"},
}


@pytest.mark.parametrize("kind", SKELETONS)
def test_values_that_encode_never_writes(kind: str, path: Path) -> None:
    """Each is an error that names the section; none allocates memory or looks anything up."""
    change_state(path, lambda state: state["sections"].update(model=SKELETONS[kind]))
    assert "section 'model': the saved state is damaged or from a newer version" in refused(path)


@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_deep_nesting(file: str, path: Path) -> None:
    """Ten megabytes of brackets end in an error, not in a crash."""
    (path / file).write_text(nested(5_000_000))
    if file == "state.json":
        forge(path)
    assert "is not JSON" in refused(path)


def test_nesting_that_json_still_reads(path: Path) -> None:
    """The decoder's own recursion ends in an error, too."""
    text = (path / "state.json").read_text()
    for depth in (200, 600, 900, 2000, 50_000):
        (path / "state.json").write_text(text.replace("[1, 2]", nested(depth)))
        forge(path)
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            assert "JSON" in str(error) or "section 'hooks'" in str(error)


@pytest.mark.parametrize("step", [10**400, "9" * 400, None, [], True, -(10**30)])
def test_invalid_steps(step: Any, tmp_path: Path, path: Path) -> None:
    """Searching a run for its newest checkpoint survives any step or none."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["meta"]["step"] = step
    write_manifest(path, manifest["files"], manifest["meta"])
    assert list_checkpoints(tmp_path) == [path]
    assert verify_checkpoint(path) == ["manifest.json: its meta differs from that in state.json"]
