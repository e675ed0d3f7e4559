"""`console_log`: show progress, validation results, checkpoints and the cost of each hook."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO, cast

from hookline._console import RunOutput, print_line, printable
from hookline._fs import relative_to_here
from hookline._parameters import NonNegativeFloat, PositiveInt
from hookline._terminal import can_redraw
from hookline._text import duration_text, of_total, rate
from hookline.core.costs import share_of_run
from hookline.core.schedule import Schedule
from hookline.hooks.base import counts_for_run, period
from hookline.hooks.console.times import StepReport, TimedHook
from hookline.run.control import RunControl

if TYPE_CHECKING:
    from hookline.hooks.console.view import LiveView

MIN_READ_SECONDS = 0.0005  # a row of zeros for an argument says nothing
REPORT_SECONDS = 2.0  # the speed and the parts of a step are means over this time


class ConsoleLogHook(TimedHook):
    """Shows progress, losses, validation results, speed and where the time goes; at the end, the cost of each hook.

    At a terminal and in a notebook it is a live view of a few lines, which stays below all other output. It is drawn
    four times a second, and `every` then sets how often the parts of a step are measured. Its numbers come from the
    record, so nothing waits for a device. Elsewhere, it prints a progress line per period. A run has this hook by
    default, unless ``console=False``; that one prints a line every 30 seconds where the output cannot be redrawn.

    Args:
        log_every_n_batches: How often to print the progress line, in batches; an alternative to `every`.
        costs: Whether to print a table with the cost of each hook when the run ends.
        stream: Where to print, instead of standard output.
        every: How often to print: 100 steps, "30 s", "10 batches".
        pause: Minimum number of seconds between two progress lines.
    """

    built_in = True
    name = "console_log"
    ranks = "zero"
    shows_progress = True
    runs_last = True  # its table at the end includes what the other hooks cost at the end

    every_aliases = ("log_every_n_batches",)

    def __init__(
        self,
        log_every_n_batches: PositiveInt = 10,
        costs: bool = True,
        stream: TextIO | None = None,
        every: int | str | None = None,
        pause: NonNegativeFloat = 0.0,
    ) -> None:
        self.log_every_n_batches, self.costs, self.pause = log_every_n_batches, costs, pause
        self.schedule = Schedule.parse(every=period(self, every) or f"{log_every_n_batches} batches")
        self._stream = stream
        self._is_due = False  # at this batch
        self._started, self._first_step = perf_counter(), 0
        self._step = self._printed_step = 0  # the last step that ended, and the last one that a line was printed for
        self._print_at = 0.0
        self._view: LiveView | None = None
        self._sink: Any = None  # the view's connection to the record
        self._report: StepReport | None = None
        self._draw_at = 0.0

    # ---- the run -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: RunControl, step: int) -> None:
        """Start the clock, and open the live view if the output allows one."""
        self.close()
        self._started = perf_counter()
        self._first_step = self._step = self._printed_step = step
        self._print_at = self._started + self.pause
        self._least_seconds = 0.0  # A printed line shows the means since the previous line.
        if not can_redraw(self._out):
            return
        self._least_seconds = REPORT_SECONDS
        with preserved_random():
            from hookline.hooks.console.view import LiveView

            entries = [entry for entry in trainer.hooks.entries() if entry.hook is self]
            self._view = LiveView(self._out, lambda: all(entry.enabled for entry in entries))
        self._view.start(trainer, self._started)
        self._sink = trainer.record.add_own_sink(self._view)
        self._draw(trainer, self._started)

    def on_train_end(self, trainer: RunControl, state: Mapping[str, Any]) -> None:
        """Replace the live view with a summary, or print a last progress line; then print the table of costs."""
        if self._view is not None:
            self._view.close(trainer, perf_counter(), self._last_loss(trainer), state["avg_loss"])
        elif self._step > self._printed_step:
            self._print_progress(trainer, self._step, perf_counter(), self._last_loss(trainer), state["avg_loss"])
        self.close()
        if self.costs and (rows := trainer.hooks.costs()):
            print_costs(rows, perf_counter() - self._started, self._out)

    def close(self) -> None:
        """Close the live view, and start over with the next run."""
        view, self._view, sink, self._sink = self._view, None, self._sink, None
        if sink is not None:
            sink.remove()
        if view is not None:
            view.place.close()
        super().close()
        self._report, self._is_due = None, False

    # ---- steps -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: RunControl, batch: Any, step: int) -> None:
        """Start to measure a batch that is due."""
        self._is_due = True
        super().on_train_batch_start(trainer, batch, step)

    def use_report(self, trainer: RunControl, report: StepReport) -> None:
        """Keep the speed and the parts of a step for the next display."""
        self._report = report

    def on_train_batch_end(self, trainer: RunControl, step: int, batch_idx: int) -> None:
        """Print the progress line if it is due and the step is complete, or draw the live view if it is time."""
        self._end_batch(step)
        if self._view is not None:
            self._view.end_batch(batch_idx)
        self._show_progress(trainer, step)

    def _show_progress(self, trainer: RunControl, step: int) -> None:
        now = perf_counter()
        if self._view is not None:
            if now >= self._draw_at:
                self._draw(trainer, now)
        elif trainer.in_window:
            return  # its line comes with the last batch of the step, whose loss is the mean over all of them
        elif self._is_due and now >= self._print_at:
            mean = trainer.epoch_metrics().get("train/epoch_loss", math.nan)  # waits for the device
            self._print_progress(trainer, step, now, self._last_loss(trainer), mean)
        self._is_due = False

    def on_before_optimizer_step(self) -> None:
        """Note that the hook is due, because a user's own loop may not report where its batches begin."""
        self._is_due = True
        super().on_before_optimizer_step()

    def on_step_end(self, trainer: RunControl, step: int) -> None:
        """Count a step."""
        super().on_step_end(trainer, step)
        self._step = step
        if self._view is not None:
            self._view.end_step(step)
        if not trainer.knows_batches:
            self._show_progress(trainer, step)

    def _last_loss(self, trainer: RunControl) -> float:
        try:
            return trainer.step_loss()
        except RuntimeError:  # after a device error no loss can be read
            if trainer.status != "error":
                raise
            return math.nan

    def _draw(self, trainer: RunControl, now: float) -> None:
        assert self._view is not None
        self._view.draw(trainer, now, self._report)
        self._draw_at = now + self._view.seconds

    def _print_progress(self, trainer: RunControl, step: int, now: float, loss: float, mean: float) -> None:
        # A resumed run starts at a later step, and only the steps since then took the time.
        pace, total = (step - self._first_step) / max(now - self._started, 1e-9), trainer.total_steps
        speed = pace if self._report is None else self._report.values["steps_per_s"]
        whose = "rank 0's " if trainer.ranks.world_size > 1 else ""
        parts = [
            f"epoch {of_total(trainer.epoch + 1, trainer.total_epochs)}" if trainer.knows_batches else "",
            f"step {of_total(step, total)}",
            f"{whose}loss {loss:.4f}  mean {mean:.4f}" if trainer.knows_loss else "",
            rate(speed, "step") if speed else "? steps/s",
            f"{duration_text((total - step) / pace)} left" if total and pace and step < total else "",
        ]
        self._print("  ".join(filter(None, parts)))
        self._printed_step, self._print_at = step, now + self.pause

    # ---- between steps -----------------------------------------------------------------------------------------------

    def on_epoch_start(self, epoch: int) -> None:
        """Exclude the time between epochs, and start another mean."""
        self._exclude()
        if self._view is not None:
            self._view.start_epoch(epoch)

    def on_validation_batch_start(self, trainer: RunControl, batch_idx: int) -> None:
        """Show how far the validation is."""
        if self._view is not None:
            self._view.validation_batches = batch_idx + 1
            if (now := perf_counter()) >= self._draw_at:
                self._draw(trainer, now)

    def on_validation_end(self, trainer: RunControl, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics that are numbers."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if self._view is not None and counts_for_run(trainer):
            self._view.add_validation(step, numbers)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        self._print(f"step {step}  validation  {shown}")
        if self._view is not None:
            self._draw(trainer, perf_counter())  # so that the view shows the new numbers, too
        self._exclude()

    def on_checkpoint_save(self, trainer: RunControl, step: int, checkpoint_path: str) -> None:
        """Print the checkpoint's path, relative to the working directory if it is inside."""
        self._print(f"saved {relative_to_here(Path(checkpoint_path))}")
        self._catch_up(trainer, step)
        self._exclude()

    @property
    def _out(self) -> TextIO | None:
        return self._stream or sys.stdout

    def _print(self, line: str) -> None:
        if self._view is None:
            print_line(printable(line), self._out)
        else:
            self._view.place.print_line(printable(line))


@contextmanager
def preserved_random() -> Iterator[None]:
    """Restore Python's random state after the block: rich draws from it, even on import."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def print_costs(rows: list[dict[str, Any]], seconds: float, out: TextIO | None) -> None:
    """Print the cost of each hook as a table.

    Args:
        rows: The result of `Registry.costs`.
        seconds: How long the run took.
        out: Where to print.
    """
    with preserved_random():
        from rich.console import Console
        from rich.table import Table

        table = Table(title="What each hook cost (host time)", title_justify="left")
        columns = ["hook", "kind", "seconds", "of the run"]
        columns += ["on the device"] if any("device_seconds" in row for row in rows) else []
        for column in columns:
            table.add_column(column, justify="left" if column in ("hook", "kind") else "right")
        shown = [row for row in rows if row["kind"] != "argument" or row["seconds"] >= MIN_READ_SECONDS]
        for row in shown:
            share = share_of_run(row["seconds"], seconds)
            cells = [row["hook"], row["kind"], f"{row['seconds']:.3f}", f"{share:.1%}"]
            table.add_row(*[*cells, f"{row.get('device_seconds', 0.0):.3f}"][: len(columns)])
        Console(file=cast(TextIO, RunOutput(out)), highlight=False, markup=False).print(table)
