"""Suppress output while a command works: prints are dropped, warnings are collected for later."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

from hookline.core.failures import logger


@contextmanager
def quiet(collected: list[str], tracebacks: bool = False) -> Iterator[None]:
    """Print nothing inside the block, and append the warnings of Hookline and of Python to a list, each once.

    Args:
        collected: The list that receives the warnings.
        tracebacks: Whether the tracebacks of logged exceptions are collected, too.
    """
    handler = _Collector(collected, tracebacks)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.showwarning = lambda message, category, *_: handler.add(f"{category.__name__}: {message}")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


class _Collector(logging.Handler):
    def __init__(self, collected: list[str], tracebacks: bool) -> None:
        super().__init__(logging.WARNING)
        self._collected, self._tracebacks = collected, tracebacks

    def emit(self, record: logging.LogRecord) -> None:
        self.add(self.format(record) if self._tracebacks else record.getMessage())

    def add(self, text: str) -> None:
        if text not in self._collected:
            self._collected.append(text)
