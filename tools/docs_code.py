"""Write the Python blocks of the README and the pages to build/docs_code, a module per page, for the type checker.

Blocks stay on the lines they have in their page, so that an error's line is the line in the page. Blocks that need
another library are left out.
"""

import json
import re
import sys
import textwrap

from pages import DOCS, ROOT

FOLDER = ROOT / "build" / "docs_code"
PYTHON_BLOCK = re.compile(r"^( *)```python\n(?! *# needs )(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def code_of(page: str) -> str:
    """Return a page with everything but its Python blocks blanked."""
    lines = [""] * (page.count("\n") + 1)
    for block in PYTHON_BLOCK.finditer(page):
        first = page.count("\n", 0, block.start(2))
        code = textwrap.dedent(block[2]).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        code = code_of(page.read_text(encoding="utf-8"))
        if code.strip():
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
            (FOLDER / f"{name}_md.py").write_text(code, encoding="utf-8")
    sources = ["../../src", "../../examples/hookline-plugin/src"]
    settings = {"typeCheckingMode": "standard", "include": [".", "../../examples"], "extraPaths": sources}
    (FOLDER / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    print(f"wrote {len(list(FOLDER.glob('*.py')))} modules to {FOLDER.relative_to(ROOT)}", file=sys.stderr)
