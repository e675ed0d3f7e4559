"""`hookline modules`: print the modules of a config's model, their output shapes, and which a pattern selects."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hookline.cli.arguments import CONFIG, DEVICE, JSON, OVERRIDES, PERMISSIONS, argument
from hookline.cli.formatting import heading, open_console, paragraph, print_json, table
from hookline.core.base import ForwardHook
from hookline.core.patterns import select

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

COLUMNS: dict[str, dict[str, Any]] = {
    "module": {"overflow": "fold"},
    "class": {"no_wrap": True},
    "parameters": {"justify": "right", "no_wrap": True},
    "output": {"overflow": "fold", "min_width": 16},
}

ARGUMENTS = (
    CONFIG
    | argument("pattern", "PATTERN", "a name, a glob or re:regex, as for a hook's `modules:`", nargs="?")
    | OVERRIDES
    | JSON
    | DEVICE
    | PERMISSIONS
)


def run(options: argparse.Namespace) -> int:
    """Create the model, run it on one batch to get its output shapes, and print them."""
    from hookline._names import plain_modules, unwrap_module
    from hookline.cli.config_args import read_config
    from hookline.config.load import FORMATS

    # Words that are neither the config file nor overrides are patterns.
    words = [word for word in options.words if not word.startswith("re:") and ("=" in word or word.endswith(FORMATS))]
    patterns = [word for word in options.words if word not in words]
    # The config's hooks are left out, because their patterns may still be wrong while you look for names.
    config, from_file = read_config(words, ["trainer.compile=false"])
    from hookline.build import trainer_from_config  # takes seconds: errors of the config come first

    trainer = trainer_from_config(
        {**config, "hooks": {}}, allow=options.allow, from_file=from_file, device=options.device
    )
    modules = plain_modules(trainer.model)
    selected = select(patterns, modules, "module") if patterns else modules
    recorder = ShapeRecorder()
    problem = run_one_batch(trainer, recorder)
    parameters = list(trainer.model.parameters())  # a shared one is listed once
    report: dict[str, Any] = {
        "model": type(unwrap_module(trainer.model)).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "frozen": sum(parameter.numel() for parameter in parameters if not parameter.requires_grad),
        "not_run_because": problem,
        "modules": [
            {
                "name": name,  # empty for the root module
                "class": type(module).__name__,
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
                "calls": recorder.calls.get(name, 0),
                "output": recorder.outputs.get(name),  # If there are several calls, the last one counts.
            }
            for name, module in selected.items()
        ],
    }
    if options.json:
        print_json(report)
    else:
        print_report(open_console(), report, patterns, len(modules))
    return 0


def print_report(console: Console, report: Mapping[str, Any], patterns: Sequence[str], count: int) -> None:
    """Print the model in one line, then a table of the selected modules; `count` is how many the model has."""
    rows, problem, frozen = report["modules"], report["not_run_because"], report["frozen"]
    also_frozen = f", {frozen:,} of them frozen" if frozen else ""
    heading(console, report["model"], f"{report['parameters']:,} parameters{also_frozen}")
    if patterns:
        given = " and ".join(f"'{pattern}'" for pattern in patterns)
        paragraph(console, f"{given}: {len(rows)} of {count} modules", indent=0)
    if problem is not None:
        paragraph(console, f"Some shapes are unknown: the model could not be run on a batch of the data. {problem}", 0)
    console.print()
    cells = []
    for row in rows:
        again = f" ({row['calls']} calls)" if row["calls"] > 1 else ""
        output = format_output(row["output"]) + again if row["calls"] else "-"
        cells.append(((row["name"] or "(the model)", row["class"], f"{row['parameters']:,}", output), ""))
    table(console, COLUMNS, cells)
    if problem is None and not all(row["calls"] for row in rows):
        console.print()
        paragraph(console, "'-': not called in this forward pass; a hook here would not fire.", indent=0)


class ShapeRecorder(ForwardHook):
    """Records the shapes of every module's output."""

    on_error = "raise"

    def __init__(self) -> None:
        self.modules = lambda name, module: True  # the root module too, which no pattern of names selects
        self.outputs: dict[str, Any] = {}
        self.calls: dict[str, int] = {}

    def on_forward(self, name: str, live_output: Any) -> None:
        """Record one call of a module."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.outputs[name] = describe_output(live_output)


def run_one_batch(trainer: Trainer, hook: ForwardHook) -> str | None:
    """Run the model on one batch of the data, in eval mode and without grad; return the error if that fails."""
    from hookline.run.manager import HookManager

    manager = HookManager()
    manager.watch(trainer.model)
    try:
        loader = next(iter(trainer.train_loaders.values()))
        batch = trainer.engine.place(next(iter(loader)))
        # In eval mode, batch norm keeps its running statistics and dropout draws nothing.
        with manager.register(hook), trainer.inference():
            trainer.forward.compute(batch)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def describe_output(value: Any) -> Any:
    """Return a module's output with every tensor replaced with its shape and dtype."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {str(key): describe_output(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe_output(item) for item in value]
    if is_dataclass(value):
        return {field.name: describe_output(getattr(value, field.name)) for field in fields(value)}
    return None if value is None else type(value).__name__


def format_output(output: Any) -> str:
    """Format a described output on one line: ``[16, 64]``, ``([2, 3], None)``, ``logits [2, 8], loss []``."""
    if isinstance(output, dict) and output.keys() == {"shape", "dtype"}:
        return str(output["shape"])
    if isinstance(output, dict):
        return ", ".join(f"{key} {format_output(item)}" for key, item in output.items())
    if isinstance(output, list):
        return f"({', '.join(map(format_output, output))})"
    return str(output)
