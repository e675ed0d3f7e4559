"""`SyntheticTrainer`: our trainer with a tiny model, whose checkpoints stay in memory, and which can be killed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.build import SimpleTrainer
from hookline.checkpoints.format import Section, decode
from hookline.ranks import Ranks
from hookline.trainer.sections import collect_sections, restore_sections


class Killed(BaseException):
    """The process ends at once, as after SIGKILL: no hook is called any more."""


class MemoryCheckpoint:
    """A checkpoint in memory; `restore_sections` reads it like one on disk.

    Args:
        sections: The sections of the run, which continues: they are copied.
    """

    world_size = 1

    def __init__(self, sections: dict[str, Any]) -> None:
        self._sections = copy.deepcopy(sections)
        self.names, self.path, self.meta = list(sections), Path("memory"), dict[str, Any]()
        self.step: int = sections["progress"]["steps_done"]

    def section(self, name: str, rank: int = 0, like: Any = None) -> Any:
        """Return a section as loading returns it, each time another copy."""
        section = copy.deepcopy(self._sections[name])
        return decode(section.value, section.tensors) if isinstance(section, Section) else section

    def tensors(self, section: str, like: Any = None) -> dict[str, Any]:
        """Return no tensors: none of them is a shard."""
        return {}


class SyntheticTrainer(SimpleTrainer):
    """A trainer for two epochs of five batches, with a validation after each. It prints nothing.

    Args:
        output_dir: Where the run's directory is created; without it, record and checkpoints stay in memory.
        ranks: The processes of the run; by default this one alone.
        checkpoint: The checkpoint that the run resumes from.
        after_step: Called at the end of each step and of each epoch.
        **options: Options of the trainer, such as `accumulate`.
    """

    def __init__(
        self,
        output_dir: Path | None = None,
        ranks: Ranks | None = None,
        checkpoint: MemoryCheckpoint | None = None,
        after_step: Callable[[SyntheticTrainer], Any] = lambda trainer: None,
        **options: Any,
    ) -> None:
        model, seed = small_model(), 0 if ranks is None else ranks.rank
        super().__init__(
            model, small_batches(5, seed), torch.optim.SGD(model.parameters(), lr=0.1), "cpu",
            val_dataloader=small_batches(1, 9), loss_fn=nn.MSELoss(), max_epochs=2, sanity_batches=0, seed=0,
            record=output_dir is not None, output_dir=str(output_dir), console=False, report=False, warn_above=None,
            enable_intervention=True, **options,
        )  # fmt: skip
        if ranks is not None:
            self.ranks, self.engine.averages = ranks, True
            self.agreement = self.make_agreement()
            self.hooks.set_ranks(ranks)
        self.checkpoint, self._resumes, self._after_step = checkpoint, checkpoint is not None, after_step
        self.tested = ""
        """The name of the hook under test."""
        self.hooks.on("validation_end", name="saver")(lambda trainer: trainer.save("validated"))

    def add_tested(self, hook: Any, options: dict[str, Any]) -> Any:
        """Add the hook under test, and return it."""
        self.tested = str(self.add_hook(hook, **options))
        return self.hook

    @property
    def hook(self) -> Any:
        """The hook under test."""
        return self.hooks.get(self.tested)

    def take_checkpoint(self) -> None:
        """Copy what a resumed run continues from."""
        self.checkpoint = MemoryCheckpoint(collect_sections(self))

    def prepare(self) -> Any:
        """Resume from the checkpoint, if there is one."""
        measured = super().prepare()
        if self._resumes and self.checkpoint is not None:
            restore_sections(self, self.checkpoint)  # type: ignore[arg-type]
            self.event_args.set_checkpoint("memory", resumed=True)
            if handler := self.hooks.slots.on_checkpoint_load:
                handler(self.event_args)
        return measured

    def save_checkpoint(self, name: str | None = None) -> Path:
        """Fire on_checkpoint_save; write nothing without a directory."""
        if self.checkpoint_dir is not None:
            return super().save_checkpoint(name)
        path = Path(name or self.step_name())
        self.report_saved(path, self.step)
        return path

    def at_boundary(self) -> bool:
        """Do what is due after a step, then call the function."""
        is_over = super().at_boundary()
        if self.accumulation.is_complete:
            self._after_step(self)
        return is_over

    def finish_epoch(self, all_read: bool) -> None:
        """End the epoch, then call the function."""
        super().finish_epoch(all_read)
        self._after_step(self)

    def end(self, error: BaseException | None = None, signal: str | None = None) -> None:
        """End the run; a killed run fires no event, and only releases what it holds in the test's process."""
        if isinstance(error, Killed):
            self.step_log.flush(wait=True)
            with self.until_end:
                self.hooks.close()
            self.record.release()
        else:
            super().end(error, signal)


def small_model() -> nn.Sequential:
    """Make a model with dropout, 4 inputs, 8 hidden units and 1 output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def small_batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Make batches for the small model."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]
