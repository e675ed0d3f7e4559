"""What the tests of the record share."""

import pytest

from hookline.record.known_secrets import for_good


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests() -> None:
    """Forget what other tests taught this process to hide: these write all kinds of texts."""
    for_good.instead.clear()
