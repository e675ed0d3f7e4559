"""The wheel and the sdist have what users need, and the quickstart runs from an installed wheel."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

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
    for name in ("pyproject.toml", "Makefile", "constraints.txt", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "tests", "docs", "examples", "tools", "bench"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=source)
    return {path.suffix: path for path in folder.iterdir() if path.is_file()}


def test_the_packages_have_sources_pages_and_licenses(packages: dict[str, Path]) -> None:
    """Users get the source with its data files, the pages of `hookline help`, and no tests."""
    names = zipfile.ZipFile(packages[".whl"]).namelist()
    sources = [path for path in (ROOT / "src" / "hookline").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [path for path in sources if path.relative_to(ROOT / "src").as_posix() not in names] == []
    assert "hookline/_docs/how-to/config.md" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert [name for name in names if name.startswith("tests")] == []
    with tarfile.open(packages[".gz"]) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "Makefile", "constraints.txt", "tests/test_package.py", "docs/index.md"} <= members


def test_the_quickstart_runs_from_an_installed_wheel(packages: dict[str, Path], tmp_path: Path) -> None:
    """In an environment that has only the dependencies, the README's first example, commands and help work."""
    bin_folder = tmp_path / "env" / "bin"
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    packages_folder = run(bin_folder / "python", "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path)
    # The dependencies are those of this environment, which are large; only Hookline itself is installed. A .pth file
    # does not read those in the folder it adds, so the editable install there is not seen.
    Path(packages_folder.strip(), "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", "--no-index", packages[".whl"])
    run(bin_folder / "python", *install, cwd=tmp_path, PIP_DISABLE_PIP_VERSION_CHECK="1")
    where = run(bin_folder / "python", "-c", "import hookline; print(hookline.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert example
    (tmp_path / "quickstart.py").write_text(example[1])
    assert "loss" in run(bin_folder / "python", "quickstart.py", cwd=tmp_path)
    assert "completed" in run(bin_folder / "hookline", "show", "latest", cwd=tmp_path)
    assert "max_steps" in run(bin_folder / "hookline", "help", "options", cwd=tmp_path)
