"""Record which hook changed learning rates, parameters or batches: hooks may do so, and the run record names them.

Only user hooks that name an argument through which they can write are checked. Learning rates and batches are compared
at every call. The version counters of all parameters are summed on the batches that the registry times, because that
takes 10 µs for a hundred parameters, twice a call; with `debug` and in `hookline verify` at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookline._tensors import iter_tensors, tensor_version
from hookline.core.catalog import Event
from hookline.core.failures import logger

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook
    from hookline.core.run_control import RunControl

# A StepContext also leads to the model and the optimizer, but its hooks are too many and rarely write.
LEADS_TO_THE_RUN = {"trainer", "optimizer", "model", "state", "batch"}


class ChangeAudit:
    """Note what the user hooks of a run write to; a wrapper of its registry's dispatch.

    Args:
        run: The run whose hooks are checked.
        lr_changes: Returns how often the learning rate was assigned through ``trainer.lr``, which notes it itself.
    """

    def __init__(self, run: RunControl, lr_changes: Callable[[], int]) -> None:
        self._run, self._lr_changes = run, lr_changes
        self._times: dict[tuple[str, str, str], int] = {}

    def wrap(self, event: Event, hooks: Sequence[BoundHook], timed: bool) -> list[BoundHook]:
        """Return the listeners of an event as they are called."""
        if event.kind != "lifecycle":
            return list(hooks)
        registry = self._run.hooks
        with_params = timed or not event.inner or registry.audits_every_call or registry.failures.debug
        return [
            hook
            if hook.built_in or LEADS_TO_THE_RUN.isdisjoint(hook.listener.wanted)
            else self._wrapped(event, hook, with_params)
            for hook in hooks
        ]

    def _wrapped(self, event: Event, hook: BoundHook, with_params: bool) -> BoundHook:
        call, find_batch = hook.listener.call, _batch_finder(hook)

        def audited(*args: Any, **kwargs: Any) -> Any:
            lr_changes, rates = self._lr_changes(), self._rates()
            params = self._param_versions() if with_params else 0
            batch = find_batch(args, kwargs)
            versions = _versions(batch)
            result = call(*args, **kwargs)
            if (now := self._rates()) != rates and self._lr_changes() == lr_changes:
                self._note(hook.hook, event, "learning rate", old=rates, new=now)
            if with_params and self._param_versions() != params:
                self._note(hook.hook, event, "parameters")
            if _versions(batch) != versions:
                self._note(hook.hook, event, "batch")
            return result

        return hook.with_call(audited)

    def _rates(self) -> list[Any]:
        return [_comparable(group["lr"]) for one in self._run.optimizers for group in one.param_groups]

    def _param_versions(self) -> int:
        return sum([tensor_version(param) for param in self._run.params.values()])

    def _note(self, hook: str, event: Event, what: str, **values: Any) -> None:
        """Write to the record at the first, second, fourth, eighth … time; log the first, unless it was a rate."""
        key = (hook, event.name, what)
        times = self._times[key] = self._times.get(key, 0) + 1
        if times & (times - 1) == 0:
            self._run.note("hook_wrote", hook=hook, on=event.name, what=what, times=times, **values)
        if times == 1 and what != "learning rate":
            logger.warning("hook %r modified the %s in %s", hook, what, event.name)


def _batch_finder(hook: BoundHook) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """Return a function that finds the batch among the arguments of a call; it finds None if the hook names none."""
    positional, keywords = hook.listener.positional, hook.listener.keywords
    if "batch" in positional:
        index = positional.index("batch")
        return lambda args, kwargs: args[index]
    name = next((parameter for parameter, source in keywords.items() if source == "batch"), None)
    return (lambda args, kwargs: None) if name is None else (lambda args, kwargs: kwargs[name])


def _versions(batch: Any) -> int:
    return 0 if batch is None else sum([tensor_version(tensor) for tensor in iter_tensors(batch)])


def _comparable(rate: Any) -> Any:
    """Return a rate to compare; a tensor is compared by its version, so that nothing waits for a device."""
    return f"tensor {id(rate)} version {tensor_version(rate)}" if isinstance(rate, torch.Tensor) else rate
