"""What people see while a run goes on, and when it ends."""

from __future__ import annotations

import random
from collections.abc import Mapping
from logging import LogRecord
from pathlib import Path
from shutil import get_terminal_size
from time import monotonic
from typing import Any, TextIO

from hookline.events.policy import logger
from hookline.events.schedule import Schedule
from hookline.hooks.parameters import switch, whole_number
from hookline.hooks.shared_terminal import SharedTerminal
from hookline.registry.base import TrainingHook


class ConsoleLogHook(TrainingHook):
    """A progress line with the loss, its mean so far, speed and time left; validation results; at the end, the costs.

    At a terminal the progress line is rewritten in place, and whatever else is printed there begins on a line of its
    own. Elsewhere every line stands by itself.
    """

    built_in = True
    name = "console_log"
    runs_last = True  # its table at the end counts what the others cost, at the end too

    def __init__(self, log_every_n_batches: int = 10, costs: bool = True, stream: TextIO | None = None) -> None:
        self.log_every_n_batches = whole_number(log_every_n_batches, "log_every_n_batches")
        self.costs = switch(costs, "costs")
        self.schedule = Schedule.parse(every=f"{log_every_n_batches} batches")
        self._stream = stream
        self._open_line = False
        self._terminal = SharedTerminal(self._finish_line)
        self._began, self._first_step = monotonic(), 0

    def on_train_start(self, step: int) -> None:
        self._began, self._first_step = monotonic(), step
        self._terminal.share()
        logger.addFilter(self._make_way)

    def on_train_batch_end(self, trainer: Any, epoch: int, step: int, state: Mapping[str, Any]) -> None:
        done, total = step - self._first_step, trainer.total_steps
        rate = done / max(monotonic() - self._began, 1e-9)
        line = f"epoch {epoch}  step {step}{f'/{total}' if total else ''}"
        line += f"  loss {state['latest_loss']:.4f} (so far {state['avg_loss']:.4f})  {_speed(rate)}"
        if total and rate:
            line += f"  {_duration((total - step) / rate)} left"
        self._print(line, rewrite=True)

    def on_validation_end(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, (int, float)))
        self._print(f"step {step}  validation  {shown}")

    def on_checkpoint_save(self, checkpoint_path: str) -> None:
        self._print(f"saved {_shown(checkpoint_path)}")

    def on_train_end(self, trainer: Any) -> None:
        self._finish_line()
        if self.costs and (rows := trainer.hooks.costs()):
            print_costs(rows, monotonic() - self._began, self._out)

    def close(self) -> None:
        """Leave the terminal and the log alone."""
        self._finish_line()
        self._terminal.leave()
        logger.removeFilter(self._make_way)

    @property
    def _out(self) -> TextIO:
        return self._stream or self._terminal.stdout

    def _print(self, line: str, rewrite: bool = False) -> None:
        at_terminal = rewrite and self._out.isatty()
        if at_terminal:  # a line that wraps could not be rewritten
            line = line[: get_terminal_size().columns - 1]
        if not at_terminal:
            self._finish_line()
        print(f"\r\x1b[K{line}" if at_terminal else line, end="" if at_terminal else "\n", file=self._out, flush=True)
        self._open_line = at_terminal

    def _make_way(self, record: LogRecord) -> bool:
        """As a filter of the log it is asked before anything is written there, and lets everything through."""
        self._finish_line()
        return True

    def _finish_line(self) -> None:
        if self._open_line:
            self._open_line = False  # first: this may be told of its own printing
            print(file=self._out, flush=True)


def print_costs(rows: list[dict[str, Any]], seconds: float, out: TextIO) -> None:
    """What each hook cost, as a table. Rich draws from Python's random stream, which is training's: it is put back."""
    stream = random.getstate()
    try:
        _print_table(rows, seconds, out)
    finally:
        random.setstate(stream)


def _print_table(rows: list[dict[str, Any]], seconds: float, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="What each hook cost (host time; inner events sampled)", title_justify="left")
    table.add_column("hook")
    table.add_column("kind")
    on_device = any("device_seconds" in row for row in rows)
    for heading in ("calls", "seconds", "of the run", *(["on the device"] if on_device else [])):
        table.add_column(heading, justify="right")
    for row in rows:
        share = row["seconds"] / seconds if seconds > 0 else 0.0
        device = [f"{row.get('device_seconds', 0.0):.3f}"] if on_device else []
        table.add_row(row["hook"], row["kind"], str(row["calls"]), f"{row['seconds']:.3f}", f"{share:.1%}", *device)
    Console(file=out, highlight=False, markup=False).print(table)


def _shown(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _speed(rate: float) -> str:
    return f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step" if rate else "? steps/s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
