"""`hookline modules`: the model of a config, module by module, and which of them a pattern selects."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from hookline.cli.page import WIDEST, entry, heading, open_page
from hookline.cli.settings import read_settings
from hookline.config.loading import FORMATS
from hookline.registry.base import ForwardHook

if TYPE_CHECKING:
    import torch

    from hookline.trainer.trainer import Trainer

HEADER = ("module", "class", "parameters", "output")
GAP = 2
NARROWEST_OUTPUT = 16


@dataclass(frozen=True)
class Row:
    """One module. A module that a pass calls several times shows its last output."""

    name: str
    kind: str
    parameters: int
    calls: int
    output: Any

    def cells(self) -> tuple[str, str, str, str]:
        """What stands in the columns of the page."""
        again = f" ({self.calls} calls)" if self.calls > 1 else ""
        output = in_words(self.output) + again if self.calls else "-"
        return self.name or "(the model)", self.kind, f"{self.parameters:,}", output


def run(options: argparse.Namespace) -> int:
    """Make the model, run it on one batch to learn its shapes, and print."""
    words, patterns = split_words(options.words)
    trainer = make_trainer(words, options.allow)
    chosen = choose(trainer.model, patterns)
    shapes = Shapes()
    problem = run_one_batch(trainer, shapes)
    rows = [shapes.row(name, module) for name, module in chosen.items()]
    if options.json:
        print(json.dumps(as_json(trainer.model, rows, problem), indent=1))
    else:
        print_page(open_page(), trainer.model, rows, patterns, problem)
    return 0


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The config file and the overrides, and the patterns, which are all the rest."""
    settings = [word for word in words if not word.startswith("re:") and ("=" in word or word.endswith(FORMATS))]
    return settings, [word for word in words if word not in settings]


def make_trainer(words: list[str], allow: list[str]) -> Trainer:
    """The config's model and data; no hooks, because who asks for names may still have wrong ones in there."""
    config, from_file = read_settings(words, ["trainer.compile=false"])
    from hookline.build import trainer_from_config  # takes seconds, which an unreadable config need not wait for

    return trainer_from_config({**config, "hooks": {}}, allow=allow, from_file=from_file)


def choose(model: torch.nn.Module, patterns: Sequence[str]) -> dict[str, torch.nn.Module]:
    """What a hook with these patterns would hear; without any, every module."""
    from hookline.registry.select import select

    modules = dict(model.named_modules())
    return select(patterns, modules, "module") if patterns else modules


# ---- one batch -----------------------------------------------------------------------------------------------------


class Shapes(ForwardHook):
    """Notes the shape of everything that modules give."""

    on_error = "raise"

    def __init__(self) -> None:
        self.modules = lambda name, module: True  # the root too, which no pattern of names selects
        self.outputs: dict[str, Any] = {}
        self.calls: dict[str, int] = {}

    def on_forward(self, name: str, live_output: Any) -> None:
        """A pass is over for one module."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.outputs[name] = described(live_output)

    def row(self, name: str, module: torch.nn.Module) -> Row:
        """What is known of a module."""
        parameters = sum(parameter.numel() for parameter in module.parameters())
        return Row(name, type(module).__name__, parameters, self.calls.get(name, 0), self.outputs.get(name))


def run_one_batch(trainer: Trainer, hook: ForwardHook) -> str | None:
    """Let the hook hear one batch of the data, in eval mode and without grad; returns why that failed, if it did."""
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


def described(value: Any) -> Any:
    """A module's output with every tensor replaced by its shape and dtype."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    if is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in fields(value)}
    return None if value is None else type(value).__name__


def in_words(output: Any) -> str:
    """A described output on one line: ``[16, 64]``, ``([2, 3], None)``, ``logits [2, 8], loss []``."""
    if isinstance(output, dict) and output.keys() == {"shape", "dtype"}:
        return str(output["shape"])
    if isinstance(output, dict):
        return ", ".join(f"{key} {in_words(item)}" for key, item in output.items())
    if isinstance(output, list):
        return f"({', '.join(map(in_words, output))})"
    return str(output)


# ---- printing ------------------------------------------------------------------------------------------------------


def as_json(model: torch.nn.Module, rows: Sequence[Row], problem: str | None) -> dict[str, Any]:
    """For programs: the same, with the dtypes. The root's name is empty."""
    total, frozen = count_parameters(model)
    modules = [{"name": row.name, "class": row.kind, **_without(asdict(row), "name", "kind")} for row in rows]
    return {
        "model": type(model).__name__,
        "parameters": total,
        "frozen": frozen,
        "not_run_because": problem,
        "modules": modules,
    }


def _without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def print_page(
    console: Console, model: torch.nn.Module, rows: Sequence[Row], patterns: Sequence[str], problem: str | None
) -> None:
    """The model in one line, then a line for each module."""
    total, frozen = count_parameters(model)
    heading(console, type(model).__name__, f"{total:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}")
    if patterns:
        of = len(list(model.modules()))
        asked = " and ".join(f"'{pattern}'" for pattern in patterns)
        entry(console, f"{asked}: {len(rows)} of {of} modules", indent=0)
    if problem is not None:
        entry(console, f"Not all shapes are known: the model could not be run on a batch of the data. {problem}", 0)
    console.print()
    print_table(console, [row.cells() for row in rows])
    if problem is None and not all(row.calls for row in rows):
        console.print()
        entry(console, "- means that the model does not call it: a hook there would hear nothing.", indent=0)


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """All of them, and those that are not trained; a shared one counts once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if not trained)


def print_table(console: Console, rows: Sequence[tuple[str, ...]]) -> None:
    """Columns that fit the page: a name that is too long gets a line to itself, a long output wraps."""
    widths = column_widths([HEADER, *rows], min(console.width, WIDEST))
    console.print(Text("\n".join(lines_of(HEADER, widths)), "dim"))
    for row in rows:
        console.print("\n".join(lines_of(row, widths)))


def column_widths(rows: Sequence[tuple[str, ...]], page: int) -> tuple[int, ...]:
    """As wide as the widest cell; names and outputs share what classes and parameters leave."""
    names, kinds, counts, outputs = (max(map(len, column)) for column in zip(*rows, strict=True))
    left = max(page - kinds - counts - 3 * GAP, 2 * NARROWEST_OUTPUT)
    names = min(names, left - min(outputs, NARROWEST_OUTPUT))
    return names, kinds, counts, left - names


def lines_of(row: tuple[str, ...], widths: tuple[int, ...]) -> list[str]:
    """One row, set in its columns."""
    name, kind, count, output = row
    above = [name] if len(name) > widths[0] else []
    first = ("" if above else name).ljust(widths[0] + GAP) + kind.ljust(widths[1] + GAP) + count.rjust(widths[2])
    wrapped = textwrap.wrap(output, widths[3], break_long_words=False) or [""]
    beneath = " " * (len(first) + GAP)
    return [*above, f"{first}{' ' * GAP}{wrapped[0]}", *(beneath + line for line in wrapped[1:])]
