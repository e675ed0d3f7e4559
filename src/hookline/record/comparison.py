"""Compare runs: what differs in their configs, hooks, environments and code, and the first step at which they part."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from hookline.record.config_yaml import flatten_config, read_config
from hookline.record.json_lines import NON_FINITE, NOT_METRICS, as_mapping
from hookline.record.packing import HEADER_FIELDS, read_header
from hookline.record.summary import RunSummary, read_rows

MISSING = "(not there)"
"""Stands for a value that a run does not have."""
THERE = "(there)"
"""Stands for a hook that a run has and another one lacks."""

_BY_THE_CLOCK = ("throughput/", "ranks/")  # metrics that differ between any two runs
# Options of the trainer that cannot change what is computed.
_CANNOT_CHANGE_NUMBERS = frozenset({
    "async_save", "console", "debug", "on_save_error", "output_dir", "rank_timeout", "record", "report",
    "trainable_only", "validate_every", "sanity_batches", "warn_above",
})  # fmt: skip
_LABELS = frozenset({"name", "tags", "notes"})  # options of the trainer that only describe a run
_CHANGES = ("lr_changed", "loss_fn_changed", "step_fn_changed", "parameters_changed", "hook_wrote", "hook_drew")


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same in all runs, with its value in each of them."""

    section: str
    """``config``, ``hooks``, ``environment`` or ``git``."""
    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Parting:
    """Where two runs part: the first step with a number that differs, bit for bit."""

    step: int | None
    """None if all numbers of the steps that both runs have are the same."""
    name: str
    """The metric, or the series and the layer."""
    values: tuple[Any, Any]
    before: int
    """How many steps before it are the same in both runs."""
    last_same: int | None = None
    """The last of these."""


# ---- differences -----------------------------------------------------------------------------------------------------


def find_differences(runs: Sequence[RunSummary]) -> list[Difference]:
    """Return everything that differs between the configs, hooks, environments and commits of runs.

    The environment has the command line. Labels are left out. A hook that some of the runs lack is one difference.
    """
    sections = {
        "config": [_config_values(run) for run in runs],
        "hooks": _hook_values(runs),
        "environment": [_environment(run) for run in runs],
        "git": [flatten_config(run.run.get("git")) for run in runs],
    }
    found = []
    for section, values in sections.items():
        for key in dict.fromkeys(key for one in values for key in one):
            across = tuple(one.get(key, MISSING) for one in values)
            if any(_text(one) != _text(across[0]) for one in across[1:]):
                found.append(Difference(section, key, across))
    return found


def _config_values(run: RunSummary) -> dict[str, Any]:
    """Return the values of a config by their dotted keys, without its hooks, which are compared by name."""
    config = {} if run.path is None else read_config(run.path / "config.yaml")
    values = {key: value for key, value in as_mapping(config).items() if key != "hooks"}
    if isinstance(trainer := values.get("trainer"), Mapping):
        values["trainer"] = {key: value for key, value in trainer.items() if key not in _LABELS}
    flat = flatten_config(values)
    if "trainer.seed" not in flat and run.run.get("seed") is not None:
        flat["seed"] = run.run["seed"]
    return flat


def _hook_values(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the values of each run's hooks; of a hook that some runs lack, those that differ between the others."""
    hooks = [{hook["name"]: _values_of_hook(hook) for hook in run.hooks} for run in runs]
    found: list[dict[str, Any]] = [{} for _ in runs]
    for name in dict.fromkeys(name for own in hooks for name in own):
        having = [own[name] for own in hooks if name in own]
        alike = {key for key, value in having[0].items() if all(_text(one.get(key)) == _text(value) for one in having)}
        for own, values in zip(hooks, found, strict=True):
            if len(having) < len(runs) and name in own:
                values[name] = THERE
            values |= {key: value for key, value in own.get(name, {}).items() if key not in alike}
    return found


def _values_of_hook(hook: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: hook.get(key) for key in ("kind", "enabled", "schedule")}
    return flatten_config({hook["name"]: {**fields, **as_mapping(hook.get("parameters"))}})


def _text(value: Any) -> str:
    """Return a value in a form in which 1 and 1.0 and True differ, and the order of keys does not matter."""
    return json.dumps(value, sort_keys=True, default=str)


def _environment(run: RunSummary) -> dict[str, Any]:
    """Return the environment without the machine's name, which says nothing about numbers."""
    values = dict(as_mapping(run.run.get("environment")))
    values.pop("hostname", None)
    if isinstance(argv := values.get("argv"), list):
        values["argv"] = _command_text(list(map(str, argv)))
    return flatten_config(values)


def _command_text(argv: Sequence[str]) -> str:
    """Return a command line without the directory of its program, and without labels, which only describe a run."""
    labels = tuple(f"trainer.{name}=" for name in _LABELS)
    program = PurePath(argv[0]).name if argv else ""
    words = ["hookline" if program == "__main__.py" else program, *argv[1:]]
    return shlex.join(word for word in words if not word.startswith(labels))


# ---- the first step at which runs part -------------------------------------------------------------------------------


def find_parting(first: RunSummary, second: RunSummary) -> Parting | None:
    """Compare every number of the steps that two runs have in common, bit for bit; None if they have none in common.

    Metrics that depend on the clock are left out.
    """
    numbers = [_numbers(run) for run in (first, second)]
    common = sorted(numbers[0].keys() & numbers[1].keys())
    for index, step in enumerate(common):
        ours, theirs = numbers[0][step], numbers[1][step]
        for name in sorted(ours.keys() & theirs.keys(), key=lambda name: (name != "train/loss", name)):
            if not _same(ours[name], theirs[name]):
                return Parting(step, name, (ours[name], theirs[name]), index, common[index - 1] if index else None)
    return Parting(None, "", (None, None), len(common)) if common else None


def _numbers(run: RunSummary) -> dict[int, dict[str, Any]]:
    """Return every number of a run by step and name; of layers, the packed numbers of a series."""
    if run.path is None:
        return {}
    steps: dict[int, dict[str, Any]] = {}
    for row in _rows(run.path / "metrics.jsonl"):
        if type(row.get("step")) is int:
            values = {name: row[name] for name in row if name not in NOT_METRICS and not name.startswith(_BY_THE_CLOCK)}
            if values:
                steps.setdefault(row["step"], {}).update(values)
    series: dict[int, str] = {}
    if (run.path / "layers.jsonl").exists():
        for row in _rows(run.path / "layers.jsonl"):
            if type(row.get("series")) is not int:  # not a line of ours
                continue
            if row.keys() >= HEADER_FIELDS:
                header = read_header(row)
                if header is not None and not {"time", "memory"} & set(header.columns):  # these depend on the clock
                    series[row["series"]] = f"{header.series}: {', '.join(header.columns)}"
            elif type(row.get("step")) is int and row["series"] in series:
                packed = row.get("data", row.get("counts"))
                steps.setdefault(row["step"], {})[series[row["series"]]] = packed
    return steps


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for batch in read_rows(path, []):
        yield from batch


def _same(first: Any, second: Any) -> bool:
    first, second = (NON_FINITE.get(one, one) if isinstance(one, str) else one for one in (first, second))
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first) and math.isnan(second):
        return True
    return bool(first == second)


# ---- the likely cause ------------------------------------------------------------------------------------------------


def likely_causes(
    first: RunSummary, second: RunSummary, parting: Parting, differences: Sequence[Difference]
) -> list[str]:
    """Return what may have made two runs part, the most likely first; empty if they do not part.

    Args:
        first: A run.
        second: Another run.
        parting: Where they part.
        differences: What differs between the two.
    """
    if parting.step is None:
        return []
    found = [*_events_before(first, second, parting)]
    changing = {hook["name"] for run in (first, second) for hook in run.hooks if hook.get("intervenes")}
    ranked: list[tuple[int, str]] = []
    for one in differences:
        rank = _rank(one, changing)
        if rank is not None:
            ranked.append((rank, f"{one.key}: {value_text(one.values[0])} and {value_text(one.values[1])}"))
    found += [text for _, text in sorted(ranked, key=lambda one: one[0])]
    if not found:  # a script may read its arguments, and what it does with them is not in the record
        commands = [one for one in differences if _is_command(one)]
        found += [f"the command: {value_text(one.values[0])} and {value_text(one.values[1])}" for one in commands]
        found.append(
            f"nothing {'else ' if commands else ''}that the record knows differs: other data or another order of the "
            "data, operations that are not deterministic (trainer.deterministic), files that changed, or code that is "
            "not in git"
        )
    return found


def _is_command(one: Difference) -> bool:
    return (one.section, one.key) == ("environment", "argv")


def _events_before(first: RunSummary, second: RunSummary, parting: Parting) -> Iterator[str]:
    """Yield what happened to one of the runs alone in the steps up to where they part."""
    # What changes after a step changes the next update, and so the loss of the step after that.
    earliest = 0 if parting.last_same is None else parting.last_same - 1
    happened = [
        {
            (str(event.get("kind")), event["step"], str(event.get("by", event.get("hook"))))
            for event in run.events
            if type(event.get("step")) is int
        }
        for run in (first, second)
    ]
    for index, run in enumerate((first, second)):
        name = run.run.get("run_id")
        for kind, at, by in sorted(happened[index] - happened[1 - index], key=str):
            if not earliest <= at <= (parting.step or 0):
                continue
            if kind in _CHANGES:
                yield f"{name}: {kind.replace('_', ' ')} at step {at} by {by}"
            elif kind in ("checkpoint_loaded", "resume_not_exact"):
                yield f"{name} was resumed at step {at}"


def _rank(one: Difference, changing: set[str]) -> int | None:
    """Return how likely a difference changes numbers, 0 the most; None if it cannot."""
    section, _, option = one.key.partition(".")
    if one.section == "hooks":
        return 2 if section in changing else None  # the others only watch
    if one.section == "git":
        return 4 if one.key in ("commit", "diff_hash") else None
    if one.section == "environment":
        return None if _is_command(one) else 5
    if section == "trainer":
        if option == "seed":
            return 0
        return None if option in _CANNOT_CHANGE_NUMBERS else 1
    if section in ("metrics", "trackers"):
        return None
    return 0 if one.key == "seed" else 1


def value_text(value: Any) -> str:
    """Return a value as JSON; a text in quotes cannot be mistaken for one of the words that stand for no value."""
    return value if value in (MISSING, THERE) else json.dumps(value, default=str, ensure_ascii=False)
