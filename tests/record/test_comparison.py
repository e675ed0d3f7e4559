"""What differs between runs, as `hookline compare` finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookline.record import Record
from hookline.record.comparison import MISSING, THERE, Difference, find_differences, find_parting, likely_causes
from hookline.record.config_yaml import flatten_config
from hookline.record.summary import RunSummary


def write_run(directory: Path, config: str = "a: 1\n", hooks: Any = (), metrics: Any = ()) -> RunSummary:
    record = Record.on_disk(directory, config={}, seed=1)
    record.start([*hooks])
    for name, value in dict(metrics).items():
        record.log(1, 0, name, value)
    record.close("completed", None, [*hooks], [], {"step": 1})
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
    config = {"trainer": {"lr": 0.1, "betas": [0.9, 0.99]}, "empty": {}, 1: {"two": None}}
    flat = {"trainer.lr": 0.1, "trainer.betas": [0.9, 0.99], "empty": {}, "1.two": None}
    assert flatten_config(config) == flat


def test_mappings_in_a_list_have_their_place_in_their_keys(tmp_path: Path) -> None:
    """A run that was made in code has a list of optimizers."""
    config = {"optimizers": [{"class": "SGD", "lr": 0.1}], "metrics": ["accuracy", {"k": 2}]}
    flat = {"optimizers.0.class": "SGD", "optimizers.0.lr": 0.1, "metrics.0": "accuracy", "metrics.1.k": 2}
    assert flatten_config(config) == flat
    runs = [write_run(tmp_path, f"optimizers: [{{class: SGD, lr: {lr}}}]\n") for lr in (0.1, 0.05)]
    assert find_differences(runs) == [Difference("config", "optimizers.0.lr", (0.1, 0.05))]


@pytest.mark.parametrize(("first", "each"), [("{x: 1}", "{}"), ("[1]", "[]"), (f"[{'x' * 5000}]", "[]")])
def test_a_config_that_repeats_itself_exponentially_is_compared_in_part(tmp_path: Path, first: str, each: str) -> None:
    differences = find_differences([write_run(tmp_path, nested_aliases(first, each)), write_run(tmp_path)])
    assert {"a", "a0.x" if each == "{}" else "a0"} <= {one.key for one in differences}
    assert sum(len(str(one)) for one in differences) < 5_000_000


def test_a_config_that_contains_itself_is_compared_in_part(tmp_path: Path) -> None:
    differences = find_differences([write_run(tmp_path, "a: &a {b: *a, c: 2}\n"), write_run(tmp_path)])
    assert {"a", "a.c", "a.b.c"} <= {one.key for one in differences}


def test_labels_are_not_differences(tmp_path: Path) -> None:
    configs = (f"trainer: {{name: {name}, tags: [{name}], notes: {name}, lr: 1}}\n" for name in ("one", "two"))
    assert find_differences([write_run(tmp_path, config) for config in configs]) == []


def test_a_hook_that_one_run_lacks_is_one_difference(tmp_path: Path) -> None:
    hook = {"name": "clip_norm", "kind": "update", "enabled": True, "parameters": {"max_norm": 1.0, "p": 2}}
    runs = [write_run(tmp_path, hooks=[hook]), write_run(tmp_path)]
    assert find_differences(runs) == [Difference("hooks", "clip_norm", (THERE, MISSING))]
    changed = {**hook, "parameters": {"max_norm": 5.0, "p": 2}}
    runs = [write_run(tmp_path, hooks=[one]) for one in (hook, changed)]
    assert find_differences(runs) == [Difference("hooks", "clip_norm.max_norm", (1.0, 5.0))]


# ---- where runs part -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["max_steps", "max_epochs"])
def test_the_length_of_a_run_may_be_why_it_parts(tmp_path: Path, option: str) -> None:
    """A scheduler follows it; where a run writes its files cannot be the reason."""
    first, second = (
        write_run(tmp_path, f"trainer: {{{option}: {number}, output_dir: x{number}}}\n", metrics={"lr": number})
        for number in (1, 2)
    )
    parting = find_parting(first, second)
    assert parting is not None
    causes = likely_causes(first, second, parting, find_differences([first, second]))
    assert causes == [f"trainer.{option}: 1 and 2"]


def with_command(run: RunSummary, *argv: str) -> RunSummary:
    run.run["environment"] = {**run.run["environment"], "argv": [*argv]}
    return run


def test_the_command_line_is_the_likely_cause_if_nothing_else_differs(tmp_path: Path) -> None:
    """A script may read its arguments; the directory of the program and labels say nothing."""
    commands = (("/a/code.py", "--depth", "1", "trainer.name=one"), ("/b/code.py", "--depth", "2", "trainer.name=two"))
    first, second = (
        with_command(write_run(tmp_path, metrics={"train/loss": loss}), *argv)
        for loss, argv in zip((1.0, 2.0), commands, strict=True)
    )
    expected = Difference("environment", "argv", ("code.py --depth 1", "code.py --depth 2"))
    assert find_differences([first, second]) == [expected]
    parting = find_parting(first, second)
    assert parting is not None
    causes = likely_causes(first, second, parting, [expected])
    assert causes[0] == 'the command: "code.py --depth 1" and "code.py --depth 2"'
    assert "nothing else that the record knows differs: other data or another order of the data" in causes[1]
    seed = Difference("config", "seed", (1, 2))
    assert likely_causes(first, second, parting, [expected, seed]) == ["seed: 1 and 2"]


def test_what_depends_on_the_clock_is_not_compared(tmp_path: Path) -> None:
    names = ("throughput/step_seconds", "ranks/slowest", "ranks/slowest_data_seconds")
    first, second = (
        write_run(tmp_path, metrics={"train/loss": 1.0, **dict.fromkeys(names, value)}) for value in (1, 2)
    )
    parting = find_parting(first, second)
    assert parting is not None
    assert parting.step is None
