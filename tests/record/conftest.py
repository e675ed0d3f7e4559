"""Fixtures for the tests of the record."""

import pytest

from hookline.record import redaction


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests() -> None:
    """Forget the secrets that other tests added to this process: these tests write all kinds of texts."""
    redaction.for_good.replacements.clear()
