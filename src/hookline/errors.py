"""Every error that Hookline raises on purpose, and how messages show values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from traceback import format_exception
from typing import Any

_MAX_SHOWN = 60  # characters of a value in a message
MAX_TEXT = 10_000  # characters of an error or a reason; the rest is left out, and its length is stated
before_cut: list[Callable[[str], str]] = []
"""Functions that are applied to a long string before it is cut; record/redaction.py adds one."""


class HooklineError(Exception):
    """Base of every error that Hookline raises on purpose. The message says what is wrong, where, and how to fix it."""


class RegistrationError(HooklineError):
    """A hook cannot be registered: a misspelt event, an unknown argument, a taken name, a cyclic order."""


class MissingArgument(HooklineError, TypeError):
    """An event was fired by hand without a value that one of its hooks names: the caller's error, not the hook's."""


class ConfigError(HooklineError):
    """The configuration is wrong: the message names the dotted path, the bad value and the nearest valid choice."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


class NothingMatches(ConfigError):
    """A filter matches nothing in this model, so it is misspelt. It ends the run regardless of the hook's policy."""

    always_raise = True


class TrainingError(HooklineError):
    """The run cannot start or continue: no loss, no parameters, an empty loader."""


class MetricMissing(HooklineError):
    """A strict monitor did not find its metric. It ends the run regardless of the hook's failure policy."""

    always_raise = True


class LiveWrite(HooklineError):
    """An observer wrote into one of the model's tensors: training is no longer the same, so the run ends."""

    always_raise = True


class GradientError(HooklineError):
    """An update hook returned gradients that do not fit the parameters; they were left as they were."""


class RecordError(HooklineError):
    """The run's record cannot be written or read."""


class CheckpointError(HooklineError):
    """A checkpoint cannot be written, or the one on disk is damaged."""


class RankError(HooklineError):
    """The ranks of a run do not fit together, or another rank has failed: the message names the rank."""

    always_raise = True


class StopTraining(Exception):
    """Raised by a hook to end the run cleanly; the same as ``trainer.request_stop(reason)``."""


def error_text(error: BaseException) -> str:
    """Return the class of an exception and its message, even if building the message fails.

    >>> error_text(ValueError("too large"))
    'ValueError: too large'
    """
    try:
        message = str(error)
    except Exception as problem:  # The exception's own __str__ failed.
        message = f"(its message cannot be shown: __str__ raised {type(problem).__name__})"
    return cut(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an exception; for a long one only the end, which shows what was raised and where."""
    return cut("".join(format_exception(error)), from_end=True)


def cut(text: str, *, from_end: bool = False) -> str:
    """Shorten a string to its first `MAX_TEXT` characters, or its last ones; the length of the rest is stated."""
    if len(text) <= MAX_TEXT:
        return text
    kept = text[-2 * MAX_TEXT :] if from_end else text[: 2 * MAX_TEXT]
    for redact in before_cut:  # half of a secret would no longer be recognized
        kept = redact(kept)
    # The cut may have removed half of a secret.
    half = MAX_TEXT if len(text) <= 2 * MAX_TEXT else min(MAX_TEXT, len(kept) // 2)
    left_out = f"{len(text) - MAX_TEXT:,} more characters"
    return f"({left_out}) …{kept[-half:]}" if from_end else f"{kept[:half]}… ({left_out})"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, once; one that refuses notes, such as a frozen dataclass, is left as it is."""
    with suppress(Exception):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception; none if they cannot be read."""
    try:
        return list(map(str, getattr(error, "__notes__", ())))
    except Exception:
        return []


def with_article(noun: str) -> str:
    """Return a noun with 'a' or 'an', according to its pronunciation.

    >>> with_article("update hook")
    'an update hook'
    """
    return f"{'an' if noun[:1].lower() in 'aeio' or noun.lower().startswith(('up', 'un')) else 'a'} {noun}"


def got(value: Any) -> str:
    """Return the end of a message that says what was expected: 'got 3 (int)'.

    A value that came from a reference is named by the reference, because it may be a secret.
    """
    reference = getattr(value, "reference", None)
    return f"which {reference} does not hold" if reference else f"got {shown(value)}"


def shown(value: Any) -> str:
    """Return a value for a message, with its type."""
    return f"{written(value)} ({type(value).__name__})"


def written(value: Any) -> str:
    """Return a value's repr, cut short; for a resolved reference, the reference."""
    try:
        text = repr(_with_references(value))
    except Exception:  # Its own __repr__ failed, it contains itself, or it has thousands of digits.
        text = "a value that cannot be shown"
    text = " ".join(map(str.strip, text.splitlines()))  # a message is one line
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "…"


def _with_references(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_with_references, value))
    if type(value) is dict:
        return {key: _with_references(item) for key, item in value.items()}
    return getattr(value, "reference", value) if isinstance(value, str) else value
