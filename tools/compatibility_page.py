"""Generate the tables of docs/help/compatibility.md from pyproject.toml, constraints.txt and tools/matrix.json.

Run it after a change of a version, and after `make matrix`: `make docs`.
"""

import json
import re
import tomllib
from collections.abc import Iterator

from pages import ROOT, table, write_part

HOSTS = ("lightning", "transformers", "pytorch-ignite", "torchmetrics")  # libraries that need no extra of ours


def versions() -> str:
    """Return a table of what Hookline needs, and one of what it works with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    others = [text for text in project["dependency-groups"]["dev"] if re.split("[>=]", text)[0] in HOSTS]
    head = ("library", "needs", "tested with")
    needed = table(head, [_row(text) for text in project["project"]["dependencies"]])
    optional = [(f"`hookline[{extra}]`", *_row(text)) for extra, texts in extras.items() for text in texts]
    optional += [("none", *_row(text)) for text in others]
    return "\n".join([*needed, "", *table(("extra", *head), optional)])


def matrix() -> str:
    """Return a table of the environments that `make matrix` has tried, and what came of them."""
    rows = []
    for name, row in json.loads((ROOT / "tools" / "matrix.json").read_text(encoding="utf-8")).items():
        versions = ", ".join(f"{library} {version}" for library, version in row["versions"].items())
        rows.append((name, row["python"], versions, row["outcome"], row["date"]))
    return "\n".join(table(("row", "Python", "versions", "outcome", "date"), rows))


def _row(requirement: str) -> tuple[str, str, str]:
    name, _, bound = requirement.partition(">=")
    return name, f"{bound} or newer" if bound else "any version", pins().get(name.lower(), "no pinned version")


def pins() -> dict[str, str]:
    """Return the versions of constraints.txt by library."""
    return {name.lower(): version for name, version in _pins()}


def _pins() -> Iterator[tuple[str, str]]:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, equals, version = line.partition("==")
        if equals:
            yield name, version


if __name__ == "__main__":
    write_part("help/compatibility.md", "versions", versions())
    write_part("help/compatibility.md", "matrix", matrix())
