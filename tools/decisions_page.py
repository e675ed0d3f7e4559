"""Generate the list in docs/project/decisions/index.md: each decision with its status.

A page that later ones have changed says so in a line that begins with "Status:". Run it after a new page: `make docs`.
"""

import re

from pages import DOCS, table, write_part

FOLDER = DOCS / "project" / "decisions"


def decisions() -> str:
    """Return a table of all decisions."""
    rows = []
    for path in sorted(FOLDER.glob("0*.md")):
        text = path.read_text(encoding="utf-8")
        number, _, title = text.splitlines()[0].removeprefix("# ").partition(": ")
        status = re.search(r"^Status: (.+)\.$", text, re.MULTILINE)
        rows.append((f"[{number}]({path.name})", title, status[1] if status else "in force"))
    return "\n".join(table(("page", "decision", "status"), rows))


if __name__ == "__main__":
    write_part("project/decisions/index.md", "decisions", decisions())
