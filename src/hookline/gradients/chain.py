"""`UpdateChain`: run the update hooks over a model's gradients, once per optimizer step.

Hooks run in registration order, without autograd. Each gets the gradients as the hooks before it left them and returns
the gradients for the optimizer. They are checked and applied together, so a failing hook changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

import torch

from hookline._names import plain_modules, plain_parameters, unwrap_module
from hookline._tensors import TensorVersions, is_sharded
from hookline.core.base import hook_attribute
from hookline.core.catalog import CATALOG
from hookline.core.dispatch import FAILED, Arguments, BoundHook, Dispatch, check_optional, invoke
from hookline.core.entry import Entry
from hookline.core.patterns import select
from hookline.core.registry import Registry
from hookline.errors import GradientError, HooklineError, MissingArgument, add_note
from hookline.gradients.view import GradientLists, Gradients, Parameters
from hookline.stats.distributed import LocalTensors
from hookline.stats.rows import INFS, NANS

ON_UPDATE = CATALOG["on_update"]
DECLARE = "an update hook that writes in place sets inplace = True (on its class, or on the function)"


class UpdateChain:
    """Runs the update hooks of a registry over a model's gradients, and stores their state.

    Args:
        registry: The registry; the chain provides the callable of its event `on_update`.
        params: The trained parameters by name; after they change, `reselect_parameters` must be called.
        model: The model, so that hooks can select parameters by the class of their module; None if it is not known.
    """

    def __init__(self, registry: Registry, params: Parameters, model: torch.nn.Module | None) -> None:
        self.registry, self.params, self.model = registry, params, model
        self.states: dict[str, Any] = {}
        self._owners: dict[str, Any] = {}  # the hook of each state: another hook of the same name gets a new state
        self._unclaimed: dict[str, Any] = {}  # a checkpoint's states of hooks that are not registered yet
        self.known: GradientLists = {}  # knowledge about the gradients of the current step
        self._subscriptions = [registry.add_registration_check(self._check), registry.on_change(self._drop_removed)]
        if registry.update_chain is not None:  # The chain of an earlier run with this registry.
            registry.update_chain.release()
        registry.update_chain = self
        registry.dispatch_table.set_maker("on_update", self.make_dispatch)

    def release(self) -> None:
        """Leave the hooks to another chain."""
        for end in self._subscriptions:
            end()

    def make_dispatch(self, bound: list[BoundHook]) -> Dispatch | None:
        """Return the callable that runs these hooks; None if there is nothing to run."""
        items = []
        for hook in bound:
            if hook_attribute(hook.owner, "passes_through"):  # as the default hook
                continue
            selected = self._select(hook.hook, hook.owner)
            self._make_state(hook.hook, hook.owner, selected)
            self._unclaimed.pop(hook.hook, None)  # a hook that is registered later under this name starts fresh
            items.append(ChainItem(self, hook, selected, selects_all=len(selected) == len(self.params)))
        if not items:
            return None
        reporter = next((hook for hook in bound if hook_attribute(hook.owner, "reports_norms")), None)
        first_clip = next((item for item in items if item.clips), None)
        reads_total = first_clip is not None and not first_clip.clips_globally  # its norm differs from that of the step

        @torch.no_grad()
        def on_update(args: Any) -> None:
            try:
                for item in items:
                    if reads_total and item is first_clip:
                        args.set_clipped_norm(Gradients(self.params, self.known).norm(), True)
                    if reporter is not None:
                        self._report_norm(reporter, item, "before", args)
                    proceed = self._run(item, args)
                    if reporter is not None:
                        self._report_norm(reporter, item, "after", args)
                    if not proceed:
                        break  # no optimizer uses these gradients, and hooks with a memory should not see them
            finally:
                self.known.clear()  # otherwise it would keep the gradients alive

        return on_update

    def _run(self, item: ChainItem, args: Any) -> bool:
        """Run one hook under its failure policy; return whether the step proceeds."""
        if invoke(ON_UPDATE, item.bound, self.registry.failures, args, read=item.read, call=item.run) is FAILED:
            if item.half_written is None:
                return True
            try:
                args.trainer.skip_step(f"{item.bound.hook} left half-written gradients")
            except (AttributeError, MissingArgument):
                raise item.half_written from None  # only the owner of the loop could skip the step
            return False
        if item.clips:
            args.set_clipped_norm(item.bound.owner.clipped_norm, item.clips_globally)
            if handler := self.registry.slots.on_gradient_clip:
                with torch.enable_grad():  # like at every other event
                    handler(args)
                self.known.clear()  # its hooks may write or replace gradients
        # Only a hook that has the trainer can skip a step.
        return "trainer" not in item.named or getattr(args, "skip_reason", None) is None

    def _report_norm(self, reporter: BoundHook, item: ChainItem, when: str, args: Any) -> None:
        """Log the norm of what a hook selects, for a hook that `reports_norms` and is due."""
        try:
            args.trainer.log(f"update/{item.bound.hook}/norm_{when}", item.shared_grads.norm())
        except Exception as error:
            if self.registry.failures.handle(ON_UPDATE, reporter, error, args) is not None:
                raise

    # ---- hooks and their state -------------------------------------------------------------------------------------

    def _check(self, entry: Entry) -> None:
        """Select parameters and make the state when a hook is registered, so that errors show there."""
        if "on_update" in entry.listeners:
            self._make_state(entry.name, entry.hook, self._select(entry.name, entry.hook))

    def _select(self, name: str, hook: Any) -> Parameters:
        if self.model is None and hook_attribute(hook, "reads_weights"):
            raise MissingArgument(f"on_update: {name!r} reads weights, which the call did not pass; pass model=…")
        try:
            model = torch.nn.Module() if self.model is None else self.model
            return select_parameters(hook_attribute(hook, "params"), self.params, model)
        except HooklineError as error:
            remedy = "" if self.model is not None else ". To select parameters by their modules, pass model=…"
            raise HooklineError(f"hook {name!r}: {error}{remedy}") from None

    def _make_state(self, name: str, hook: Any, selected: Parameters) -> None:
        """Make a hook's state once, or take it from the checkpoint that was loaded before."""
        if name not in self.states or self._owners.get(name) is not hook:
            initial = _initial_state(name, hook, selected)
            self.states[name] = _completed(self._unclaimed.get(name, initial), initial, selected)
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
            selected = self._select(name, hook)
            self.states[name] = _completed(self.states[name], _initial_state(name, hook, selected), selected)
        self.registry.dispatch_table.reset()

    def _drop_removed(self) -> None:
        """Drop the states of removed hooks."""
        for name in [name for name in self.states if name not in self.registry]:
            del self.states[name], self._owners[name]


class ChainItem:
    """One update hook of the chain: calls it, and takes over its whole result or restores everything.

    Args:
        chain: The chain, whose states and whose knowledge about the gradients it uses.
        bound: The hook and its listener.
        params: The parameters it selects.
        selects_all: Whether these are all trained parameters.
    """

    def __init__(self, chain: UpdateChain, bound: BoundHook, params: Parameters, selects_all: bool) -> None:
        self.bound, self._known, self._states = bound, chain.known, chain.states
        self.shared_grads = Gradients(params, chain.known)
        # A user's hook may write or replace gradients at any time, so no earlier knowledge about them is used.
        self.grads = self.shared_grads if bound.built_in else Gradients(params)
        owner, registry = bound.owner, chain.registry
        self._in_place = bool(hook_attribute(owner, "inplace"))
        self._needs_backup = self._in_place and registry.entry(bound.hook).policy != "raise"
        # A user's hook may write in place without declaring it, or fail halfway; the chain must detect that.
        self._detects_writes = not bound.built_in and not self._needs_backup
        self.named = tuple(name for name in bound.listener.wanted if name not in ("grads", "own_state"))
        self.clips = bool(hook_attribute(owner, "clips"))
        self.clips_globally = self.clips and selects_all and hook_attribute(owner, "norm_type") == 2.0
        self.half_written: Exception | None = None  # its failure, if its writes could not be undone
        # Checked for NaN: a user's hook unless it declines, any hook that asks for it, and with `debug` every hook.
        # Only the latter two are checked on a device too, where the host has to wait for the answer.
        asks = hook_attribute(owner, "check_finite")
        self._waits = bool(registry.failures.debug or asks)
        checked = self._waits or (asks is None and not bound.built_in)
        costs = registry.dispatch_table.argument_costs
        self._check_cost = costs[f"whether {bound.hook} left finite gradients"] if checked else None

    def read(self, args: Any) -> Arguments:
        """Return the arguments of the hook: the gradients, its state, and the event's arguments that it names."""
        values = {"grads": self.grads, "own_state": self._states[self.bound.hook]}
        for name in self.named:
            try:
                values[name] = getattr(args, name)
            except MissingArgument:
                check_optional(ON_UPDATE, [self.bound], name)
        return self.bound.listener.arguments(values)

    def run(self, *positional: Any, **keywords: Any) -> None:
        """Call the hook once with the arguments that `read` returned, and take over its result."""
        grads, self.half_written, were_finite = self.grads, None, None
        if self._check_cost is not None and (self._waits or all(grad.is_cpu for grad in grads.tensors())):
            were_finite = self.shared_grads.norms().isfinite().all()
        before: dict[str, torch.Tensor | None] = {}
        if self._needs_backup:
            before = {name: None if p.grad is None else p.grad.clone() for name, p in grads.params.items()}
        elif were_finite is not None:
            before = {name: param.grad for name, param in grads.params.items()}
        snapshot = TensorVersions(self._memory()) if self._detects_writes else None
        try:
            returned = self.bound.call(*positional, **keywords)
            if self.clips and not self.bound.built_in:
                self._check_clipped_norm()
            if returned is None and self._in_place:
                returned = grads
            elif returned is None and self._has_written(snapshot):
                raise GradientError(f"wrote into the gradients in place and returned None; {DECLARE}")
            has_new = returned is not grads or bool(grads.assigned)
            if has_new:
                grads.commit(returned)
            if has_new or not self.bound.built_in:
                self._known.clear()
            elif self._in_place:
                for gradients in self._known.values():
                    gradients.forget_norms()
            if were_finite is not None:
                self._check_finite(were_finite, before)
        except Exception as error:
            for name, gradient in before.items():
                grads.params[name].grad = gradient
            grads.assigned.clear()
            self._known.clear()
            if self._has_written(snapshot):
                self.half_written = error
                remedy = "" if self._in_place or DECLARE in str(error) else f"; {DECLARE}"
                add_note(error, f"it had already written into the gradients, which cannot be undone{remedy}")
            raise

    def _check_clipped_norm(self) -> None:
        norm = hook_attribute(self.bound.owner, "clipped_norm")
        if not isinstance(norm, (int, float)) and not (isinstance(norm, torch.Tensor) and norm.numel() == 1):
            raise GradientError(
                f"has clips = True, but its clipped_norm is {type(norm).__name__}; set self.clipped_norm to the "
                "norm before clipping, a number or a tensor of one element, at every call"
            )

    def _has_written(self, before: TensorVersions | None) -> bool:
        """Return whether the hook is known to have written; writes into inference tensors leave no trace."""
        return before is not None and before.versions is not None and not before.matches(self._memory())

    def _memory(self) -> list[torch.Tensor]:
        """Return the tensors whose versions count the writes: a DTensor's own version misses some, its shard's none."""
        return [grad.to_local() if is_sharded(grad) else grad for grad in self.grads.tensors()]  # type: ignore[attr-defined]

    def _check_finite(self, were_finite: torch.Tensor, before: Mapping[str, torch.Tensor | None]) -> None:
        """Raise GradientError if all gradients were finite before the hook and one is not now.

        If one was not finite before, a hook that combines gradients may leave none of them finite.

        Args:
            were_finite: Whether all norms were finite, on the device.
            before: The gradients as they were, to tell an overflowing norm from a non-finite element.
        """
        assert self._check_cost is not None
        grads, began = self.shared_grads, perf_counter_ns()
        # A norm overflows earlier than its elements, so these decide.
        fine = [] if grads.norms().isfinite().all() else _finite(grads.tensors())
        bad = [name for name, is_fine in zip(grads, fine, strict=False) if not is_fine]
        self._check_cost.add(perf_counter_ns() - began)
        if bad and (were_finite or all(_finite([grad for grad in before.values() if grad is not None]))):
            count = f" ({len(bad)} parameters in all)" if len(bad) > 1 else ""
            raise GradientError(f"made the gradient of {bad[0]!r}{count} non-finite, although it was finite before")


def _finite(tensors: list[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether all its elements are finite."""
    if not tensors:
        return []
    rows = LocalTensors(tensors).summarize()
    finite: list[bool] = (rows[:, NANS] + rows[:, INFS] == 0).tolist()
    return finite


def _initial_state(name: str, hook: Any, selected: Parameters) -> Any:
    """Return the result of the hook's `init`; an exception gets the hook's name as a note."""
    try:
        return hook_attribute(hook, "init")(selected)
    except Exception as error:
        add_note(error, f"raised by hook {name!r} in init")
        raise


def _completed(saved: Any, initial: Any, selected: Parameters) -> Any:
    """Return a checkpoint's state with new entries for parameters that were not selected when it was saved."""
    if not (isinstance(saved, dict) and isinstance(initial, dict)):
        return saved
    return {name: initial[name] for name in initial if name in selected and name not in saved} | saved


# ---- selecting parameters --------------------------------------------------------------------------------------------


def select_parameters(pattern: Any, params: Parameters, model: torch.nn.Module) -> Parameters:
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
    trained = set(map(id, params.values()))
    # `params` has one of the names of a tied weight, so everything is looked up by identity.
    named = plain_parameters(model, remove_duplicate=False)
    all_names = {**params, **{name: param for name, param in named.items() if id(param) in trained}}
    selected: set[int] = set()
    for wanted in patterns:
        is_class = isinstance(wanted, type) and not issubclass(wanted, torch.Tensor)
        names_class = isinstance(wanted, str) and wanted.startswith("class:")
        if is_class or names_class or isinstance(wanted, torch.nn.Module):
            module = unwrap_module(wanted) if isinstance(wanted, torch.nn.Module) else wanted
            modules = select(module, plain_modules(model), "module")
            inside = {id(param) for owner in modules.values() for param in owner.parameters()}
            if inside.isdisjoint(trained):
                first = next(iter(modules))
                raise HooklineError(f"params={wanted!r} matches {first!r} and others, none of which is trained")
            selected |= inside
        else:
            things = all_names if isinstance(wanted, str) else params
            selected |= set(map(id, select(wanted, things, "parameter").values()))
    return {name: param for name, param in params.items() if id(param) in selected}
