"""The wheel and the sdist have what users need, and the quickstart runs from an installed wheel."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, and return what it printed."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the wheel and the sdist of a copy of the repository; return them by suffix."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":  # a worktree has a file of that name
            shutil.copy(path, source)
    for name in ("src", "tests", "docs", "examples", "tools", "bench"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=source)
    return {path.suffix: path for path in folder.iterdir() if path.is_file()}


def test_the_packages_have_sources_pages_and_licenses(packages: dict[str, Path]) -> None:
    """Users get the source with its data files, the pages of `hookline help`, and no tests."""
    wheel = zipfile.ZipFile(packages[".whl"])
    names = wheel.namelist()
    sources = [path for path in (ROOT / "src" / "hookline").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [path for path in sources if path.relative_to(ROOT / "src").as_posix() not in names] == []
    assert "hookline/_docs/how-to/config.md" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("METADATA"))
    links = re.findall(r"\]\((.*?)\)", metadata.partition("# Hookline")[2])
    assert len(links) > 20 and all(link.startswith("https://") for link in links)  # there are no files beside it
    assert [name for name in names if name.startswith("tests")] == []
    with tarfile.open(packages[".gz"]) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "mkdocs.yml", "tests/test_package.py", "docs/index.md"} <= members
    assert {path.name for path in ROOT.glob("*.md")} <= members


def link_dependencies(distribution: Distribution, folder: Path) -> None:
    """Link into a folder what a distribution declares that it needs, and what that needs in turn."""
    for text in distribution.requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            installed = importlib.metadata.distribution(needed.name)
            for name in {path.parts[0] for path in installed.files or ()} - {"..", "__pycache__"}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(installed.locate_file(name))
            link_dependencies(installed, folder)


def test_the_quickstart_runs_from_an_installed_wheel(packages: dict[str, Path], tmp_path: Path) -> None:
    """In an empty environment with the wheel and what it declares, the README's example, commands and help work."""
    bin_folder = tmp_path / "env" / "bin"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    (folder,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", bin_folder / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", packages[".whl"], cwd=tmp_path)
    # The dependencies are large, so they are links to those of this test's own environment.
    (wheel,) = importlib.metadata.distributions(name="hookline", path=[str(folder)])
    link_dependencies(wheel, folder)
    run(*pip, "check", cwd=tmp_path)
    where = run(bin_folder / "python", "-c", "import hookline; print(hookline.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert example
    (tmp_path / "quickstart.py").write_text(example[1])
    assert "loss" in run(bin_folder / "python", "quickstart.py", cwd=tmp_path)
    assert "completed" in run(bin_folder / "hookline", "show", "latest", cwd=tmp_path)
    assert "max_steps" in run(bin_folder / "hookline", "help", "options", cwd=tmp_path)
