"""docs/project/architecture.md tells the truth about the way through the code: traced runs have the same steps."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hookline.cli import main

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "hookline"
ROW = re.compile(r"^\| (\S+) \| `([^`]+)` \|", re.MULTILINE)
CONFIG = """
model: {name: char_gpt, context: 16, width: 16, heads: 2, layers: 1}
data: {name: stdlib_text, context: 16, batch_size: 4, max_bytes: 60000}
optimizer: {name: adamw, lr: 1e-3}
trainer: {max_steps: 50, seed: 1, console: false, validate_every: null, sanity_batches: 0}
hooks:
  forward: [{name: activation_stats, modules: "blocks.*.mlp", every: 10}]
"""


def walk(name: str) -> list[tuple[str, str]]:
    """Return the rows of one table of the page: file and function."""
    text = (ROOT / "docs" / "project" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition(f"<!-- walk: {name} -->")[2].partition("<!-- walk: end -->")[0]
    return [(file.replace("\\_", "_"), function) for file, function in ROW.findall(table)]


def steps_taken(expected: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Train with the config and return how far the calls follow the expected functions, in their order."""
    taken: list[tuple[str, str]] = []
    here = str(SOURCE)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and len(taken) < len(expected) and code.co_filename.startswith(here):
            called = code.co_filename[len(here) + 1 :], code.co_qualname
            if called == expected[len(taken)]:
                taken.append(called)

    Path("run.yaml").write_text(CONFIG)
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        assert main(["train", "run.yaml"]) == 0
    finally:
        sys.setprofile(before)
    return taken


@pytest.mark.parametrize("name", ["train", "forward hook"])
def test_a_run_takes_the_steps_of_the_page_in_their_order(name: str) -> None:
    """Every function of the table is called, each after the one above it."""
    expected = walk(name)
    assert len(expected) > 10
    assert steps_taken(expected) == expected


def test_a_forward_hook_takes_at_most_twelve_files() -> None:
    """From its line in the config to its row in layers.jsonl."""
    assert len({file for file, _ in walk("forward hook")}) <= 12
