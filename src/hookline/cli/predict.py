"""`hookline predict`: write what a trained model predicts, a line of JSON per example."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline._console import printable
from hookline._fs import relative_to_here
from hookline._text import counted
from hookline.cli.arguments import JSON, argument
from hookline.cli.evaluate import MODEL, load_model
from hookline.cli.formatting import check_output, print_json
from hookline.cli.output import CommandOutput
from hookline.errors import HooklineError, with_article
from hookline.record import strict_json
from hookline.record.json_lines import writing

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

_ABOUT_OUTPUT = "the file to write: JSON lines, one per example"
ARGUMENTS = MODEL | argument("--output", "FILE", _ABOUT_OUTPUT, required=True) | JSON


def run(options: argparse.Namespace) -> int:
    """Write the predictions for the validation data, and print their number; nothing is written into the run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise HooklineError("`hookline predict` writes one file: start it without torchrun or accelerate launch")
    path = Path(options.output)
    check_output(path)
    trainer, checkpoint = load_model(options)
    partial, count = path.with_name(f".{path.name}.{os.getpid()}.tmp"), 0
    try:
        # An existing file stays unchanged until the new one is complete.
        with writing(path):
            with partial.open("w", encoding="ascii") as file:
                for row in rows_of(trainer):
                    file.write(f"{json.dumps(row, allow_nan=False)}\n")
                    count += 1
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if options.json:
        print_json({"path": str(path), "examples": count, "checkpoint": str(checkpoint.path)})
    else:
        source = printable(str(relative_to_here(checkpoint.path)))
        CommandOutput().write(f"{printable(str(path))}: {counted(count, 'example')}, predicted by {source}\n")
    return 0


def rows_of(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """Yield a row for each example: its number, its loader if there are several, and what `describe` says."""
    for name, loader in trainer.val_loaders.items():
        index = 0
        for batch in loader:
            for row in describe(trainer.predict({name: [batch]})[0], batch):
                place = {"index": index} if len(trainer.val_loaders) == 1 else {"loader": name, "index": index}
                yield strict_json.simplify({**place, **row})
                index += 1


def describe(output: Any, batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the predictions for the examples of a batch: classes with their scores, or the output as it is.

    They are classes if the targets are integers with a score for each class. The scores of every position of a sequence
    would be a thousand times as long as the text, and are left out.
    """
    import torch

    from hookline._predictions import align_classes, find_predictions
    from hookline.run.outputs import find_target

    predictions, target = find_predictions(output), find_target(None, batch)
    if not isinstance(predictions, torch.Tensor) or not predictions.dim():
        remedy = "Trainer.load(run).predict() in a script returns it as it is"
        raise HooklineError(f"the model's output is {with_article(type(predictions).__name__)}, not a tensor; {remedy}")
    predictions = predictions.detach().cpu()
    targets = target.detach().cpu() if isinstance(target, torch.Tensor) and len(target) == len(predictions) else None
    columns: dict[str, torch.Tensor] = {} if targets is None else {"target": targets}
    if targets is not None and not targets.is_floating_point() and predictions.dim() > targets.dim():
        predictions, _ = align_classes("predict", predictions, targets)
    if targets is not None and not targets.is_floating_point() and predictions.dim() == targets.dim() + 1:
        columns["prediction"] = predictions.argmax(-1)
        if predictions.dim() == 2:
            columns["scores"] = predictions
    else:
        columns["output"] = predictions
    lists = {key: column.tolist() for key, column in columns.items()}
    for index in range(len(predictions)):
        yield {key: values[index] for key, values in lists.items()}
