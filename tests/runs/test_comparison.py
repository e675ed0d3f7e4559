"""What differs between runs, as `hookline compare` finds it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from records import close_record, start_record

from hookline.record import Record
from hookline.runs.compare import (
    MISSING,
    THERE,
    Difference,
    Divergence,
    find_differences,
    find_divergence,
    likely_causes,
)
from hookline.runs.config import flatten_config
from hookline.runs.summary import RunSummary


def write_run(directory: Path, config: str = "a: 1\n", hooks: Any = (), metrics: Any = ()) -> RunSummary:
    record = Record.on_disk(directory, config={}, seed=1)
    record.start([*hooks])
    for name, value in dict(metrics).items():
        record.log(1, 0, name, value)
    record.close("completed", None, [*hooks], [], {"step": 1})
    (record.path / "config.yaml").write_text(config)
    return RunSummary.read(record.path, numbers=True)


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
def test_a_config_that_repeats_itself_exponentially_was_not_written_by_us(
    tmp_path: Path, first: str, each: str
) -> None:
    (difference,) = find_differences([write_run(tmp_path, nested_aliases(first, each)), write_run(tmp_path)])
    assert difference.key == "config.yaml" and "it has aliases" in difference.values[0]


def test_a_config_that_contains_itself_was_not_written_by_us(tmp_path: Path) -> None:
    (difference,) = find_differences([write_run(tmp_path, "a: &a {b: *a, c: 2}\n"), write_run(tmp_path)])
    assert difference.key == "config.yaml" and "it has aliases" in difference.values[0]


def test_labels_are_not_differences(tmp_path: Path) -> None:
    configs = (f"trainer: {{name: {name}, tags: [{name}], notes: {name}, lr: 1}}\n" for name in ("one", "two"))
    assert find_differences([write_run(tmp_path, config) for config in configs]) == []


def test_a_hook_that_one_run_lacks_is_one_difference(tmp_path: Path) -> None:
    hook = {"name": "clip_norm", "kind": "update", "enabled": True, "parameters": {"max_norm": 1.0, "p": 2}}
    runs = [write_run(tmp_path, hooks=[hook]), write_run(tmp_path)]
    assert find_differences(runs) == [Difference("hooks", "clip_norm", (THERE, MISSING))]
    changed = {**hook, "parameters": {"max_norm": 5.0, "p": 2}}
    runs = [write_run(tmp_path, hooks=[item]) for item in (hook, changed)]
    assert find_differences(runs) == [Difference("hooks", "clip_norm.max_norm", (1.0, 5.0))]


def test_hooks_that_a_run_has_by_default_are_not_compared(tmp_path: Path) -> None:
    """Whether a run prints its progress depends on the terminal."""
    console = {"name": "console_log", "kind": "lifecycle", "origin": "default", "parameters": {"every": 10}}
    assert find_differences([write_run(tmp_path, hooks=[console]), write_run(tmp_path)]) == []


def test_a_large_config_is_compared_whole(tmp_path: Path) -> None:
    large = f"model: {{w: [{', '.join(map(str, range(12_000)))}]}}\n"
    first, second, again = (write_run(tmp_path, f"{large}zeta: {value}\n") for value in (1, 2, 1))
    assert find_differences([first, second]) == [Difference("config", "zeta", (1, 2))]
    assert find_differences([first, again]) == []


def test_hooks_are_compared_though_a_config_cannot_be_read(tmp_path: Path) -> None:
    hook = {"name": "clip_norm", "kind": "update", "enabled": True, "parameters": {}}
    first, second = write_run(tmp_path, hooks=[hook]), write_run(tmp_path, "a: [1\n")
    there, lacks = find_differences([first, second])
    assert there.key == "config.yaml" and "there" in there.values[0]
    assert "is damaged" in there.values[1]
    assert (lacks.section, lacks.key, lacks.values[1]) == ("hooks", "clip_norm", MISSING)


def test_a_hook_with_a_dot_in_its_name_may_be_why_runs_part(tmp_path: Path) -> None:
    hook = {"name": "my.clip", "kind": "update", "enabled": True, "intervenes": True}
    first, second = (
        write_run(tmp_path, hooks=[{**hook, "parameters": {"max_norm": norm}}], metrics={"train/loss": norm})
        for norm in (1, 2)
    )
    divergence = find_divergence(first, second)
    assert divergence is not None
    assert likely_causes(first, second, divergence, find_differences([first, second])) == ["my.clip.max_norm: 1 and 2"]


@pytest.mark.parametrize("has_hook", [(True, False), (False, True)])
def test_a_hook_that_one_of_the_runs_lacks_may_be_why_they_diverge(tmp_path: Path, has_hook: tuple[bool, bool]) -> None:
    """It does not matter which of the two runs comes first."""
    hook = {"name": "clip", "kind": "update", "enabled": True, "intervenes": True}
    first, second = (
        write_run(tmp_path, hooks=[hook] * has_it, metrics={"train/loss": float(has_it)}) for has_it in has_hook
    )
    divergence = find_divergence(first, second)
    assert divergence is not None
    (cause,) = likely_causes(first, second, divergence, find_differences([first, second]))
    assert cause.startswith("clip: ")


# ---- where runs diverge ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["max_steps", "max_epochs"])
def test_the_length_of_a_run_may_be_why_it_parts(tmp_path: Path, option: str) -> None:
    """A scheduler follows it; where a run writes its files cannot be the reason."""
    first, second = (
        write_run(tmp_path, f"trainer: {{{option}: {number}, output_dir: x{number}}}\n", metrics={"lr": number})
        for number in (1, 2)
    )
    divergence = find_divergence(first, second)
    assert divergence is not None
    causes = likely_causes(first, second, divergence, find_differences([first, second]))
    assert causes == [f"trainer.{option}: 1 and 2"]


def test_of_several_metrics_that_differ_the_loss_says_where_runs_part(tmp_path: Path) -> None:
    """Others that differ at the same step are named by their order."""
    first, second = (write_run(tmp_path, metrics={"acc": number, "train/loss": -number}) for number in (1.0, 2.0))
    divergence = find_divergence(first, second)
    assert divergence is not None
    assert (divergence.name, divergence.values) == ("train/loss", (-1.0, -2.0))


def with_command(run: RunSummary, *argv: str) -> RunSummary:
    run.run["environment"] = {**run.run["environment"], "argv": [*argv]}
    return run


@pytest.mark.parametrize(
    "kind", ["lr_changed", "loss_fn_changed", "step_fn_changed", "parameters_changed", "hook_wrote"]
)
def test_what_a_hook_changed_in_one_run_may_be_why_it_parts(kind: str, tmp_path: Path) -> None:
    """Events that change no number are not causes."""
    first, second = (write_run(tmp_path, metrics={"train/loss": number}) for number in (1.0, 2.0))
    second.events.extend([{"kind": kind, "step": 1, "by": "warmup"}, {"kind": "checkpoint_saved", "step": 1}])
    divergence = find_divergence(first, second)
    assert divergence is not None
    causes = likely_causes(first, second, divergence, find_differences([first, second]))
    assert causes == [f"{second.run['run_id']}: {kind.replace('_', ' ')} at step 1 by warmup"]


def test_the_name_of_the_machine_is_no_difference(tmp_path: Path) -> None:
    """It says nothing about numbers; what the machine has is compared."""
    first, second = write_run(tmp_path), write_run(tmp_path)
    second.run["environment"] = {**second.run["environment"], "hostname": "elsewhere"}
    assert find_differences([first, second]) == []
    second.run["environment"]["torch"] = "0.1"
    assert [item.key for item in find_differences([first, second])] == ["torch"]


def test_the_command_line_is_the_likely_cause_if_nothing_else_differs(tmp_path: Path) -> None:
    """A script may read its arguments; the directory of the program and labels say nothing."""
    commands = (("/a/code.py", "--depth", "1", "trainer.name=one"), ("/b/code.py", "--depth", "2", "trainer.name=two"))
    first, second = (
        with_command(write_run(tmp_path, metrics={"train/loss": loss}), *argv)
        for loss, argv in zip((1.0, 2.0), commands, strict=True)
    )
    expected = Difference("environment", "argv", ("code.py --depth 1", "code.py --depth 2"))
    assert find_differences([first, second]) == [expected]
    divergence = find_divergence(first, second)
    assert divergence is not None
    causes = likely_causes(first, second, divergence, [expected])
    assert causes[0] == 'the command: "code.py --depth 1" and "code.py --depth 2"'
    assert "nothing else in the record differs; perhaps the data, its order, a file or code" in causes[1]
    seed = Difference("config", "seed", (1, 2))
    assert likely_causes(first, second, divergence, [expected, seed]) == ["seed: 1 and 2"]


def test_what_depends_on_the_clock_is_not_compared(tmp_path: Path) -> None:
    names = ("throughput/step_seconds", "ranks/slowest", "ranks/slowest_data_seconds")
    first, second = (
        write_run(tmp_path, metrics={"train/loss": 1.0, **dict.fromkeys(names, value)}) for value in (1, 2)
    )
    divergence = find_divergence(first, second)
    assert divergence.step is None


def write_layers(
    directory: Path, *rows: tuple[str, Sequence[str], Sequence[str], Any], resumed: Any = ()
) -> RunSummary:
    """Write a run of one step per row (all in step 1), and the rows of a second attempt in step 2."""
    record = start_record(directory)
    for series, names, columns, values in rows:
        record.log_layers(series, 1, names, columns, torch.tensor(values))
    path = close_record(record, step=1)
    if resumed:
        record = start_record(directory, path.name)
        record.resume_at(1, 0)
        for series, names, columns, values in resumed:
            record.log_layers(series, 2, names, columns, torch.tensor(values))
        close_record(record, step=2)
    return RunSummary.read(path, numbers=True)


def test_runs_that_watch_different_layers_are_compared_where_both_watch(tmp_path: Path) -> None:
    first = write_layers(tmp_path, ("activations", ["a"], ["mean"], [[1.0]]))
    both = write_layers(tmp_path, ("activations", ["a", "b"], ["mean", "std"], [[1.0, 5.0], [3.0, 5.0]]))
    other = write_layers(tmp_path, ("activations", ["b", "a"], ["std", "mean"], [[5.0, 3.0], [5.0, 1.5]]))
    assert find_divergence(first, both) == Divergence(None, "", (None, None), 1)
    assert find_divergence(both, other) == Divergence(1, "activations: mean of a", (1.0, 1.5), 0)


def test_every_hook_that_writes_a_series_is_compared(tmp_path: Path) -> None:
    """Two hooks write the same columns of other layers; the first one's differ."""
    first, second = (
        write_layers(tmp_path, ("s", ["a"], ["mean"], [[value]]), ("s", ["b"], ["mean"], [[7.0]])) for value in (1.0, 2)
    )
    assert find_divergence(first, second) == Divergence(1, "s: mean of a", (1.0, 2.0), 0)


def test_times_are_not_compared_also_after_a_resume(tmp_path: Path) -> None:
    """The second attempt gives the id of the first one's series to another series."""
    first, second = (
        write_layers(tmp_path, ("s", ["a"], ["mean"], [[1.0]]), resumed=[("costs", ["a"], ["time"], [[seconds]])])
        for seconds in (0.1, 0.2)
    )
    assert find_divergence(first, second) == Divergence(None, "", (None, None), 1)


def test_histograms_are_compared(tmp_path: Path) -> None:
    first, second, again = (
        write_layers(tmp_path, ("h", ["a", "b"], ["counts"], [[[1.0, 2.0]], [[3.0, last]]])) for last in (4.0, 5.0, 4.0)
    )
    assert find_divergence(first, second) == Divergence(1, "h: counts of b", (None, None), 0)
    assert find_divergence(first, again) == Divergence(None, "", (None, None), 1)


def test_values_that_are_not_finite_are_the_same_if_they_are_alike(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    runs = [write_run(tmp_path, metrics={"x": nan, "y": value}) for value in (inf, inf, -inf)]
    assert [find_divergence(runs[0], other) for other in runs[1:]] == [
        Divergence(None, "", (None, None), 1),
        Divergence(1, "y", ("Infinity", "-Infinity"), 0),
    ]
