"""The live view of a run: a few lines with its progress, redrawn in place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hookline import _device
from hookline._console import print_line
from hookline._terminal import Region, is_notebook, open_region
from hookline._text import duration_text, number, of_total, rate
from hookline.hooks.console.layout import Layout, Part
from hookline.hooks.console.times import StepReport
from hookline.hooks.metric_hook import MetricHook
from hookline.run.control import RunControl
from hookline.runs.step_parts import STEP_PARTS

TERMINAL_SECONDS, NOTEBOOK_SECONDS = 0.25, 0.5  # between two drawings
NOTEBOOK_COLUMNS = 101
NARROW, WIDE = 70, 120  # minimum columns for words, and for details that are only nice to have
MAX_WIDTH = 200  # columns; a longer bar says nothing more
WORTH_NAMING = 0.01  # the remaining share of a step's time is shown from here on
INPUT_BOUND = 0.4  # waiting for data is mentioned from this share of a step's time on
SHOWN_ANYWAY = ("loss", "lr", "grad_norm")  # These have their own place, or do not deserve one next to the loss.
MEGABYTE = 2**20
MEMORY_DRAWS = 20  # Memory is compared by its minimum over this many drawings.


class NotebookOutput:
    """One output of a notebook's cell, which is replaced; the counterpart of a terminal's `Region`."""

    columns = NOTEBOOK_COLUMNS

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._handle: Any = None

    def draw(self, lines: Sequence[str], width: int) -> None:
        """Replace the text."""
        from IPython.display import display

        text = {"text/plain": "\n".join(lines)}
        if self._handle is None:
            self._handle = display(text, raw=True, display_id=True)
        else:
            self._handle.update(text, raw=True)

    def print_line(self, line: str) -> None:
        """Print a line below it."""
        print_line(line, self._stream)

    def close(self) -> None:
        """Keep showing the last text."""


class LiveView:
    """Collects the numbers of a run and draws them. As a sink of the record it gets losses without waiting for them.

    Args:
        stream: Where the run prints: to a terminal or into a notebook.
        is_enabled: Whether the hook that draws it is enabled. While it is disabled, nothing is shown.
    """

    def __init__(self, stream: Any, is_enabled: Callable[[], bool] = lambda: True) -> None:
        self._is_enabled = is_enabled
        self._stream, self._in_notebook = stream, is_notebook(stream)
        self.place: Region | NotebookOutput = NotebookOutput(stream) if self._in_notebook else open_region(stream)
        self.seconds = NOTEBOOK_SECONDS if self._in_notebook else TERMINAL_SECONDS
        self._report: StepReport | None = None
        self.step = self.batches = 0  # completed, in the run and in the epoch
        self._batches_seen = self._batches_of_steps = self._steps_seen = 0  # since the start, while it was enabled
        self.validation_batches: int | None = None  # how many have begun, while a validation runs
        self._layout: Layout | None = None
        self._name = ""
        self._started = 0.0
        self._first_step = 0
        self._first: tuple[float, int] | None = None  # time and number of the first steps, which pay for warming up
        self._loss: float | None = None  # none yet
        self._loss_step = 0  # The record is written later than the step, so the view may lag behind.
        self._epoch, self._sum, self._count = -1, 0.0, 0  # The epoch, and the sum and count of its losses.
        self._step_metrics: dict[str, float] = {}  # the last ones of training, besides the loss
        self._metrics: dict[str, float] = {}
        self._monitor, self._sign = "val/loss", 1  # -1 if larger is better
        self._best: tuple[float, int] | None = None
        self._memory: deque[int] = deque(maxlen=MEMORY_DRAWS)
        self._early_memory: tuple[int, int] | None = None  # with its step

    # ---- collecting --------------------------------------------------------------------------------------------------

    def start(self, trainer: RunControl, now: float) -> None:
        """Begin at the current step. The best value is that of the first metric that a hook follows, or of val/loss."""
        self._started, self.step, self._first_step = now, trainer.step, trainer.step
        self._name = trainer.record.labels.name or trainer.run_id or ""
        for entry in trainer.hooks.entries():
            hook = entry.hook
            if entry.enabled and isinstance(hook, MetricHook) and hook.monitor and hook.key.startswith("val/"):
                self._monitor, self._sign = hook.key, -1 if hook.mode == "max" else 1
                break

    def write_metrics(self, rows: Sequence[Mapping[str, Any]], /) -> None:
        """Take losses and metrics of steps; the record passes them even while the hook is disabled."""
        if not self._is_enabled():
            self.place.draw([], 0)  # until the hook draws again
        for row in rows:
            if (loss := row.get("train/loss")) is not None:
                self.add_loss(loss, row["epoch"], row["step"])
            self._step_metrics |= {key: row[key] for key in row if _is_step_metric(key)}

    def add_loss(self, loss: float, epoch: int, step: int) -> None:
        """Take the loss of a step; the mean covers the epoch so far."""
        self._loss, self._loss_step = loss, step
        if epoch > self._epoch:
            self.start_epoch(epoch)
        if epoch == self._epoch and math.isfinite(loss):  # otherwise its epoch is over: the record is written later
            self._sum, self._count = self._sum + loss, self._count + 1

    def start_epoch(self, epoch: int) -> None:
        """Start the mean of another epoch."""
        self._epoch, self._sum, self._count = epoch, 0.0, 0

    def end_batch(self, batch_idx: int) -> None:
        """Count a batch."""
        self.batches, self._batches_seen = batch_idx + 1, self._batches_seen + 1

    def end_step(self, step: int) -> None:
        """Count a step, and the batches so far as batches of steps that are done."""
        self.step, self._batches_of_steps = step, self._batches_seen
        self._steps_seen += 1

    def add_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a validation."""
        self._metrics, self.validation_batches = dict(metrics), None
        value = metrics.get(self._monitor, math.nan)
        if math.isfinite(value) and (self._best is None or value * self._sign < self._best[0] * self._sign):
            self._best = value, step

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, trainer: RunControl, now: float, report: StepReport | None = None) -> None:
        """Draw the current state, with the speed and the parts of a step that were reported last."""
        self._report = report
        layout, on_device = self._fitting_layout(), _device.is_accelerator(trainer.device)
        rows = layout.bars(self._bars(trainer, now, layout.width))
        rows.append(layout.row("loss" if trainer.knows_loss else "training", self._loss_parts(trainer)))
        if self._metrics or self.validation_batches is not None:
            rows.append(layout.row("validation", self._validation_parts()))
        rows.append(layout.row("speed", [*self._speed_parts(now), f"{duration_text(now - self._started)} so far"]))
        if self._report is not None:
            rows.append(layout.row("host time" if on_device else "time", self._time_parts(layout, on_device)))
        if on_device:
            rows.append(layout.row("memory", self._memory_parts(trainer)))
        self.place.draw(rows, layout.width)

    def close(self, trainer: RunControl, now: float, loss: float, mean: float) -> None:
        """Replace the view with a summary that stays.

        Args:
            trainer: The run.
            now: The time.
            loss: The last loss.
            mean: The mean of the epoch.
        """
        self._loss, self._sum, self._count, self.validation_batches = loss, mean, 1, None
        self._loss_step = self.step
        layout, steps = self._fitting_layout(), of_total(self.step, trainer.total_steps, "steps")
        epochs = [f"epoch {of_total(trainer.epoch + 1, trainer.total_epochs)}"] if trainer.knows_batches else []
        pace = (self.step - self._first_step) / max(now - self._started, 1e-9)
        speed = [rate(pace, "step")] if pace else []
        rows = [layout.row("run", [steps, *epochs, duration_text(now - self._started), *speed])]
        rows.append(layout.row("loss" if trainer.knows_loss else "training", self._loss_parts(trainer)))
        if self._metrics:
            rows.append(layout.row("validation", self._validation_parts()))
        if self._in_notebook:
            self.place.draw(rows, layout.width)
            return
        self.place.close()
        for line in rows:
            print_line(line, self._stream)

    def _fitting_layout(self) -> Layout:
        width = min(self.place.columns - 1, MAX_WIDTH)
        if self._layout is None or self._layout.width != width:
            self._layout = Layout(self._stream, width, plain=self._in_notebook)
        return self._layout

    # ---- what the lines say ------------------------------------------------------------------------------------------

    def _steps_per_second(self, now: float) -> float | None:
        """Return the pace of the run, including validations, because the rest of the run has them, too."""
        if self._first is None and self.step > self._first_step:
            self._first = now, self.step
        if self._first is None or self.step == self._first[1]:
            return None
        return (self.step - self._first[1]) / max(now - self._first[0], 1e-9)

    def _bars(self, trainer: RunControl, now: float, width: int) -> dict[str, tuple[float | None, list[str]]]:
        batches, total, epochs = trainer.epoch_batches, trainer.total_steps, trainer.total_epochs
        pace, in_step = self._steps_per_second(now), self._batches_of_steps / max(self._steps_seen, 1)
        left_in_epoch = None if batches is None else (batches - self.batches) / max(in_step, 1)
        left = None if total is None else total - self.step
        if left_in_epoch is not None and left is not None and left_in_epoch > left + 1:
            left_in_epoch = None  # the run ends before the epoch
        units, name = ("batches", "steps") if width >= NARROW else ("", ""), self._name if width >= WIDE else ""
        run = {"run": _bar(self.step, total, units[1], left, pace, name)}
        if not trainer.knows_batches:
            return run
        epoch = f"epoch {of_total(trainer.epoch + 1, epochs)}"
        return {epoch: _bar(self.batches, batches, units[0], left_in_epoch, pace), **run}

    def _loss_parts(self, trainer: RunControl) -> list[Part]:
        whose = " on rank 0" if trainer.ranks.world_size > 1 else ""
        is_bad = self._loss is not None and not math.isfinite(self._loss)
        at = "" if self._loss_step == self.step else f" at step {self._loss_step:,}"
        losses: list[Part] = [
            ("-" if self._loss is None else f"{number(self._loss)}{whose}{at}", "bold red" if is_bad else "bold"),
            f"mean {number(self._sum / self._count)}" if self._count else "mean -",
        ]
        return [
            *(losses if trainer.knows_loss else ()),
            f"lr {trainer.lr:.3g}",
            *(f"{key.removeprefix('train/')} {number(value)}" for key, value in self._step_metrics.items()),
        ]

    def _validation_parts(self) -> list[Part]:
        parts: list[Part] = []
        if self.validation_batches is not None:
            parts.append((f"running, batch {self.validation_batches:,}", "bold"))
        for name in sorted(self._metrics, key=lambda name: name != self._monitor):  # only the monitored one moves
            parts.append(f"{name} {number(self._metrics[name])}")
            if name == self._monitor and self._best is not None:
                parts.append((f"best {number(self._best[0])} at step {self._best[1]:,}", "green"))
        return parts

    def _speed_parts(self, now: float) -> list[Part]:
        parts: list[Part] = []
        times = {} if self._report is None else self._report.values
        if tokens := times.get("tokens_per_s"):
            parts.append(rate(tokens, "token"))
        if samples := times.get("samples_per_s"):
            parts.append(rate(samples, "sample"))
        steps = times.get("steps_per_s") or self._steps_per_second(now)
        return [*parts, rate(steps, "step")] if steps else parts

    def _time_parts(self, layout: Layout, on_device: bool) -> list[Part]:
        assert self._report is not None
        times = self._report.values
        seconds = {part: times[f"{part}_seconds"] for part in STEP_PARTS if f"{part}_seconds" in times}
        # Hooks also run inside the other parts, and the batches that are measured may be slower than the others.
        whole = max(times["step_seconds"], sum(seconds.values()), 1e-9)
        shares = {part: value / whole for part, value in seconds.items()}
        rest = 1 - sum(shares.values())
        named = self._named_shares(shares, rest, on_device, short=False)
        if not layout.fits(named):
            named = self._named_shares(shares, rest, on_device, short=True)
        return [*named, f"of {1000 * times['step_seconds']:,.1f} ms a step"] if layout.width >= WIDE else named

    def _named_shares(self, shares: Mapping[str, float], rest: float, on_device: bool, short: bool) -> list[Part]:
        parts: list[Part] = []
        for name, share in shares.items():
            part = STEP_PARTS[name]
            text, style = f"{part.short if short else part.label} {share:.0%}", part.style
            if name == "data_wait" and share >= INPUT_BOUND:
                text, style = f"{text} ({'maybe ' if on_device else ''}input-bound)", "bold yellow"
            parts.append((text, style))
        return [*parts, f"other {rest:.0%}"] if rest >= WORTH_NAMING else parts

    def _memory_parts(self, trainer: RunControl) -> list[Part]:
        """Return the allocated memory and its growth, from the minimum at the beginning to the current minimum."""
        now, peak = _device.memory_allocated(trainer.device) or 0, _device.max_memory_allocated(trainer.device) or 0
        self._memory.append(now)
        parts: list[Part] = [f"{now / MEGABYTE:,.0f} MB", f"peak {peak / MEGABYTE:,.0f} MB"]
        if len(self._memory) < MEMORY_DRAWS:
            return parts
        if self._early_memory is None:
            self._early_memory = min(self._memory), self.step
            self._memory.clear()
            return parts
        least, step = self._early_memory
        growth = (min(self._memory) - least) / MEGABYTE / max(self.step - step, 1) * 1000
        return [*parts, (f"drift {growth:+,.1f} MB per 1,000 steps", "bold yellow" if growth >= 1 else "")]


def _is_step_metric(key: str) -> bool:
    """Return whether a key of the record is a metric of a step that the view does not show otherwise."""
    place, _, name = key.rpartition("/")
    return place == "train" and name not in SHOWN_ANYWAY and not name.startswith("epoch_")


def _bar(
    done: int, total: int | None, unit: str, left: float | None, pace: float | None, name: str = ""
) -> tuple[float | None, list[str]]:
    """Return the completed share, and the strings after the bar: counts, percentage, time left and a name."""
    share = None if not total else done / total
    time_left = f"{duration_text(max(left, 0) / pace)} left" if left is not None and pace else ""
    return share, [of_total(done, total, unit), "" if share is None else f"{min(share, 1.0):.0%}", time_left, name]
