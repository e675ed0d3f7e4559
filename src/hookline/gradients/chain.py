"""The update chain: what makes the callable of `on_update`.

Links run in registration order, without autograd. Each gets the gradients as the links before it left them and returns
what the optimizer shall use; that is checked and taken over as a whole, so a link that fails leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import torch

from hookline.errors import HooklineError
from hookline.events.catalog import CATALOG
from hookline.events.dispatch import Bound, Fired
from hookline.events.moment import known
from hookline.gradients.finite_check import FiniteCheck
from hookline.gradients.link import Link
from hookline.gradients.norms import Norms
from hookline.gradients.selection import choose
from hookline.gradients.view import Gradients
from hookline.registry.entry import Entry
from hookline.registry.registry import HookRegistry

ON_UPDATE = CATALOG["on_update"]
OVERFLOWED = "non-finite gradients under GradScaler"  # why a step may be left out before the chain


class UpdateChain:
    """Runs the update hooks of a registry over a model's gradients, and keeps their state.

    With the model, links may select parameters by the class of their module.
    """

    def __init__(
        self,
        registry: HookRegistry,
        params: Callable[[], Mapping[str, torch.nn.Parameter]],
        model: torch.nn.Module | None = None,
    ) -> None:
        self.registry = registry
        self._params, self._model = params, model
        self.states: dict[str, Any] = {}
        self._owners: dict[str, Any] = {}  # whose state it is: another hook of the same name gets its own
        self._waiting: dict[str, Any] = {}  # a checkpoint's states, of hooks that are not registered yet
        self.known = Norms()  # what one link has read, the next need not read again
        registry.admit_with(self._check)
        registry.watch_changes(self._drop_removed)
        registry.tables.compile_with("on_update", self.compile)

    def compile(self, bound: list[Bound], timed: bool) -> Fired | None:
        """The chain for the hooks that are due now; None when there is none."""
        measures_cost = timed and not self.registry.tables.agenda.due  # not in a step that has more to bear
        if not measures_cost and all(_passes_through(item) for item in bound):
            return None  # the default link alone has nothing to do: it is called where its cost is measured
        links = [self._link(item) for item in bound]
        self._have_norms_read(links)

        @torch.no_grad()
        def on_update(moment: Any) -> None:
            try:
                for link in links:
                    if not self._run_and_report(link, moment, timed):
                        break  # nobody will use these gradients, and links with a memory should not see them
            finally:
                self.known.clear()  # it holds on to gradients

        return on_update

    def _have_norms_read(self, links: list[Link]) -> None:
        """Around every link if a hook reports them; all before the first clipping if that link finds another norm."""
        reporter = next((link for link in links if getattr(link.bound.owner, "reports_norms", False)), None)
        for link in links:
            link.reporter = None if _passes_through(link.bound) else reporter
        first_clip = next((link for link in links if link.clips), None)
        if first_clip is not None and not first_clip.clips_globally:
            first_clip.everything = Gradients(self._params(), self.known, steady=True)

    def _run_and_report(self, link: Link, moment: Any, timed: bool) -> bool:
        """One link, and the norms that are read around it; whether the step goes on."""
        if link.everything is not None:
            moment.clipped(link.everything.norm(), True)
        if link.reporter is None:
            return self._run(link, moment, timed)
        self._report(link.reporter, link, "before", moment)
        goes_on = self._run(link, moment, timed)
        self._report(link.reporter, link, "after", moment)
        return goes_on

    def _run(self, link: Link, moment: Any, timed: bool) -> bool:
        """One link, its failure treated by its policy, its time noted, its clipping told; whether the step goes on."""
        began = perf_counter_ns() if timed else 0
        values = link.values(moment) if link.named else {}
        self.known.begin_link(link.bound.built_in, link.tells_norms)
        try:
            link.run(values)
        except Exception as error:
            return self._failed(link, error, moment)
        finally:
            self.known.end_link(link.may_write)
            if not link.bound.built_in:
                self.known.clear()  # it may have written in a way that no version counts
        if link.bound.recovering:
            self.registry.desk.recovered(ON_UPDATE, link.bound)
        if timed:
            link.bound.cost.add(perf_counter_ns() - began)
        if link.clips:
            self._tell_clipping(link, moment)
        return not (link.may_skip and getattr(moment, "skip_asked_at", None) == moment.step)

    def _failed(self, link: Link, error: Exception, moment: Any) -> bool:
        """By its policy it ends the run or is left out; half-written gradients must reach no optimizer."""
        if self.registry.desk.failed(ON_UPDATE, link.bound, error, moment) is not None:
            raise error
        if not link.half_written:
            return True
        skip = getattr(known(moment, "trainer", None), "skip_step", None)
        if skip is None:
            raise error  # nobody here can leave the step out but the loop's owner
        skip(f"{link.bound.hook} left half-written gradients")
        return False

    def _tell_clipping(self, link: Link, moment: Any) -> None:
        moment.clipped(link.bound.owner.clipped_norm, link.clips_globally)
        if heard := self.registry.fire.on_gradient_clip:
            self.known.settle()  # who hears it could write, or
            with torch.enable_grad():  # as at every other event
                heard(moment)
            self.known.seen.forget_owners()  # have given parameters other gradients

    def _report(self, reporter: Link, link: Link, when: str, moment: Any) -> None:
        """Log the norm of what a link selects, for the hook that asked for it."""
        try:
            moment.trainer.log(f"update/{link.bound.hook}/norm_{when}", link.grads.norm())
        except Exception as error:
            if self.registry.desk.failed(ON_UPDATE, reporter.bound, error, moment) is not None:
                raise

    def _check(self, entry: Entry) -> None:
        """Choose its parameters and make its state when a hook is registered: what fails, fails there."""
        if "on_update" in entry.listeners:
            self._state_of(entry.name, entry.hook, self._chosen(entry.name, entry.hook))

    def choose_again(self) -> None:
        """The parameters are others: links select among them anew, and states get what the new ones need."""
        for name, hook in self._owners.items():
            if isinstance(state := self.states.get(name), dict):
                self.states[name] = {**_made(name, hook, self._chosen(name, hook)), **state}
        self.registry.tables.reset()

    def _chosen(self, name: str, hook: Any) -> Mapping[str, torch.nn.Parameter]:
        try:
            return choose(getattr(hook, "params", None), self._params(), self._model)
        except HooklineError as error:
            raise HooklineError(f"hook {name!r}: {error}") from None

    def _state_of(self, name: str, hook: Any, chosen: Mapping[str, torch.nn.Parameter]) -> None:
        """Made once per hook, and then replaced by what a checkpoint holds for it."""
        if name not in self.states or self._owners.get(name) is not hook:
            made = _made(name, hook, chosen)
            self.states[name] = _completed(self._waiting.get(name, made), made, chosen)
            self._owners[name] = hook

    def restore(self, states: Mapping[str, Any]) -> None:
        """Take over a checkpoint's states; that of a hook which is not registered yet waits for it."""
        for name, state in states.items():
            if name in self.states:
                chosen = self._chosen(name, self._owners[name])
                self.states[name] = _completed(state, self.states[name], chosen)
            else:
                self._waiting[name] = state

    def _drop_removed(self) -> None:
        """The set of hooks has changed: a removed one takes its state with it."""
        if len(self.states) > self.registry.tables.hearers["on_update"]:
            for name in [name for name in self.states if name not in self.registry]:
                del self.states[name], self._owners[name]

    def _link(self, bound: Bound) -> Link:
        chosen = self._chosen(bound.hook, bound.owner)
        self._state_of(bound.hook, bound.owner, chosen)
        self._waiting.pop(bound.hook, None)  # it has what it waited for; a successor begins anew
        policy = self.registry.entry(bound.hook).policy
        spans_all = len(chosen) == len(self._params())
        grads = Gradients(chosen, self.known, steady=bound.built_in)
        link = Link(bound, grads, self.states, policy != "raise", spans_all)
        link.finite_check = self._finite_check(bound, grads)
        return link

    def _finite_check(self, bound: Bound, grads: Gradients) -> FiniteCheck | None:
        """What looks for NaN behind a link: a user's unless it declines, any that asks, and with `debug` every one."""
        desk, asks = self.registry.desk, getattr(bound.owner, "check_finite", None)
        if_asked = bool(desk.debug or asks)
        if _passes_through(bound) or not (if_asked or (asks is None and not bound.built_in)):
            return None
        return FiniteCheck(grads, desk.argument_cost(f"whether {bound.hook} left finite gradients"), if_asked)


def _made(name: str, hook: Any, chosen: Mapping[str, torch.nn.Parameter]) -> Any:
    """What the hook's `init` makes; if that fails, the hook is named."""
    init = getattr(hook, "init", None)
    try:
        return init(chosen) if callable(init) else {}
    except Exception as error:
        error.add_note(f"raised by hook {name!r} in init")
        raise


def _completed(saved: Any, made: Any, chosen: Mapping[str, torch.nn.Parameter]) -> Any:
    """A checkpoint's state, with what was made for parameters that the hook did not select when it was saved."""
    if not (isinstance(saved, dict) and isinstance(made, dict)):
        return saved
    return {name: made[name] for name in made if name in chosen and name not in saved} | saved


def _passes_through(item: Bound) -> bool:
    return bool(getattr(item.listener.call, "__hookline_passes_through__", False))
