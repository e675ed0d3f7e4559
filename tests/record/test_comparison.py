"""What differs between runs, as `hookline compare` finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookline.record import Record
from hookline.record.comparison import find_differences
from hookline.record.config_yaml import flatten_config
from hookline.record.summary import RunSummary


def write_run(directory: Path, config: str = "a: 1\n") -> RunSummary:
    record = Record.on_disk(directory, config={}, seed=1)
    record.start([])
    record.close("completed", None, [], [], {"step": 1})
    assert record.path is not None
    (record.path / "config.yaml").write_text(config)
    return RunSummary.read(record.path)


def nested_aliases(first: str, each: str) -> str:
    """Return 40 lines of YAML, each of which has the one before it nine times."""
    lines = [f"a0: &a0 {first}"]
    for level in range(1, 40):
        again = ", ".join(f"k{index}: *a{level - 1}" if each == "{}" else f"*a{level - 1}" for index in range(9))
        lines.append(f"a{level}: &a{level} {each[0]}{again}{each[1]}")
    return "\n".join(lines) + "\n"


# ---- differences -----------------------------------------------------------------------------------------------------


def test_values_of_a_config_have_dotted_keys() -> None:
    config = {"trainer": {"lr": 0.1, "betas": [0.9, {"x": 1}]}, "empty": {}, 1: {"two": None}}
    flat = {"trainer.lr": 0.1, "trainer.betas": [0.9, {"x": 1}], "empty": {}, "1.two": None}
    assert flatten_config(config) == flat


@pytest.mark.parametrize(("first", "each"), [("{x: 1}", "{}"), ("[1]", "[]"), (f"[{'x' * 5000}]", "[]")])
def test_a_config_that_repeats_itself_exponentially_is_compared_in_part(tmp_path: Path, first: str, each: str) -> None:
    differences = find_differences([write_run(tmp_path, nested_aliases(first, each)), write_run(tmp_path)])
    assert {"a", "a0.x" if each == "{}" else "a0"} <= {one.key for one in differences}
    assert sum(len(str(one)) for one in differences) < 5_000_000


def test_a_config_that_contains_itself_is_compared_in_part(tmp_path: Path) -> None:
    differences = find_differences([write_run(tmp_path, "a: &a {b: *a, c: 2}\n"), write_run(tmp_path)])
    assert {"a", "a.c", "a.b.c"} <= {one.key for one in differences}
