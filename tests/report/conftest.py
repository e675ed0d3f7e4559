"""One headless browser for all tests of the report."""

from collections.abc import Iterator

import pytest
from browser import CHROMIUM, Browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A browser; the tests are skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium, for instance from `apt-get install chromium`")
    browser = Browser()
    yield browser
    browser.close()
