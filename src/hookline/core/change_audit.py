"""Record which hook changed what training consists of: hooks may do so, and the run record names them.

Only user hooks that name an argument through which they can write are checked; with `debug` and in `hookline verify`
all of them are, at every call. Otherwise learning rates and batches are compared at every call, the version counters of
parameters on the batches that the registry times (summing a hundred of them takes 10 µs, twice a call), and everything
else, a `RunSnapshot`, at a hook's first call and on one timed batch in eight.

Writes through ``.data`` leave no version, so a snapshot also compares a few elements of some tensors. It does not find
a write to other elements, or to tensors on an accelerator, for which it would wait; `hookline verify` finds these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger
from hookline._tensors import is_dense, iter_tensors, tensor_version
from hookline.core.catalog import Event

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook
    from hookline.core.run_control import RunControl

# A StepContext also leads to the model and the optimizer, but its hooks are too many and rarely write.
LEADS_TO_THE_RUN = {"trainer", "optimizer", "model", "state", "batch"}
LEADS_TO_TENSORS = {"grads", "live_loss"}  # Hooks that name only these are checked on timed batches alone.
SNAPSHOT_ONE_IN = 8  # Of the timed batches: it takes about 1 ms for a hundred parameters.
SNAPSHOT_PARAMS, SNAPSHOT_ELEMENTS = 16, 8  # Parameters whose elements are compared, and elements of each at least.


class ChangeAudit:
    """Note what the user hooks of a run write to; a wrapper of its registry's dispatch.

    Args:
        run: The run whose hooks are checked.
        lr_changes: Returns how often the learning rate was assigned through ``trainer.lr``, which notes it itself.
        reruns: Returns how often a batch was run again, which writes buffers and restores them.
    """

    def __init__(self, run: RunControl, lr_changes: Callable[[], int], reruns: Callable[[], int]) -> None:
        self._run, self._lr_changes, self._reruns = run, lr_changes, reruns
        self._failed = False  # Its own failure is logged once.
        self._times: dict[tuple[str, str, str], int] = {}
        self._timed_calls: Counter[tuple[str, str]] = Counter()
        self._called: set[tuple[str, str]] = set()
        self._snapshots = 0

    def wrap(self, event: Event, hooks: Sequence[BoundHook], timed: bool) -> list[BoundHook]:
        """Return the listeners of an event as they are called."""
        if event.kind != "lifecycle":
            return list(hooks)
        registry = self._run.hooks
        every_call = registry.audits_every_call or registry.failures.debug
        sampled = timed or not event.inner or every_call
        leads = LEADS_TO_THE_RUN | LEADS_TO_TENSORS if sampled else LEADS_TO_THE_RUN
        return [
            self._wrapped(event, hook, sampled, every_call)
            if not hook.built_in and (every_call or not leads.isdisjoint(hook.listener.wanted))
            else hook
            for hook in hooks
        ]

    def _wrapped(self, event: Event, hook: BoundHook, sampled: bool, every_call: bool) -> BoundHook:
        call, find_batch, find_loss = hook.listener.call, _finder(hook, "batch"), _finder(hook, "live_loss")
        key = (hook.hook, event.name)
        # Rare events are always checked in full.
        always = every_call or not (event.inner or "batch" in event.name)

        def compare(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[None]:
            """Read what the hook can write to, and after the call note what is different."""
            lr_changes, reruns, rates = self._lr_changes(), self._reruns(), self._rates()
            params = self._param_versions() if sampled else 0
            batch = find_batch(args, kwargs)
            versions = _versions(batch)
            snapshot = None
            if always or self._is_due(key, sampled):
                self._snapshots += 1
                passed = {"batch": batch, "loss": find_loss(args, kwargs)}
                snapshot = RunSnapshot(self._run, passed, every_call, self._snapshots)
            yield
            if (now := self._rates()) != rates and self._lr_changes() == lr_changes:
                self._note(hook.hook, event, "learning rate", old=rates, new=now)
            changes = dict(snapshot.changes()) if snapshot is not None else {}
            if self._reruns() != reruns:
                changes.pop("buffers", None)
            if sampled and self._param_versions() != params:
                changes.setdefault("parameters", {})
            if _versions(batch) != versions:
                changes.setdefault("batch", {})
            for what, values in changes.items():
                self._note(hook.hook, event, what, **values)

        def audited(*args: Any, **kwargs: Any) -> Any:
            comparison = compare(args, kwargs)
            self._advance(comparison, hook.hook, event)
            try:
                return call(*args, **kwargs)
            finally:  # A hook that fails may have written before.
                self._advance(comparison, hook.hook, event)

        return hook.with_call(audited)

    def _advance(self, comparison: Iterator[None], hook: str, event: Event) -> None:
        """Run the next half of a comparison; if it fails, the hook is called as without it."""
        try:
            next(comparison, None)
        except Exception:
            if not self._failed:
                message = (
                    "what hook %r writes to in %s cannot be compared; the hook is called, and its changes may be missed"
                )
                logger.warning(message, hook, event.name, exc_info=True)
            self._failed = True

    def _is_due(self, key: tuple[str, str], sampled: bool) -> bool:
        """Return whether a snapshot is taken at this call: the first one, and one in several of the sampled ones."""
        is_first = key not in self._called
        self._called.add(key)
        if not sampled:
            return is_first
        self._timed_calls[key] += 1
        return is_first or self._timed_calls[key] % SNAPSHOT_ONE_IN == 1

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
            logger.warning("hook %r modified the %s in %s, step %d", hook, what, event.name, self._run.step)


class RunSnapshot:
    """What a hook can write to, as it was before a call: versions and identities of tensors, options, a few elements.

    Args:
        run: The run.
        passed: Tensors that the hook was called with, by what they are; nested structures are allowed.
        thorough: Whether to compare elements of every parameter, and on accelerators, too, which are waited for.
        number: Decides which parameters' elements are compared if there are many.
    """

    def __init__(self, run: RunControl, passed: dict[str, Any], thorough: bool, number: int) -> None:
        self._run, self._thorough = run, thorough
        self._passed = {what: list(iter_tensors(value)) for what, value in passed.items() if value is not None}
        params = list(run.params.values())
        stride = 1 if thorough else -(-len(params) // SNAPSHOT_PARAMS) or 1
        self._sampled_params: list[torch.Tensor] = [*params[number % stride :: stride]]
        # Tensors are compared by their addresses, which are unique only while all of them are alive.
        self._alive: list[Any] = []
        self._before, self._elements_before = self._read(), self._elements()

    def changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what has changed since, with old and new values where these are small."""
        now, elements = self._read(), self._elements()
        for what, before in self._before.items():
            same_elements = map(torch.equal, self._elements_before.get(what, ()), elements.get(what, ()))
            if now[what] == before and all(same_elements):
                continue
            values = {}
            if what == "optimizer options":
                pairs = [(old, new) for old, new in zip(before, now[what], strict=False) if old != new]
                values = {
                    "old": [_other(old, new) for old, new in pairs],
                    "new": [_other(new, old) for old, new in pairs],
                }
            yield what, values

    def _read(self) -> dict[str, Any]:
        run, optimizers = self._run, self._run.optimizers
        params, buffers = run.params.values(), list(run.model.buffers())
        grads = [param.grad for param in params]
        by_param = [state for one in optimizers for state in one.state.values()]
        states = [value for state in by_param if isinstance(state, Mapping) for value in state.values()]
        self._alive += [buffers, grads, states]
        found: dict[str, Any] = {
            "parameters": [tensor_version(param) for param in params],
            "buffers": [_comparable(buffer) for buffer in buffers],
            "gradients": [_comparable(grad) for grad in grads],
            "optimizer state": [_comparable(state) for state in states],
            "optimizer options": [
                {key: _comparable(value) for key, value in group.items() if key not in ("params", "lr")}
                for one in optimizers
                for group in one.param_groups
            ],
            "train or eval mode": [module.training for module in run.model.modules()],
        }
        return found | {what: [tensor_version(one) for one in tensors] for what, tensors in self._passed.items()}

    def _elements(self) -> dict[str, list[torch.Tensor]]:
        """Return a few elements of some tensors of each kind, as bytes: a NaN then equals itself."""
        params = self._sampled_params
        tensors: dict[str, list[torch.Tensor]] = {
            "parameters": params,
            "gradients": [param.grad for param in params if param.grad is not None],
            "optimizer state": list(
                iter_tensors([one.state.get(param) for one in self._run.optimizers for param in params])
            ),
            **self._passed,
        }
        return {
            what: [_few_elements(one) for one in found if self._is_readable(one)] for what, found in tensors.items()
        }

    def _is_readable(self, tensor: torch.Tensor) -> bool:
        # Subclasses such as DTensor, which are not dense, would communicate.
        has_bytes = is_dense(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        return has_bytes and (self._thorough or tensor.device.type == "cpu")


def _few_elements(tensor: torch.Tensor) -> torch.Tensor:
    stride = max(tensor.numel() // SNAPSHOT_ELEMENTS, 1)
    return tensor.detach().view(-1)[::stride].clone().view(torch.uint8)


def _finder(hook: BoundHook, attribute: str) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """Return a function that finds an argument in a call of a hook; it finds None if the hook does not name it."""
    positional, keywords = hook.listener.positional, hook.listener.keywords
    if attribute in positional:
        index = positional.index(attribute)
        return lambda args, kwargs: args[index]
    name = next((parameter for parameter, source in keywords.items() if source == attribute), None)
    return (lambda args, kwargs: None) if name is None else (lambda args, kwargs: kwargs[name])


def _versions(batch: Any) -> int:
    return 0 if batch is None else sum([tensor_version(tensor) for tensor in iter_tensors(batch)])


def _comparable(value: Any) -> Any:
    """Return a value to compare; tensors are compared by address and version, so that nothing waits for a device."""
    if isinstance(value, torch.Tensor):
        return f"tensor {id(value)} version {tensor_version(value)}"
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_comparable(item) for item in value]
    return repr(value)


def _other(one: dict[str, Any], another: dict[str, Any]) -> dict[str, Any]:
    """Return the items of a dict that are different in another."""
    return {key: value for key, value in one.items() if another.get(key) != value}
