"""Train on loaders whose batches may be anything, and report which batch came from which loader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hookline import SimpleTrainer

ONE_WINDOW = 1000  # an `accumulate` that no epoch of a test reaches: a step ends with the epoch's last batch


class Unknown:
    """A loader that does not know its length; counts what is read of it."""

    def __init__(self, items: Any) -> None:
        self.items, self.read = list(items), 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.read += 1
            yield item


class Boastful(Unknown):
    """A loader that promises more than it has."""

    def __len__(self) -> int:
        return len(self.items) + 3


class Modest(Unknown):
    """A loader that gives more than it says."""

    def __len__(self) -> int:
        return 2


def make_reader(loaders: Any, **options: Any) -> SimpleTrainer:
    """Make a trainer that ignores what is in a batch and learns nothing."""
    model = torch.nn.Linear(1, 1)
    options = {
        "step_fn": lambda model, batch: model.weight.sum(), "record": False, "console": False, **options,
    }  # fmt: skip
    return SimpleTrainer(model, loaders, torch.optim.SGD(model.parameters(), 0.0), "cpu", **options)


class Reader:
    """A run that was read up to a batch, which it saved, or to its end.

    Args:
        loaders: The training loaders.
        stop_at: Save and stop after this many batches of this attempt; None to read everything.
        resume: The run to resume; its directory is used again.
        root: The directory of runs, if the run is to be saved.
        **options: Options of the trainer.
    """

    def __init__(
        self,
        loaders: Any,
        stop_at: int | None = None,
        resume: "Reader | None" = None,
        root: Path | None = None,
        **options: Any,
    ) -> None:
        if root is not None or resume is not None:
            options = {"record": True, "output_dir": str(root), **options}
        self.trainer = make_reader(loaders, **options)
        self.batches: list[Any] = []
        self.loaders: list[tuple[int, str]] = []  # where each batch came from
        self.ends: list[int] = []  # the batches after which a step ended, from 1
        self.trainer.on("train_batch_end", name="read")(self._note)
        self.trainer.on("step_end", name="end")(lambda: self.ends.append(len(self.batches)))
        self._stop_at = stop_at
        self.trainer.fit(resume=None if resume is None else resume.trainer.run_dir)

    def _note(self, batch: Any, dataloader_idx: int, dataloader_name: str) -> None:
        self.batches.append(batch)
        self.loaders.append((dataloader_idx, dataloader_name))
        if len(self.batches) == self._stop_at:
            self.trainer.save()
            self.trainer.request_stop("tested")

    def by_epoch(self) -> list[list[Any]]:
        """Return the batches between the ends of steps; with `ONE_WINDOW` these are epochs."""
        starts = [0, *self.ends[:-1]]
        return [self.batches[start:end] for start, end in zip(starts, self.ends, strict=True)]
