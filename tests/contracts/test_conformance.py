"""conformance.json is written by runs of the whole test suite only."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

PYPROJECT = """
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = ["-m", "not soak", "-p", "no:cacheprovider"]
markers = ["req(*ids): shown", "soak: long"]
"""
ONE = '''
import pytest

@pytest.mark.req("000-01")
def test_good():
    """It holds. And more."""

@pytest.mark.req("000-01")
def test_bad():
    assert False
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Write a project with this suite's conftest, two modules of tests, and the outcomes of an earlier run."""
    (tmp_path / "tests").mkdir()
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "requirements.tsv").write_text("000-01\tone\n000-02\ttwo\n")
    (tmp_path / "tests" / "test_one.py").write_text(ONE)
    (tmp_path / "tests" / "test_two.py").write_text(ONE.replace("000-01", "000-02").replace("assert False", "pass"))
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "torch.py").write_text(
        "def set_num_threads(count): pass\nclass dtype: pass\n"
    )  # all that conftest wants
    (tmp_path / "hookline" / "core").mkdir(parents=True)
    for empty in ("hookline/__init__.py", "hookline/core/__init__.py"):
        (tmp_path / empty).touch()
    (tmp_path / "hookline" / "core" / "failures.py").write_text("class FailureHandler:\n    apply_policy = None\n")
    (tmp_path / "hookline" / "core" / "plugins.py").write_text("class PluginTable: pass\n")
    (tmp_path / "conformance.json").write_text("earlier")
    return tmp_path


def run_tests(project: Path, *arguments: str) -> str:
    """Run the tests with these arguments, and return the content of conformance.json afterwards."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(command, cwd=project, env={"PYTHONPATH": str(project)}, capture_output=True, text=True)
    assert done.returncode in (0, 1, 2), done.stdout + done.stderr
    return (project / "conformance.json").read_text()


CACHE = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(4))
def test_cache(number):
    cache = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert cache.is_dir()
    (pathlib.Path(__file__).parent / f"cache-{os.getpid()}-{number}").write_text(str(cache))
"""


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]])
def test_every_run_has_its_own_compile_cache(project: Path, arguments: list[str]) -> None:
    """The processes of one run share a folder, two runs do not, and nothing is left of it."""
    (project / "tests" / "test_cache.py").write_text(CACHE)
    caches = []
    for _ in range(2):
        run_tests(project, "tests/test_cache.py", *arguments)
        folders = list((project / "tests").glob("cache-*"))
        assert len(folders) == 4
        caches += {path.read_text() for path in folders}
        for path in folders:
            path.unlink()
    assert len(caches) == len(set(caches)) == 2
    assert not any(Path(cache).exists() for cache in caches)


def test_torch_uses_that_cache() -> None:
    """The folder of this run is the one that inductor writes to."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert Path(cache_dir()).name.startswith("hookline-tests-inductor-")


@pytest.mark.parametrize("arguments", [[], ["tests"], ["-n", "2"]])
def test_a_whole_run_is_written(project: Path, arguments: list[str]) -> None:
    """Counts and sentences per requirement are written, with one process or several."""
    outcomes = json.loads(run_tests(project, *arguments))
    counts = {requirement: (row["passed"], row["failed"], row["skipped"]) for requirement, row in outcomes.items()}
    assert counts == {"000-01": (1, 1, 0), "000-02": (2, 0, 0)}
    assert {"test": "tests/test_one.py::test_good", "sentence": "It holds."} in outcomes["000-01"]["tests"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tests/test_one.py"],
        ["tests/test_one.py::test_good", "tests/test_two.py"],
        ["-k", "good"],
        ["-m", "soak or not soak"],
        ["--ignore", "tests/test_one.py"],
        ["-x"],
    ],
)
def test_a_partial_run_writes_nothing(project: Path, arguments: list[str]) -> None:
    """A run that selects some tests, or ends early, leaves conformance.json as it is."""
    assert run_tests(project, *arguments) == "earlier"
