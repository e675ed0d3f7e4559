"""The pytest plugin: its fixtures, and that it costs nothing where they are not used."""

import tomllib
from pathlib import Path

from commands import python

from hookline.testing import lifecycles

ROOT = Path(__file__).resolve().parents[2]
USES = """
from hookline import TrainingHook

class Quiet(TrainingHook):
    def on_step_end(self): ...

def test_lifecycles(hookline_lifecycle, hookline_recorder, hookline_sink):
    hookline_lifecycle.run(hookline_recorder)
    assert hookline_recorder.names[-1] == "on_train_end" and hookline_sink.metrics == []

def test_checks(assert_hook_harmless, assert_hook_resumable, assert_hook_within_budget):
    assert_hook_harmless(Quiet())
    assert_hook_resumable(Quiet())
    assert_hook_within_budget(Quiet(), microseconds_per_step=5000)
"""
USES_NOTHING = """
import sys

def test_nothing_is_imported():
    assert "pytest_hookline" in sys.modules
    assert not {"hookline", "torch"} & set(sys.modules)
"""


def pytest_on(text: str, *options: str) -> str:
    Path("test_it.py").write_text(text)
    Path("pytest.ini").write_text("[pytest]\n")
    words = ("-p", "pytest_hookline", "-p", "no:cacheprovider", *options)
    return python("-m", "pytest", *words, "test_it.py").stdout


def test_the_fixtures() -> None:
    """A test with the lifecycle runs once for each, with its name; the others give objects and functions."""
    out = pytest_on(USES, "-v", "-k", "checks or on_step_end")
    assert "test_lifecycles[exception_at_on_step_end] PASSED" in out and "test_checks PASSED" in out, out
    assert f"3 passed, {len(lifecycles()) - 2} deselected" in out


def test_nothing_is_imported_without_them() -> None:
    """Neither Hookline nor torch, in a project that has Hookline installed but tests other things."""
    assert "1 passed" in (out := pytest_on(USES_NOTHING)), out


def test_the_plugin_is_installed() -> None:
    """The entry point has the module's name, and the module is in the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_hookline": "pytest_hookline"}
    assert "src/pytest_hookline.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
