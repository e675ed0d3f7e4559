"""While a command works nothing disturbs its page; warnings are kept for its end."""

import logging
import warnings

import pytest

from hookline.cli.quiet import quiet

logger = logging.getLogger("hookline")


def test_prints_are_dropped_and_warnings_kept_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Hookline's log and Python's warnings come together, in order, without repetitions; prints are lost."""
    warned: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with quiet(warned):
            print("something")
            logger.warning("hook %r: %s", "a", "failed")
            for _ in range(2):
                warnings.warn("old", UserWarning, stacklevel=1)
            logger.warning("hook %r: %s", "a", "failed")
            logger.info("by the way")
    assert warned == ["hook 'a': failed", "UserWarning: old"]
    assert capfd.readouterr() == ("", "")


def test_tracebacks_on_request() -> None:
    """A warning about an exception is one line, or the line and its traceback."""
    for tracebacks in (False, True):
        warned: list[str] = []
        with quiet(warned, tracebacks):
            try:
                raise ValueError("oh no")
            except ValueError:
                logger.warning("failed", exc_info=True)
        assert warned[0].startswith("failed")
        assert ("ValueError: oh no" in warned[0]) is tracebacks


def test_afterwards_all_is_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    """Also when what was silenced failed: the log speaks again and prints are seen."""
    before = (logger.propagate, list(logger.handlers), warnings.showwarning)
    with pytest.raises(RuntimeError), quiet([]):
        raise RuntimeError
    assert (logger.propagate, list(logger.handlers), warnings.showwarning) == before
    print("seen")
    assert capfd.readouterr().out == "seen\n"
