"""Run a batch again with hooks on every module, and name the first module, tensor or operation that went wrong."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from hookline._names import plain_parameters
from hookline._tensors import iter_tensors, map_tensors, tensors_with_keys
from hookline._text import first_of
from hookline.activations.debug import Debug, statistics_of
from hookline.core.base import ForwardHook
from hookline.run.control import ModelCall, RunControl
from hookline.run.manager import HookManager

_OPERATION = re.compile(r"Function '(\w+)'")
NAMES_SHOWN = 3


@dataclass(frozen=True)
class Diagnosis:
    """The result of running a batch again. Names are in the order of the model or the batch.

    The report of a crash holds these fields under these names.
    """

    loss: float | None
    """The loss, if it is known how to compute it; otherwise only the model was called."""
    module: str | None = None
    """The first module whose output contained a NaN, or else the first whose output contained an Inf."""
    statistics: dict[str, float] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    first_inf: str | None = None
    """The first module whose output contained an Inf: an overflow there may have become NaN later."""
    batch: tuple[str, ...] = ()
    """The tensors of the batch that are not finite."""
    parameters: tuple[str, ...] = ()
    """The parameters that are not finite."""
    gradients: tuple[str, ...] = ()
    """The parameters whose gradients are not finite although the loss is."""
    backward_module: str | None = None
    """The module whose backward turned finite gradients into non-finite ones, for its inputs or its parameters."""
    operation: str | None = None
    """The operation whose backward returned NaN, as torch's anomaly detection calls it."""

    @property
    def finite(self) -> bool:
        """Whether all numbers were finite this time."""
        is_fine = self.module is None if self.loss is None else math.isfinite(self.loss)
        return is_fine and not self.gradients

    @property
    def origin(self) -> str | None:
        """The module that the bad numbers came from, if it is known."""
        return self.module if self.backward_module is None else self.backward_module

    def __str__(self) -> str:
        if self.finite and self.loss is None:
            return "running it again gave only finite outputs: the problem cannot be reproduced without the loss"
        if self.finite:
            result = f"running it again gave the loss {self.loss:.6g} and finite gradients"
            return f"{result}: the problem cannot be reproduced"
        return "; ".join(self._clauses())

    def _clauses(self) -> Iterator[str]:
        gradients = f"not the gradients of {first_of(self.gradients, NAMES_SHOWN)}"
        if self.batch:
            yield f"the batch itself is not finite in {first_of(self.batch, NAMES_SHOWN)}"
        if self.parameters:
            yield f"parameters were already not finite: {first_of(self.parameters, NAMES_SHOWN)}"
        if self.loss is None and self.module is None:
            yield f"the model's outputs are finite, but {gradients}"
            yield "the cause is the loss or the backward pass, which can be run again only with step_fn"
        elif self.loss is not None and math.isfinite(self.loss):
            yield f"the loss is finite ({self.loss:.6g}), but {gradients}"
            if self.backward_module is not None:
                yield f"the first bad gradient came from the backward pass of {_module(self.backward_module)}"
            if self.operation is not None:
                yield f"the first NaN came from {self.operation}"
        elif self.module is None:
            yield f"every module's output is finite, but the loss computed from them is {self.loss}"
        else:
            # An Inf elsewhere may have come before the NaN.
            what = "bad output came from" if self.first_inf in (None, self.module) else "NaN came out of"
            yield f"the first {what} {_module(self.module)} ({', '.join(self.outputs)})"
        if self.first_inf is not None and self.first_inf != self.module:
            yield f"the first Inf came out of {_module(self.first_inf)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and a summary, for the report of a crash."""
        return {"summary": str(self), **asdict(self)}


def diagnose(
    trainer: RunControl, batch: Any, random_state: dict[str, Any], by: str, *, backward: bool = True, step: int = -1
) -> Diagnosis:
    """Run a batch again on the current weights; the run continues as if nothing had happened.

    Args:
        trainer: The run.
        batch: The micro-batch, or a call of the model.
        random_state: What `trainer.random_state()` returned before its forward pass.
        by: The name that errors of the temporary hooks mention.
        backward: Whether to run the backward pass again if the loss is finite.
        step: The step of the batch; by default the current one.

    Returns:
        The problem, if there is one.
    """
    model, step, trace = trainer.model, trainer.step if step < 0 else step, BackwardTrace()
    # A model that writes into its input must not change the run's batch.
    copied = map_tensors(torch.Tensor.clone, batch)
    nan, inf = (Debug(torch.nn.Module, {kind: True}, break_at_terminal=False, keep=1) for kind in ("nan", "inf"))
    manager = HookManager(enable_intervention=True)  # a registry of these hooks alone
    manager.watch(model, SimpleNamespace(step=step, epoch=0, phase="train", trainer=None, model=model))
    with trainer.rerunning(random_state) as forward:
        try:
            for name, hook in {by: nan, f"{by} (inf)": inf, f"{by} (backward)": trace}.items():
                manager.register(hook, name, on_error="raise")
            output = forward(copied)
            loss = None if isinstance(batch, ModelCall) else output.item()
            is_fine = are_finite(list(iter_tensors(output)))
            bad = nonfinite_gradients(model, output) if backward and loss is not None and is_fine else ()
        finally:
            manager.dispatcher.detach()
        # Anomaly detection raises at the first NaN, so it gets a forward pass without the hooks.
        operation = _find_operation(model, forward, map_tensors(torch.Tensor.clone, batch)) if bad else None
    # An Inf may be harmless, or become NaN later, so a NaN is reported first.
    first = next(iter([*nan.findings, *inf.findings]), None)
    if loss is None and is_fine and not nan.findings:
        first = None  # an Inf that did no harm, such as a mask
    names = ("module", "statistics", "inputs", "outputs")
    return Diagnosis(
        loss=loss,
        **({} if first is None else {name: getattr(first, name) for name in names}),
        first_inf=inf.findings[0].module if inf.findings else None,
        batch=nonfinite_names(name_batch_tensors(batch)),
        parameters=nonfinite_names(plain_parameters(model)),
        gradients=bad,
        backward_module=trace.find_source(bad) if bad else None,
        operation=operation,
    )


class BackwardTrace(ForwardHook):
    """Collects the gradients of the outputs and inputs of every call of a module.

    It intervenes only to get the live tensors, which are part of the graph; it changes nothing.
    """

    modules = torch.nn.Module  # every module; a name pattern would not select the model itself
    intervene = True

    def __init__(self) -> None:
        # Each call of a module, in the order of the forward pass: name, gradients of the outputs and of the inputs.
        self._calls: list[tuple[str, list[torch.Tensor], list[torch.Tensor]]] = []

    def on_forward(self, name: str, inputs: Any, kwargs: Any, output: Any) -> None:
        """Register a hook on every tensor of the call that collects its gradient."""
        of_outputs, of_inputs = list[torch.Tensor](), list[torch.Tensor]()
        self._calls.append((name, of_outputs, of_inputs))
        for gradients, value in ((of_outputs, output), (of_inputs, (inputs, kwargs))):
            for tensor in iter_tensors(value):
                if tensor.requires_grad:
                    tensor.register_hook(gradients.append)  # type: ignore[no-untyped-call]

    def find_source(self, parameters: Sequence[str]) -> str | None:
        """Return the last module of the forward pass, innermost first, that made finite gradients non-finite.

        Args:
            parameters: The parameters whose gradients are not finite; their modules count too, if they got finite
                gradients.
        """
        owners = {name.rpartition(".")[0] for name in parameters}
        sources = [
            name
            for name, of_outputs, of_inputs in self._calls
            if are_finite(of_outputs) and (name in owners or not are_finite(of_inputs))
        ]
        for outer in reversed(sources):
            prefix = f"{outer}." if outer else ""
            if not any(inner != outer and inner.startswith(prefix) for inner in sources):
                return outer
        return None


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all numbers in all tensors are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def nonfinite_gradients(model: torch.nn.Module, loss: torch.Tensor) -> tuple[str, ...]:
    """Return the parameters whose gradients are not finite; their `.grad` is left alone."""
    params = {name: param for name, param in plain_parameters(model).items() if param.requires_grad}
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, retain_graph=True)
    return nonfinite_names({name: grad for name, grad in zip(params, grads, strict=True) if grad is not None})


def _find_operation(model: torch.nn.Module, forward: Callable[[Any], torch.Tensor], batch: Any) -> str | None:
    """Return the operation whose backward gives NaN, by torch's anomaly detection; None if it finds only an Inf."""
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # it warns that it is slow, and prints the forward's traceback
        try:
            nonfinite_gradients(model, forward(batch))
        except RuntimeError as error:
            match = _OPERATION.search(str(error))
            return match[1] if match else None
    return None


def nonfinite_names(tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the tensors that contain a NaN or an Inf."""
    rows = zip(tensors, statistics_of([tensor.detach() for tensor in tensors.values()]), strict=True)
    return tuple(name for name, row in rows if row and row["nan"] + row["inf"] > 0)


def name_batch_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """Return a nested batch's tensors by the expressions that lead to them: ``batch[0]``, ``batch['input_ids']``."""
    named = list(tensors_with_keys(batch))
    if isinstance(batch, ModelCall):  # ``args[0]``, ``kwargs['input_ids']``
        return {keys[0] + "".join(f"[{key!r}]" for key in keys[1:]): tensor for keys, tensor in named}
    return {"batch" + "".join(f"[{key!r}]" for key in keys): tensor for keys, tensor in named}


def _module(name: str) -> str:
    return f"module {name!r}" if name else "the model itself"
