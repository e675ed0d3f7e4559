"""The manifest vouches for every file and for itself."""

from pathlib import Path

import pytest

from hookline.checkpoints.manifest import check_files, manifest_text, read_manifest, sha256_of
from hookline.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with two files and their manifest."""
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    files = {file.name: {"sha256": sha256_of(file), "bytes": file.stat().st_size} for file in tmp_path.iterdir()}
    (tmp_path / "manifest.json").write_text(manifest_text(files, {"step": 3, "loss": 0.1}))
    return tmp_path


def test_a_manifest_describes_its_directory(folder: Path) -> None:
    """Sizes and hashes of all files are in it, and they agree."""
    manifest = read_manifest(folder)
    assert manifest["format"] == 1
    assert manifest["meta"] == {"step": 3, "loss": 0.1}
    assert manifest["files"]["model.safetensors"]["bytes"] == 3
    assert check_files(folder, manifest["files"]) == []


def test_spelling_is_checked(folder: Path) -> None:
    """Even a change that means nothing to JSON shows that somebody was there."""
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(' "format": 1', ' "format":  1'))
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ("\xff", "is no JSON"),
        ("[]\n", "is not of format 1"),
        (manifest_text({}, {}), "lacks its list of files"),
        (manifest_text({"state.json": 3}, {}), "lacks its list of files"),
        (manifest_text({"state.json": {}}, None), "lacks its list of files or its meta"),
        (manifest_text({"state.json": {}}, {}).replace('"format": 1', '"format": 2'), "is not of format 1"),
    ],
)
def test_manifests_that_are_none(folder: Path, text: str, message: str) -> None:
    """A torn, foreign or newer manifest is told apart."""
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", "a/b", "..", "", "manifest.json", ".hidden"])
def test_names_that_lead_out(folder: Path, name: str) -> None:
    """A name that is no plain file name is never opened."""
    assert check_files(folder, {name: {"bytes": 0, "sha256": ""}})[0] == f"{name!r}: leads out of the checkpoint"
