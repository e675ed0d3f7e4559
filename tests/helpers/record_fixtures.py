"""Fixtures for the tests that write records, and for those that read them."""

from pathlib import Path

import pytest
from records import start_record

from hookline.record import Record, redaction


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Return a record on disk of a run that has begun, with the id "r"."""
    return start_record(tmp_path, "r")


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests() -> None:
    """Forget the secrets that other tests added to this process: these tests write all kinds of texts."""
    redaction.for_good.replacements.clear()
