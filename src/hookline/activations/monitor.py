"""The monitoring hook: statistics of activations and of their gradients, and the cost of each module's forward."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from hookline._parameters import Percentage, PositiveInt
from hookline._tensors import iter_tensors, measurable
from hookline._words import nearest
from hookline.activations.forward_hooks import BuiltInForwardHook, Observe
from hookline.activations.series import (
    CallCosts,
    DeadUnits,
    FunctionValues,
    History,
    MonitoredState,
    Source,
    StepTable,
    TensorStatistics,
)
from hookline.core.entry import numbered
from hookline.core.shared_part import SharedPart
from hookline.errors import ConfigError, HooklineError
from hookline.stats.histograms import Histograms
from hookline.stats.rows import STATISTICS

if TYPE_CHECKING:
    from hookline.run.control import RunControl

COSTS = ("time", "memory")
METRICS = (*STATISTICS, *COSTS, "histogram", "dead_units")
DEFAULT_METRICS = ("mean", "std", "absmax", "zeros", "nans", "infs")
HISTORY_LIMIT = 1000  # values per module
MAX_PENDING_CALLS = 4096  # without a run, before results are moved to the history
SERIES, HISTOGRAMS = "activations", "activation_histograms"  # the names in layers.jsonl


class Monitor(BuiltInForwardHook):
    """Statistics, percentiles, histograms, dead units, gradients, time and memory of the selected modules.

    Tensors are collected while the model runs and read together in one pass; values stay on the device and arrive
    later, under their own step. A module that runs several times in a step has one row for all its calls. With a
    trainer they go to layers.jsonl (read by `hookline.read_layers`), and the number of NaN and infinite values to the
    metrics, as ``activations/non_finite``. Validation is not monitored. Memory is bounded with and without a run: the
    last thousand values of each module are kept.

    Args:
        modules: The modules to monitor.
        metrics: Any of mean, std, min, max, absmax, l2, zeros, nans, infs, count, time, memory, histogram and
            dead_units; functions of the output that return one number, each measured under its name; or one function.
        percentiles: Numbers from 0 to 100.
        gradients: Whether to compute the same for each output's gradient, as ``grad_mean`` and so on.
        dead_window: A unit is dead if it was never above 0 in a window of this number of steps.
        unit_dim: The dimension of the units; by default the last one, for images the second.

    Raises:
        ConfigError: If a metric does not exist or a parameter is out of range.
    """

    name = "monitor"
    built_in = True
    needs_all_ranks = True  # its rows cover all ranks; if one rank fails, they are left out

    def __init__(
        self,
        modules: Any = "*",
        metrics: Callable[[Tensor], Any] | Sequence[str | Callable[[Tensor], Any]] | None = None,
        percentiles: Sequence[Percentage] = (),
        gradients: bool = False,
        dead_window: PositiveInt = 100,
        unit_dim: int | None = None,
    ) -> None:
        super().__init__(modules)
        listed = (metrics,) if callable(metrics) else metrics
        self.metrics = DEFAULT_METRICS if listed is None else listed if isinstance(listed, str) else tuple(listed)
        requested, functions = _parse_metrics(self.metrics, percentiles)
        statistics = tuple(metric for metric in requested if metric in STATISTICS)
        points = tuple(percentiles)
        costs = tuple(metric for metric in requested if metric in COSTS)
        self._histogram = "histogram" in requested
        reads_tensors = bool(statistics or points or self._histogram)
        if gradients and not reads_tensors:
            raise ConfigError("gradients", "no statistic to compute; add one to metrics, such as 'l2'")
        self._outputs = TensorStatistics(statistics, points, self._histogram) if reads_tensors else None
        self._gradients = TensorStatistics(statistics, points, self._histogram, "grad_") if gradients else None
        self._dead_units = DeadUnits(dead_window, unit_dim) if "dead_units" in requested else None
        self._costs = CallCosts(costs) if costs else None
        self._functions = FunctionValues(functions) if functions else None
        sources = [self._outputs, self._gradients, self._dead_units, self._costs, self._functions]
        self._sources: list[Source] = [source for source in sources if source is not None]
        self._history = History(HISTORY_LIMIT)
        self._recorded_names: tuple[str, ...] = ()  # The modules so far, in the order of layers.jsonl.
        self.watches_backward = gradients  # compiled code must then leave the modules' outputs to autograd
        # Compiled code can accumulate statistics by itself, and nothing else.
        self.statistics_only = requested == statistics and not points and not gradients
        self._trainer: RunControl | None = None
        self._before_backward = False
        self._calls = 0  # without a run, since results were last moved to the history
        self._lock = threading.RLock()
        # Each method names only the arguments that it needs, because measuring time and memory costs extra.
        self._reads_outputs = any(source is not None for source in (self._outputs, self._dead_units, self._functions))
        self.on_forward: Any = self._observe if self._costs is None else self._observe_and_measure

    # ---- forward and backward ----------------------------------------------------------------------------------------

    def _observe(self, name: str, live_output: Any, step: int, phase: str) -> None:
        if phase == "validation" or not self._reads_outputs:
            return
        tensors = [live_output] if isinstance(live_output, Tensor) else list(iter_tensors(live_output))
        pairs = ((tensor, measured) for tensor in tensors if (measured := measurable(tensor)) is not None)
        tensor, measured = next(pairs, (None, None))
        if tensor is None or measured is None:
            if tensors:
                self._pass_over(name, tensors[0])
            return
        with self._lock:
            if self._outputs is not None:
                if measured is not tensor:
                    self._outputs.note_part(name, tensor)
                # The tensor itself is kept until the backward pass: its graph, unlike a view's, shows whether autograd
                # keeps it, too.
                keep = self._before_backward or measured is not tensor
                self._outputs.add(name, measured if keep else measured.detach(), step)
            if self._dead_units is not None and measured is tensor:
                self._dead_units.add(name, tensor)
            elif self._dead_units is not None:  # A stand-in may have different dimensions.
                self._pass_over(name, tensor, "counts no dead units in")
            if self._functions is not None:
                self._functions.measure(name, measured.detach(), step)
            if not step:
                self._count_call()
        if self._gradients is not None and tensor.requires_grad:
            # A tensor hook costs less than half of an identity function in the graph, and adds neither a node nor a
            # view: the model may still write into the tensor in place.
            tensor.register_hook(partial(self._add_gradient, self._gradients, name, step))  # type: ignore[no-untyped-call]

    def _add_gradient(self, source: TensorStatistics, name: str, step: int, gradient: Tensor) -> None:
        measured = measurable(gradient)
        if measured is None:
            self._pass_over(name, gradient)
            return
        with self._lock:
            if measured is not gradient:
                source.note_part(name, gradient)
            source.add(name, measured.detach() if measured is gradient else measured, step)

    def _observe_and_measure(
        self, name: str, live_output: Any, seconds: float, memory: int, step: int, phase: str
    ) -> None:
        self._observe(name, live_output, step, phase)
        if self._costs is not None and phase != "validation":
            with self._lock:
                self._costs.add(name, seconds, memory, step)
                if not step:
                    self._count_call()

    def _count_call(self) -> None:
        """Move results to the bounded history from time to time, because no step ends without a run (step 0)."""
        self._calls += 1
        if self._calls >= MAX_PENDING_CALLS:
            self._calls = 0
            self._collect(wait=False)

    def bind_module(self, name: str, module: Module, run: Any) -> Observe | None:
        """Return `on_forward` for one module with everything looked up; None if time or memory is measured."""
        if self._costs is not None:
            return None
        observe = self._observe
        return lambda inputs, kwargs, output: observe(name, output, run.step, run.phase)

    # ---- statistics from compiled code -------------------------------------------------------------------------------

    def _flush_compiled(self) -> None:
        """Let `add_rows` add what compiled code has accumulated; this takes a lock, so never call it inside ours."""
        stats = None if self._registry is None else self._registry.dispatcher.compiled_stats
        if stats is not None:
            stats.deliver()

    def add_rows(self, names: Sequence[str], rows: Tensor, step: int) -> None:
        """Add statistics rows, on their device, that compiled code has accumulated in a step."""
        with self._lock:
            if self._outputs is not None:
                self._outputs.add_rows(names, rows, step)
            if not step:
                self._count_call()

    # ---- events of a run ---------------------------------------------------------------------------------------------

    def on_train_batch_start(self) -> None:
        """Note that a backward pass will follow this forward pass."""
        self._before_backward = True

    def on_before_backward(self) -> None:
        """Read the collected outputs, before the backward pass frees them."""
        self._before_backward = False
        self._send(self._outputs)

    def on_after_backward(self) -> None:
        """Read the collected gradients."""
        self._send(self._gradients)

    def _send(self, source: TensorStatistics | None) -> None:
        if source is not None:
            with self._lock:
                source.send()

    def on_step_end(self, step: int, trainer: RunControl | None = None) -> None:
        """Complete the step, and record the values that have arrived so far."""
        self._trainer = trainer
        self._flush_compiled()
        with self._lock:
            for source in self._sources:
                source.end_step(step)
            self._share(trainer)
            self._collect(wait=False)

    def on_train_end(self, trainer: RunControl | None = None) -> None:
        """Record the values that are still on the device, and those of an incomplete step."""
        self._trainer = trainer
        self._flush_compiled()
        if trainer is not None:  # otherwise nothing is recorded, and the rest of a step can still be read
            with self._lock:
                self._share(trainer, at_end=True)
                for source in self._sources:
                    if source is not self._dead_units:  # Their window has not ended.
                        source.end_step(trainer.step)
                for table in self._collect_all():
                    self._record(table._replace(step=table.step or trainer.step))
        self._trainer, self._before_backward = None, False

    def close(self) -> None:
        """Release the collected tensors."""
        with self._lock:
            for source in (self._outputs, self._gradients, self._dead_units):
                if source is not None:
                    source.discard()
        self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        """Return the current window of dead units, the only state that spans steps.

        Values that are still on the device are recorded first: a run that resumes here repeats only later steps.
        """
        self._flush_compiled()
        with self._lock:
            self._collect(wait=True)
        return {} if self._dead_units is None else {"dead_units": self._dead_units.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window of dead units."""
        if self._dead_units is not None and "dead_units" in state:
            self._dead_units.load_state_dict(state["dead_units"])

    # ---- results -----------------------------------------------------------------------------------------------------

    def latest(self) -> dict[str, dict[str, float]]:
        """Return the newest values of every module; waits for the device."""
        return self._read().latest()

    def history(self, name: str) -> list[tuple[int, dict[str, float]]]:
        """Return (step, values) of one module, oldest first, at most the last thousand; without a run, one per call."""
        return self._read().of(name)

    @property
    def states(self) -> list[MonitoredState]:
        """The measurements by module and step, oldest first: `history` of all modules; waits for the device."""
        return self._read().states()

    def _read(self) -> History:
        """Return the history with the current step so far; waits for the device."""
        self._flush_compiled()
        with self._lock:
            tables = self._collect_all()
            return self._history.plus(tables)

    def clear_states(self) -> None:
        """Drop the measurements; in a run, they are still recorded."""
        self._flush_compiled()
        with self._lock:
            self._collect(wait=True)
            self._history = History(HISTORY_LIMIT)

    def running(self, name: str) -> dict[str, float]:
        """Return the mean over all kept values of one module."""
        columns: defaultdict[str, list[float]] = defaultdict(list)
        for _, values in self.history(name):
            for column, value in values.items():
                columns[column].append(value)
        kept = {column: torch.tensor(numbers, dtype=torch.float64) for column, numbers in columns.items()}
        return {column: numbers.nanmean().item() for column, numbers in kept.items()}

    def histogram(self, name: str, gradient: bool = False) -> Histograms:
        """Return the newest histogram of a module's output, or of its gradient, as in `hookline.stats.histograms`."""
        source = self._gradients if gradient else self._outputs
        if source is None or not self._histogram:
            needed = "gradients=True and 'histogram' among its metrics" if gradient else "'histogram' among its metrics"
            raise HooklineError(f"this monitor does not compute that histogram: it needs {needed}")
        with self._lock:
            self._collect(wait=True)
            return source.histogram(name)

    def dead_units(self, name: str) -> list[int]:
        """Return the indices of a module's dead units in the last complete window, or in the unfinished first one."""
        if self._dead_units is None:
            raise HooklineError("this monitor does not count dead units: it needs 'dead_units' among its metrics")
        with self._lock:
            self._collect(wait=True)
            dead = self._dead_units.by_module()
        if name not in dead:
            raise HooklineError(f"no units of {name!r} have been counted yet; {nearest(name, dead)}")
        return [int(unit) for unit in dead[name].nonzero().flatten().tolist()]

    # ---- from the device to the record -------------------------------------------------------------------------------

    def _collect(self, wait: bool) -> None:
        """Record the tables of complete steps that have arrived; those of several ranks arrive with an exchange."""
        for source in self._local_sources:
            for table in source.complete(wait):
                self._record(table)

    @property
    def _local_sources(self) -> list[Source]:
        """The sources that are not shared with other ranks; time, memory and functions are rank 0's own."""
        shares = self._trainer is not None and self._trainer.ranks.act_together
        return [source for source in self._sources if not shares or isinstance(source, CallCosts)]

    def _share(self, trainer: RunControl | None, at_end: bool = False) -> None:
        """With several ranks, contribute the measurements to the exchange; time and memory are rank 0's own."""
        if trainer is None or not trainer.ranks.act_together:
            return

        def use(table: StepTable) -> dict[str, float]:
            with self._lock:
                self._log_layers(table, trainer)
            return {f"{SERIES}/{name}": total for name, total in table.totals.items()}

        key, epoch, has_same_batch = self._registered_name, trainer.epoch, not trainer.counts_batch
        parts: list[SharedPart] = []
        for source, scale in ((self._outputs, 1.0), (self._gradients, trainer.loss_share)):
            if source is not None:
                parts += source.share(key, epoch, has_same_batch, scale, use)
        if self._dead_units is not None:
            parts += self._dead_units.share(key, epoch, use, trainer.step if at_end else None)
        for part in parts:
            trainer.share(part)

    def _collect_all(self) -> list[StepTable]:
        """Wait for and record all complete steps; return the tables of the current step."""
        self._collect(wait=True)
        return [table for source in self._local_sources for table in source.current()]

    def _record(self, table: StepTable) -> None:
        if self._trainer is None:
            self._history.add(table)
            return
        self._log_layers(table, self._trainer)
        for name, total in table.totals.items():
            self._trainer.log(f"{SERIES}/{name}", total, table.step)

    def _log_layers(self, table: StepTable, trainer: RunControl) -> None:
        self._history.add(table)
        if self._recorded_names != tuple(table.names):
            self._recorded_names = tuple(dict.fromkeys((*self._recorded_names, *table.names)))
        names, series = self._recorded_names, HISTOGRAMS if table.is_histogram else SERIES
        trainer.log_layers(series, names, table.columns, table.align(names), table.step)


class ActivationStats(Monitor):
    """A `Monitor` of mean and standard deviation, in layers.jsonl; `hookline.read_layers` reads them.

    Args:
        modules: The modules to record, as `ForwardHook.modules` selects them.
    """

    built_in = True
    name = "activation_stats"

    def __init__(self, modules: Any = "*") -> None:
        super().__init__(modules, metrics=("mean", "std"))


def _parse_metrics(
    metrics: Sequence[Any], points: Sequence[float]
) -> tuple[tuple[Any, ...], dict[str, Callable[[Tensor], Any]]]:
    """Return the metrics that are requested, each once, and the functions among them by their names.

    Raises:
        ConfigError: If there is none, or one does not exist.
    """
    if isinstance(metrics, str) or not (metrics or points):
        raise ConfigError("metrics", f"expected a list with some of {', '.join(METRICS)}, got {metrics!r}")
    functions: dict[str, Callable[[Tensor], Any]] = {}
    for metric in metrics:
        if callable(metric):  # A name that is already taken gets a number.
            name = getattr(metric, "__name__", type(metric).__name__).strip("<>")
            functions[numbered(name, {*METRICS, *functions})] = metric
        elif metric not in METRICS:
            remedy = nearest(str(metric), METRICS, "`hookline help measure-activations`")
            raise ConfigError("metrics", f"unknown metric {metric!r}; {remedy}")
    return tuple(dict.fromkeys(metrics)), functions
