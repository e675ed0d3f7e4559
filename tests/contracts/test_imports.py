"""The packages import in one direction only, and the hot path stays light."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "hookline"

SHARED = {"errors", "_checks", "_device", "_fs", "_host_copy", "_tensors"}  # helper modules that anything may import
BELOW_HOOKS = SHARED | {"core", "stats", "activations", "gradients", "record", "checkpoints"}
BELOW_CONFIG = BELOW_HOOKS | {"hooks", "trainer"}
ABOVE = {"config", "demo", "build", "cli", "testing", "verify", "__init__"}
EVERYTHING = BELOW_CONFIG | ABOVE

# Which parts of hookline each part may import; a part may always import itself.
# Lists are transitive: what a part's own imports may use, it may use too. A dotted entry allows that one module.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_checks": {"errors"},
    "_device": set(),
    "_fs": set(),
    "_host_copy": {"_device"},
    "_tensors": set(),
    "core": SHARED,
    "stats": SHARED | {"core"},
    "activations": SHARED | {"core", "stats"},
    "gradients": SHARED | {"core", "stats"},
    "record": SHARED | {"core"},
    "checkpoints": SHARED | {"core"},
    "hooks": BELOW_HOOKS,
    "trainer": SHARED | {"core", "gradients", "record", "checkpoints"},
    "config": SHARED | {"core", "trainer.options"},
    "demo": EVERYTHING,
    "build": EVERYTHING,
    "cli": EVERYTHING,
    "testing": EVERYTHING,
    "verify": EVERYTHING,
    "__init__": EVERYTHING,
    "__main__": EVERYTHING,
}

HOT_PATH = ("core", "stats", "activations", "gradients", "trainer")
HEAVY = {"pydantic", "rich", "yaml"}
LOADED_ON_FIRST_USE = ("config", "demo", "build", "cli", "testing", "verify")


def part_of(path: Path) -> str:
    """The top-level package or module under hookline that a source file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def is_type_checking(node: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`, whose imports never run."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def statements_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below this one, except the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield other
                yield from statements_that_run(other)
            continue
        yield child
        yield from statements_that_run(child)


def absolute_base(node: ast.ImportFrom, path: Path) -> str:
    """The dotted module that a `from … import` reads, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = ["hookline", *path.relative_to(SOURCE).parent.parts]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, at module level or inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in statements_that_run(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, path)
            # `from hookline import events` names its part in the alias, not in the module.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imported_part(name: str) -> str | None:
    """The part of hookline that a dotted name belongs to; None for other people's modules."""
    top, _, rest = name.partition(".")
    first = rest.split(".")[0]
    if top != "hookline" or not first or first.startswith("__"):
        return None
    # A name that is no part comes through the front door, which leads everywhere.
    return first if first in MAY_IMPORT else "__init__"


def forbidden_imports(path: Path) -> list[str]:
    """Each import in a file that its part may not make, as one line of explanation."""
    part = part_of(path)
    allowed = MAY_IMPORT.get(part, set())
    return [
        f"{path}:{line}: {part} imports {name}; it may import {sorted(allowed)}"
        for line, name in imported_modules(path)
        if imported_part(name) not in allowed | {part, None} and not is_under(name, allowed)
    ]


def is_under(name: str, allowed: set[str]) -> bool:
    """Whether a dotted name lies in one of the single modules that are allowed."""
    return any(f"{name}.".startswith(f"hookline.{entry}.") for entry in allowed if "." in entry)


def source_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(SOURCE.rglob("*.py"))


def hot_path_files() -> list[Path]:
    """Every Python file of the hot-path packages, less what is loaded for CUDA tensors only."""
    return [path for path in source_files() if part_of(path) in HOT_PATH and not needs_triton(path)]


def needs_triton(path: Path) -> bool:
    """Whether a file is one of the kernels or of the paths that call them."""
    return path.stem.startswith("cuda_") or "import triton" in path.read_text()


def dotted_name(path: Path) -> str:
    """The name under which a source file is imported."""
    pieces = ["hookline", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(piece for piece in pieces if piece != "__init__")


def loaded_after(*names: str) -> set[str]:
    """All modules that a fresh interpreter holds after importing the named ones."""
    imports = "\n".join(f"import {name}" for name in names)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{imports}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
    )
    return set(done.stdout.split())


def test_imports_follow_the_layout() -> None:
    """Every import inside the package goes in a direction that the layout allows."""
    broken = [line for path in source_files() for line in forbidden_imports(path)]
    assert not broken, "\n".join(broken)


def test_every_part_has_a_row() -> None:
    """A part of the package that the table does not know is refused, so that the table stays whole."""
    unknown = {part_of(path) for path in source_files()} - MAY_IMPORT.keys()
    assert not unknown, f"add {sorted(unknown)} to MAY_IMPORT"


def test_a_wrong_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself notices relative, late and front-door imports, and exempts TYPE_CHECKING."""
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "core").mkdir()
    module = tmp_path / "core" / "bad.py"
    module.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from hookline.trainer import loop\n"
        "from ..record import lock\n"
        "def late():\n    from hookline import stats\n    import hookline.hooks.console_log\n"
        "from hookline.errors import HooklineError\n"
        "from hookline import __version__\n"
        "from hookline import SimpleTrainer\n"
    )
    lines = [int(text.split(":")[1]) for text in forbidden_imports(module)]
    assert sorted(lines) == [4, 6, 7, 10]


def test_importing_hookline_is_light() -> None:
    """`import hookline` loads neither pydantic, rich nor yaml, nor our own parts that wait for first use."""
    loaded = loaded_after("hookline")
    assert "hookline" in loaded
    assert not loaded & (HEAVY | {f"hookline.{part}" for part in LOADED_ON_FIRST_USE})


def test_the_hot_path_names_nothing_heavy() -> None:
    """No file of the hot path imports pydantic, rich or yaml, not even inside a function."""
    heavy = [
        f"{path}:{line}: {name}"
        for path in hot_path_files()
        for line, name in imported_modules(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(heavy)


def test_the_hot_path_loads_nothing_heavy() -> None:
    """Importing every module of the hot path loads neither pydantic, rich nor yaml by way of another."""
    loaded = loaded_after("hookline", *map(dotted_name, hot_path_files()))
    assert not loaded & HEAVY
