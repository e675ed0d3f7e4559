"""`console_log`: print progress, validation results, checkpoints and the cost of each hook."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from logging import LogRecord
from pathlib import Path
from shutil import get_terminal_size
from time import monotonic
from typing import Any, TextIO, cast

from hookline import _checks
from hookline._console import RunOutput, can_rewrite_lines, is_terminal, logger, print_line
from hookline._fs import relative_to_here
from hookline.core.base import TrainingHook
from hookline.core.costs import share_of_run
from hookline.core.entry import HookKeywords
from hookline.core.run_control import RunControl
from hookline.core.schedule import Schedule
from hookline.hooks.base import period


class ConsoleLogKeywords(HookKeywords, total=False):
    """What `ConsoleLogHook` takes, with the options of a hook, for type checkers."""

    costs: bool
    stream: TextIO | None


class ConsoleLogHook(TrainingHook):
    """Prints a progress line with the loss, its mean, speed and time left; validation results; at the end, the costs.

    At a terminal the progress line is rewritten in place, and other output starts on a new line. Elsewhere each
    progress line is printed separately.

    Args:
        log_every_n_batches: The same as `every`, in batches; how often to print the progress line.
        costs: Whether to print a table of what each hook cost when the run ends.
        stream: Where to print, instead of standard output.
        every: How often to print: 100 steps, "30 s", "10 batches".
    """

    built_in = True
    name = "console_log"
    ranks = "zero"
    runs_last = True  # its table at the end includes what the other hooks cost at the end

    every_aliases = ("log_every_n_batches",)

    def __init__(
        self,
        log_every_n_batches: int = 10,
        costs: bool = True,
        stream: TextIO | None = None,
        every: int | str | None = None,
    ) -> None:
        self.log_every_n_batches = _checks.integer(log_every_n_batches, "log_every_n_batches", at_least=1)
        self.costs = _checks.boolean(costs, "costs")
        self.schedule = Schedule.parse(every=period(self, every) or f"{log_every_n_batches} batches")
        self._stream = stream
        self._is_line_open = False
        self._proxies: dict[str, StreamProxy] = {}  # of the standard streams that are terminals
        self._started, self._first_step = monotonic(), 0

    def on_train_start(self, step: int) -> None:
        """Start the clock, and watch the terminal and the log for other output."""
        self.close()
        self._started, self._first_step = monotonic(), step
        # The progress line is open while other code prints, so each write has to be noticed before it happens.
        logger.logger.addFilter(self._end_line_before_log)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream):
                self._proxies[name] = StreamProxy(stream, self._end_line)
                setattr(sys, name, self._proxies[name])

    def on_train_batch_end(self, trainer: RunControl, epoch: int, step: int, state: Mapping[str, Any]) -> None:
        """Print the progress line."""
        # A resumed run starts at a later step, and only the steps since then took the time.
        done, total = step - self._first_step, trainer.total_steps
        rate = done / max(monotonic() - self._started, 1e-9)
        whose = "rank 0's " if trainer.ranks.world_size > 1 else ""
        parts = {
            "epoch": f"epoch {epoch}",
            "step": f"step {step}{f'/{total}' if total else ''}",
            "loss": f"{whose}loss {state['latest_loss']:.4f} (so far {state['avg_loss']:.4f})",
            "speed": f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step" if rate else "? steps/s",
            "left": f"{_duration((total - step) / rate)} left" if total and rate else "",
        }
        if not can_rewrite_lines(self._out):
            self._print("  ".join(filter(None, parts.values())))
            return
        width = get_terminal_size().columns - 1  # a line that wraps could not be rewritten
        print_line(f"\r\x1b[K{_fitted(parts, width)}", self._out, end="")
        self._is_line_open = True

    def on_validation_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics that are numbers."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, (int, float)))
        self._print(f"step {step}  validation  {shown}")

    def on_checkpoint_save(self, checkpoint_path: str) -> None:
        """Print the checkpoint's path, relative to the working directory if it is inside."""
        self._print(f"saved {relative_to_here(Path(checkpoint_path))}")

    def on_train_end(self, trainer: RunControl) -> None:
        """Print the table of costs."""
        self._end_line()
        if self.costs and (rows := trainer.hooks.costs()):
            print_costs(rows, monotonic() - self._started, self._out)

    def close(self) -> None:
        """Stop watching the terminal and the log."""
        self._end_line()
        logger.logger.removeFilter(self._end_line_before_log)
        for name, proxy in self._proxies.items():
            proxy.is_closed = True
            # Overlapping runs may end in any order: a proxy that is under another one is removed after that one.
            while isinstance(current := getattr(sys, name), StreamProxy) and current.is_closed:
                setattr(sys, name, current.stream)
        self._proxies = {}

    @property
    def _out(self) -> TextIO | None:
        """Where to print; not to the proxy, which would end the line."""
        return self._stream or (self._proxies["stdout"].stream if "stdout" in self._proxies else sys.stdout)

    def _print(self, line: str) -> None:
        self._end_line()
        print_line(line, self._out)

    def _end_line_before_log(self, record: LogRecord) -> bool:
        """Filter nothing: filters of a logger are called before anything is written."""
        self._end_line()
        return True

    def _end_line(self) -> None:
        if self._is_line_open:
            self._is_line_open = False  # first, because the print below may call this again
            print_line(stream=self._out)


def print_costs(rows: list[dict[str, Any]], seconds: float, out: TextIO | None) -> None:
    """Print what each hook cost as a table.

    Args:
        rows: What `HookRegistry.costs` returns.
        seconds: How long the run took.
        out: Where to print.
    """
    random_state = random.getstate()  # rich draws from training's generator, already when it is imported
    from rich.console import Console
    from rich.table import Table

    try:
        table = Table(title="What each hook cost (host time; about: inner events are sampled)", title_justify="left")
        columns = ["hook", "kind", "calls", "seconds", "of the run"]
        columns += ["on the device"] if any("device_seconds" in row for row in rows) else []
        for column in columns:
            table.add_column(column, justify="left" if column in ("hook", "kind") else "right")
        for row in rows:
            share = share_of_run(row["seconds"], seconds)
            time = ["-", "too short to tell"] if share is None else [f"{row['seconds']:.3f}", f"{share:.1%}"]
            cells = [row["hook"], row["kind"], str(row["calls"]), *time]
            table.add_row(*[*cells, f"{row.get('device_seconds', 0.0):.3f}"][: len(columns)])
        Console(file=cast(TextIO, RunOutput(out)), highlight=False, markup=False).print(table)
    finally:
        random.setstate(random_state)


def _fitted(parts: Mapping[str, str], width: int) -> str:
    """Join the parts of the progress line that fit a width: the speed is left out first, then the epoch, then the mean.

    Step, loss and time left remain; what does not fit even then is cut.
    """
    shown = dict(parts)
    shorter = [("speed", ""), ("epoch", ""), ("loss", parts["loss"].partition(" (")[0]), ("left", "")]
    for name, text in shorter:
        if len("  ".join(filter(None, shown.values()))) <= width:
            break
        shown[name] = text
    return "  ".join(filter(None, shown.values()))[:width]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class StreamProxy:
    """Replaces a stream of `sys`: calls `before_write` before every write, and is the stream in all else."""

    def __init__(self, stream: Any, before_write: Callable[[], None]) -> None:
        self.stream, self._before_write, self.is_closed = stream, before_write, False

    def write(self, text: str) -> Any:
        """Write to the stream and return what its `write` returns; custom streams may return None."""
        self._before_write()
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines to the stream."""
        self._before_write()
        self.stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
