"""What the page generators share: generated parts of pages, and Markdown tables.

A generated part is between two comment lines of its page, ``<!-- made: NAME -->`` and ``<!-- made: end -->``; the text
around it is written by hand and is left alone.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_origin

from hookline import _parameters

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def with_part(page: str, name: str, part: str) -> str:
    """Return a page with the generated part of that name replaced."""
    begin, end = f"<!-- made: {name} -->", "<!-- made: end -->"
    found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", page, re.DOTALL)
    if found is None:
        raise SystemExit(f"the page has no lines {begin} and {end} around its generated part {name!r}")
    return f"{page[: found.start()]}{begin}\n{part}\n{end}{page[found.end() :]}"


def write_part(page: str, name: str, part: str) -> None:
    """Replace a generated part of a page under docs/."""
    path = DOCS / page
    path.write_text(with_part(path.read_text(encoding="utf-8"), name, part), encoding="utf-8")
    print(f"wrote the part {name!r} of docs/{page}")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def visible(text: str) -> str:
    """Escape ``<name>``, which Markdown would take for a tag, unless it is code."""
    return "".join(
        part if part.startswith("`") else part.replace("<", "&lt;") for part in re.split(r"(`+[^`]*`+)", text)
    )


def without_bounds(annotation: Any) -> Any:
    """Return the text of an annotation with the bare types of what is `Annotated`; one that is not text as it is.

    `Annotated[int, Ge(2)]` and its like with a name, such as `PositiveInt`, are `int`.
    """
    if not isinstance(annotation, str):
        return annotation

    class BareTypes(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Name:
            alias = getattr(_parameters, node.id, None)
            return ast.Name(alias.__origin__.__name__) if get_origin(alias) is Annotated else node

        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            self.generic_visit(node)
            is_annotated = isinstance(node.value, ast.Name) and node.value.id == "Annotated"
            return node.slice.elts[0] if is_annotated and isinstance(node.slice, ast.Tuple) else node

    return ast.unparse(BareTypes().visit(ast.parse(annotation, mode="eval")))
