"""Load the weights of a checkpoint, and check that the state of its optimizers fits those of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch

from hookline._names import load_plain_state_dict, plain_state_dict
from hookline.errors import CheckpointError


def load_saved_weights(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights under their plain names.

    Raises:
        CheckpointError: If a tensor does not fit; it names the first, where torch would list all of them.
    """
    try:
        load_plain_state_dict(model, weights)
    except RuntimeError as error:
        misfits = [*_misfits(plain_state_dict(model), weights)]
        if not misfits:
            raise
        more = f", and {len(misfits) - 1} more" if len(misfits) > 1 else ""
        what = f"the saved weights do not fit the model: {misfits[0]}{more}"
        raise CheckpointError(f"{what}; build the model as it was when they were saved") from error


def _misfits(model: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with each tensor in which a model's state and a saved one differ."""
    for name in {**model, **saved}:
        if name not in saved:
            yield f"{name} is not among them"
        elif name not in model:
            yield f"the model has no {name}"
        elif (now := getattr(model[name], "shape", None)) != (then := getattr(saved[name], "shape", None)):
            yield f"size mismatch: {name} was {list(then or ())}, and is {list(now or ())}"


def check_kind(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Reject the state of a different kind of optimizer, which torch would load and which would fail in its first step.

    Raises:
        CheckpointError: If each of them has options that the other one lacks; the message lists them.
    """
    # A newer torch may have added options to an optimizer, so a difference on only one side proves nothing.
    present = {key for group in optimizer.param_groups for key in group}
    saved = {key for group in state["param_groups"] for key in group}
    if present - saved and saved - present:
        raise another_kind("the checkpoint has the state of another kind of optimizer", optimizer, present, saved)


def another_kind(what: str, part: object, present: Set[str], saved: Set[str]) -> CheckpointError:
    """Return the error that an optimizer or a scheduler cannot continue what was saved, given the keys of both."""
    return CheckpointError(
        f"{what}: it has {_listed(saved - present)}, {type(part).__name__} has {_listed(present - saved)}; resume with "
        "the same kind, or start a new run from the weights alone (init_from)"
    )


def missing_state(optimizer: torch.optim.Optimizer) -> str:
    """Say why a step of an optimizer may not find its state in a run that continues from a checkpoint."""
    problem = f"the checkpoint lacks this if its optimizer was not {type(optimizer).__name__}, or had different options"
    return f"{problem}; resume with the original optimizer, or start a new run from the weights alone (init_from)"


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing else"


def check_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Reject the state of an optimizer with different parameter groups; check it after the weights, which say more.

    Raises:
        CheckpointError: With the number of parameters of each group.
    """
    then, now = (
        " and ".join(str(len(group["params"])) for group in groups)
        for groups in (state["param_groups"], optimizer.param_groups)
    )
    if then != now:
        what = f"the groups of {type(optimizer).__name__} had {then} parameters, and have {now}"
        raise CheckpointError(f"{what}; pass it the parameters in the same groups as before")
