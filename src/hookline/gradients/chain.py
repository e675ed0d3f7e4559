"""`UpdateChain`: run the update hooks over a model's gradients, once per optimizer step.

Hooks run in registration order, without autograd. Each gets the gradients as the hooks before it left them and returns
what the optimizer is to use; that is checked and taken over as a whole, so a hook that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import torch

from hookline._tensors import tensor_version
from hookline.core.catalog import CATALOG
from hookline.core.costs import Cost
from hookline.core.dispatch import FAILED, BoundHook, Dispatch, invoke
from hookline.core.entry import Entry
from hookline.core.failures import argument_if_any
from hookline.core.patterns import select
from hookline.core.registry import HookRegistry
from hookline.errors import GradientError, HooklineError
from hookline.gradients.local_storage import is_sharded
from hookline.gradients.view import GradientCache, Gradients, Parameters
from hookline.stats.columns import INFS, NANS
from hookline.stats.distributed import LocalTensors

ON_UPDATE = CATALOG["on_update"]
DECLARE = "an update hook that writes in place sets inplace = True (on its class, or on the function)"


class UpdateChain:
    """Runs the update hooks of a registry over a model's gradients, and stores their state.

    Args:
        registry: The registry; the chain provides the callable of its event `on_update`.
        params: Returns the trained parameters by name.
        model: The model, so that hooks can select parameters by the class of their module.
    """

    def __init__(
        self, registry: HookRegistry, params: Callable[[], Parameters], model: torch.nn.Module | None = None
    ) -> None:
        self.registry = registry
        self._params, self._model = params, model
        self.states: dict[str, Any] = {}
        self._owners: dict[str, Any] = {}  # the hook of each state: another hook of the same name gets a new state
        self._unclaimed: dict[str, Any] = {}  # a checkpoint's states of hooks that are not registered yet
        self._cache = GradientCache()
        registry.add_registration_check(self._check)
        registry.on_change(self._drop_removed)
        registry.dispatch_table.compile_with("on_update", self.compile)

    def compile(self, bound: list[BoundHook], timed: bool) -> Dispatch | None:
        """Return the callable that runs these hooks; None if there is nothing to run."""
        measures_cost = timed and not self.registry.scheduler.decision.due
        if not measures_cost and all(map(_passes_through, bound)):
            return None  # the default hook alone has nothing to do, and is only called to measure its cost
        items = [self._make_item(one) for one in bound]
        reporter = next((item for item in items if getattr(item.bound.owner, "reports_norms", False)), None)
        first_clip = next((item for item in items if item.clips), None)
        reads_total = first_clip is not None and not first_clip.clips_globally  # it finds another norm than the step's

        @torch.no_grad()
        def on_update(args: Any) -> None:
            try:
                for item in items:
                    if reads_total and item is first_clip:
                        args.clipped(Gradients(self._params(), self._cache).norm(), True)
                    reported = reporter if not _passes_through(item.bound) else None
                    self._report_norm(reported, item, "before", args)
                    proceed = self._run(item, args, timed)
                    self._report_norm(reported, item, "after", args)
                    if not proceed:
                        break  # no optimizer uses these gradients, and hooks with a memory should not see them
            finally:
                self._cache.replaced()  # otherwise it would keep the gradients alive

        return on_update

    def _run(self, item: ChainItem, args: Any, timed: bool) -> bool:
        """Run one hook under its failure policy; return whether the step proceeds."""
        failures = self.registry.failures
        if invoke(ON_UPDATE, item.bound, failures, args, read=item.read, call=item.run, timed=timed) is FAILED:
            if item.half_written is None:
                return True
            skip = getattr(argument_if_any(args, "trainer", None), "skip_step", None)
            if skip is None:
                raise item.half_written  # only the owner of the loop could skip the step
            skip(f"{item.bound.hook} left half-written gradients")
            return False
        if item.clips:
            args.clipped(item.bound.owner.clipped_norm, item.clips_globally)
            if handler := self.registry.slots.on_gradient_clip:
                with torch.enable_grad():  # as at every other event
                    handler(args)
                self._cache.replaced()  # its hooks may write gradients
        return not (item.may_skip and getattr(args, "skip_requested_at", None) == args.step)

    def _report_norm(self, reporter: ChainItem | None, item: ChainItem, when: str, args: Any) -> None:
        """Log the norm of what a hook selects, if the hook `link_norms` is due."""
        if reporter is None:
            return
        try:
            args.trainer.log(f"update/{item.bound.hook}/norm_{when}", item.cached_grads.norm())
        except Exception as error:
            if self.registry.failures.handle(ON_UPDATE, reporter.bound, error, args) is not None:
                raise

    # ---- hooks and their state -------------------------------------------------------------------------------------

    def _make_item(self, bound: BoundHook) -> ChainItem:
        selected = self._select(bound.hook, bound.owner)
        self._make_state(bound.hook, bound.owner, selected)
        self._unclaimed.pop(bound.hook, None)  # a hook that is registered later under this name starts fresh
        item = ChainItem(
            bound,
            selected,
            self._cache,
            self.states,
            may_fail=self.registry.entry(bound.hook).policy != "raise",
            selects_all=len(selected) == len(self._params()),
        )
        # Checked for NaN: a user's hook unless it declines, any hook that asks for it, and with `debug` every hook.
        asks = getattr(bound.owner, "check_finite", None)
        wait = bool(self.registry.failures.debug or asks)
        if not _passes_through(bound) and (wait or (asks is None and not bound.built_in)):
            cost = self.registry.dispatch_table.argument_costs[f"whether {bound.hook} left finite gradients"]
            item.finite_check = FiniteCheck(item.cached_grads, cost, wait)
        return item

    def _check(self, entry: Entry) -> None:
        """Select parameters and make the state when a hook is registered, so that errors show there."""
        if "on_update" in entry.listeners:
            self._make_state(entry.name, entry.hook, self._select(entry.name, entry.hook))

    def _select(self, name: str, hook: Any) -> Parameters:
        try:
            return select_parameters(getattr(hook, "params", None), self._params(), self._model)
        except HooklineError as error:
            raise HooklineError(f"hook {name!r}: {error}") from None

    def _make_state(self, name: str, hook: Any, selected: Parameters) -> None:
        """Make a hook's state once, or take it from the checkpoint that was loaded before."""
        if name not in self.states or self._owners.get(name) is not hook:
            made = _initial_state(name, hook, selected)
            self.states[name] = _completed(self._unclaimed.get(name, made), made, selected)
            self._owners[name] = hook

    def restore(self, states: Mapping[str, Any]) -> None:
        """Load a checkpoint's states; those of hooks that are not registered yet are kept for them."""
        for name, state in states.items():
            if name in self.states:
                self.states[name] = _completed(state, self.states[name], self._select(name, self._owners[name]))
            else:
                self._unclaimed[name] = state

    def reselect_parameters(self) -> None:
        """Select among changed parameters, and add to the states what new parameters need."""
        for name, hook in self._owners.items():
            if isinstance(state := self.states.get(name), dict):
                self.states[name] = {**_initial_state(name, hook, self._select(name, hook)), **state}
        self.registry.dispatch_table.reset()

    def _drop_removed(self) -> None:
        """Drop the states of removed hooks."""
        if len(self.states) > self.registry.dispatch_table.listener_counts["on_update"]:
            for name in [name for name in self.states if name not in self.registry]:
                del self.states[name], self._owners[name]


class ChainItem:
    """One update hook of the chain: calls it and takes over what it returns as a whole, or restores everything.

    Args:
        bound: The hook and its listener.
        params: The parameters it selects.
        cache: The chain's cache.
        states: The chain's states by hook, which a checkpoint may replace.
        may_fail: Whether its policy lets the run continue after a failure.
        selects_all: Whether it selects all trained parameters.
    """

    def __init__(
        self,
        bound: BoundHook,
        params: Parameters,
        cache: GradientCache,
        states: Mapping[str, Any],
        may_fail: bool,
        selects_all: bool,
    ) -> None:
        self.bound, self._cache, self._states = bound, cache, states
        self.cached_grads = Gradients(params, cache)
        # A user's hook may write or replace gradients at any time, so it reads nothing from the cache.
        self.grads = self.cached_grads if bound.built_in else Gradients(params)
        owner = bound.owner
        self._in_place = bool(getattr(owner, "inplace", False))
        self._needs_backup = self._in_place and may_fail
        # A user's hook may write in place without saying so, or fail half-way: that must be noticed.
        self._detects_writes = not bound.built_in and not self._needs_backup
        self._may_write = not bound.built_in or getattr(owner, "intervenes", True)
        self._only_grads = bound.listener.positional == ("grads",) and not bound.listener.keywords
        self._named = tuple(name for name in bound.listener.wanted if name not in ("grads", "own_state"))
        self.may_skip = "trainer" in self._named  # only a hook that has the trainer can skip a step
        self.clips = bool(getattr(owner, "clips", False))
        self.clips_globally = self.clips and selects_all and getattr(owner, "norm_type", 2.0) == 2.0
        self.half_written: Exception | None = None  # its failure, if what it had written could not be restored
        self.finite_check: FiniteCheck | None = None

    def read(self, args: Any) -> tuple[tuple[dict[str, Any]], dict[str, Any]]:
        """Read the event arguments that the hook names besides the gradients and its state."""
        return ({name: getattr(args, name) for name in self._named},), {}

    def run(self, values: Mapping[str, Any]) -> None:
        """Call the hook once and take over what it returns."""
        self.half_written = None
        were_finite = self.finite_check.begin() if self.finite_check else None
        before = self._backup(were_finite is not None)
        versions = self._versions() if self._detects_writes else None
        try:
            if self._only_grads:
                returned = self.bound.listener.call(self.grads)
            else:
                own = {"grads": self.grads, "own_state": self._states[self.bound.hook]}
                returned = self.bound.listener.with_values({**values, **own})
            self._take_over(returned, versions)
            if self.finite_check and were_finite is not None:
                self.finite_check.end(were_finite, before)
        except Exception as error:
            self._restore(before)
            if versions is not None and versions != self._versions():
                self.half_written = error
                remedy = "" if self._in_place or DECLARE in str(error) else f"; {DECLARE}"
                error.add_note(f"it had already written into the gradients, which cannot be undone{remedy}")
            raise

    def _take_over(self, returned: Any, versions: list[tuple[int, int]] | None) -> None:
        """Check what the hook returned and make it the parameters' gradients."""
        if self.clips:
            norm = getattr(self.bound.owner, "clipped_norm", None)
            if not isinstance(norm, (int, float)) and not (isinstance(norm, torch.Tensor) and norm.numel() == 1):
                raise GradientError(
                    f"has clips = True, but its clipped_norm is {type(norm).__name__}; set self.clipped_norm to the "
                    "norm before clipping, a number or a tensor of one element, at every call"
                )
        if returned is None and self._in_place:
            returned = self.grads
        elif returned is None and versions is not None and versions != self._versions():
            raise GradientError(f"wrote into the gradients in place and returned None; {DECLARE}")
        if returned is not self.grads or self.grads.assigned:
            self.grads.commit(returned)
        if not self.bound.built_in:
            self._cache.replaced()
        elif self._may_write:
            self.grads.finish_write()

    def _versions(self) -> list[tuple[int, int]]:
        """Return which gradients there are and how often each was written, without keeping them alive."""
        # A DTensor's own version misses some writes, so its shard is asked.
        tensors = [(grad, grad.to_local() if is_sharded(grad) else grad) for grad in self.grads.tensors()]  # type: ignore[attr-defined]
        return [(id(grad), tensor_version(memory)) for grad, memory in tensors]

    def _backup(self, checked: bool) -> dict[str, torch.Tensor | None]:
        """Return the gradients to restore if the hook fails, as copies if it writes into them."""
        if not self._needs_backup and not checked:
            return {}
        now = {name: param.grad for name, param in self.grads.params.items()}
        if not self._needs_backup:
            return now
        return {name: None if grad is None else grad.clone() for name, grad in now.items()}

    def _restore(self, before: Mapping[str, torch.Tensor | None]) -> None:
        for name, gradient in before.items():
            self.grads.params[name].grad = gradient
        self.grads.discard()
        self._cache.replaced()


def _initial_state(name: str, hook: Any, selected: Parameters) -> Any:
    """Return what the hook's `init` makes; an exception gets the hook's name as a note."""
    init = getattr(hook, "init", None)
    try:
        return init(selected) if callable(init) else {}
    except Exception as error:
        error.add_note(f"raised by hook {name!r} in init")
        raise


def _completed(saved: Any, made: Any, selected: Parameters) -> Any:
    """Return a checkpoint's state with new entries for parameters that were not selected when it was saved."""
    if not (isinstance(saved, dict) and isinstance(made, dict)):
        return saved
    return {name: made[name] for name in made if name in selected and name not in saved} | saved


def _passes_through(bound: BoundHook) -> bool:
    return bool(getattr(bound.listener.call, "__hookline_passes_through__", False))


# ---- selecting parameters --------------------------------------------------------------------------------------------


def select_parameters(pattern: Any, params: Parameters, model: torch.nn.Module | None) -> Parameters:
    """Return the parameters that a hook's `params` selects, in the model's order.

    Besides what `select` accepts, a pattern may be about modules: a module class, ``"class:Linear"`` or a module of the
    model selects the parameters of all matching modules, including those of their submodules. A tied weight is found
    under each of its names.

    Args:
        pattern: One pattern or several; None selects everything.
        params: The trained parameters by name.
        model: The model, for patterns about modules and for the other names of tied weights.

    Returns:
        `params` itself if everything is selected, otherwise a new mapping.

    Raises:
        HooklineError: If a pattern matches nothing; it lists the nearest names.
    """
    if pattern is None:
        return params
    patterns = pattern if isinstance(pattern, (list, tuple, set, frozenset)) else [pattern]
    if not patterns:
        raise HooklineError(f"params={pattern!r} selects nothing; leave params out to select all")
    selected: set[str] = set()
    for one in patterns:
        is_class = isinstance(one, type) and not issubclass(one, torch.Tensor)
        names_class = isinstance(one, str) and one.startswith("class:")
        if is_class or names_class or isinstance(one, torch.nn.Module):
            selected |= _in_modules(one, params, model)
        else:
            selected |= _by_name(one, params, model)
    return {name: param for name, param in params.items() if name in selected}


def _by_name(pattern: Any, params: Parameters, model: torch.nn.Module | None) -> set[str]:
    if model is None or not isinstance(pattern, str):
        return set(select(pattern, params, "parameter"))
    # `params` has one of the names of a tied weight, so the others are looked up by identity.
    trained = {id(param): name for name, param in params.items()}
    named = model.named_parameters(remove_duplicate=False)
    others = {name: param for name, param in named if id(param) in trained}
    return {trained[id(param)] for param in select(pattern, {**params, **others}, "parameter").values()}


def _in_modules(pattern: Any, params: Parameters, model: torch.nn.Module | None) -> set[str]:
    if model is None:
        raise HooklineError(f"params={pattern!r} is about modules, but this chain was made without a model")
    modules = select(pattern, dict(model.named_modules()), "module")
    # By identity, so that a tied weight is found through each of the modules that share it.
    inside = {id(param) for module in modules.values() for param in module.parameters()}
    found = {name for name, param in params.items() if id(param) in inside}
    if not found:
        raise HooklineError(f"params={pattern!r} matches {next(iter(modules))!r} and others, none of which is trained")
    return found


# ---- checking for NaN ------------------------------------------------------------------------------------------------


class FiniteCheck:
    """Compare norms before and after a hook; look at elements only where a norm is not finite.

    Args:
        grads: The gradients that the hook selects; their norms are cached, so later hooks need not read them again.
        cost: Where the time it takes is counted.
        wait: Whether to check on a device too, where the host has to wait for the answer.
    """

    def __init__(self, grads: Gradients, cost: Cost, wait: bool) -> None:
        self._grads, self._cost, self._wait = grads, cost, wait

    def begin(self) -> torch.Tensor | None:
        """Return whether all norms are finite, on the device; None if this is not checked."""
        if not self._wait and not all(tensor.is_cpu for tensor in self._grads.as_list().tensors):
            return None
        return self._grads.norms().isfinite().all()

    def end(self, were_finite: torch.Tensor, before: Mapping[str, torch.Tensor | None]) -> None:
        """Raise if all gradients were finite before the hook and one is not now.

        If one was not finite before, a hook that relates gradients to each other can leave none of them finite.

        Args:
            were_finite: What `begin` returned.
            before: The gradients as they were, to tell an overflowing norm from a non-finite element.

        Raises:
            GradientError: If the hook made a gradient non-finite.
        """
        began = perf_counter_ns()
        are_finite = self._grads.norms().isfinite().all()
        all_before, all_now = torch.stack([were_finite.to(are_finite.device), are_finite]).tolist()
        # A norm overflows earlier than the elements it is made of, so these decide.
        fine = [] if all_now else _finite(self._grads.tensors())
        bad = [name for name, is_fine in zip(self._grads, fine, strict=False) if not is_fine]
        self._cost.add(perf_counter_ns() - began)
        if bad and (all_before or all(_finite([grad for grad in before.values() if grad is not None]))):
            count = f" ({len(bad)} parameters in all)" if len(bad) > 1 else ""
            raise GradientError(f"made the gradient of {bad[0]!r}{count} non-finite, which was finite before")


def _finite(tensors: list[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether all its elements are finite."""
    if not tensors:
        return []
    rows = LocalTensors(tensors, [f"a gradient of shape {tuple(tensor.shape)}" for tensor in tensors]).summarize()
    finite: list[bool] = (rows[:, NANS] + rows[:, INFS] == 0).tolist()
    return finite
