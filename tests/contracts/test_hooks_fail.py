"""A test fails if a hook fails in it and nothing else shows that, because the run continues."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
SUITE = """
import threading

import pytest

from hookline import HookRegistry


def fire(error, **options):
    def fail():
        raise error

    registry = HookRegistry()
    registry.register(fail, "fails", event="step_end", **options)
    registry.on_step_end(step=1)


def test_swallowed():
    fire(AssertionError("seen by nobody"))


def test_in_a_thread():
    thread = threading.Thread(target=fire, args=(AssertionError(),))
    thread.start()
    thread.join()


@pytest.mark.hooks_fail(raises=ValueError)
def test_other_error():
    fire(ValueError())
    fire(AssertionError())


@pytest.mark.hooks_fail(raises=ValueError)
def test_expected():
    fire(UnicodeError())


def test_raised():
    with pytest.raises(AssertionError):
        fire(AssertionError(), on_error="raise")
"""


def test_an_assertion_inside_a_hook_fails_the_test(tmp_path: Path) -> None:
    """Under the policy `warn` and in a thread too; not if the test names the error or gets it itself."""
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest.py", "requirements.tsv"):
        shutil.copy(TESTS / name, tests)
    (tests / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    failed = [line.split()[1].partition("::")[2] for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert failed == ["test_swallowed", "test_in_a_thread", "test_other_error"], done.stdout + done.stderr
    assert "hook 'fails' failed in on_step_end:" in done.stdout and "AssertionError: seen by nobody" in done.stdout
