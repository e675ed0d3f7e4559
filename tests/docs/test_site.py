"""The site works from disk and without a network: its search finds pages, and no page asks another host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]


def test_search_works_from_disk_without_a_network(tmp_path: Path) -> None:
    """A search in a page that was opened from disk lists the page that it names first, and nothing is requested."""
    pytest.importorskip("material", reason="needs the group `site`")
    if CHROMIUM is None:
        pytest.skip("needs Chromium, for instance from `apt-get install chromium`")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    browser = Browser()
    try:
        browser.call("Page.navigate", url=f"{(tmp_path / 'how-to' / 'own-loop.html').as_uri()}?q=clip_norm")
        browser.wait("document.querySelector('.md-search-result__meta')?.innerText.includes('matching')")
        browser.run("document.querySelector('.md-search__input').focus()")
        assert browser.wait("document.querySelector('.md-search-result__item h1')?.innerText") == "clip_norm"
        assert browser.problems() == []
    finally:
        browser.close()
