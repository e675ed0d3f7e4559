"""What is said while a command works: prints are dropped, warnings kept until its page is printed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

from hookline.events.policy import logger


@contextmanager
def silence(warned: list[str], tracebacks: bool = False) -> Iterator[None]:
    """Nothing reaches the console meanwhile; the warnings of Hookline and of Python go into the list, each once."""
    handler = _Keeper(warned, tracebacks)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.showwarning = lambda message, category, *_: handler.keep(f"{category.__name__}: {message}")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


class _Keeper(logging.Handler):
    """Keeps each text once, with the traceback if that is asked for."""

    def __init__(self, kept: list[str], tracebacks: bool) -> None:
        super().__init__(logging.WARNING)
        self._kept, self._tracebacks = kept, tracebacks

    def emit(self, record: logging.LogRecord) -> None:
        self.keep(self.format(record) if self._tracebacks else record.getMessage())

    def keep(self, text: str) -> None:
        if text not in self._kept:
            self._kept.append(text)
