"""The log without secrets: a hook that fails may quote one, and its traceback goes to the console."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hookline.record.known_secrets import without_known
from hookline.record.redaction import redact_text

logger = logging.getLogger("hookline")
_formatter = logging.Formatter()


def take_out_secrets(record: logging.LogRecord) -> bool:
    """As a filter of a logger: rewrites what is about to be written, and lets everything through."""
    record.msg, record.args = redact_text(record.getMessage()), ()
    if record.exc_info and not record.exc_text:
        record.exc_text = without_known(_formatter.formatException(record.exc_info))
    return True


@contextmanager
def secrets_kept_out() -> Iterator[None]:
    """Inside the block Hookline's own log shows no secret. Runs may overlap: the last to end takes the filter away."""
    global _runs
    _runs += 1
    logger.addFilter(take_out_secrets)  # once, however often it is added
    try:
        yield
    finally:
        _runs -= 1
        if not _runs:
            logger.removeFilter(take_out_secrets)


_runs = 0
