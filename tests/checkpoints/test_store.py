"""Test that a checkpoint exists whole or not at all, and that what is read is what was written."""

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer
from saved_checkpoints import list_checkpoints, verify_checkpoint

from hookline import SimpleTrainer, _fs
from hookline.checkpoints.store import newest_good, read_checkpoint, temporary_name, write_checkpoint
from hookline.errors import CheckpointError

DEAD_PID = 2**22 + 1  # larger than any id that the kernel assigns


def sections(seed: int = 0) -> dict[str, Any]:
    """Make the state of a small run."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2, generator=generator)
    return {"model": {"a": weight, "tied": weight, "part": weight[1:]}, "loop": {"step": 3, "seen": (1, 2)}}


def save(directory: Path, step: int, name: str | None = None) -> Path:
    """Write a checkpoint for a step."""
    return write_checkpoint(directory, name or f"step-{step:08d}", sections(step), {"step": step, "loss": 0.25})


def names(directory: Path) -> list[str]:
    """List a directory."""
    return sorted(entry.name for entry in directory.iterdir())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Sections and meta come back exactly, ties included."""
    path = save(tmp_path, 3)
    assert path == tmp_path / "step-00000003"
    assert names(path) == ["manifest.json", "model.safetensors", "state.json"]
    assert names(tmp_path) == ["step-00000003"]
    loaded, meta = read_checkpoint(path)
    assert meta == {"step": 3, "loss": 0.25}
    assert loaded["loop"] == {"step": 3, "seen": (1, 2)}
    assert loaded["model"]["a"] is loaded["model"]["tied"]
    assert torch.equal(loaded["model"]["a"], sections(3)["model"]["a"])
    assert torch.equal(loaded["model"]["part"], sections(3)["model"]["a"][1:])
    loaded["model"]["a"].add_(1)
    assert verify_checkpoint(path) == []


def test_files_follow_the_umask(tmp_path: Path) -> None:
    """Every file has the permissions that the umask allows."""
    before = os.umask(0o027)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert modes == {"manifest.json": 0o640, "model.safetensors": 0o640, "state.json": 0o640}


def test_views_of_one_memory_are_stored_apart(tmp_path: Path) -> None:
    """Overlapping views, slices of a big buffer and transposed tensors are all written with their own values."""
    base = torch.arange(12.0)
    state = {"all": base, "half": base[6:], "square": base.view(3, 4), "turned": base.view(3, 4).t(), "one": base[2]}
    loaded, _ = read_checkpoint(write_checkpoint(tmp_path, "x", {"s": state}, {}))
    assert all(torch.equal(loaded["s"][name], state[name]) for name in state)
    path = write_checkpoint(tmp_path, "y", {"s": {"slice": torch.zeros(1_000_000)[:10]}}, {})
    assert (path / "s.safetensors").stat().st_size < 1000


def test_a_taken_name_gets_a_number(tmp_path: Path) -> None:
    """Nothing is ever overwritten, not even an empty directory or a file."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x-1").write_text("")
    (tmp_path / "x-2").symlink_to("nowhere")
    assert [save(tmp_path, step, "x").name for step in (1, 2)] == ["x-3", "x-4"]
    assert read_checkpoint(tmp_path / "x-3")[1]["step"] == 1


def test_a_name_taken_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process takes the name between the check and the rename, a number is appended."""
    save(tmp_path, 1, "x")
    monkeypatch.setattr(_fs.os.path, "lexists", lambda path: False)
    assert save(tmp_path, 2, "x").name == "x-1"


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "../x", "a b", "ä", "a\n", "x\x00"])
def test_invalid_names(tmp_path: Path, name: str) -> None:
    """A name that is not a plain file name raises for checkpoints and for sections."""
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        write_checkpoint(tmp_path, name, {}, {})
    with pytest.raises(CheckpointError, match="cannot name a section"):
        write_checkpoint(tmp_path, "x", {name: {}}, {})
    assert names(tmp_path) == []


def test_state_that_cannot_be_saved(tmp_path: Path) -> None:
    """The error names section and path, and nothing is left behind."""
    with pytest.raises(CheckpointError, match=r"section 'hooks': cannot save a\.b: an object"):
        write_checkpoint(tmp_path, "x", {"model": sections()["model"], "hooks": {"a": {"b": object()}}}, {})
    with pytest.raises(CheckpointError, match="meta holds the tensor 'best'"):
        write_checkpoint(tmp_path, "x", {}, {"best": torch.tensor(1.0)})
    assert names(tmp_path) == []


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a save propagates, and the partial files are removed."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hookline.checkpoints.store.write_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    """A file in the directory's place is a CheckpointError with its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file", 1)


def test_a_killed_process_leaves_a_temporary_that_the_next_save_removes(tmp_path: Path) -> None:
    """After SIGKILL during a save the older checkpoint is the newest good one; the next save removes the rest."""
    save(tmp_path, 1)
    code = """
        import os, signal, sys
        from pathlib import Path
        import torch
        from hookline import _fs
        from hookline.checkpoints.store import write_checkpoint
        real = _fs.os.write
        def die(*args):
            real(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        _fs.os.write = die
        write_checkpoint(Path(sys.argv[1]), "step-2", {"m": {"w": torch.ones(5)}}, {"step": 2})
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len([name for name in names(tmp_path) if name.startswith(".tmp-step-2-")]) == 1
    newest, problems = newest_good(tmp_path)
    assert newest is not None and newest.path == tmp_path / "step-00000001" and problems == []
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_only_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """Temporary directories of living processes, also our own, and other files stay."""
    host = temporary_name(tmp_path / "a").name.partition("@")[2]
    kept = [f".tmp-a-{os.getpid()}-0af3@{host}", f".tmp-a-1-0af3@{host}", ".tmp-odd", f".tmp-a-{DEAD_PID}-0af3"]
    for name in [*kept, ".other", f".tmp-step-1-{DEAD_PID}-0af3@{host}", f".tmp-b-{10**30}-aa@{host}"]:
        (tmp_path / name).mkdir()
    save(tmp_path, 1)
    assert names(tmp_path) == sorted([*kept, ".other", "step-00000001"])


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """A change of any byte of any file is detected before anything is read."""
    path = write_checkpoint(tmp_path, "x", {"m": {"w": torch.ones(2)}, "loop": {"n": 1}}, {"step": 1, "loss": 0.5})
    for file in path.iterdir():
        good = file.read_bytes()
        for index in range(len(good)):
            file.write_bytes(good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :])
            assert verify_checkpoint(path), f"byte {index} of {file.name}"
        file.write_bytes(good)
    assert verify_checkpoint(path) == []


def test_every_cut_is_found(tmp_path: Path) -> None:
    """A file cut short anywhere is detected, and so is one that grew."""
    path = save(tmp_path, 1)
    for file in path.iterdir():
        good = file.read_bytes()
        for length in {0, 1, len(good) // 2, len(good) - 1}:
            file.write_bytes(good[:length])
            assert verify_checkpoint(path), f"{file.name} cut to {length}"
        file.write_bytes(good + b" ")
        assert verify_checkpoint(path)
        file.write_bytes(good)


def _replace_with_link(file: Path) -> None:
    copy = file.parent.parent / "elsewhere"
    shutil.copy(file, copy)
    file.unlink()
    file.symlink_to(copy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.safetensors").unlink(), r"model\.safetensors: is missing"),
        (lambda path: (path / "state.json").unlink(), r"state\.json: is missing"),
        (lambda path: (path / "manifest.json").unlink(), r"manifest\.json: is missing"),
        (lambda path: (path / "extra.bin").write_text("x"), r"extra\.bin: is not in the manifest"),
        (lambda path: (path / "sub").mkdir(), r"sub: is not in the manifest"),
        (lambda path: _replace_with_link(path / "model.safetensors"), r"model\.safetensors: is a link"),
        (lambda path: _replace_with_link(path / "manifest.json"), r"manifest\.json: is a link"),
        (lambda path: (path / "state.json").write_text("x"), r"state\.json: has 1 bytes instead of \d+"),
        (lambda path: shutil.rmtree(path), "is not a directory"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    """Reading a damaged checkpoint fails with the file and the problem."""
    path = save(tmp_path / "checkpoints", 1)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


def test_newest_first(tmp_path: Path) -> None:
    """Checkpoints are ordered by step, then by time, whatever their names; temporary directories are not listed."""
    assert list_checkpoints(tmp_path / "missing") == []
    paths = [save(tmp_path, step, name) for step, name in ((2, "b"), (10, "a"), (2, "c"), (1, "z"))]
    os.utime(paths[0], (1, 1))
    (tmp_path / ".tmp-x-1-aa@host").mkdir()
    (tmp_path / "note.txt").write_text("")
    (tmp_path / "latest").symlink_to(paths[0])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["a", "c", "b", "z"]


def test_other_directories_are_not_checkpoints(tmp_path: Path) -> None:
    """Directories of runs, or of anything else, are not listed; one file of a checkpoint makes a directory one."""
    save(tmp_path / "20260101-000000-abcdefgh" / "checkpoints", 1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_text("")
    assert newest_good(tmp_path) == (None, [])
    for name in ("manifest.json", "state.json", "model.safetensors"):
        (tmp_path / name.partition(".")[0]).mkdir()
        (tmp_path / name.partition(".")[0] / name).write_text("")
    assert {path.name for path in list_checkpoints(tmp_path)} == {"manifest", "state", "model"}
    assert len(newest_good(tmp_path)[1]) == 3


def test_the_newest_good_one_is_found(tmp_path: Path) -> None:
    """Damaged newer checkpoints are skipped, and each problem is returned."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000004" / "manifest.json").write_text("{")
    (tmp_path / "step-00000003" / "model.safetensors").unlink()
    newest, problems = newest_good(tmp_path)
    assert newest is not None and newest.path == tmp_path / "step-00000002"
    assert len(problems) == 2
    assert "step-00000004: manifest.json: is not JSON" in problems[0]
    assert "step-00000003: model.safetensors: is missing" in problems[1]
    assert newest_good(tmp_path / "missing") == (None, [])


def test_a_forged_meta_is_found(tmp_path: Path) -> None:
    """A manifest rewritten with another step does not agree with the state."""
    path = save(tmp_path, 1)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 9'))
    assert verify_checkpoint(path) == ["manifest.json: its meta differs from that in state.json"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_state_is_saved_and_loaded(tmp_path: Path) -> None:
    """Tensors on a GPU are written, and come back on the host."""
    weight = torch.randn(3, device="cuda")
    path = write_checkpoint(tmp_path, "x", {"m": {"w": weight, "t": weight}}, {"step": 1})
    loaded, _ = read_checkpoint(path)
    assert loaded["m"]["w"] is loaded["m"]["t"]
    assert torch.equal(loaded["m"]["w"], weight.cpu())


# ---- hashes ----------------------------------------------------------------------------------------------------------


def test_sizes_and_hashes(tmp_path: Path) -> None:
    """The manifest has the size and hash of every file, in the order of names."""
    path = write_checkpoint(tmp_path, "x", {"b": {"w": torch.ones(3)}, "a": {"w": torch.ones(5)}}, {"step": 1})
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert list(files) == ["a.safetensors", "b.safetensors", "state.json"]
    for name, entry in files.items():
        data = (path / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_hashing_runs_beside_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No write waits for a hash."""
    written, real_hash, real_write = threading.Event(), hashlib.sha256, _fs.write_file

    def hash_late() -> Any:
        assert written.wait(300)
        return real_hash()

    def write(path: Path, parts: list[bytes]) -> None:
        real_write(path, parts)
        if path.name == "state.json":  # the last one
            written.set()

    monkeypatch.setattr(hashlib, "sha256", hash_late)
    monkeypatch.setattr("hookline.checkpoints.store.write_file", write)
    path = write_checkpoint(tmp_path, "x", {"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(3000)}}, {"step": 1})
    monkeypatch.undo()
    assert verify_checkpoint(path) == []


def test_a_failing_write_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error propagates and the threads end."""
    before = threading.active_count()

    def fail(path: Path, parts: list[bytes]) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("hookline.checkpoints.store.write_file", fail)
    with pytest.raises(CheckpointError, match="no space left"):
        write_checkpoint(tmp_path, "x", sections(), {"step": 1})
    assert threading.active_count() == before


# ---- the manifest ----------------------------------------------------------------------------------------------------


def manifest_text(files: Any, meta: Any) -> str:
    """Return a manifest as checkpoints have it."""
    return json.dumps({"format": 1, "files": files, "meta": meta}, indent=1) + "\n"


def test_spelling_is_checked(tmp_path: Path) -> None:
    """Even a change of whitespace is detected."""
    path = write_checkpoint(tmp_path, "x", sections(), {"step": 3})
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(' "format": 1', ' "format":  1'))
    assert verify_checkpoint(path) == ["manifest.json: was changed after it was written"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]\n", "is not of format 1"),
        (manifest_text({}, {}), "lacks its list of files"),
        (manifest_text({"state.json": 3}, {}), "lacks its list of files"),
        (manifest_text({"state.json": {}}, None), "lacks its list of files or its meta"),
        (manifest_text({"state.json": {}}, {}).replace('"format": 1', '"format": 2'), "is not of format 1"),
    ],
)
def test_invalid_manifests(tmp_path: Path, text: str, message: str) -> None:
    """Torn, foreign and newer manifests have different messages."""
    path = write_checkpoint(tmp_path, "x", sections(), {"step": 3})
    (path / "manifest.json").write_text(text, encoding="latin-1")
    [problem] = verify_checkpoint(path)
    assert message in problem


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", "a/b", "..", "", "manifest.json", ".hidden"])
def test_names_that_lead_out(tmp_path: Path, name: str) -> None:
    """A name that is not a plain file name is never opened."""
    path = write_checkpoint(tmp_path, "x", sections(), {"step": 3})
    manifest = json.loads((path / "manifest.json").read_text())
    files = {**manifest["files"], name: {"bytes": 0, "sha256": ""}}
    (path / "manifest.json").write_text(manifest_text(files, manifest["meta"]))
    assert verify_checkpoint(path) == [f"{name!r}: points outside the checkpoint"]


# ---- abandoned checkpoints -------------------------------------------------------------------------------------------


def saving_trainer(steps: int) -> SimpleTrainer:
    trainer = make_trainer(data=make_batches(30), max_steps=steps, record=True)
    trainer.add_hook("checkpoint", save_every_n_steps=8, save_every_n_epochs=None)
    return trainer


def test_resuming_the_run_follows_the_new_branch(caplog: pytest.LogCaptureFixture) -> None:
    """Resumed from step 8 and stopped at 16, the newest checkpoint is the new 16, not the old 24."""
    first = saving_trainer(24)
    first.train()
    holder = first.checkpoint_dir
    (early,) = [path for path in list_checkpoints(holder) if path.name.endswith("8")]
    saving_trainer(16).fit(resume=early)
    assert sorted(path.name for path in list_checkpoints(holder)) == ["step-00000008", "step-00000016"]
    assert "moved a checkpoint of a later step away" in caplog.text
    third = saving_trainer(20)
    third.fit(resume=first.run_dir)
    assert third.step == 20
    lines = [json.loads(line) for line in (first.run_dir / "events.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "checkpoint_abandoned" for line in lines) == 2
    moved = first.run_dir / "abandoned"
    assert names(moved) == ["step-00000016", "step-00000024"]
    assert not any(verify_checkpoint(path) for path in list_checkpoints(moved))
    saving_trainer(10).fit(resume=early)  # the same step is abandoned again, and nothing is overwritten
    assert names(moved) == ["step-00000016", "step-00000016-1", "step-00000024"]
