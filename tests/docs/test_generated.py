"""The pages that are made from code are what the code makes now."""

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hookline.events.catalog import ARGUMENTS, CATALOG, SPELLINGS
from hookline.registry.names import HOOKS
from hookline.trainer.options import TrainerOptions

ROOT = Path(__file__).resolve().parents[2]
MAKER: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "events_page.py"))
REMEDY = "run `make docs` (or `python tools/events_page.py`) and commit what it writes"


def page(name: str) -> str:
    """The text of a page under docs/."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_events_page_is_current() -> None:
    """docs/events.md is what the generator makes of the catalogue."""
    assert page("events.md") == MAKER["events_page"](), REMEDY


@pytest.mark.parametrize("name", MAKER["MADE_TABLES"])
def test_tables_are_current(name: str) -> None:
    """A table that a page takes from the code is what the generator makes."""
    where, make = MAKER["MADE_TABLES"][name]
    assert page(where) == MAKER["with_table"](page(where), name, make()), REMEDY


def test_events_page_leaves_nothing_out() -> None:
    """Every event has its section, every other spelling and every argument is on the page."""
    text = page("events.md")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(CATALOG)
    assert [name for name in (*SPELLINGS, *ARGUMENTS) if f"`{name}`" not in text and f"### {name}\n" not in text] == []


def test_diagram_nests_what_belongs_together() -> None:
    """The diagram sets events in between the start and the end of what they are part of, and ends where it began."""
    depth = {line.split()[0]: len(line) - len(line.lstrip()) for line in MAKER["diagram"]()}
    assert list(depth) == list(CATALOG)
    assert depth["on_train_start"] == depth["on_train_end"] == 0
    assert depth["on_epoch_start"] == depth["on_epoch_end"] < depth["on_step_end"] == depth["on_train_batch_end"]
    assert depth["on_train_batch_start"] == depth["on_train_batch_end"] < depth["on_update"]
    assert depth["on_validation_start"] == depth["on_validation_end"] < depth["on_validation_batch_start"]


def test_tables_hold_every_row() -> None:
    """Every option of a run and every built-in hook is in its table."""
    options, hooks = MAKER["options_table"](), MAKER["hooks_table"]()
    assert [name for name in (one.name for one in fields(TrainerOptions)) if f"| `{name}` |" not in options] == []
    assert [name for name in HOOKS.built_in if f"| `{name}` |" not in hooks] == []


def test_options_that_are_a_choice_list_their_words() -> None:
    """Whoever reads the table of options need not guess what may be written."""
    row = next(line for line in MAKER["options_table"]().splitlines() if line.startswith("| `precision`"))
    assert row.endswith(": `fp32` or `bf16` or `fp16` |")


def test_a_page_without_markers_is_refused() -> None:
    """A page that has lost its markers is named, not silently left as it is."""
    with pytest.raises(SystemExit, match="trainer options"):
        MAKER["with_table"]("# Training\n", "trainer options", "| a |")
