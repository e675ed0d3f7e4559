"""The monitoring hook: statistics of activations and of their gradients, and what each module's forward costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from hookline.activations.backward import watch_gradient
from hookline.activations.costs import Costs
from hookline.activations.dead_units import DeadUnits
from hookline.activations.moment import first_floating
from hookline.activations.readings import Readings
from hookline.activations.site import Site
from hookline.activations.sites import weakly
from hookline.activations.tables import Source, StepTable, Tables, means
from hookline.activations.wanted import DEFAULT, Wanted
from hookline.errors import ConfigError, HooklineError, nearest
from hookline.registry.base import ForwardHook
from hookline.stats.histograms import Histograms

KEPT = 1000  # values per module
MOST_WAITING = 4096  # calls without a run
SERIES, HISTOGRAMS = "activations", "activation_histograms"  # in layers.jsonl


class Monitor(ForwardHook):
    """Statistics, percentiles, histograms, dead units, gradients, time and memory of the selected modules.

    Tensors are gathered while the model runs and read together in one pass; values stay on the device and arrive a
    flush later, under their true step. A module that runs several times in a step has one row for all its calls.
    With a trainer they go to layers.jsonl (read by `hookline.read_layers`), and how many values were NaN or infinite to
    the metrics, as ``activations/non_finite``. Validation is not watched. Memory is bounded with and without a run: the
    last thousand values of each module are kept.

    `metrics` are any of mean, std, min, max, absmax, l2, zeros, nans, infs, count, time, memory, histogram and
    dead_units; `percentiles` are numbers from 0 to 100; `gradients` asks for the same of each output's gradient, as
    ``grad_mean`` and so on. A unit is dead that was never above 0 in a window of `dead_window` steps; units lie along
    `unit_dim`, by default the last dimension and the second one of images.
    """

    built_in = True
    name = "monitor"

    def __init__(
        self,
        modules: Any = "*",
        metrics: Sequence[str] | None = None,
        percentiles: Sequence[float] = (),
        gradients: bool = False,
        dead_window: int = 100,
        unit_dim: int | None = None,
    ) -> None:
        self.modules = weakly(modules)
        self.metrics = DEFAULT if metrics is None else metrics if isinstance(metrics, str) else tuple(metrics)
        wanted = self._wanted = Wanted.parse(self.metrics, percentiles)
        if gradients and not wanted.reads_tensors:
            raise ConfigError("gradients", "there is nothing to take of them; add a statistic to metrics, such as 'l2'")
        self._outputs = Readings(wanted) if wanted.reads_tensors else None
        self._gradients = Readings(wanted, "grad_") if gradients else None
        self._dead = DeadUnits(dead_window, unit_dim) if wanted.dead_units else None
        self._costs = Costs(wanted.costs) if wanted.costs else None
        every: tuple[Source | None, ...] = (self._outputs, self._gradients, self._dead, self._costs)
        self._sources = [source for source in every if source is not None]
        self._tables = Tables(KEPT)
        self._names: tuple[str, ...] = ()  # of all modules that were recorded, in their order
        self.watches_backward = gradients  # compiled code must leave its modules' outputs to autograd
        self.statistics_only = wanted.statistics_only and not gradients  # there, kernels in the graph add them up
        self._hand_over: Callable[[], None] = _nothing
        self._own_name = self.name
        self._trainer: Any = None
        self._validating = self._before_backward = False
        self._calls = 0  # without a run, since what they left was last picked up
        self._lock = threading.RLock()
        # The method names only what is asked for: a clock before and after costs, and so do views.
        looks = self._outputs is not None or self._dead is not None
        self.on_forward: Any = (self._both if looks else self._cost) if wanted.costs else self._look

    # ---- while the model runs ------------------------------------------------------------------------------------

    def _look(self, name: str, live_output: Any, step: int) -> None:
        tensor = None if self._validating else first_floating(live_output)
        if tensor is None:
            return
        with self._lock:
            if self._outputs is not None:
                # Until the backward pass it may wait as it is: its graph shows who else keeps it, which a view hides.
                self._outputs.add(name, tensor if self._before_backward else tensor.detach(), step)
            if self._dead is not None:
                self._dead.add(name, tensor)
            if not step:
                self._without_run()
        if self._gradients is not None:
            watch_gradient(tensor, partial(self._gradient, self._gradients, name, step))

    def _gradient(self, readings: Readings, name: str, step: int, gradient: Tensor) -> None:
        with self._lock:
            readings.add(name, gradient, step)
            if not step:
                self._without_run()

    def _cost(self, name: str, seconds: float, memory: int, step: int) -> None:
        if self._costs is not None and not self._validating:
            with self._lock:
                self._costs.add(name, seconds, memory, step)
                if not step:
                    self._without_run()

    def _both(self, name: str, live_output: Any, seconds: float, memory: int, step: int) -> None:
        self._look(name, live_output, step)
        self._cost(name, seconds, memory, step)

    def setup(self, name: str) -> None:
        """Be counted under the name it goes by."""
        self._own_name = name

    def shortcut(self, site: Site, tap: Any) -> Callable[[Any, Any, Any], None] | None:
        """The same as `on_forward` for a module, with everything looked up beforehand; None where a clock is wanted."""
        if self._costs is not None:
            return None
        name, fired, own_name = site.name_for(self._own_name), site.fired, self._own_name

        def look(inputs: Any, kwargs: Any, output: Any) -> None:
            self._look(name, output, tap.run.step)
            fired.add(own_name)

        def gather(inputs: Any, kwargs: Any, output: Any) -> None:
            step = tap.run.step
            if step and self._before_backward and type(output) is Tensor and output.dtype.is_floating_point:
                with lock:
                    add(name, output, step)
            else:
                self._look(name, output, step)
            fired.add(own_name)

        if self._outputs is None or self._dead is not None or self._gradients is not None:
            return look
        add, lock = self._outputs.add, self._lock
        return gather  # the same in the usual case: all that is done for each module is done hundreds of times

    def take_from(self, hand_over: Callable[[], None]) -> None:
        """Compiled code adds statistics up for this monitor; the call has those that it has given to `take`."""
        self._hand_over = hand_over

    def listens(self) -> bool:
        """Whether what runs now is to be added up."""
        return not self._validating

    def take(self, names: Sequence[str], rows: Tensor, step: int) -> None:
        """Get rows of statistics, on their device, that compiled code has added up in a step."""
        with self._lock:
            if self._outputs is not None:
                self._outputs.add_rows(names, rows, step)
            if not step:
                self._without_run()

    def _without_run(self) -> None:
        """No step ends here, so now and then what has arrived goes where only the last values are kept."""
        self._calls += 1
        if self._calls >= MOST_WAITING:
            self._calls = 0
            self._pick_up(wait=False)

    # ---- while the run goes on -----------------------------------------------------------------------------------

    def on_train_batch_start(self) -> None:
        """A forward pass begins that a backward pass will follow."""
        self._before_backward = True

    def on_before_backward(self, trainer: Any) -> None:
        """The forward pass is over: read what it left, before the backward pass frees it."""
        self._before_backward = False
        self._read(self._outputs, trainer)

    def on_after_backward(self, trainer: Any) -> None:
        """Read the gradients that the backward pass left."""
        self._read(self._gradients, trainer)

    def on_step_end(self, trainer: Any, step: int) -> None:
        """The step is complete: what has arrived of it goes to the record."""
        self._trainer = trainer
        self._hand_over()
        with self._lock:
            for source in self._sources:
                source.end_step(step)
            self._pick_up(wait=False)

    def on_validation_start(self) -> None:
        """What runs from now on is not training."""
        self._validating, self._before_backward = True, False

    def on_validation_end(self) -> None:
        """Training goes on."""
        self._validating = False

    def on_train_end(self, trainer: Any) -> None:
        """Record what is still on the device, and what there is of a step that was not completed."""
        self._trainer = trainer
        self._hand_over()
        with self._lock:
            for table in self._under_way():
                self._arrived(table._replace(step=table.step or trainer.step))
        self._trainer, self._validating, self._before_backward = None, False, False

    def close(self) -> None:
        """Let go of what was gathered."""
        with self._lock:
            for source in self._sources:
                source.discard()
        self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        """The open window of dead units; everything else begins anew with each step.

        What is still on the device is recorded first: a run that goes on from here makes only later steps again.
        """
        self._hand_over()
        with self._lock:
            self._pick_up(wait=True)
        return {} if self._dead is None else {"dead_units": self._dead.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the window of dead units."""
        if self._dead is not None and "dead_units" in state:
            self._dead.load_state_dict(state["dead_units"])

    # ---- reading -------------------------------------------------------------------------------------------------

    def latest(self) -> dict[str, dict[str, float]]:
        """The newest values of every module; waits for what is still on the device."""
        self._hand_over()
        with self._lock:
            return self._tables.latest(_flat(self._under_way()))

    def history(self, name: str) -> list[tuple[int, dict[str, float]]]:
        """(step, values) of one module, oldest first; at most the last thousand. Without a run, one entry a call."""
        self._hand_over()
        with self._lock:
            return self._tables.history(name, _flat(self._under_way()))

    def running(self, name: str) -> dict[str, float]:
        """The mean over all kept values of one module."""
        return means(self.history(name))

    def histogram(self, name: str, gradient: bool = False) -> Histograms:
        """The newest histogram of a module's output, or of its gradient, as `hookline.stats.histograms` has them."""
        readings = self._gradients if gradient else self._outputs
        if readings is None or not self._wanted.histogram:
            asked = "gradients=True and 'histogram' among its metrics" if gradient else "'histogram' among its metrics"
            raise HooklineError(f"this monitor does not count that histogram: it needs {asked}")
        with self._lock:
            self._pick_up(wait=True)
            return readings.histogram(name)

    def dead_units(self, name: str) -> list[int]:
        """The indices of a module's dead units in the last complete window; before its end, in what has been seen."""
        if self._dead is None:
            raise HooklineError("this monitor looks for no dead units; it needs 'dead_units' among its metrics")
        with self._lock:
            self._pick_up(wait=True)
            dead = self._dead.of()
        if name not in dead:
            raise HooklineError(f"no unit of {name!r} has been seen; {nearest(name, dead)}")
        return [int(unit) for unit in dead[name].nonzero().flatten().tolist()]

    # ---- from the device -----------------------------------------------------------------------------------------

    def _read(self, readings: Readings | None, trainer: Any) -> None:
        if readings is not None:
            self._trainer = trainer
            with self._lock:
                readings.send()
                self._pick_up(wait=False)

    def _pick_up(self, wait: bool) -> None:
        for source in self._sources:
            for table in source.complete(wait):
                self._arrived(table)

    def _under_way(self) -> list[StepTable]:
        """Wait for everything; then what there is of a step that is not complete."""
        self._pick_up(wait=True)
        return [table for source in self._sources for table in source.under_way()]

    def _arrived(self, table: StepTable) -> None:
        if table.values.dim() == 2:
            self._tables.add(table)
        if self._trainer is not None:
            if self._names != tuple(table.names):
                self._names = tuple(dict.fromkeys((*self._names, *table.names)))
            series = SERIES if table.values.dim() == 2 else HISTOGRAMS
            self._trainer.log_layers(series, self._names, table.columns, table.over(self._names), table.step)
            for name, total in table.totals.items():
                self._trainer.log(f"{SERIES}/{name}", total, table.step)


def _nothing() -> None:
    """There is no compiled code to ask."""


def _flat(tables: list[StepTable]) -> list[StepTable]:
    """Those that are no histograms."""
    return [table for table in tables if table.values.dim() == 2]
