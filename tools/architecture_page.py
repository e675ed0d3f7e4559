"""Generate the tree of source files in docs/project/architecture.md: every file with the first line of its docstring.

Folders come with the first line of their `__init__.py`. Run it after a change of a file or its docstring: `make docs`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from pages import ROOT, write_part

SOURCE = ROOT / "src" / "hookline"
COLUMN = 34  # where the descriptions begin
KINDS = (".py", ".js", ".css", ".yaml")


def source_tree() -> str:
    """Return the tree as a block of text, top-level files first."""
    lines = [_line(0, "src/hookline/", SOURCE / "__init__.py"), *_folder(SOURCE, 1)]
    return "\n".join(["```", *lines, "```"])


def _folder(folder: Path, depth: int) -> Iterator[str]:
    files = [file for file in sorted(folder.iterdir()) if file.suffix in KINDS and "uPlot" not in file.name]
    files = [file for file in files if file.name != "__init__.py"]
    yield from (_line(depth, file.name, file) for file in files)
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield _line(depth, f"{inner.name}/", inner / "__init__.py")
        yield from _folder(inner, depth + 1)


def _line(depth: int, name: str, file: Path) -> str:
    return f"{'  ' * depth}{name} ".ljust(COLUMN) + first_line(file)


def first_line(file: Path) -> str:
    """Return the first line of a module's docstring, or of the comment that begins a script or a style sheet."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return text.partition("\n")[0].strip("/*# ")


if __name__ == "__main__":
    write_part("project/architecture.md", "source tree", source_tree())
