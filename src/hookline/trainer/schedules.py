"""Resume optimizers and learning-rate schedules at the step of the checkpoint, with their current settings.

A checkpoint has the settings of an optimizer and a scheduler, too, and torch loads both, so that a new `lr` or a longer
`T_max` would be lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from hookline._console import logger
from hookline._text import counted
from hookline.errors import CheckpointError
from hookline.run.saved_parts import another_kind

if TYPE_CHECKING:
    from hookline.trainer.checkpointing import CheckpointedRun

State = Mapping[str, Any]

SETTINGS = (
    "T_max", "eta_min", "total_steps", "total_iters", "start_factor", "end_factor", "power", "gamma", "step_size",
    "milestones", "T_0", "T_mult",
)  # fmt: skip
"""The options of torch's schedulers, by the names in their state; the rest of a state is their position."""
_NO_SETTINGS = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
AFTER_END = {
    "T_max": "the learning rate rises again",
    "total_steps": "the scheduler raises an error",
    "total_iters": "the learning rate is 0",
    "num_training_steps": "the learning rate stays at 0 or rises again",
}


def settings_of(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Return the settings of optimizers' groups, such as `lr`, before training or a scheduler changes them."""
    return [
        [{key: _plain(value) for key, value in group.items() if key not in _NO_SETTINGS} for group in made.param_groups]
        for made in optimizers
    ]


def check_kind_of_scheduler(scheduler: Any, state: State) -> None:
    """Reject the state of a different kind of scheduler, which torch would load, and which would follow no schedule.

    Raises:
        CheckpointError: If only one of them has some fields; the message lists them.
    """
    # A scheduler's functions are not saved.
    present, saved = {key for key, value in scheduler.state_dict().items() if not callable(value)}, state.keys()
    # A newer torch may have added something that is not a setting, so a difference on only one side proves nothing.
    is_setting = not {key.lstrip("_") for key in present ^ saved}.isdisjoint(SETTINGS)
    missing, added = ({key for key in keys if key[0] != "_"} for keys in (saved - present, present - saved))
    # The state of a user's own scheduler may have other keys once it has stepped.
    if is_setting or (missing and added and type(scheduler).__module__.startswith("torch.")):
        raise another_kind("the checkpoint has the state of another kind of scheduler", scheduler, present, saved)


def restore_schedulers(
    run: CheckpointedRun,
    states: Sequence[State],
    optimizer_states: Sequence[dict[str, Any]],
    made_with: Sequence[Sequence[State]],
) -> None:
    """Restore optimizers and schedulers; a scheduler with new settings moves to its place on its new curve.

    It is stepped there from its beginning, as in a run that had these settings from its first step.

    Args:
        run: The run.
        states: The states of its schedulers.
        optimizer_states: The states of its optimizers.
        made_with: The options of the optimizers of the checkpoint's run.

    Raises:
        CheckpointError: If a scheduler ends before the step of the checkpoint, and cannot move there.
    """
    pairs = list(zip(run.schedulers, states, strict=True))
    changes = [_changes(scheduler, state) for scheduler, state in pairs]
    owners: list[Any] = [getattr(scheduler, "optimizer", None) for scheduler in run.schedulers]
    changed = [owner for owner, change in zip(owners, changes, strict=True) if change]
    # All schedulers of one optimizer move together, because each multiplies the rate that the others left.
    moved = [index for index, owner in enumerate(owners) if any(owner is other for other in changed)]
    places = {index: _place(states[index]) for index in moved}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about schedulers that step before their optimizer
        for place in range(max(places.values(), default=0)):
            for index in moved:
                if place < places[index]:
                    _step(run.schedulers[index], changes[index])
    on_curve = {id(owner): [_values(group) for group in owner.param_groups] for owner in changed}
    for optimizer, saved in zip(run.optimizers, optimizer_states, strict=True):
        optimizer.load_state_dict(saved)
    _keep_new_settings(run, made_with, changed)
    for index, (scheduler, state) in enumerate(pairs):
        if index not in moved:
            scheduler.load_state_dict(state)
    for owner, change in zip(owners, changes, strict=True):
        if change:
            old = float(owner.param_groups[0]["lr"])
            for group, values in zip(owner.param_groups, on_curve[id(owner)], strict=True):
                _assign(group, values)
            new = float(owner.param_groups[0]["lr"])
            why = f"{change}: the learning rate changes from {old:.4g} to {new:.4g}, its value on the new schedule"
            logger.warning("%s", why)
            run.note("resume_not_exact", why=why)


def _keep_new_settings(run: CheckpointedRun, made_with: Sequence[Sequence[State]], scheduled: Sequence[Any]) -> None:
    """Keep settings that changed since the checkpoint; the learning rate of `scheduled` optimizers is on a curve."""
    new: dict[str, str] = {}
    for optimizer, then, now in zip(run.optimizers, made_with, run.optimizer_settings, strict=False):
        for group, old, settings in zip(optimizer.param_groups, then, now, strict=False):
            changed = {key: value for key, value in settings.items() if key in old and old[key] != value}
            if any(optimizer is owner for owner in scheduled):
                changed.pop("lr", None)
            _assign(group, changed)
            new |= {key: f"{key}={value}, which was {old[key]}" for key, value in changed.items()}
    if new:
        why = f"the optimizer has {' and '.join(new.values())}: it continues with its current values"
        logger.warning("%s", why)
        run.note("resume_not_exact", why=why)


def warn_of_ends(run: CheckpointedRun) -> None:
    """Warn if a resumed run continues past the end of a schedule."""
    by_epochs = run.options.scheduler_interval == "epoch"
    total = run.total_epochs if by_epochs else run.total_steps
    done = run.progress.epochs_done if by_epochs else run.progress.steps_done
    if total is None or not done:
        return
    for scheduler in run.schedulers:
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
        last = _place(state) + total - done
        ends = [*_ends(state), *_end_of_function(scheduler, _place(state), last)]
        name, value, end = min(ends, key=lambda setting: setting[2], default=("", 0, inf))
        if last > end:
            needs = value + last - end
            early = counted(int(last - end), "epoch" if by_epochs else "step")
            words = (
                "the schedule of %s (%s=%d) ends %s before this run, and then %s; "
                "create it with %s=%d and resume the run"
            )
            logger.warning(words, type(scheduler).__name__, name, value, early, AFTER_END[name], name, needs)


def _changes(scheduler: Any, saved: State) -> str:
    """Say in which settings a scheduler differs from its saved state; empty if in none, or if it has already begun."""
    now = scheduler.state_dict()
    if isinstance(scheduler, ReduceLROnPlateau) or not hasattr(scheduler, "optimizer") or _place(now):
        return ""
    name, old, new = type(scheduler).__name__, list(_settings(saved)), list(_settings(now))
    odd = [(key, then, value) for (key, then), (_, value) in zip(old, new, strict=False) if then != value]
    if [key for key, _ in old] == [key for key, _ in new] and odd:
        listed = " and ".join(f"{key}={value}, which was {then}" for key, then, value in odd)
        keep = ", ".join(f"{key}={then}" for key, then, _ in odd)
        return f"{name} has {listed} (to keep its schedule, create it with {keep})"
    if isinstance(scheduler, LambdaLR) and len(scheduler.lr_lambdas) == len(saved["_last_lr"]):
        place = _place(saved)
        pairs = zip(saved["base_lrs"], scheduler.lr_lambdas, strict=True)
        if [float(rate * factor(place)) for rate, factor in pairs] != list(map(float, saved["_last_lr"])):
            keep = "create it with the parameters that it had, such as total_steps"
            return f"{name} has a different function (to keep its schedule, {keep})"
    return ""


def _settings(state: State) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a scheduler and of those inside it."""
    yield from ((key.lstrip("_"), value) for key, value in state.items() if key.lstrip("_") in SETTINGS)
    if "base_lrs" in state:
        yield "the optimizer's lr", [*map(_plain, state["base_lrs"])]
    for inner in state.get("_schedulers", ()):
        yield from _settings(inner)


def _place(state: State) -> int:
    """Return how often a scheduler has stepped."""
    inner = state.get("_schedulers", ())
    return int(state["last_epoch"]) if "last_epoch" in state else max(map(_place, inner), default=0)


def _ends(state: State, begin: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield the settings that end a schedule, with their value and the step of the scheduler at which it ends."""
    inner, milestones = state.get("_schedulers", ()), state.get("_milestones")
    begins = [0] * len(inner) if milestones is None else [0, *milestones]
    nexts = [inf] * len(inner) if milestones is None else [*milestones, inf]
    for part, at, following in zip(inner, begins, nexts, strict=True):
        yield from (setting for setting in _ends(part, begin + at) if setting[2] < begin + following)
    for name in AFTER_END.keys() & state.keys():
        if name != "total_iters" or "power" in state or state.get("end_factor") == 0:  # others end at a constant rate
            yield name, state[name], begin + state[name]


def _end_of_function(scheduler: Any, place: int, last: int) -> Iterator[tuple[str, int, int]]:
    """Yield the next step at which a `LambdaLR` falls to 0, as Transformers' schedules do at their end."""
    factors = scheduler.lr_lambdas if isinstance(scheduler, LambdaLR) else ()
    ends = (step for step in range(place, last) if all(factor(step) == 0 < factor(step - 1) for factor in factors))
    for end in islice(ends, 1 if factors else 0):
        yield "num_training_steps", end, end


def _step(scheduler: Any, change: str) -> None:
    try:
        scheduler.step()
    except ValueError as error:
        raise CheckpointError(f"{change}: it cannot continue at the checkpoint's position: {error}") from error


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a scheduler may change in an optimizer's group."""
    return {"lr": float(group["lr"]), **{key: group[key] for key in ("momentum", "betas") if key in group}}


def _plain(value: Any) -> Any:
    """Return a setting as a checkpoint has it: a rate may be a tensor, and pairs are lists there."""
    return float(value) if hasattr(value, "fill_") else list(value) if isinstance(value, tuple) else value


def _assign(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if hasattr(group[key], "fill_"):  # a rate that is a tensor
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(group[key], tuple) else value
