"""`UpdateChain`: run the update hooks over a model's gradients, once per optimizer step.

Hooks run in registration order, without autograd. Each gets the gradients as the hooks before it left them and returns
what the optimizer is to use; that is checked and taken over as a whole, so a hook that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hookline._tensors import tensor_version
from hookline.core.dispatch import FAILED, BoundHook, invoke
from hookline.errors import GradientError, HooklineError
from hookline.events.catalog import CATALOG
from hookline.events.dispatch import Fired
from hookline.events.moment import known
from hookline.gradients.finite_check import FiniteCheck
from hookline.gradients.local_storage import is_sharded
from hookline.gradients.parameters import Parameters, select_parameters
from hookline.gradients.view import GradientCache, Gradients
from hookline.registry.entry import Entry
from hookline.registry.registry import HookRegistry

ON_UPDATE = CATALOG["on_update"]
OVERFLOWED = "non-finite gradients under GradScaler"  # why a step may be skipped before the chain
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
        registry.admit_with(self._check)
        registry.watch_changes(self._drop_removed)
        registry.tables.compile_with("on_update", self.compile)

    def compile(self, bound: list[BoundHook], timed: bool) -> Fired | None:
        """Return the callable that runs these hooks; None if there is nothing to run."""
        measures_cost = timed and not self.registry.tables.agenda.due
        if not measures_cost and all(map(_passes_through, bound)):
            return None  # the default hook alone has nothing to do, and is only called to measure its cost
        links = [self._link(item) for item in bound]
        reporter = next((link for link in links if getattr(link.bound.owner, "reports_norms", False)), None)
        first_clip = next((link for link in links if link.clips), None)
        reads_total = first_clip is not None and not first_clip.clips_globally  # it finds another norm than the step's

        @torch.no_grad()
        def on_update(moment: Any) -> None:
            try:
                for link in links:
                    if reads_total and link is first_clip:
                        moment.clipped(Gradients(self._params(), self._cache).norm(), True)
                    reported = reporter if not _passes_through(link.bound) else None
                    self._report_norm(reported, link, "before", moment)
                    proceed = self._run(link, moment, timed)
                    self._report_norm(reported, link, "after", moment)
                    if not proceed:
                        break  # no optimizer uses these gradients, and hooks with a memory should not see them
            finally:
                self._cache.replaced()  # otherwise it would keep the gradients alive

        return on_update

    def _run(self, link: Link, moment: Any, timed: bool) -> bool:
        """Run one hook under its failure policy; return whether the step proceeds."""
        desk = self.registry.desk
        if invoke(ON_UPDATE, link.bound, desk, moment, read=link.read, call=link.run, timed=timed) is FAILED:
            if link.half_written is None:
                return True
            skip = getattr(known(moment, "trainer", None), "skip_step", None)
            if skip is None:
                raise link.half_written  # only the owner of the loop could skip the step
            skip(f"{link.bound.hook} left half-written gradients")
            return False
        if link.clips:
            moment.clipped(link.bound.owner.clipped_norm, link.clips_globally)
            if handler := self.registry.fire.on_gradient_clip:
                with torch.enable_grad():  # as at every other event
                    handler(moment)
                self._cache.replaced()  # its hooks may write gradients
        return not (link.may_skip and getattr(moment, "skip_asked_at", None) == moment.step)

    def _report_norm(self, reporter: Link | None, link: Link, when: str, moment: Any) -> None:
        """Log the norm of what a hook selects, if the hook `link_norms` is due."""
        if reporter is None:
            return
        try:
            moment.trainer.log(f"update/{link.bound.hook}/norm_{when}", link.cached_grads.norm())
        except Exception as error:
            if self.registry.desk.failed(ON_UPDATE, reporter.bound, error, moment) is not None:
                raise

    # ---- hooks and their state -------------------------------------------------------------------------------------

    def _link(self, bound: BoundHook) -> Link:
        selected = self._select(bound.hook, bound.owner)
        self._make_state(bound.hook, bound.owner, selected)
        self._unclaimed.pop(bound.hook, None)  # a hook that is registered later under this name starts fresh
        link = Link(
            bound,
            selected,
            self._cache,
            self.states,
            may_fail=self.registry.entry(bound.hook).policy != "raise",
            selects_all=len(selected) == len(self._params()),
        )
        # Checked for NaN: a user's hook unless it declines, any hook that asks for it, and with `debug` every hook.
        desk, asks = self.registry.desk, getattr(bound.owner, "check_finite", None)
        wait = bool(desk.debug or asks)
        if not _passes_through(bound) and (wait or (asks is None and not bound.built_in)):
            cost = desk.argument_cost(f"whether {bound.hook} left finite gradients")
            link.finite_check = FiniteCheck(link.cached_grads, cost, wait)
        return link

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

    def choose_again(self) -> None:
        """Select among changed parameters, and add to the states what new parameters need."""
        for name, hook in self._owners.items():
            if isinstance(state := self.states.get(name), dict):
                self.states[name] = {**_initial_state(name, hook, self._select(name, hook)), **state}
        self.registry.tables.reset()

    def _drop_removed(self) -> None:
        """Drop the states of removed hooks."""
        if len(self.states) > self.registry.tables.hearers["on_update"]:
            for name in [name for name in self.states if name not in self.registry]:
                del self.states[name], self._owners[name]


class Link:
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


def _passes_through(item: BoundHook) -> bool:
    return bool(getattr(item.listener.call, "__hookline_passes_through__", False))
