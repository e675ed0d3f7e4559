"""Record which hook changed the state of training, except for `trainer.lr = …`, which run/control.py records.

Only user hooks that name an argument through which they can write are checked; with `debug` and in `hookline verify`
all of them are, and everything is compared at every call. Otherwise, at events inside steps, learning rates and batches
are compared at every call, the version counters of parameters at a hook's first call and at one in 17 (summing a
hundred of them takes 10 µs, twice a call), and everything else, a `RunSnapshot`, at the first call and at one in 136.

Writes through ``.data`` leave no version, so a snapshot also compares a few elements of some tensors. It does not find
a write to other elements, or to tensors on an accelerator, for which it would wait; `hookline verify` finds these.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hookline._console import logger
from hookline._tensors import is_dense, iter_tensors, tensor_version
from hookline.core.catalog import Event

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook
    from hookline.run.control import RunControl

LEADS_TO_THE_RUN = {"trainer", "optimizer", "model", "state", "ctx", "batch"}
LEADS_TO_TENSORS = {"grads", "live_loss"}  # Hooks that name only these are checked where versions are.
VERSIONS_ONE_IN = 17  # A prime, because otherwise it would always fall on the same place in an accumulation window.
SNAPSHOT_ONE_IN = 8 * VERSIONS_ONE_IN  # It takes about 1 ms for a hundred parameters.
SNAPSHOT_TENSORS, SNAPSHOT_ELEMENTS = 16, 8  # Parameters or buffers that are compared, and elements of each at least.
PASSED = {"batch": "batch", "live_loss": "loss"}  # Arguments whose tensors are compared, and what these are.


class ChangeAudit:
    """Note what the user hooks of a run write to; a wrapper of its registry's dispatch.

    Args:
        run: The run whose hooks are checked.
    """

    def __init__(self, run: RunControl) -> None:
        self._run = run
        self._failed = False  # The audit's own failure is logged once.
        self._times: dict[tuple[str, str, str], int] = {}
        self._sampled: set[tuple[str, str]] = set()  # Hooks and what they wrote, where not every call is compared.
        self.summary = ""
        """The things each hook wrote to and how often, once the run is over."""
        self._calls: Counter[tuple[str, str]] = Counter()
        self._snapshots = 0

    def wrap(self, event: Event, hook: BoundHook) -> BoundHook:
        """Return a listener of an event as it is called."""
        registry, listener = self._run.hooks, hook.listener
        every_call = registry.audits_every_call or registry.failures.debug
        names_run = not LEADS_TO_THE_RUN.isdisjoint(listener.wanted)
        can_write = every_call or names_run or not LEADS_TO_TENSORS.isdisjoint(listener.wanted)
        if event.kind != "lifecycle" or hook.built_in or not can_write:
            return hook
        call, names_tensors = hook.call, not PASSED.keys().isdisjoint(listener.wanted)
        # Rare events are always checked in full.
        always = every_call or not (event.inner or "batch" in event.name)

        def snapshot(number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> RunSnapshot:
            """Read what the hook can write to."""
            named: dict[str, Any] = {}
            if names_tensors:
                named.update(zip(listener.positional, args, strict=True))
                named.update((listener.keywords[name], value) for name, value in kwargs.items())
            versions, full = always or number % VERSIONS_ONE_IN == 0, always or number % SNAPSHOT_ONE_IN == 0
            self._snapshots += full
            return RunSnapshot(self._run, named, versions, self._snapshots if full else None, every_call)

        def compare(before: RunSnapshot) -> None:
            """Note what is different."""
            for what, values in before.changes():
                if not always and what not in ("learning rate", "batch"):
                    self._sampled.add((hook.hook, what))
                self._note(hook.hook, event, what, **values)

        def audited(*args: Any, **kwargs: Any) -> Any:
            number = self._calls[hook.place]  # From 0.
            self._calls[hook.place] = number + 1
            if not (always or names_run) and number % VERSIONS_ONE_IN:
                return call(*args, **kwargs)
            before = self._try(hook, snapshot, number, args, kwargs)
            try:
                return call(*args, **kwargs)
            finally:  # A hook that fails may have written before.
                if before is not None:
                    self._try(hook, compare, before)

        return hook.with_call(audited)

    def _try(self, hook: BoundHook, function: Callable[..., Any], *args: Any) -> Any:
        """Make a half of a comparison; if it fails, return None, and the hook is called as without it."""
        try:
            return function(*args)
        except Exception:
            if not self._failed:
                message = "changes by hook %r in %s cannot be checked; it is called, and its changes may be missed"
                logger.warning(message, *hook.place, exc_info=True)
            self._failed = True

    def _note(self, hook: str, event: Event, what: str, **values: Any) -> None:
        """Write to the record at the first, second, fourth, eighth … time and the end; log the first, except rates."""
        key = (hook, event.name, what)
        times = self._times[key] = self._times.get(key, 0) + 1
        if _is_power_of_two(times):
            self._run.note("hook_wrote", hook=hook, on=event.name, what=what, times=times, **values)
        if times == 1 and what != "learning rate":
            logger.warning("hook %r modified the %s in %s, step %d", hook, what, event.name, self._run.step)

    def finish(self) -> None:
        """Write the counts that are not yet in the record, and start counting for another run."""
        totals: Counter[tuple[str, str]] = Counter()
        for (hook, on, what), times in self._times.items():
            totals[hook, what] += times
            if not _is_power_of_two(times):
                self._run.note("hook_wrote", hook=hook, on=on, what=what, times=times)
        by_hook: dict[str, list[str]] = {}
        for (hook, what), times in totals.items():
            count = f"{'at least ' if (hook, what) in self._sampled else ''}{times}"
            by_hook.setdefault(hook, []).append(f"{what} ({count} {'time' if times == 1 else 'times'})")
        self.summary = ", ".join(f"hook {hook!r} modified the {' and '.join(by_hook[hook])}" for hook in by_hook)
        self._times.clear()
        self._sampled.clear()


class RunSnapshot:
    """The state that a hook can write to, before a call: versions and identities of tensors, options, a few elements.

    Args:
        run: The run.
        named: The hook's arguments, by name.
        versions: Whether to compare the versions of the parameters.
        number: Whether to compare everything, and if so, which parameters' elements if there are many.
        thorough: Whether to compare elements of every parameter, and on accelerators, too, which are waited for.
    """

    def __init__(
        self, run: RunControl, named: dict[str, Any], versions: bool, number: int | None, thorough: bool
    ) -> None:
        self._run, self._versions, self._full, self._thorough = run, versions, number is not None, thorough
        self._passed = {what: list(iter_tensors(named[name])) for name, what in PASSED.items() if name in named}
        if number is not None:
            self._sampled_params = self._some(list(run.params.values()), number)
            self._sampled_buffers = self._some(list(run.model.buffers()), number)
        self._lr_changes, self._reruns = run.lr_changes, run.reruns
        # Tensors are compared by their addresses, which are unique only while all of them are alive.
        self._alive: list[Any] = []
        self._before = self._read()

    def _some(self, tensors: list[Any], number: int) -> list[torch.Tensor]:
        stride = 1 if self._thorough else -(-len(tensors) // SNAPSHOT_TENSORS) or 1
        return tensors[number % stride :: stride]

    def changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield everything that has changed since, with old and new values where these are small."""
        now = self._read()
        # The run itself records the changes it is asked to make, and a rerun restores the buffers.
        is_known = {
            "learning rate": self._run.lr_changes != self._lr_changes, "buffers": self._run.reruns != self._reruns
        }  # fmt: skip
        for what, before in self._before.items():
            if now[what] == before or is_known.get(what):
                continue
            values = {"old": before, "new": now[what]} if what == "learning rate" else {}
            if what == "optimizer options":
                pairs = [(old, new) for old, new in zip(before, now[what], strict=False) if old != new]
                values = {
                    "old": [_other(old, new) for old, new in pairs],
                    "new": [_other(new, old) for old, new in pairs],
                }
            yield what, values

    def _read(self) -> dict[str, Any]:
        run, optimizers = self._run, self._run.optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        values: dict[str, Any] = {"learning rate": [_comparable(group["lr"]) for group in groups]}
        for what, tensors in self._passed.items():
            values[what] = [tensor_version(tensor) for tensor in tensors]
        if self._versions:
            values["parameters"] = [tensor_version(param) for param in run.params.values()]
        if not self._full:
            return values
        modules, params = list(run.model.modules()), run.params.values()
        buffers, grads = list(run.model.buffers()), [param.grad for param in params]
        forwards = [vars(module).get("forward") for module in modules]  # A function that replaces the method.
        by_param = [state for optimizer in optimizers for state in optimizer.state.values()]
        states = [value for state in by_param if isinstance(state, Mapping) for value in state.values()]
        self._alive += [modules, forwards, buffers, grads, states]
        values |= {
            "buffers": [_comparable(buffer) for buffer in buffers],
            "gradients": [_comparable(grad) for grad in grads],
            "optimizer state": [_comparable(state) for state in states],
            "optimizer options": [
                {key: _comparable(value) for key, value in group.items() if key not in ("params", "lr")}
                for group in groups
            ],
            "train or eval mode": [module.training for module in modules],
            "requires_grad of parameters": [param.requires_grad for param in params],
            "submodules": [*map(id, modules), *map(id, forwards)],
        }
        sampled = self._sampled_params
        sampled_states = [optimizer.state.get(param) for optimizer in optimizers for param in sampled]
        compared_by_elements = {
            "parameters": sampled,
            "buffers": self._sampled_buffers,
            "gradients": [param.grad for param in sampled if param.grad is not None],
            "optimizer state": iter_tensors(sampled_states),
            **self._passed,
        }
        for what, chosen in compared_by_elements.items():
            values[what] = values[what], [_few_elements(tensor) for tensor in chosen if self._is_readable(tensor)]
        return values

    def _is_readable(self, tensor: torch.Tensor) -> bool:
        # Subclasses such as DTensor, which are not dense, would communicate.
        has_bytes = is_dense(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        return has_bytes and (self._thorough or tensor.device.type == "cpu")


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _few_elements(tensor: torch.Tensor) -> bytes:
    """Return a few elements as bytes: a NaN then equals itself."""
    stride = max(tensor.numel() // SNAPSHOT_ELEMENTS, 1)
    few = tensor.detach().view(-1)[::stride].to("cpu").contiguous()
    return ctypes.string_at(few.data_ptr(), few.nbytes)


def _comparable(value: Any) -> Any:
    """Return a value to compare; tensors are compared by address and version, so that nothing waits for a device."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return f"tensor {id(value)} version {tensor_version(value)}"
    if isinstance(value, (tuple, list)):
        return [_comparable(item) for item in value]
    return repr(value)


def _other(items: dict[str, Any], another: dict[str, Any]) -> dict[str, Any]:
    """Return the items of a dict that are different in another."""
    return {key: value for key, value in items.items() if another.get(key) != value}
