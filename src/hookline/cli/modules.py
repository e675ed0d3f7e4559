"""`hookline modules`: print the modules of a config's model, their output shapes, and which a pattern selects."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hookline.cli.config_args import read_config
from hookline.cli.formatting import heading, open_console, paragraph, table
from hookline.config.load import FORMATS
from hookline.core.base import ForwardHook
from hookline.core.patterns import select

if TYPE_CHECKING:
    import torch

    from hookline.trainer.trainer import Trainer

COLUMNS: dict[str, dict[str, Any]] = {
    "module": {"overflow": "fold"},
    "class": {"no_wrap": True},
    "parameters": {"justify": "right", "no_wrap": True},
    "output": {"overflow": "fold", "min_width": 16},
}


@dataclass(frozen=True)
class Row:
    """One module. A module that is called several times in a forward pass shows its last output."""

    name: str
    kind: str
    parameters: int
    calls: int
    output: Any

    def cells(self) -> tuple[str, str, str, str]:
        """Return the text of the columns."""
        again = f" ({self.calls} calls)" if self.calls > 1 else ""
        output = format_output(self.output) + again if self.calls else "-"
        return self.name or "(the model)", self.kind, f"{self.parameters:,}", output


def run(options: argparse.Namespace) -> int:
    """Make the model, run it on one batch to get its output shapes, and print."""
    # Words that are neither the config file nor overrides are patterns.
    words = [word for word in options.words if not word.startswith("re:") and ("=" in word or word.endswith(FORMATS))]
    patterns = [word for word in options.words if word not in words]
    # The config's hooks are left out, because their patterns may still be wrong when one looks for names.
    config, from_file = read_config(words, ["trainer.compile=false"])
    from hookline.build import trainer_from_config  # takes seconds: errors of the config come first

    trainer = trainer_from_config({**config, "hooks": {}}, allow=options.allow, from_file=from_file)
    modules = dict(trainer.model.named_modules())
    if patterns:
        modules = select(patterns, modules, "module")
    recorder = ShapeRecorder()
    problem = run_one_batch(trainer, recorder)
    rows = [recorder.row(name, module) for name, module in modules.items()]
    if options.json:
        print(json.dumps(as_json(trainer.model, rows, problem), indent=1))
    else:
        print_modules(open_console(), trainer.model, rows, patterns, problem)
    return 0


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

    def row(self, name: str, module: torch.nn.Module) -> Row:
        """Return the row of a module."""
        parameters = sum(parameter.numel() for parameter in module.parameters())
        return Row(name, type(module).__name__, parameters, self.calls.get(name, 0), self.outputs.get(name))


def run_one_batch(trainer: Trainer, hook: ForwardHook) -> str | None:
    """Run the model on one batch of the data, in eval mode and without grad; return the error if that fails."""
    from hookline.activations.manager import HookManager

    manager = HookManager()
    manager.watch(trainer.model)
    try:
        loader = next(iter(trainer.train_loaders.values()))
        batch = trainer.engine.place(next(iter(loader)))
        with manager.register(hook), trainer.inference():
            trainer.compute(batch)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def describe_output(value: Any) -> Any:
    """Return a module's output with every tensor replaced by its shape and dtype."""
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


def as_json(model: torch.nn.Module, rows: Sequence[Row], problem: str | None) -> dict[str, Any]:
    """Return the same for programs, with dtypes. The root module's name is empty."""
    total, frozen = count_parameters(model)
    modules = [
        {"name": row.name, "class": row.kind, "parameters": row.parameters, "calls": row.calls, "output": row.output}
        for row in rows
    ]
    return {
        "model": type(model).__name__,
        "parameters": total,
        "frozen": frozen,
        "not_run_because": problem,
        "modules": modules,
    }


def print_modules(
    console: Console, model: torch.nn.Module, rows: Sequence[Row], patterns: Sequence[str], problem: str | None
) -> None:
    """Print the model in one line, then a table of its modules.

    Args:
        console: Where to print.
        model: The model.
        rows: The selected modules.
        patterns: The patterns that selected them.
        problem: Why the model could not be run, if so.
    """
    total, frozen = count_parameters(model)
    heading(console, type(model).__name__, f"{total:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}")
    if patterns:
        given = " and ".join(f"'{pattern}'" for pattern in patterns)
        paragraph(console, f"{given}: {len(rows)} of {len(list(model.modules()))} modules", indent=0)
    if problem is not None:
        paragraph(console, f"Some shapes are unknown: the model could not be run on a batch of the data. {problem}", 0)
    console.print()
    table(console, COLUMNS, [(row.cells(), "") for row in rows])
    if problem is None and not all(row.calls for row in rows):
        console.print()
        paragraph(console, "'-': not called in this forward pass; a hook here would not fire.", indent=0)


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Count all parameters, and those that are frozen; a shared one counts once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if not trained)
