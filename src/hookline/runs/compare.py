"""Compare runs: what differs in their configs, hooks, environments and code, and where their numbers diverge."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from hookline._text import counted
from hookline.errors import RecordError
from hookline.record import strict_json
from hookline.record.events import EVENTS
from hookline.record.format import CONFIG_FILE, SeriesHeader
from hookline.record.json_lines import as_mapping
from hookline.record.labels import LABEL_OPTIONS
from hookline.runs.config import flatten_config
from hookline.runs.summary import Array, Numbers, RunSummary

MISSING = "(not there)"
"""Stands for a value that a run does not have."""
THERE = "(there)"
"""Stands for a hook that a run has and another one lacks."""

# Options of the trainer that cannot change what is computed.
_CANNOT_CHANGE_NUMBERS = frozenset({
    "async_save", "console", "debug", "on_save_error", "output_dir", "rank_timeout", "record", "report",
    "trainable_only", "validate_every", "sanity_batches", "warn_above",
})  # fmt: skip
_SEED_ARGUMENT = re.compile(r"(seed)[= ]+\S+", re.IGNORECASE)  # A seed among the arguments of a script.


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same in all runs, with its value in each of them."""

    section: str
    """``config``, ``hooks``, ``environment`` or ``git``."""
    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Divergence:
    """Where two runs diverge: the first step with a number that differs, bit for bit."""

    step: int | None
    """None if all numbers of the steps that both runs have are the same."""
    name: str
    """The metric, or the series, the layer and the statistic."""
    values: tuple[Any, Any]
    """Its numbers in both runs; None for a histogram."""
    before: int
    """How many steps before it are the same in both runs."""
    last_same: int | None = None
    """The last of these."""

    def __str__(self) -> str:
        """Return a sentence without its subject, with all digits of the numbers.

        >>> str(Divergence(7, "train/loss", (0.5, 0.25), 6))
        'diverge at step 7 (the 6 steps before it are the same): train/loss is 0.5 vs 0.25'
        """
        if self.step is None:
            return f"are the same, bit for bit, in all {counted(self.before, 'step')} that both recorded"
        same = {0: "the first step", 1: "the step before it is the same"}.get(
            self.before, f"the {self.before:,} steps before it are the same"
        )
        what = "differs" if None in self.values else f"is {self.values[0]} vs {self.values[1]}"
        return f"diverge at step {self.step:,} ({same}): {self.name} {what}"


# ---- differences -----------------------------------------------------------------------------------------------------


def find_differences(runs: Sequence[RunSummary]) -> list[Difference]:
    """Return everything that differs between the configs, hooks, environments and commits of runs.

    The environment has the command line. Labels are left out. A hook that some of the runs lack is one difference.
    """
    sections = {
        "config": _configs(runs),
        "hooks": _hook_values(runs),
        "environment": [_environment(run) for run in runs],
        "git": [flatten_config(run.run.get("git")) for run in runs],
    }
    differences = []
    for section, runs_values in sections.items():
        for key in dict.fromkeys(key for values in runs_values for key in values):
            across = tuple(values.get(key, MISSING) for values in runs_values)
            if any(_text(value) != _text(across[0]) for value in across[1:]):
                differences.append(Difference(section, key, across))
    return differences


def _configs(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the values of each config; if one of them cannot be read, only the seeds and which configs exist."""
    try:
        return [_config_values(run) for run in runs]
    except RecordError:
        return [{"seed": run.run.get("seed"), **_readable(run)} for run in runs]


def _readable(run: RunSummary) -> dict[str, Any]:
    if not os.path.lexists(run.files.path / CONFIG_FILE):
        return {}
    try:
        run.files.config  # noqa: B018 - read now
    except RecordError as error:
        return {CONFIG_FILE: str(error)}
    return {CONFIG_FILE: THERE}


def _config_values(run: RunSummary) -> dict[str, Any]:
    """Return the values of a config by their dotted keys, without its hooks, which are compared by name."""
    values = {key: value for key, value in as_mapping(run.files.config).items() if key != "hooks"}
    flat = {key: value for key, value in flatten_config(values).items() if key not in LABEL_OPTIONS}
    if "trainer.seed" not in flat and run.run.get("seed") is not None:
        flat["seed"] = run.run["seed"]
    return flat


def _hook_values(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the values of each run's hooks; for a hook that some lack, only values that differ."""
    # The default hooks of a run depend on the options, which are compared, and on the terminal.
    chosen = [[hook for hook in run.hooks if hook.get("origin") != "default"] for run in runs]
    hooks = [{hook["name"]: _values_of_hook(hook) for hook in hooks_of_run} for hooks_of_run in chosen]
    different: list[dict[str, Any]] = [{} for _ in runs]
    for name in dict.fromkeys(name for hooks_of_run in hooks for name in hooks_of_run):
        having = [hooks_of_run[name] for hooks_of_run in hooks if name in hooks_of_run]
        alike = {
            key for key, value in having[0].items() if all(_text(hook.get(key)) == _text(value) for hook in having)
        }
        for hooks_of_run, values in zip(hooks, different, strict=True):
            if len(having) < len(runs) and name in hooks_of_run:
                values[name] = THERE
            values |= {key: value for key, value in hooks_of_run.get(name, {}).items() if key not in alike}
    return different


def _values_of_hook(hook: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: hook.get(key) for key in ("kind", "enabled", "schedule")}
    return flatten_config({hook["name"]: {**fields, **hook.get("parameters", {})}})


def _text(value: Any) -> str:
    """Return a value in a form in which 1 and 1.0 and True differ, and the order of keys does not matter."""
    return json.dumps(value, sort_keys=True, default=str)


def _environment(run: RunSummary) -> dict[str, Any]:
    """Return the environment without the machine's name, which says nothing about numbers."""
    values = {key: value for key, value in run.run.get("environment", {}).items() if key != "hostname"}
    if "argv" in values:
        values["argv"] = _command_text(values["argv"])
    return flatten_config(values)


def _command_text(argv: Sequence[str]) -> str:
    """Return a command line without the directory of its program, and without labels, which only describe a run."""
    program = PurePath(argv[0]).name if argv else ""
    words = ["hookline" if program == "__main__.py" else program, *argv[1:]]
    return shlex.join(word for word in words if word.partition("=")[0] not in LABEL_OPTIONS)


# ---- runs of one config ----------------------------------------------------------------------------------------------


def group_runs(runs: Sequence[RunSummary]) -> list[list[int]]:
    """Return groups of places of runs whose configs differ only in seeds, in the order of their first runs.

    Runs of a script must have been started by the same command, because their config does not say everything that the
    script does with its arguments. If a group has a seed twice, runs of different code form separate groups; runs of a
    single seed form no group.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        groups.setdefault(_without_seeds(run) or f"run {place}", []).append(place)
    seeds = [_text(_seeds(run)) for run in runs]
    parts: dict[tuple[str, str], list[int]] = {}
    for key, places in groups.items():
        is_repeated = len({seeds[place] for place in places}) < len(places)
        for place in places:
            git = runs[place].run.get("git", {})
            code = _text([git.get("commit"), git.get("diff_hash")]) if is_repeated else ""
            parts.setdefault((key, code), []).append(place)
    split: list[list[int]] = []
    for places in parts.values():
        is_group = len({seeds[place] for place in places}) > 1
        split += [places] if is_group else [[place] for place in places]
    return sorted(split)


def _seeds(run: RunSummary) -> dict[str, Any]:
    """Return every seed of a run whose config can be read."""
    config = flatten_config(run.files.config).items() if _without_seeds(run) else ()
    return {"seed": run.run.get("seed")} | {key: value for key, value in config if key.rpartition(".")[2] == "seed"}


def _without_seeds(run: RunSummary) -> str | None:
    """Return a run's config and command without seeds, labels and places; None if its config cannot be read."""
    try:
        config = flatten_config(run.files.config)
    except RecordError:
        return None
    left_out = {*LABEL_OPTIONS, *(f"trainer.{name}" for name in _CANNOT_CHANGE_NUMBERS - {"validate_every"})}
    values = {key: value for key, value in config.items() if key not in left_out and key.rpartition(".")[2] != "seed"}
    argv = run.run.get("environment", {}).get("argv", [])
    command = _command_text(argv)
    command = "" if command.partition(" ")[0] == "hookline" else _SEED_ARGUMENT.sub(r"\1", command)
    return _text([values, command])


# ---- the first step at which runs diverge ----------------------------------------------------------------------------


def find_divergence(first: RunSummary, other: RunSummary) -> Divergence | None:
    """Return where two runs that were read with their numbers diverge; None if they have no step in common.

    Every number that both have is compared, bit for bit. Metrics that depend on the clock are left out.
    """
    ours, theirs = first.numbers, other.numbers
    common = np.intersect1d(ours.steps, theirs.steps, assume_unique=True)
    if not common.size:
        return None
    different = [*_different_metrics(ours, theirs), *_different_layers(ours, theirs)]
    if not different:
        return Divergence(None, "", (None, None), int(common.size))
    step, name, values = min(different, key=lambda number: (number[0], number[1] != "train/loss", number[1]))
    before = int(np.searchsorted(common, step))
    shown = strict_json.simplify(values[0]), strict_json.simplify(values[1])
    return Divergence(step, name, shown, before, int(common[before - 1]) if before else None)


def _different_metrics(ours: Numbers, theirs: Numbers) -> Iterator[tuple[int, str, tuple[Any, Any]]]:
    """Yield for each metric that differs the first step at which it does, and its values."""
    for name in ours.metrics.keys() & theirs.metrics.keys():
        (our_steps, our_values), (their_steps, their_values) = ours.metrics[name], theirs.metrics[name]
        steps, at, their_at = np.intersect1d(our_steps, their_steps, assume_unique=True, return_indices=True)
        first, second = our_values[at], their_values[their_at]
        differs = (first != second) & ~(np.isnan(first) & np.isnan(second))
        if differs.any():
            index = int(differs.argmax())
            yield int(steps[index]), name, (float(first[index]), float(second[index]))


def _different_layers(ours: Numbers, theirs: Numbers) -> Iterator[tuple[int, str, tuple[Any, Any]]]:
    """Yield the statistics that differ at the first step at which one does."""
    for step in sorted(ours.layers.keys() & theirs.layers.keys()):
        first, second = ours.layers[step], theirs.layers[step]
        common = first.keys() & second.keys()
        same = {header for header in common if np.array_equal(first[header], second[header], equal_nan=True)}
        cells, others = (_cells(rows, same) for rows in (first, second))
        different = [key for key in cells.keys() & others.keys() if not _same(cells[key], others[key])]
        for key in different:
            series, name, column, bins = key
            values = (None, None) if bins is not None else (cells[key], others[key])
            yield step, f"{series}: {column} of {name}", values
        if different:
            return


def _cells(rows: Mapping[SeriesHeader, Array], same: set[SeriesHeader]) -> dict[tuple[str, str, str, int | None], Any]:
    """Return the values of a step by series, name, column and bins, without those that are the same in both runs."""
    return {
        (header.series, name, column, header.bins): value
        for header, values in rows.items()
        if header not in same
        for name, line in zip(header.names, values.tolist(), strict=True)
        for column, value in zip(header.columns, line, strict=True)
    }


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


# ---- the likely cause ------------------------------------------------------------------------------------------------


def likely_causes(
    first: RunSummary, second: RunSummary, divergence: Divergence, differences: Sequence[Difference]
) -> list[str]:
    """Return what may have made two runs diverge, the most likely first; empty if they do not.

    Args:
        first: A run.
        second: Another run.
        divergence: Where they diverge.
        differences: The differences between the two.
    """
    if divergence.step is None:
        return []
    causes = [*_events_before(first, second, divergence)]
    changing = {hook["name"] for run in (first, second) for hook in run.hooks if hook.get("intervenes")}
    ranked: list[tuple[int, str]] = []
    for difference in differences:
        rank = _rank(difference, changing)
        if rank is not None:
            ranked.append((rank, f"{difference.key}: {' and '.join(map(value_text, difference.values))}"))
    causes += [text for _, text in sorted(ranked, key=lambda cause: cause[0])]
    if not causes:  # a script may read its arguments, and what it does with them is not in the record
        commands = [*filter(_is_command, differences)]
        causes += [f"the command: {' and '.join(map(value_text, command.values))}" for command in commands]
        causes.append(
            f"nothing {'else ' if commands else ''}in the record differs; perhaps the data, its order, a file or code "
            "outside of git changed, or operations are not deterministic (trainer.deterministic)"
        )
    return causes


def _is_command(difference: Difference) -> bool:
    return (difference.section, difference.key) == ("environment", "argv")


def _events_before(first: RunSummary, second: RunSummary, divergence: Divergence) -> Iterator[str]:
    """Yield what happened in only one of the runs up to the step where they diverge."""
    # A change after a step affects the next update, and so the loss of the step after that.
    earliest = 0 if divergence.last_same is None else divergence.last_same - 1
    happened = [
        {
            (str(event.get("kind")), event["step"], str(event.get("by", event.get("hook"))))
            for event in run.events
            if event.get("step") is not None
        }
        for run in (first, second)
    ]
    for index, run in enumerate((first, second)):
        name = run.run.get("run_id")
        for kind, at, by in sorted(happened[index] - happened[1 - index], key=str):
            if not earliest <= at <= (divergence.step or 0):
                continue
            if kind in EVENTS and EVENTS[kind].changes_numbers:
                yield f"{name}: {kind.replace('_', ' ')} at step {at} by {by}"
            elif kind in ("checkpoint_loaded", "resume_not_exact"):
                yield f"{name} was resumed at step {at}"


def _rank(difference: Difference, changing: set[str]) -> int | None:
    """Return how likely a difference changes numbers, 0 the most; None if it cannot."""
    section, _, option = difference.key.partition(".")
    if difference.section == "hooks":
        of_hooks = (f"{difference.key}.".startswith(f"{name}.") for name in changing)  # a name may have dots
        return 2 if any(of_hooks) else None  # the others only observe
    if difference.section == "git":
        return 4 if difference.key in ("commit", "diff_hash") else None
    if difference.section == "environment":
        return None if _is_command(difference) else 5
    if section == "trainer":
        if option == "seed":
            return 0
        return None if option in _CANNOT_CHANGE_NUMBERS else 1
    if section in ("metrics", "trackers"):
        return None
    return 0 if difference.key == "seed" else 1


def value_text(value: Any) -> str:
    """Return a value as JSON; its quotes distinguish a string from the words that stand for a missing value."""
    return value if value in (MISSING, THERE) else json.dumps(value, default=str, ensure_ascii=False)
