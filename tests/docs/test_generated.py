"""The generated pages, parts of pages and stubs are up to date."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import hookline
from hookline.core.catalog import ARGUMENTS, CATALOG, SPELLINGS
from hookline.core.plugins import HOOKS
from hookline.trainer.options import TrainerOptions

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "run `make docs` and commit what it writes"

sys.path.insert(0, str(ROOT / "tools"))
(
    api_page, architecture_page, benchmarks_page, compatibility_page, decisions_page, events_page, matrix, pages,
    public_stub, reference_pages,
) = (
    import_module(name)
    for name in (
        "api_page", "architecture_page", "benchmarks_page", "compatibility_page", "decisions_page", "events_page",
        "matrix", "pages", "public_stub", "reference_pages",
    )
)  # fmt: skip
sys.path.remove(str(ROOT / "tools"))

PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "public names": ("reference/api.md", api_page.api_reference),
    "source tree": ("project/architecture.md", architecture_page.source_tree),
    "decisions": ("project/decisions/index.md", decisions_page.decisions),
    "versions": ("help/compatibility.md", compatibility_page.versions),
    "matrix": ("help/compatibility.md", compatibility_page.matrix),
}


def page(name: str) -> str:
    """Return the text of a page under docs/."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_events_page_is_current() -> None:
    """docs/reference/events.md is what its generator makes from the catalog."""
    assert page("reference/events.md") == events_page.events_page(), REMEDY


def test_reference_pages_are_current() -> None:
    """The pages under docs/reference/ are what their generator makes from the code, and no hook has another."""
    made = {name: text for name, text in reference_pages.pages().items() if page(f"reference/{name}") != text}
    assert list(made) == [], REMEDY
    committed = {f"hooks/{path.name}" for path in (ROOT / "docs" / "reference" / "hooks").glob("*.md")}
    assert committed <= set(reference_pages.pages()), REMEDY


def test_the_benchmarks_are_current() -> None:
    """docs/explanation/benchmarks.md and its chart are what their generator makes from bench/results."""
    assert page("explanation/benchmarks.md") == benchmarks_page.benchmarks_page(), REMEDY
    assert page("images/overhead.svg") == benchmarks_page.chart(), REMEDY


def test_the_chart_has_every_contender_of_the_newest_result() -> None:
    """Each contender of the newest table of overhead has a bar without hooks and one with ten."""
    newest = max((ROOT / "bench" / "results").glob("*-overhead.md")).read_text(encoding="utf-8")
    contenders = set(re.findall(r"^\| (.+), \d+ hooks", newest, re.MULTILINE))
    assert {name: sorted(bars) for name, bars in benchmarks_page.overhead().items()} == {
        name: [0, 10] for name in contenders
    }
    assert len(contenders) >= 5


@pytest.mark.parametrize("name", PARTS)
def test_generated_parts_are_current(name: str) -> None:
    """A generated part of a page is what its generator makes from the code."""
    where, generate = PARTS[name]
    assert page(where) == pages.with_part(page(where), name, generate()), REMEDY


@pytest.mark.parametrize("name", public_stub.STUBS)
def test_the_stubs_are_current(name: str) -> None:
    """The stubs have the names of the table in __init__.py, and the keywords of the functions that get them."""
    assert (public_stub.SOURCE / name).read_text(encoding="utf-8") == public_stub.STUBS[name](), REMEDY


@pytest.mark.parametrize("row", matrix.ROWS, ids=lambda row: row.name)
def test_the_matrix_ran_with_the_bounds_of_today(row: Any) -> None:
    """No row of the matrix has failed, and those that were tried had the versions that pyproject.toml names now."""
    remedy = f"run `make matrix ARGS={row.name}` and `make docs`, and commit what they write"
    outcome = json.loads(matrix.OUTCOMES.read_text(encoding="utf-8")).get(row.name)
    if outcome is None:
        pytest.skip(remedy)
    assert "failed" not in outcome["outcome"], remedy
    for requirement in map(Requirement, row.requirements if outcome["versions"] else ()):
        assert requirement.specifier.contains(outcome["versions"][requirement.name], prereleases=True), remedy


@pytest.mark.parametrize("name", public_stub.STUBS)
def test_the_hook_of_git_leaves_the_stubs_alone(name: str) -> None:
    """pre-commit passes each file by name to ruff, which formats it even if pyproject.toml excludes it."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (entry,) = (hook["entry"] for hook in config["repos"][0]["hooks"] if hook["id"] == "ruff-format")
    ruff, *options = entry.split()
    command = [Path(sys.executable).with_name(Path(ruff).name), *options, "--check", public_stub.SOURCE / name]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def test_events_page_leaves_nothing_out() -> None:
    """Every event has a section, and every alias and every argument is on the page."""
    text = page("reference/events.md")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(CATALOG)
    assert [name for name in (*SPELLINGS, *ARGUMENTS) if f"`{name}`" not in text and f"### {name}\n" not in text] == []


def test_diagram_nests_what_belongs_together() -> None:
    """The diagram indents events that occur between the start and the end of another one."""
    depth = {line.split()[0]: len(line) - len(line.lstrip()) for line in events_page.diagram()}
    assert list(depth) == list(CATALOG)
    assert depth["on_train_start"] == depth["on_train_end"] == 0
    assert depth["on_epoch_start"] == depth["on_epoch_end"] < depth["on_step_end"] == depth["on_train_batch_end"]
    assert depth["on_train_batch_start"] == depth["on_train_batch_end"] < depth["on_update"]
    assert depth["on_validation_start"] == depth["on_validation_end"] < depth["on_validation_batch_start"]


def test_tables_have_every_row() -> None:
    """Every option of a run and every built-in hook is in its table."""
    options, hooks = page("reference/options.md"), page("reference/hooks/index.md")
    assert [name for name in (field.name for field in fields(TrainerOptions)) if f"| `{name}` |" not in options] == []
    assert [name for name in HOOKS.built_in if f"| [`{name}`]({name}.md) |" not in hooks] == []


def test_options_list_their_valid_values() -> None:
    """The table of options lists the valid values of a choice."""
    row = next(line for line in page("reference/options.md").splitlines() if line.startswith("| `precision`"))
    assert row.endswith(": `fp32` or `bf16` or `fp16` |")


def test_the_reference_has_every_public_name() -> None:
    """Each public name has a section with its signature, or is an alias of one that has."""
    sections = re.findall(r"^### (\w+)\n\n(```py\n|Another name of )", api_page.api_reference(), re.MULTILINE)
    others = {name for _, names, _ in api_page.MODULES.values() for name in names}
    assert sorted(name for name, _ in sections) == sorted({*hookline.__all__, *others})
    assert {"Ablate", "Freeze", "assert_harmless"} <= others
    assert [name for name, begin in sections if begin.startswith("Another")] == [
        "BaseTrainer",
        "HookRegistry",
        "TrainerHooks",
        "ModelCheckpoint",
    ]


def test_the_reference_has_each_name_in_its_group_and_nothing_internal() -> None:
    """Only errors are listed as errors; methods that loops call, and placeholders in code, look as in the code."""
    reference = api_page.api_reference()
    errors = reference.partition("## Errors")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\w+)", errors, re.MULTILINE) == ["HooklineError", "StopTraining"]
    assert "decide_due_hooks" not in reference and "``lr/<optimizer>/<group>``" in reference


def test_the_reference_shows_parameters_and_sections_of_docstrings() -> None:
    """Signatures have annotations and defaults; arguments are a list; examples are blocks of code."""

    def example(path: "str | None", *, every: int = 3, make: Any = dict, **more: Any) -> bool:
        """Do something.

        >>> example("x")
        True

        Args:
            path: Where,
                or None.
            every: How often.

        Returns:
            Whether it was done.
        """
        return not path

    shown = "example(path: str | None, *, every: int = 3, make: Any = dict, **more: Any) -> bool"
    assert api_page.signature("example", example) == shown
    assert [*api_page.docstring(inspect.getdoc(example) or "")] == [
        "Do something.",
        "",
        "```py",
        '>>> example("x")',
        "True",
        "```",
        "",
        "Args:",
        "",
        "- `path`: Where,",
        "  or None.",
        "- `every`: How often.",
        "",
        "Returns:",
        "",
        "  Whether it was done.",
    ]


def test_the_tree_has_every_file() -> None:
    """Every module is listed with the first line of its docstring."""
    tree = architecture_page.source_tree()
    assert "  build.py                        Build trainers " in tree
    assert (
        "  config/                         " in tree and "    factory.py                    Construct a config" in tree
    )
    assert not [line for line in tree.splitlines()[1:-1] if len(line.split()) < 2], "a module without a docstring"


def test_a_page_without_markers_is_refused() -> None:
    """The error for a page without markers names the part."""
    with pytest.raises(SystemExit, match="trainer options"):
        pages.with_part("# Training\n", "trainer options", "| a |")
