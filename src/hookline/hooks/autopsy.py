"""What went wrong in a batch: it is run again with hooks on every module, and the first bad one is named."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from hookline.activations.copies import mapped
from hookline.activations.debug import Debug, Finding, statistics_of
from hookline.activations.manager import HookManager
from hookline.activations.moment import tensors_in
from hookline.registry.base import ForwardHook

_OPERATION = re.compile(r"Function '(\w+)'")
NAMES_SHOWN = 3


@dataclass(frozen=True)
class Autopsy:
    """What a batch did when it was run again. Lists are in the model's or the batch's order, empty when all is well."""

    loss: float
    module: str | None = None
    """The first module whose output held a NaN, else the first whose output held an Inf."""
    statistics: dict[str, float] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    first_inf: str | None = None
    """The first module whose output held an Inf: an overflow there may be what became NaN later."""
    batch: tuple[str, ...] = ()
    """Which tensors of the batch are not finite."""
    parameters: tuple[str, ...] = ()
    """Which parameters are not finite."""
    gradients: tuple[str, ...] = ()
    """Which parameters' gradients are not finite, although the loss is."""
    backward_module: str | None = None
    """The module whose backward turned finite gradients into others, for its inputs or its own parameters."""
    operation: str | None = None
    """The operation whose backward gave NaN, as torch's anomaly detection calls it."""

    @property
    def finite(self) -> bool:
        """Whether nothing went wrong this time."""
        return math.isfinite(self.loss) and not self.gradients

    def __str__(self) -> str:
        if self.finite:
            return f"run again, the batch gave the loss {self.loss:.6g} and finite gradients: it cannot be reproduced"
        return "; ".join(self._clauses())

    def _clauses(self) -> Iterator[str]:
        if self.batch:
            yield f"the batch itself is not finite in {_named(self.batch)}"
        if self.parameters:
            yield f"parameters were not finite already: {_named(self.parameters)}"
        if math.isfinite(self.loss):
            yield from self._backward_clauses()
        elif self.module is None:
            yield f"every module's output is finite, the loss made of them is {self.loss}"
        else:
            yield f"the first bad output is that of {_module(self.module)} ({', '.join(self.outputs)})"
        if self.first_inf is not None and self.first_inf != self.module:
            yield f"the first Inf came out of {_module(self.first_inf)}"

    def _backward_clauses(self) -> Iterator[str]:
        yield f"the loss is finite ({self.loss:.6g}), gradients are not in {_named(self.gradients)}"
        if self.backward_module is not None:
            yield f"the first bad one was given by the backward of {_module(self.backward_module)}"
        if self.operation is not None:
            yield f"the first NaN by {self.operation}"

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return {"summary": str(self), **asdict(self)}


def examine(trainer: Any, batch: Any, random_state: Mapping[str, Any], by: str = "autopsy") -> Autopsy:
    """Run a batch again on the weights as they are; the run goes on as if nothing had happened."""
    model, trace = trainer.model, BackwardTrace()
    watches = {kind: Debug(torch.nn.Module, {kind: True}, break_at_terminal=False, keep=1) for kind in ("nan", "inf")}
    hooks = {by: watches["nan"], f"{by} (inf)": watches["inf"], f"{by} (backward)": trace}
    with trainer.rerunning(random_state) as forward:
        with watching(model, hooks, trainer.step):
            loss = forward(_copied(batch))
            bad = bad_gradients(model, loss) if math.isfinite(loss.item()) else ()
        operation = find_operation(model, forward, _copied(batch)) if bad else None
    first = {kind: watch.findings[0] for kind, watch in watches.items() if watch.findings}
    return Autopsy(
        loss=loss.item(),
        **_of_finding(first.get("nan") or first.get("inf")),
        first_inf=first["inf"].module if "inf" in first else None,
        batch=bad_tensors(named_tensors(batch)),
        parameters=bad_tensors(dict(model.named_parameters())),
        gradients=bad,
        backward_module=trace.culprit(bad) if bad else None,
        operation=operation,
    )


def _of_finding(finding: Finding | None) -> dict[str, Any]:
    if finding is None:
        return {}
    return {name: getattr(finding, name) for name in ("module", "statistics", "inputs", "outputs")}


@contextmanager
def watching(model: torch.nn.Module, hooks: Mapping[str, Any], step: int) -> Iterator[None]:
    """Hooks on every module of a model for one block, with a registry of their own; nothing is left behind."""
    manager = HookManager(enable_intervention=True)
    manager.watch(model, SimpleNamespace(step=step, epoch=0, phase="train", trainer=None, model=model))
    try:
        for name, hook in hooks.items():
            manager.register(hook, name, on_error="raise")
        yield
    finally:
        manager.tap.detach()


class BackwardTrace(ForwardHook):
    """Notes, for every call of a module, whether gradients were finite where they came in and where they left.

    It returns nothing and so changes nothing; it intervenes only to be given the live tensors, which carry the graph.
    """

    modules = torch.nn.Module  # all of them, the model itself included, which no name pattern selects
    intervene = True

    def __init__(self) -> None:
        self._calls: list[_Call] = []  # in the order of the forward pass

    def on_forward(self, name: str, inputs: Any, kwargs: Any, output: Any) -> None:
        """Ask every tensor of the call to tell of its gradient."""
        call = _Call(name)
        self._calls.append(call)
        for side, value in ((call.came, output), (call.left, (inputs, kwargs))):
            for tensor in tensors_in(value):
                if tensor.requires_grad:
                    tensor.register_hook(side.append)  # type: ignore[no-untyped-call]

    def culprit(self, parameters: Sequence[str]) -> str | None:
        """The last module of the forward pass, and there the innermost, that got finite gradients and gave others.

        It may have given them to what it was called with, or to `parameters` of its own, those that ended up bad.
        """
        owners = {name.rpartition(".")[0] for name in parameters}
        got_finite = [call for call in self._calls if _finite(call.came)]
        guilty = [call.name for call in got_finite if call.name in owners or not _finite(call.left)]
        return next((one for one in reversed(guilty) if not any(_inside(other, one) for other in guilty)), None)


@dataclass
class _Call:
    """One call of a module, and the gradients of what it made (`came`) and of what it was given (`left`)."""

    name: str
    came: list[torch.Tensor] = field(default_factory=list)
    left: list[torch.Tensor] = field(default_factory=list)


def _finite(gradients: Sequence[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _inside(inner: str, outer: str) -> bool:
    return inner != outer and inner.startswith(f"{outer}." if outer else "")


def bad_gradients(model: torch.nn.Module, loss: torch.Tensor) -> tuple[str, ...]:
    """The parameters whose gradients are not finite; their `.grad` is not touched."""
    wanted = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, retain_graph=True)
    present = {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}
    return bad_tensors(present)


def find_operation(model: torch.nn.Module, forward: Any, batch: Any) -> str | None:
    """Which operation's backward gives NaN, by torch's anomaly detection; None when it finds none (an Inf, say)."""
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # it warns that it is slow, and prints the forward's traceback
        try:
            bad_gradients(model, forward(batch))
        except RuntimeError as error:
            found = _OPERATION.search(str(error))
            return found[1] if found else None
    return None


def bad_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """The names of those that hold a NaN or an Inf."""
    measured = zip(tensors, statistics_of([tensor.detach() for tensor in tensors.values()]), strict=True)
    return tuple(name for name, row in measured if row and row["nan"] + row["inf"] > 0)


def named_tensors(value: Any, name: str = "batch") -> dict[str, torch.Tensor]:
    """The tensors of a nested batch under their places in it: ``batch[0]``, ``batch['input_ids']``."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        items: Any = value.items()
    else:
        items = enumerate(value) if isinstance(value, (tuple, list)) else ()
    return {key: tensor for place, item in items for key, tensor in named_tensors(item, f"{name}[{place!r}]").items()}


def _copied(batch: Any) -> Any:
    """A model that writes into what it is given shall not change the run's."""
    return mapped(torch.Tensor.clone, batch)


def _module(name: str) -> str:
    return name or "the model itself"


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
