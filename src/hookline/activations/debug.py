"""The debug hook: open the debugger, or record a finding, when an activation or its gradient meets a condition."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger
from hookline._parameters import PositiveInt
from hookline._tensors import inside_transform, is_dense, iter_tensors, measurable, shape_of
from hookline._text import format_table
from hookline._words import nearest
from hookline.activations.forward_hooks import BuiltInForwardHook
from hookline.core.entry import Entry
from hookline.errors import ConfigError, StopTraining
from hookline.stats.distributed import LocalTensors
from hookline.stats.rows import STATISTICS

if TYPE_CHECKING:
    from hookline.run.control import RunControl

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
COUNTS = ("nan", "inf")  # conditions that need no comparison: a single occurrence meets them
CONDITION_STATISTICS = (*COUNTS, "absmax", "mean", "std", "zeros", "min", "max", "l2")
GRADIENT = "grad_"  # prefix of the statistics of gradients, as in monitors
STATISTIC_NAMES = (*CONDITION_STATISTICS, *(GRADIENT + name for name in CONDITION_STATISTICS))
GRADIENT_PARAMETERS = ("gradient", "grad")  # a function whose second parameter has one of these names gets gradients
BACKWARD = "backward"  # where reports say that a check of a gradient failed
DEFAULT_CONDITIONS = {"nan": True, "inf": True}
MAX_STACK_FRAMES = 12
_COMPARISON = re.compile(rf"\s*({'|'.join(COMPARISONS)})\s*(\S+)\s*")
# Frames that are not the user's: Hookline's and torch's.
_HIDDEN_FILES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


Predicate = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Condition:
    """A comparison of one statistic of an activation with a number (``absmax > 1e4``), or a user's function of it."""

    text: str
    holds: Callable[..., Any]
    """A function of the statistic, or of the module's name and its output."""
    statistic: str = ""
    """Empty for a function."""
    of_gradient: bool = False
    """Whether it is about the gradient of the activation."""

    def check(self, name: str, value: Any, statistics: list[dict[str, float]]) -> dict[str, Any] | None:
        """Return the fields of a finding about the first tensor that meets the condition; NaN meets none."""
        if self.statistic:
            for numbers in statistics:
                number = numbers[self.statistic]
                if not math.isnan(number) and self.holds(number):
                    return {"condition": self.text, "value": number, "statistics": numbers}
        elif self.holds(name, value):
            return {"condition": self.text, "value": None, "statistics": statistics[0] if statistics else {}}
        return None


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module."""

    module: str
    step: int
    phase: str
    call: int
    """Which call of the module, counted from 1 since the hook was registered."""

    @property
    def name(self) -> str:
        """The module's name, as in the states of other hooks."""
        return self.module


@dataclass(frozen=True)
class Inspection(ModuleCall):
    """One tensor of one call's output; the numbers are NaN if it has none (integer, empty, sparse)."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    mean: float
    std: float
    absmax: float


@dataclass(frozen=True)
class Finding(ModuleCall):
    """A condition that held: where, when, and the statistics of the activation."""

    condition: str
    value: float | None
    """The value of the condition's statistic; None if the condition is a function."""
    statistics: dict[str, float]
    """Statistics of the tensor that met the condition; for a function, of the output's first floating-point tensor."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """For a condition on gradients, the gradient."""
    stack: tuple[str, ...]
    """The user's own stack frames, outermost first."""

    def __str__(self) -> str:
        value = "" if self.value is None else f" ({self.value:g})"
        numbers = ", ".join(f"{name} {number:.4g}" for name, number in self.statistics.items())
        when = f"step {self.step}, {self.phase}, call {self.call}"
        where = self.module or "the model"  # The root module's name is empty.
        return f"{where}: {self.condition}{value} at {when}; output {'; '.join(self.outputs)}; {numbers}"


class Debug(BuiltInForwardHook):
    """Checks every output of the selected modules and reports when a condition holds.

    At a terminal, a condition that holds opens the debugger, with `name`, `output` and `finding` as local variables;
    quitting it ends the run. In every case the finding is kept in `findings`, logged as one warning per module and
    condition, and written to the run's record.

    Each call of a selected module waits for the device, because its statistics are needed at once: use this hook for
    debugging only.

    Args:
        modules: The modules to check.
        conditions: A mapping such as ``{"nan": True, "absmax": "> 1e4", "zeros": "> 0.9"}`` (`zeros` is a fraction,
            `nan` and `inf` are counts), the same as a string (``"nan"``, ``"absmax > 1e4"``), a function ``(name,
            output)
            -> bool``, or a list of these; NaN and Inf by default. A tensor that contains a NaN has no other statistics
            and meets no other condition, so keep ``nan`` among them. With the prefix ``grad_`` (``"grad_nan"``,
            ``"grad_l2 > 1e3"``), or in a function ``(name, gradient) -> bool``, a condition is about the gradients of
            the outputs; it is checked in the backward pass.
        inspect: Whether to keep shape, dtype, device, mean, std and absmax of every output in `inspected`.
        break_at_terminal: Whether to open the debugger if the process runs at a terminal.
        keep: How many findings and inspections to keep: the first findings, because the origin of a problem matters
            most, and the latest inspections. `found` counts all findings.

    Raises:
        ConfigError: If a condition cannot be parsed, a function cannot be called with two arguments, or there is
            nothing to check.
    """

    name = "debug"
    built_in = True

    def __init__(
        self,
        modules: Any = "*",
        conditions: Mapping[str, Any] | str | Predicate | Sequence[Any] | None = None,
        inspect: bool = False,
        break_at_terminal: bool = True,
        keep: PositiveInt = 100,
    ) -> None:
        super().__init__(modules)
        self.conditions, self.inspect, self.break_at_terminal, self.keep = conditions, inspect, break_at_terminal, keep
        self.findings: list[Finding] = []
        self.found = 0
        self.inspected: deque[Inspection] = deque(maxlen=self.keep)
        given = list(parse_conditions(conditions))
        self._conditions = [condition for condition in given if not condition.of_gradient]
        self._gradient_conditions = [condition for condition in given if condition.of_gradient]
        if not given and not inspect:
            raise ConfigError("conditions", f"{conditions!r} checks nothing; pass a condition, or set inspect")
        self.watches_backward = bool(self._gradient_conditions)  # compiled code must leave the outputs to autograd
        self._calls: dict[str, Iterator[int]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def on_forward(
        self,
        name: str,
        inputs: Any,
        kwargs: Any,
        output: Any,
        live_output: Any,
        step: int,
        phase: str,
        trainer: RunControl | None,
    ) -> None:
        """Compute the output's statistics in one read, and check every condition; gradients are checked later."""
        call = next(self._calls.setdefault(name, itertools.count(1)))
        where: dict[str, Any] = {"module": name, "step": step, "phase": phase, "call": call}
        described_inputs = describe_tensors((inputs, kwargs))
        if self._conditions or self.inspect:
            tensors = list(iter_tensors(output))
            statistics = statistics_of(tensors)
            for tensor, numbers in zip(tensors, statistics, strict=True):
                if not numbers and not is_dense(tensor):  # Dense integers and empty tensors cannot meet a condition.
                    self._pass_over(name, tensor)
                if self.inspect:
                    shape, dtype, device = shape_of(tensor), _dtype_name(tensor), str(tensor.device)
                    shown: dict[str, Any] = {key: numbers.get(key, math.nan) for key in ("mean", "std", "absmax")}
                    self.inspected.append(Inspection(**where, shape=shape, dtype=dtype, device=device, **shown))
            self._check(where, self._conditions, output, statistics, described_inputs, trainer)
        if self._gradient_conditions:
            entry = self._registry.entry(self._registered_name)
            for tensor in iter_tensors(live_output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._check_gradient, entry, where, described_inputs, trainer))  # type: ignore[no-untyped-call]

    def _check_gradient(
        self,
        entry: Entry,
        where: dict[str, Any],
        inputs: tuple[str, ...],
        trainer: RunControl | None,
        gradient: torch.Tensor,
    ) -> None:
        """Check a gradient when backward has computed it; an exception in a function is a failure of the hook."""
        if not entry.enabled or all(entry is not other for other in self._registry.entries("forward")):
            return  # The hook was disabled or removed since the forward pass.
        try:
            gradient = gradient.detach()
            self._check(where, self._gradient_conditions, gradient, statistics_of([gradient]), inputs, trainer)
        except StopTraining:
            raise
        except Exception as error:
            # Not counted with the failures in the forward pass, because their successes would reset the count.
            if self._registry.failures.apply_policy(entry, entry.name, BACKWARD, error, where["step"]) is not None:
                raise
        else:
            entry.failures.in_a_row.pop(BACKWARD, None)

    def _check(
        self,
        where: dict[str, Any],
        conditions: Sequence[Condition],
        value: Any,
        statistics: list[dict[str, float]],
        inputs: tuple[str, ...],
        trainer: RunControl | None,
    ) -> None:
        """Check an output or a gradient, and report each condition that holds."""
        measured = list(filter(None, statistics))
        for condition in conditions:
            result = condition.check(where["module"], value, measured)
            if result is None:
                continue
            breaks = self.break_at_terminal and at_terminal()
            with self._lock:
                self.found += 1
                keeps = self.found <= self.keep
            if keeps or breaks:
                outputs, stack = describe_tensors(value), _user_stack()
                finding = Finding(**where, **result, inputs=inputs, outputs=outputs, stack=stack)
                if keeps:
                    self._report(finding, trainer)
                if breaks:
                    self._break(where["module"], value, finding)

    @property
    def states(self) -> list[Inspection | Finding]:
        """The inspections, then the findings, each oldest first."""
        with self._lock:
            return [*self.inspected, *self.findings]

    def clear_states(self) -> None:
        """Drop everything collected; later findings are counted and kept again."""
        with self._lock:
            self.findings.clear()
            self.inspected.clear()
            self.found = 0

    def table(self) -> str:
        """Return the findings as a table, one line each."""
        if not self.findings:
            return "no findings"
        numbers = ("mean", "std", "absmax")
        header = ("module", "condition", "value", "step", "phase", "call", *numbers, "output")
        rows = []
        for finding in self.findings:
            value = "-" if finding.value is None else f"{finding.value:g}"
            shown = [f"{finding.statistics[name]:.3g}" if finding.statistics else "-" for name in numbers]
            when = (str(finding.step), finding.phase, str(finding.call))
            rows.append((finding.module, finding.condition, value, *when, *shown, ", ".join(finding.outputs)))
        more = self.found - len(self.findings)
        return format_table(header, rows) + (f"\nand {more} more, not kept" if more > 0 else "")

    def _report(self, finding: Finding, trainer: RunControl | None) -> None:
        with self._lock:
            self.findings.append(finding)
            first = (finding.module, finding.condition) not in self._warned
            self._warned.add((finding.module, finding.condition))
        if first:
            logger.warning("hook %r: %s", self._registered_name, finding)
        if trainer is not None:
            fields = asdict(finding)
            del fields["step"]  # the note has the run's step
            trainer.note("debug_finding", by=self._registered_name, **fields)

    def _break(self, name: str, output: Any, finding: Finding) -> None:
        """Open the debugger; `name`, `output` and `finding` are in its frame."""
        breakpoint()


def at_terminal() -> bool:
    """Return whether a debugger can be used: standard input and output are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


# ---- conditions ------------------------------------------------------------------------------------------------------


def parse_conditions(given: Any) -> Iterator[Condition]:
    """Yield the conditions in the form users write them; None stands for the default ones.

    Raises:
        ConfigError: If one cannot be parsed, with the nearest valid name, or a function has the wrong parameters.
    """
    if given is None:
        given = DEFAULT_CONDITIONS
    if isinstance(given, Mapping):
        for name, value in given.items():
            if name not in STATISTIC_NAMES:
                choices = nearest(str(name), STATISTIC_NAMES)
                raise ConfigError(f"conditions.{name}", f"unknown statistic {name!r}; {choices}")
            if value is not False:
                yield _parse_condition(name, value)
    elif isinstance(given, str):
        name, _, comparison = given.strip().partition(" ")
        yield from parse_conditions({name: comparison or name.removeprefix(GRADIENT) in COUNTS or given})
    elif callable(given):
        yield _parse_function(given)
    elif isinstance(given, (list, tuple)):
        for condition in given:
            yield from parse_conditions(condition)
    else:
        choice = "write {'absmax': '> 1e4'}, 'absmax > 1e4', a function, or a list of these"
        raise ConfigError("conditions", f"invalid condition {given!r}; {choice}")


def _parse_function(function: Predicate) -> Condition:
    name = str(getattr(function, "__name__", type(function).__name__))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # A built-in function may have no signature.
        return Condition(name, function)
    try:
        signature.bind("name", None)
    except TypeError:
        choice = "write one with the parameters (name, output) or (name, gradient)"
        raise ConfigError("conditions", f"{name}{signature} takes other arguments; {choice}") from None
    second = [*signature.parameters, ""][1]
    return Condition(name, function, of_gradient=second in GRADIENT_PARAMETERS)


def _parse_condition(name: str, value: Any) -> Condition:
    statistic = name.removeprefix(GRADIENT)
    given = "> 0" if value is True and statistic in COUNTS else value
    match = _COMPARISON.fullmatch(given) if isinstance(given, str) else None
    try:
        limit = float(match[2]) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or not math.isfinite(limit):
        choice = "True or '> 3'" if statistic in COUNTS else "'> 1e4'"
        problem = f"invalid comparison {value!r}; write {choice}, with one of {' '.join(COMPARISONS)}"
        raise ConfigError(f"conditions.{name}", problem)
    compare = COMPARISONS[match[1]]
    text = f"{name} {match[1]} {limit:g}"
    return Condition(text, lambda number: compare(number, limit), statistic, name.startswith(GRADIENT))


# ---- describing tensors ----------------------------------------------------------------------------------------------


def statistics_of(tensors: Sequence[torch.Tensor]) -> list[dict[str, float]]:
    """Return the statistics of each floating-point tensor in one read per device; {} for a tensor without any."""
    measured = {index: part for index, tensor in enumerate(tensors) if (part := measurable(tensor)) is not None}
    measured = {index: part for index, part in measured.items() if part.numel() > 0}
    by_tensor: list[dict[str, float]] = [{} for _ in tensors]
    try:
        rows = LocalTensors(list(measured.values())).summarize().tolist() if measured else []
    except Exception:
        if inside_transform() is None:
            raise
        return by_tensor  # Inside `torch.func.grad`, tensors have no memory that a kernel could read.
    for index, numbers in zip(measured, rows, strict=True):
        row = dict(zip(STATISTICS, numbers, strict=True))
        # Conditions use shorter names, and the fraction of zeros instead of their number.
        row |= {"nan": row["nans"], "inf": row["infs"], "zeros": row["zeros"] / row["count"]}
        by_tensor[index] = {name: row[name] for name in CONDITION_STATISTICS}
    return by_tensor


def describe_tensors(value: Any) -> tuple[str, ...]:
    """Describe each tensor of a nested value: ``float32 (2, 3) on cpu``."""
    return tuple(f"{_dtype_name(tensor)} {shape_of(tensor)} on {tensor.device}" for tensor in iter_tensors(value))


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _user_stack() -> tuple[str, ...]:
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_HIDDEN_FILES)]
    shown = frames[-MAX_STACK_FRAMES:]
    return tuple(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in shown)
