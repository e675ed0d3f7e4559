"""The state of a run's hooks as a checkpoint saves it: what they save, the update chain's, and their random streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hookline._console import logger
from hookline._tensors import is_sharded, map_tensors
from hookline.checkpoints.format import Encoder

if TYPE_CHECKING:
    from hookline.core.registry import Registry
    from hookline.run.run import Run

_PROBLEMS = {  # what events.jsonl says about a state, by the field that `Registry.load_state_dict` returns
    "without_hook": "no hook has this name",
    "without_state": "the checkpoint has no state for it",
}


def hooks_state(run: Run) -> dict[str, Any]:
    """Return the hooks' sections of a checkpoint; note which hooks have no state in it.

    The states are encoded already: one that cannot be read or saved is left out, unless its hook's policy ends the run.
    """
    hooks, chain_states = run.hooks, run.chain.states
    states = _encode(hooks, {entry.name: entry.state for entry in hooks.entries()})
    update_states = _encode(hooks, {name: partial(chain_states.get, name) for name in chain_states})
    stateless = [
        entry.name
        for entry in hooks.entries()
        if entry.name not in states.items.keys() | update_states.items.keys()
        and (not entry.built_in or "state_dict" in entry.failures.in_a_row)
    ]
    if stateless and run.run_status.first_time(f"hooks_without_state: {stateless}"):
        run.note("hooks_without_state", hooks=stateless)
    return {
        "hooks": states.section(),
        "hook_names": list(hooks),
        "update_state": update_states.section(),
        "streams": hooks.rng_guard.state_dict(),
    }


def _encode(hooks: Registry, states: Mapping[str, Callable[[], Any]]) -> Encoder:
    """Encode states of hooks, given functions that return them by the hooks' names."""
    encoder = Encoder(with_shards=True)
    for name, read in states.items():
        if name in hooks:
            hooks.failures.state_of(hooks.entry(name), partial(encoder.add, name, read))
    return encoder


def load_hooks_state(run: Run, sections: Mapping[str, Any]) -> None:
    """Restore what `hooks_state` returned, once the counters are restored; record how the hooks differ from then.

    The present hooks and their order count: a new hook starts without a state, and the state of a removed one is left
    out; renaming a hook is both.
    """
    hooks = run.hooks

    def note(kind: str, **fields: Any) -> None:
        if not run.run_ended:  # in that case its record is closed
            run.record.event(kind, run.progress.step, **fields)

    # Update hooks handle gradients on the device, so their state goes there, too; shards are already there.
    run.chain.restore(
        map_tensors(lambda tensor: tensor if is_sharded(tensor) else tensor.to(run.device), sections["update_state"])
    )
    for problem, names in hooks.load_state_dict(sections["hooks"]).items():
        for name in names:
            note("hook_state", hook=name, problem=_PROBLEMS[problem])
    before, now = sections["hook_names"], list(hooks)
    if before != now:
        added, removed = [name for name in now if name not in before], [name for name in before if name not in now]
        moved = [name for name in now if name in before] != [name for name in before if name in now]
        note("hooks_changed", added=added, removed=removed, reordered=moved)
        with_state = [name for name in removed if sections["update_state"].get(name) or sections["hooks"].get(name)]
        if with_state:
            logger.warning(
                "the checkpoint's state of %s is not used: this run has no such hook "
                "(a renamed hook starts without its state)",
                ", ".join(map(repr, with_state)),
            )
    hooks.replan(restored=run.progress)
    hooks.rng_guard.load_state_dict(sections["streams"])
