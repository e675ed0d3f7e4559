"""Make docs/requirements.md: every requirement, and the sentences of the tests that show it to hold.

Reads tests/requirements.tsv and conformance.json, which a whole test run leaves in the project's root.
Run it after the tests: `python tools/requirements_page.py`.
"""

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "requirements.tsv"
OUTCOMES = ROOT / "conformance.json"
PAGE = ROOT / "docs" / "requirements.md"

HEAD = """# Requirements

Made by `make docs` from `tests/requirements.tsv` and the outcomes of the last test run; do not edit.
Each promise stands beside the tests that show it to hold; "not yet" means that none does.
"""


def requirements() -> list[tuple[str, str]]:
    """Id and text of every requirement, in the file's order."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("\t", 1) for line in lines if line.strip())
    return [(one, text.strip()) for one, text in pairs]


def outcomes() -> dict[str, Any]:
    """What the last test run said about each requirement."""
    if not OUTCOMES.exists():
        sys.exit(f"{OUTCOMES.name} is not in {ROOT}: run `make test` first, then `make docs`")
    found: dict[str, Any] = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    return found


def cell(text: str) -> str:
    """The text with the one character escaped that would end a table's cell."""
    return text.replace("|", "\\|")


def shown_by(row: dict[str, Any] | None) -> str:
    """The sentences of a requirement's tests, each once, or "not yet" when none of them passed."""
    if not row or not row["passed"]:
        return "not yet"
    sentences = dict.fromkeys(test["sentence"] or test["test"] for test in row["tests"])
    failing = " **(some fail)**" if row["failed"] else ""
    return "<br>".join(cell(sentence) for sentence in sentences) + failing


def lines_of_page(rows: list[tuple[str, str]], seen: dict[str, Any]) -> Iterator[str]:
    """The page, line by line: a count, then one table per seed document."""
    held = sum(1 for one, _ in rows if shown_by(seen.get(one)) != "not yet")
    yield HEAD
    yield f"{held} of {len(rows)} have a passing test."
    for seed, members in groupby(rows, key=lambda row: row[0].split("-")[0]):
        yield f"\n## Seed {seed}\n"
        yield "| id | promise | shown by |"
        yield "|---|---|---|"
        for one, text in members:
            yield f"| {one} | {cell(text)} | {shown_by(seen.get(one))} |"


def main() -> None:
    """Write the page and say where it is."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines_of_page(requirements(), outcomes())) + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
