"""The packages import in one direction only, the hot path stays light, and users import from a few modules only."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "hookline"

# The only modules that users import from. Every other module is private, whatever its name: it may change at any time.
PUBLIC_MODULES = {
    "hookline",
    "hookline.gradients.gradient_flow",
    "hookline.activations.interventions",
    "hookline.cli",
    "hookline.config.schema",
    "hookline.gradients.transforms",
    "hookline.ignite",
    "hookline.lightning",
    "hookline.record",
    "hookline.stats",
    "hookline.stats.histograms",
    "hookline.testing",
    "hookline.transformers",
}

SHARED = {
    "errors",
    "_bins",
    "_console",
    "_device",
    "_fs",
    "_limits",
    "_names",
    "_parameters",
    "_predictions",
    "_tensors",
    "_terminal",
    "_text",
    "_words",
    "rank_watch",
    "ranks",
}  # any part may import

# The parts of hookline from the lowest to the highest. A part imports from lower layers only, never from its own.
LAYERS = (
    {"core"},
    {"stats"},
    {"activations", "gradients"},
    {"record"},
    {"runs"},
    {"checkpoints", "report"},
    {"run"},
    {"hooks"},
    {"trainer"},
    {"hosts"},
    {"ignite", "lightning", "transformers"},
    {"config"},
    {"demo", "verify"},
    {"build"},
    {"cli", "testing"},
    {"__init__", "__main__"},
)


def below(part: str) -> set[str]:
    """Return everything that the layers allow a part to import."""
    number = next(number for number, layer in enumerate(LAYERS) if part in layer)
    return SHARED.union(*LAYERS[:number])


# Which parts of hookline each part may import; a part may always import itself. Most need less than the layers allow.
# Lists are transitive: what a part's own imports may use, it may use too. A dotted entry allows that one module.
MAY_IMPORT: dict[str, set[str]] = {
    "_bins": set(),
    "_words": set(),
    "errors": set(),
    "_parameters": {"_words", "errors"},
    "_predictions": {"_words", "errors"},
    "_console": set(),
    "_device": {"errors"},
    "_fs": {"_limits"},
    "_limits": set(),
    "_names": set(),
    "_tensors": set(),
    "_terminal": {"_console"},
    "_text": set(),
    "rank_watch": {"_console", "_fs", "errors"},
    "ranks": {"_console", "_fs", "errors", "rank_watch"},
    "core": SHARED,
    "stats": SHARED | {"core"},
    "activations": SHARED | {"core", "stats"},
    "gradients": SHARED | {"core", "stats"},
    "record": SHARED | {"core"},
    "runs": SHARED | {"core", "record"},
    "checkpoints": SHARED | {"core", "record"},
    "report": SHARED | {"core", "record", "runs"},
    "run": below("run"),
    "hooks": below("hooks"),
    "trainer": SHARED | {"core", "gradients", "record", "runs", "checkpoints", "run"},
    "hosts": SHARED
    | {"core", "record", "runs", "checkpoints", "run"}
    | {"trainer.counting", "activations.compile.detection", "activations.hooked_modules"},
    **dict.fromkeys(("ignite", "lightning", "transformers"), SHARED | {"checkpoints", "hosts"}),
    "config": SHARED | {"core", "record", "runs", "trainer.metrics", "trainer.options"},
    "demo": below("demo"),
    "verify": below("verify"),
    "build": below("build"),
    "cli": below("cli"),
    "testing": below("testing"),
    "__init__": below("__init__"),
    "__main__": below("__main__"),
}

HOT_PATH = ("core", "stats", "activations", "gradients", "run", "trainer")
HEAVY = {"pydantic", "rich", "yaml"}
LOADED_ON_FIRST_USE = ("config", "demo", "build", "cli", "testing", "verify")


def part_of(path: Path) -> str:
    """Return the top-level package or module under hookline that a source file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def is_type_checking(node: ast.stmt) -> bool:
    """Return True for `if TYPE_CHECKING:`, whose imports never run."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def statements_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node below this one, except the bodies of `if TYPE_CHECKING:`."""
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
    """Return the dotted module that a `from … import` reads, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = ["hookline", *path.relative_to(SOURCE).parent.parts]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything a file imports, at module level or inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in statements_that_run(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, path)
            # `from hookline import events` names its part in the alias, not in the module.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imported_part(name: str) -> str | None:
    """Return the part of hookline that a dotted name belongs to; None for other packages."""
    top, _, rest = name.partition(".")
    first = rest.split(".")[0]
    if top != "hookline" or not first or first.startswith("__"):
        return None
    # A name that is not a part is a public name: `__init__` imports it, and may import everything.
    return first if first in MAY_IMPORT else "__init__"


def forbidden_imports(path: Path) -> list[str]:
    """Describe each import in a file that its part may not make, in one line."""
    part = part_of(path)
    allowed = MAY_IMPORT.get(part, set())
    return [
        f"{path}:{line}: {part} imports {name}; it may import {sorted(allowed)}"
        for line, name in imported_modules(path)
        if imported_part(name) not in allowed | {part, None} and not is_under(name, allowed)
    ]


def is_under(name: str, allowed: set[str]) -> bool:
    """Return True if a dotted name is in one of the single modules that are allowed."""
    return any(f"{name}.".startswith(f"hookline.{entry}.") for entry in allowed if "." in entry)


def source_files() -> list[Path]:
    """Return every Python file of the package."""
    return sorted(SOURCE.rglob("*.py"))


def hot_path_files() -> list[Path]:
    """Return every Python file of the hot-path packages, except those that are loaded for CUDA tensors only."""
    return [path for path in source_files() if part_of(path) in HOT_PATH and not needs_triton(path)]


def needs_triton(path: Path) -> bool:
    """Return True for a file with Triton kernels, or that launches them."""
    return path.stem.startswith("cuda_") or "import triton" in path.read_text()


def dotted_name(path: Path) -> str:
    """Return the name under which a source file is imported."""
    pieces = ["hookline", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(piece for piece in pieces if piece != "__init__")


def loaded_after(*names: str) -> set[str]:
    """Return all modules that a fresh interpreter has loaded after importing the named ones."""
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
    """Every import inside the package is one that the table of parts allows."""
    broken = [line for path in source_files() for line in forbidden_imports(path)]
    assert not broken, "\n".join(broken)


def test_the_table_follows_the_layers() -> None:
    """core < stats < activations, gradients < record, checkpoints < hooks < trainer < config < build < cli."""
    wrong = {
        part: sorted(above)
        for layer in LAYERS
        for part in layer
        if (above := {name.split(".")[0] for name in MAY_IMPORT[part]} - below(part))
    }
    assert not wrong
    assert set().union(*LAYERS) | SHARED == MAY_IMPORT.keys()


def test_core_names_no_folder_above_it() -> None:
    """What `core` needs of other folders is handed to it by `hookline/__init__.py`; it refers to none by a string."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((SOURCE / "core").glob("*.py"))]
    named = {reference for text in texts for reference in re.findall(r"\"(hookline\.[\w.]+:\w+)\"", text)}
    assert named <= {"hookline.gradients.by_hand:update_by_hand"}


def test_every_part_has_a_row() -> None:
    """A new part of the package must be added to the table."""
    unknown = {part_of(path) for path in source_files()} - MAY_IMPORT.keys()
    assert not unknown, f"add {sorted(unknown)} to MAY_IMPORT"


def test_reading_runs_needs_no_torch() -> None:
    """Every module of `runs` can be imported without it, so that commands which only read start quickly."""
    modules = ", ".join(f"hookline.runs.{path.stem}" for path in sorted((SOURCE / "runs").glob("[a-z]*.py")))
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wrong_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds relative imports, late ones and those of public names, and ignores TYPE_CHECKING."""
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "core").mkdir()
    module = tmp_path / "core" / "bad.py"
    module.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from hookline.trainer import loop\n"
        "from ..record import lock\n"
        "def late():\n    from hookline import stats\n    import hookline.hooks.console.hook\n"
        "from hookline.errors import HooklineError\n"
        "from hookline import __version__\n"
        "from hookline import SimpleTrainer\n"
    )
    lines = [int(text.split(":")[1]) for text in forbidden_imports(module)]
    assert sorted(lines) == [4, 6, 7, 10]


def test_importing_hookline_is_light() -> None:
    """`import hookline` loads neither pydantic, rich nor yaml, nor what hookline loads on first use."""
    loaded = loaded_after("hookline")
    assert "hookline" in loaded
    assert not loaded & (HEAVY | {f"hookline.{part}" for part in LOADED_ON_FIRST_USE})


def test_the_hot_path_imports_nothing_heavy() -> None:
    """No file of the hot path imports pydantic, rich or yaml, not even inside a function."""
    heavy = [
        f"{path}:{line}: {name}"
        for path in hot_path_files()
        for line, name in imported_modules(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(heavy)


def test_the_hot_path_loads_nothing_heavy() -> None:
    """Importing every module of the hot path loads neither pydantic, rich nor yaml, not even indirectly."""
    loaded = loaded_after("hookline", *map(dotted_name, hot_path_files()))
    assert not loaded & HEAVY


def test_docs_and_examples_import_public_modules_only() -> None:
    """What users read imports from the public modules only; all other modules are private."""
    missing = [name for name in PUBLIC_MODULES if importlib.util.find_spec(name) is None]
    assert not missing
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    pattern = re.compile(r"^\s*(?:>>> )?(?:from|import)\s+(hookline\b[\w.]*)", re.MULTILINE)
    mentioned = {(page.name, name) for page in pages for name in pattern.findall(page.read_text(encoding="utf-8"))}
    assert len(mentioned) >= 15
    private = sorted(f"{page}: {name}" for page, name in mentioned if name not in PUBLIC_MODULES)
    assert not private, "\n".join(private)
