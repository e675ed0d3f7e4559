"""The debug hook: breaks, or writes down what it saw, where an activation meets a condition."""

from __future__ import annotations

import bdb
import itertools
import logging
import math
import operator
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hookline.activations.accounting import aligned
from hookline.activations.copies import unwrapped
from hookline.activations.moment import tensors_in
from hookline.activations.sites import weakly
from hookline.errors import ConfigError, nearest
from hookline.registry.base import ForwardHook
from hookline.stats.statistics import STATISTICS, summarize

logger = logging.getLogger("hookline")

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
COUNTS = ("nan", "inf")  # conditions that need no number: one is one too many
MEASURED = (*COUNTS, "absmax", "mean", "std", "zeros", "min", "max", "l2")
DEFAULT = {"nan": True, "inf": True}
STACK_KEPT = 12
_COMPARISON = re.compile(rf"\s*({'|'.join(COMPARISONS)})\s*(\S+)\s*")
# Frames that are not the user's: ours, the dispatch code we generate, and torch's.
_HIDDEN = (str(Path(__file__).parents[1]), "<hookline", str(Path(torch.__file__).parent))


@dataclass(frozen=True)
class Condition:
    """A statistic of an activation compared with a number: ``absmax > 1e4``."""

    statistic: str
    sign: str
    limit: float

    def holds(self, statistics: Mapping[str, float]) -> bool:
        """Whether these statistics meet it; one that is NaN meets nothing."""
        value = statistics[self.statistic]
        return not math.isnan(value) and COMPARISONS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.statistic} {self.sign} {self.limit:g}"


Predicate = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Inspection:
    """One tensor of one call's output; the numbers are nan where it has none (integers, empty, sparse)."""

    module: str
    step: int
    phase: str
    call: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    mean: float
    std: float
    absmax: float


@dataclass(frozen=True)
class Finding:
    """A condition that held: where, when, and what the activation looked like."""

    module: str
    step: int
    phase: str
    call: int
    """Which call of the module, of those this hook has heard, from 1."""
    condition: str
    value: float | None
    """What the condition's statistic was; None for a condition that is a function."""
    statistics: dict[str, float]
    """Of the tensor that met the condition; for a function, of the output's first floating tensor."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stack: tuple[str, ...]
    """The user's own frames, outermost first."""

    def __str__(self) -> str:
        value = "" if self.value is None else f" ({self.value:g})"
        numbers = ", ".join(f"{name} {number:.4g}" for name, number in self.statistics.items())
        when = f"step {self.step}, {self.phase}, call {self.call}"
        return f"{self.module}: {self.condition}{value} at {when}; output {'; '.join(self.outputs)}; {numbers}"


class Debug(ForwardHook):
    """Looks at every output of the selected modules and speaks up when a condition holds.

    `conditions` is a mapping such as ``{"nan": True, "absmax": "> 1e4", "zeros": "> 0.9"}`` (`zeros` is a fraction,
    `nan` and `inf` are counts), the same in words (``"nan"``, ``"absmax > 1e4"``), a function ``(name, output) ->
    bool``, or a list of these; by default NaN and Inf. A tensor with a NaN in it has no other statistics and meets no
    other condition, so keep ``nan`` among them.

    At a terminal a condition that holds opens the debugger, with `name`, `output` and `finding` at hand
    (`break_at_terminal`); quitting it ends the run. Everywhere it is written down: in `findings` (the first `keep`,
    because where trouble began matters more than where it went; `found` counts all), as one warning per module and
    condition, and in the run's record. `inspect` also keeps shape, dtype, device, mean, std and absmax of every output,
    the latest `keep` of them in `inspected`.

    Each call of a selected module waits for the device, because its numbers are needed at once: this is for debugging.
    """

    built_in = True
    name = "debug"

    def __init__(
        self,
        modules: Any = "*",
        conditions: Mapping[str, Any] | str | Predicate | Sequence[Any] | None = None,
        inspect: bool = False,
        break_at_terminal: bool = True,
        keep: int = 100,
    ) -> None:
        if keep < 1:
            raise ConfigError("keep", f"{keep!r} keeps nothing; the smallest is 1")
        self.modules = weakly(modules)
        self.conditions, self.inspect, self.break_at_terminal, self.keep = conditions, inspect, break_at_terminal, keep
        self.findings: list[Finding] = []
        self.found = 0
        self.inspected: deque[Inspection] = deque(maxlen=keep)
        self._conditions = list(parse_conditions(conditions))
        if not self._conditions and not inspect:
            raise ConfigError("conditions", f"{conditions!r} looks for nothing; name a condition, or set inspect")
        self._own_name = self.name
        self._calls: dict[str, Iterator[int]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def setup(self, name: str) -> None:
        """Sign notes with the name it goes by."""
        self._own_name = name

    def on_forward(self, name: str, inputs: Any, kwargs: Any, output: Any, step: int, phase: str, trainer: Any) -> None:
        """Measure the output in one read, then ask every condition."""
        call = next(self._calls.setdefault(name, itertools.count(1)))
        where: dict[str, Any] = {"module": name, "step": step, "phase": phase, "call": call}
        tensors = tensors_in(output)
        measured = statistics_of(tensors)
        if self.inspect:
            self.inspected.extend(_inspection(where, *pair) for pair in zip(tensors, measured, strict=True))
        for condition in self._conditions:
            met = _met(condition, name, output, measured)
            if met is not None and self._wants_one_more():
                given, made = described((inputs, kwargs)), described(output)
                finding = Finding(**where, **met, inputs=given, outputs=made, stack=own_stack())
                self._keep(finding, trainer)
                self._break(name, output, finding)

    def table(self) -> str:
        """What was found, one line each."""
        if not self.findings:
            return "no findings"
        numbers = ("mean", "std", "absmax")
        header = ("module", "condition", "value", "step", "phase", "call", *numbers, "output")
        rows = [_cells(finding, numbers) for finding in self.findings]
        more = self.found - len(self.findings)
        return aligned(header, rows) + (f"\nand {more} more, not kept" if more > 0 else "")

    def _wants_one_more(self) -> bool:
        """Count a finding; beyond the ones that are kept, only a terminal still wants to see it."""
        with self._lock:
            self.found += 1
            return self.found <= self.keep or self._breaks

    def _keep(self, finding: Finding, trainer: Any) -> None:
        with self._lock:
            if len(self.findings) >= self.keep:
                return
            self.findings.append(finding)
            first = (finding.module, finding.condition) not in self._warned
            self._warned.add((finding.module, finding.condition))
        if first:
            logger.warning("hook %r: %s", self._own_name, finding)
        if callable(note := getattr(trainer, "note", None)):
            fields = asdict(finding)
            del fields["step"]  # a note carries the run's own
            note("debug_finding", by=self._own_name, **fields)

    @property
    def _breaks(self) -> bool:
        return self.break_at_terminal and at_terminal()

    def _break(self, name: str, output: Any, finding: Finding) -> None:
        if not self._breaks:
            return
        try:
            _pause(name, output, finding)
        except bdb.BdbQuit:  # an Exception: it would count as a failure of this hook, and the run would go on
            raise KeyboardInterrupt(f"quit in the debugger at {finding.module}") from None


def _pause(name: str, output: Any, finding: Finding) -> None:
    """Open the debugger in a frame that holds what one wants to look at."""
    breakpoint()


def at_terminal() -> bool:
    """Whether somebody can answer a debugger: both ends are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def parse_conditions(given: Any) -> Iterator[Condition | Predicate]:
    """Conditions as users write them; what cannot be one is refused with the nearest right name."""
    if given is None:
        given = DEFAULT
    if isinstance(given, Mapping):
        parsed = [_condition(name, value) for name, value in given.items()]
        yield from (condition for condition in parsed if condition is not None)
    elif isinstance(given, str):
        name, _, comparison = given.strip().partition(" ")
        yield from parse_conditions({name: comparison or name in COUNTS or given})
    elif callable(given):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from parse_conditions(one)
    else:
        choice = "write {'absmax': '> 1e4'}, 'absmax > 1e4', a function, or a list of these"
        raise ConfigError("conditions", f"{given!r} is no condition; {choice}")


def _condition(name: Any, value: Any) -> Condition | None:
    """One item of a mapping; None for what is switched off."""
    path = f"conditions.{name}"
    if name not in MEASURED:
        raise ConfigError(path, f"{name!r} is no statistic; {nearest(str(name), MEASURED)}")
    if value is False:
        return None
    if value is True and name in COUNTS:
        return Condition(name, ">", 0.0)
    match = _COMPARISON.fullmatch(value) if isinstance(value, str) else None
    limit = _number(match[2]) if match else math.nan
    if match is None or not math.isfinite(limit):
        choice = "True or '> 3'" if name in COUNTS else "'> 1e4'"
        raise ConfigError(path, f"{value!r} is no comparison; write {choice}, with one of {' '.join(COMPARISONS)}")
    return Condition(name, match[1], limit)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _met(
    condition: Condition | Predicate, name: str, output: Any, measured: list[dict[str, float]]
) -> dict[str, Any] | None:
    """What a finding says about a condition that holds; None when it does not."""
    floating = [statistics for statistics in measured if statistics]
    if not isinstance(condition, Condition):
        label = getattr(condition, "__name__", type(condition).__name__)
        statistics = floating[0] if floating else {}
        return {"condition": label, "value": None, "statistics": statistics} if condition(name, output) else None
    for statistics in floating:
        if condition.holds(statistics):
            value = statistics[condition.statistic]
            return {"condition": str(condition), "value": value, "statistics": statistics}
    return None


def statistics_of(tensors: Sequence[torch.Tensor]) -> list[dict[str, float]]:
    """The statistics of each floating tensor in one read per device; nothing for one that has none."""
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if _measurable(tensor):
            places.setdefault(tensor.device, []).append(index)
    found: list[dict[str, float]] = [{} for _ in tensors]
    for indices in places.values():
        rows = summarize([_plain(tensors[index]) for index in indices]).tolist()
        for index, row in zip(indices, rows, strict=True):
            found[index] = _named(dict(zip(STATISTICS, row, strict=True)))
    return found


def _measurable(tensor: torch.Tensor) -> bool:
    real = tensor.is_floating_point() or tensor.is_complex()
    return real and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _plain(tensor: Any) -> torch.Tensor:
    """This rank's part of a sharded tensor, the whole batch under `vmap`, complex numbers as pairs of real ones."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else unwrapped(tensor)
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local


def _named(row: Mapping[str, float]) -> dict[str, float]:
    """A row under the names that conditions use."""
    named = {"nan": row["nans"], "inf": row["infs"], "zeros": row["zeros"] / row["count"]}
    return {name: named[name] if name in named else row[name] for name in MEASURED}


def _inspection(where: Mapping[str, Any], tensor: torch.Tensor, statistics: Mapping[str, float]) -> Inspection:
    mean, std, absmax = (statistics.get(name, math.nan) for name in ("mean", "std", "absmax"))
    facts = tuple(tensor.shape), _dtype_name(tensor), str(tensor.device)
    return Inspection(where["module"], where["step"], where["phase"], where["call"], *facts, mean, std, absmax)


def described(value: Any) -> tuple[str, ...]:
    """Each tensor of a nested value in words: ``float32 (2, 3) on cpu``."""
    return tuple(f"{_dtype_name(one)} {tuple(one.shape)} on {one.device}" for one in tensors_in(value))


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def own_stack() -> tuple[str, ...]:
    """The innermost frames that are the user's: neither Hookline's nor torch's."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_HIDDEN)]
    return tuple(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-STACK_KEPT:])


def _cells(finding: Finding, numbers: Sequence[str]) -> tuple[str, ...]:
    value = "-" if finding.value is None else f"{finding.value:g}"
    shown = [f"{finding.statistics[name]:.3g}" if finding.statistics else "-" for name in numbers]
    place = (str(finding.step), finding.phase, str(finding.call))
    return (finding.module, finding.condition, value, *place, *shown, ", ".join(finding.outputs))
