"""Test the update chain: hooks run in order, each on what the one before left, and a failure changes nothing."""

import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer

from hookline import HooklineError, HookRegistry, StopTraining, TrainingHook, UpdateHook
from hookline.errors import GradientError, MissingArgument
from hookline.gradients.transforms import ClipNorm, Identity, Mask
from hookline.ranks import Ranks

Grads = Mapping[str, torch.Tensor]


class Bench:
    """A registry with a chain over two parameters whose gradients are 1 and 2."""

    def __init__(self, rig: Any) -> None:
        self.params = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("encoder", "decoder")}
        made = rig(self.params)
        self.registry, self.chain = made.registry, made.chain
        self.norms: list[torch.Tensor] = []
        self.incidents: list[Any] = []
        self.registry.failures.subscribe(self.incidents.append)
        self.reset()

    def reset(self) -> None:
        for value, param in enumerate(self.params.values(), 1):
            param.grad = torch.full((2,), float(value))

    def step(self) -> list[float]:
        """Run the chain as a step does; return the first element of each gradient."""
        if fired := self.registry.slots.on_update:
            fired(
                SimpleNamespace(
                    step=1,
                    epoch=0,
                    model=None,
                    trainer=None,
                    set_clipped_norm=lambda norm, is_global: self.norms.append(norm),
                )
            )
        return [param.grad[0].item() if param.grad is not None else 0.0 for param in self.params.values()]


@pytest.fixture
def bench(rig: Any) -> Bench:
    """Return a new registry with a chain."""
    return Bench(rig)


def make_hook(function: Callable[[Grads], Any], name: str, **more: Any) -> UpdateHook:
    """Make an update hook from a function; unless the test says otherwise, the run continues if it fails."""
    members = {"on_update": lambda self, grads: function(grads), "on_error": "warn", **more}
    return type("Made", (UpdateHook,), members)(name)


def scaled(factor: float) -> Callable[[Grads], dict[str, torch.Tensor]]:
    """Return a function that multiplies all gradients."""
    return lambda grads: {name: grad * factor for name, grad in grads.items()}


@pytest.mark.req("000-40", "000-07")
def test_hooks_run_in_registration_order(bench: Bench) -> None:
    """Adding one and multiplying by ten gives another result than the other order."""
    bench.registry.register(make_hook(lambda grads: {n: g + 1 for n, g in grads.items()}, "add"))
    bench.registry.register(make_hook(scaled(10), "scale"))
    assert bench.step() == [20.0, 30.0]


@pytest.mark.req("000-20", "000-21")
def test_identity_receives_the_gradients_and_passes_them_through(bench: Bench) -> None:
    """It is called with every gradient, and each tensor is the same object afterwards, bit for bit."""
    seen: list[str] = []

    class Watched(Identity):
        def on_update(self, grads: Grads) -> Grads:
            seen.extend(grads)
            return super().on_update(grads)

    before = [param.grad for param in bench.params.values()]
    bench.registry.register(Watched())
    bench.step()
    assert seen == ["encoder", "decoder"]
    assert all(param.grad is old for param, old in zip(bench.params.values(), before, strict=True))


@pytest.mark.parametrize("wrong", ["raises", "none", "drops", "shape"])
@pytest.mark.hooks_fail(raises=(GradientError, ZeroDivisionError))
def test_a_failing_hook_changes_nothing(bench: Bench, wrong: str) -> None:
    """The other hooks run, and the failure is reported under the hook's name."""
    returns: dict[str, Callable[[Grads], Any]] = {
        "raises": lambda grads: 1 / 0,
        "none": lambda grads: None,
        "drops": lambda grads: {},
        "shape": lambda grads: {name: torch.zeros(3) for name in grads},
    }
    bench.registry.register(make_hook(returns[wrong], "broken"))
    bench.registry.register(make_hook(scaled(10), "scale"))
    assert bench.step() == [10.0, 20.0]
    assert [(incident.kind, incident.hook) for incident in bench.incidents] == [("failed", "broken")]


@pytest.mark.hooks_fail(raises=ValueError)
def test_assignments_of_a_failing_hook_are_dropped(bench: Bench) -> None:
    """Assignments before the error reach neither the gradients nor the next hook."""

    def half(grads: Any) -> None:
        grads["encoder"] = torch.zeros(2)
        raise ValueError

    bench.registry.register(make_hook(half, "half"))
    assert bench.step() == [1.0, 2.0]
    assert bench.step() == [1.0, 2.0]


@pytest.mark.parametrize("declared", ["warn", "raise"])
@pytest.mark.hooks_fail(raises=ValueError)
def test_writes_of_a_failing_inplace_hook_are_undone(bench: Bench, declared: str) -> None:
    """The policy that counts is the one it was registered with, not the one its class declares."""

    def half(grads: Grads) -> None:
        grads["encoder"].zero_()
        raise ValueError

    bench.registry.register(make_hook(half, "half", inplace=True, on_error=declared), on_error="warn")
    assert bench.step() == [1.0, 2.0]


def test_an_inplace_hook_may_return_none(bench: Bench) -> None:
    """inplace=True means that the gradients it got are the result."""
    bench.registry.register(
        make_hook(lambda grads: [grad.mul_(3) for grad in grads.values()] and None, "x", inplace=True)
    )
    assert bench.step() == [3.0, 6.0]


def test_the_policy_raise_raises_the_hooks_exception(bench: Bench) -> None:
    """The exception gets a note and keeps its cause; it is not replaced."""

    def broken(grads: Grads) -> None:
        raise ValueError("boom") from KeyError("why")

    bench.registry.register(make_hook(broken, "fatal", on_error="raise"))
    with pytest.raises(ValueError, match="boom") as caught:
        bench.step()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__notes__ == ["raised by hook 'fatal' in on_update, step 1"]


@pytest.mark.hooks_fail(raises=ValueError)
def test_three_failures_in_a_row_disable_a_hook(bench: Bench) -> None:
    """Failures are counted as at every other event."""
    fails = iter([True, True, False, True, True, True])

    def sometimes(grads: Grads) -> Grads:
        if next(fails):
            raise ValueError
        return grads

    bench.registry.register(make_hook(sometimes, "flaky"))
    for _ in range(5):
        bench.step()
    assert bench.registry.is_enabled("flaky")
    bench.step()
    assert not bench.registry.is_enabled("flaky")


@pytest.mark.req("000-06")
def test_a_disabled_hook_does_nothing(bench: Bench) -> None:
    """The gradients reach the optimizer as they were."""
    bench.registry.register(make_hook(scaled(10), "scale"), enabled=False)
    assert bench.step() == [1.0, 2.0] and bench.registry.slots.on_update is None


def test_params_selects_and_must_match(bench: Bench) -> None:
    """A hook may select some of the gradients."""
    bench.registry.register(make_hook(scaled(10), "part", params="enc*"))
    assert bench.step() == [10.0, 2.0]
    with pytest.raises(HooklineError, match=r"hook 'typo': parameter pattern 'encodr'.*did you mean 'encoder'"):
        bench.registry.register(make_hook(scaled(10), "typo", params="encodr"))


class Counting(UpdateHook):
    """A hook that counts its calls in its state."""

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        return {"calls": 0, "params": list(params)}

    def on_update(self, grads: Grads, state: dict[str, Any]) -> Grads:
        state["calls"] += 1
        return grads


def test_state_is_made_once_and_survives_changes_of_the_registry(bench: Bench) -> None:
    """Registering another hook or disabling and enabling this one does not reset its state."""
    bench.registry.register(Counting("count"))
    bench.step()
    bench.registry.register(make_hook(scaled(1), "other"))
    bench.registry.disable("count")
    bench.step()
    bench.registry.enable("count")
    bench.step()
    assert bench.chain.states["count"] == {"calls": 2, "params": ["encoder", "decoder"]}


def test_restored_state_is_used_also_by_a_chain_that_has_run(bench: Bench) -> None:
    """A checkpoint replaces the state of a hook that has run, and that of one that is registered later."""
    bench.registry.register(Counting("count"))
    bench.step()
    bench.chain.restore({"count": {"calls": 10}, "later": {"calls": 20}})
    bench.registry.register(Counting("later"))
    bench.step()
    assert bench.chain.states == {"count": {"calls": 11}, "later": {"calls": 21}}


def test_init_is_called_although_a_state_was_restored(bench: Bench) -> None:
    """Masks are prepared in init, so a restored state must not skip it."""
    bench.chain.restore({"mask": {}})
    bench.registry.register(Mask(masks={"encoder": torch.tensor([0, 1])}))
    assert bench.step() == [0.0, 2.0]


def test_the_state_of_a_removed_hook_is_dropped(bench: Bench) -> None:
    """Neither its state is saved nor what a checkpoint holds for a hook that was never registered."""
    bench.registry.register(Counting("gone"))
    bench.registry.register(Counting("stays"))
    bench.step()
    bench.registry.remove("gone")
    bench.chain.restore({"stranger": {"calls": 3}})
    assert list(bench.chain.states) == ["stays"]
    bench.registry.register(Counting("stranger"))
    bench.step()
    bench.registry.remove("stranger")
    bench.registry.register(Counting("stranger"))
    assert bench.chain.states["stranger"]["calls"] == 0


def test_a_hook_whose_setup_registers_another_keeps_its_state(bench: Bench) -> None:
    """This includes the state that a checkpoint holds for it."""

    class Brings(Counting):
        def setup(self, registry: HookRegistry) -> None:
            registry.register(Counting("brought"))

    bench.chain.restore({"brings": {"calls": 5}})
    bench.registry.register(Brings("brings"))
    bench.step()
    assert bench.chain.states["brings"]["calls"] == 6 and bench.chain.states["brought"]["calls"] == 1


def test_another_hook_of_the_same_name_gets_a_new_state(bench: Bench) -> None:
    """The state of a removed hook is not passed on."""
    bench.registry.register(Counting("count"))
    bench.step()
    bench.registry.remove("count")
    bench.registry.register(Counting("count"))
    bench.step()
    assert bench.chain.states["count"]["calls"] == 1


class Sums(UpdateHook):
    """A hook that adds up each parameter's gradients in its state."""

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        return {name: torch.zeros_like(param) for name, param in params.items()}

    def on_update(self, grads: Grads, state: dict[str, Any]) -> Grads:
        for name, grad in grads.items():
            state[name] += grad
        return grads


@pytest.mark.parametrize("registered_first", [True, False])
def test_a_run_may_resume_with_more_parameters(bench: Bench, registered_first: bool) -> None:
    """What a checkpoint holds for some parameters is kept; the others start with what init makes for them."""
    saved = {"sums": {"encoder": torch.tensor([10.0, 10.0])}}
    if not registered_first:
        bench.chain.restore(saved)
    bench.registry.register(Sums(), "sums", on_error="raise")
    if registered_first:
        bench.chain.restore(saved)
    bench.step()
    sums = {name: total.tolist() for name, total in bench.chain.states["sums"].items()}
    assert sums == {"encoder": [11.0, 11.0], "decoder": [2.0, 2.0]}


def test_entries_that_a_hook_removed_from_its_state_stay_removed(bench: Bench) -> None:
    """A resumed run equals the uninterrupted one: only entries of parameters are added, not what else init makes."""
    bench.registry.register(Counting("count"))
    bench.chain.restore({"count": {"calls": 4}})
    assert bench.chain.states["count"] == {"calls": 4}


def test_a_hook_whose_init_fails_is_named(bench: Bench) -> None:
    """The hook is not registered, and the error names it."""

    class Fails(UpdateHook):
        def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
            raise ValueError("no room")

        def on_update(self, grads: Grads) -> Grads:
            return grads

    with pytest.raises(ValueError, match="no room") as caught:
        bench.registry.register(Fails(), "roomy")
    assert caught.value.__notes__ == ["raised by hook 'roomy' in init"]
    assert "roomy" not in bench.registry and not bench.chain.states


@pytest.mark.hooks_fail(raises=TypeError)
def test_on_gradient_clip_follows_a_clipping_hook(bench: Bench) -> None:
    """on_gradient_clip fires between the clipping hook and the next one, and not if the clipping hook failed."""
    received: list[float] = []
    bench.registry.register(ClipNorm(1.0), on_error="warn")
    bench.registry.register(lambda grad_norm: received.append(grad_norm), "clip", event="gradient_clip")
    fired = bench.registry.slots.on_update
    assert fired is not None
    args = SimpleNamespace(step=1, clipped_norm=3.5, set_clipped_norm=lambda norm, is_global: bench.norms.append(norm))
    fired(args)
    assert received == [3.5] and bench.norms[0].item() == pytest.approx(10**0.5)
    bench.registry.get("clip_norm").max_norm = "broken"
    fired(args)
    assert received == [3.5] and len(bench.norms) == 1


def test_a_missing_argument_is_the_callers_error(bench: Bench) -> None:
    """Firing an event without what a hook names is the caller's error."""

    class NamesModel(UpdateHook):
        def on_update(self, grads: Grads, model: Any) -> Grads:
            return grads

    bench.registry.register(NamesModel())
    with pytest.raises(MissingArgument, match="'names_model' names 'model'"):
        bench.registry.on_update(step=1)
    assert bench.registry.entry("names_model").failures.total == 0


def test_an_empty_chain_has_no_callable(bench: Bench) -> None:
    """Without update hooks there is nothing to call."""
    assert bench.registry.slots.on_update is None


@pytest.mark.hooks_fail(raises=GradientError)
def test_a_wrong_return_says_what_was_wrong(bench: Bench) -> None:
    """The reported error is a GradientError with the reason."""
    bench.registry.register(make_hook(lambda grads: None, "silent"))
    bench.step()
    assert isinstance(bench.incidents[0].error, GradientError) and "returned None" in bench.incidents[0].message


def test_a_skipped_step_ends_the_chain(bench: Bench) -> None:
    """The hooks after it are not called, because the gradients are not used, and their states stay as they were."""
    called: list[str] = []

    class Guard(UpdateHook):
        inplace = True

        def on_update(self, trainer: Any) -> None:
            trainer.skip_step("bad")

    bench.registry.register(make_hook(lambda grads: called.append("before") or grads, "before"))
    bench.registry.register(Guard())
    bench.registry.register(make_hook(lambda grads: called.append("after") or grads, "after"))
    args = SimpleNamespace(step=3, epoch=0, model=None, skip_reason=None)
    args.trainer = SimpleNamespace(skip_step=lambda reason: setattr(args, "skip_reason", reason))
    fired = bench.registry.slots.on_update
    fired(args)
    assert called == ["before"]
    args.step, args.skip_reason = 4, None
    args.trainer.skip_step = lambda reason: None
    fired(args)
    assert called == ["before", "before", "after"]


def test_gradients_are_freed_after_the_chain(bench: Bench) -> None:
    """The chain's cache keeps no gradients alive after the step, even if a hook failed."""
    bench.registry.register(ClipNorm(1.0))
    bench.registry.register(make_hook(lambda grads: 1 / 0, "fatal", on_error="raise"))
    with pytest.raises(ZeroDivisionError):
        bench.step()
    bench.incidents.clear()  # its exception refers to the gradients
    grads = [weakref.ref(param.grad) for param in bench.params.values() if param.grad is not None]
    for param in bench.params.values():
        param.grad = None
    gc.collect()
    assert [grad() for grad in grads] == [None, None]


# ---- what a user's hook may do without declaring it ------------------------------------------------------------------


class Skipping:
    """Event arguments whose trainer can skip the step."""

    def __init__(self) -> None:
        self.step, self.epoch, self.model, self.trainer, self.ranks = 1, 0, None, self, Ranks()
        self.reasons: list[str] = []
        self.stops: list[str] = []
        self.norms: list[tuple[float, bool]] = []

    def skip_step(self, reason: str) -> None:
        self.reasons.append(reason)

    def request_stop(self, reason: str, by: str | None = None) -> None:
        self.stops.append(reason)

    def set_clipped_norm(self, norm: Any, is_global: bool) -> None:
        self.norms.append((float(norm), is_global))


def ran(bench: Bench) -> Skipping:
    """Run the chain once where steps can be skipped."""
    args, fired = Skipping(), bench.registry.slots.on_update
    fired(args)
    return args


def zero_half(grads: Grads) -> None:
    """Write into the first gradient and then fail."""
    grads["encoder"].zero_()
    raise ValueError("half-way")


def zero_all(grads: Grads) -> None:
    """Write into all gradients without declaring it."""
    for grad in grads.values():
        grad.zero_()


@pytest.mark.hooks_fail(raises=ValueError)
def test_half_written_gradients_reach_no_optimizer(bench: Bench) -> None:
    """If a hook writes in place without declaring it and fails, the step is skipped and no later hook runs."""
    called: list[str] = []
    bench.registry.register(make_hook(zero_half, "half"))
    bench.registry.register(make_hook(lambda grads: called.append("after") or grads, "after"))
    assert ran(bench).reasons == ["half left half-written gradients"] and called == []
    assert isinstance(bench.incidents[0].error, ValueError)
    assert any("sets inplace = True" in note for note in bench.incidents[0].error.__notes__)


@pytest.mark.hooks_fail(raises=GradientError)
def test_writing_in_place_and_returning_nothing_must_be_declared(bench: Bench) -> None:
    """The message says what the hook did and how to declare it; declared, it works, for functions too."""
    bench.registry.register(zero_all, event="update", on_error="warn")
    assert ran(bench).reasons == ["zero_all left half-written gradients"]
    assert "wrote into the gradients in place and returned None" in bench.incidents[0].message
    bench.registry.remove("zero_all")
    bench.reset()

    def declared(grads: Grads) -> None:
        zero_all(grads)

    declared.inplace = True
    bench.registry.register(declared, event="update")
    assert bench.step() == [0.0, 0.0] and len(bench.incidents) == 1


@pytest.mark.hooks_fail(raises=ValueError)
def test_where_steps_cannot_be_skipped_the_failure_is_raised(bench: Bench) -> None:
    """A user's own loop gets the exception instead of wrong gradients."""
    bench.registry.register(make_hook(zero_half, "half"))
    with pytest.raises(ValueError, match="half-way"):
        bench.step()


@pytest.mark.hooks_fail(raises=(ValueError, ZeroDivisionError))
def test_a_failing_hook_that_wrote_nothing_skips_no_step(bench: Bench) -> None:
    """Only writes count, and those of an earlier failure do not."""
    fail = iter([zero_half, lambda grads: 1 / 0])
    bench.registry.register(make_hook(lambda grads: next(fail)(grads), "flaky"))
    assert len(ran(bench).reasons) == 1
    assert ran(bench).reasons == [] and len(bench.incidents) == 2


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_stop_raised_while_writing_uses_no_half_written_gradients(bench: Bench, policy: str) -> None:
    """With a backup the step uses the gradients as they were; without one it is skipped."""

    def stops(grads: Grads) -> None:
        grads["encoder"].zero_()
        raise StopTraining("enough")

    bench.registry.register(make_hook(stops, "stops", inplace=True), on_error=policy)
    args = ran(bench)
    assert args.stops == ["enough"]
    if policy == "raise":
        assert args.reasons == ["stops left half-written gradients"]
    else:
        assert args.reasons == [] and bench.params["encoder"].grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("write", [lambda grad: grad.data.mul_(100), lambda grad: grad.numpy().__imul__(100)])
def test_norms_are_read_again_after_a_users_hook(bench: Bench, write: Callable[[torch.Tensor], Any]) -> None:
    """Writes through .data or NumPy raise no version, and the result is clipped nevertheless."""
    bench.registry.register("measure", name="first", on_error="raise")
    bench.registry.register(make_hook(lambda grads: [write(grad) for grad in grads.values()] and grads, "secretly"))
    bench.registry.register(ClipNorm(1.0))
    args = Skipping()
    args.log = lambda name, value, **_: None
    fired = bench.registry.slots.on_update
    fired(args)
    assert args.norms == [(pytest.approx(1000**0.5 * 10**0.5 * 10**0.5), True)]


def test_what_a_hook_returns_is_copied(bench: Bench) -> None:
    """Later hooks write into copies of it: a state, a parameter, one tensor under two names, an expanded one."""
    kept = {name: torch.full((2,), 8.0) for name in bench.params}
    shared = torch.full((2,), 8.0)
    for returned in (kept, {name: param.detach() for name, param in bench.params.items()},
                     dict.fromkeys(kept, shared), {name: torch.tensor(8.0).expand(2) for name in kept}):  # fmt: skip
        values = [tensor.clone() for tensor in returned.values()]
        returns = make_hook(lambda grads, new=returned: dict(new), "returns")
        with bench.registry.register(returns), bench.registry.register("scale", factor=0.5):
            assert bench.step() == [value[0].item() / 2 for value in values]
        assert all(torch.equal(tensor, before) for tensor, before in zip(returned.values(), values, strict=True))
        bench.reset()


def test_a_hook_may_both_assign_and_return(bench: Bench) -> None:
    """What it deleted stays deleted although it returns a new mapping of the rest."""

    def deletes(grads: Any) -> Any:
        del grads["encoder"]
        return dict(grads)

    bench.registry.register(make_hook(deletes, "deletes"))
    assert bench.step() == [0.0, 2.0] and bench.params["encoder"].grad is None


def test_hooks_run_without_autograd(bench: Bench) -> None:
    """A gradient made from parameters has no graph; hooks of on_gradient_clip run with autograd, as at every event."""
    enabled: list[bool] = []
    bench.registry.register(
        make_hook(
            lambda grads: {name: grad + bench.params[name] for name, grad in grads.items()}, "decay", on_error="raise"
        )
    )
    bench.registry.register(ClipNorm(100.0))
    bench.registry.register(lambda: enabled.append(torch.is_grad_enabled()), "clip", event="gradient_clip")
    assert bench.step() == [1.0, 2.0] and enabled == [True]


@pytest.mark.hooks_fail(raises=GradientError)
def test_a_clipping_hook_must_set_its_norm(bench: Bench) -> None:
    """Without clipped_norm it fails under its policy, and its gradients are not used."""
    bench.registry.register(make_hook(scaled(0.1), "silent", clips=True))
    assert bench.step() == [1.0, 2.0]
    assert "set self.clipped_norm" in bench.incidents[0].message

    class Tells(UpdateHook):
        clips = True

        def on_update(self, grads: Any) -> Any:
            self.clipped_norm = grads.norm()
            return scaled(0.1)(grads)

    bench.registry.register(Tells())
    assert bench.step() == pytest.approx([0.1, 0.2]) and len(bench.norms) == 1


@pytest.mark.parametrize(
    ("clip", "is_global"),
    [
        ({}, True),
        ({"params": "*"}, True),
        ({"norm_type": 1.0}, False),
        ({"params": "encoder"}, False),
        ({"name": "clip_value", "max_value": 9.0, "params": "decoder"}, False),
        ({"name": "spike_guard", "action": "clip", "params": "decoder"}, False),
        ({"name": "spike_guard", "action": "clip"}, True),
    ],
)
def test_the_steps_norm_is_the_global_one_before_clipping(bench: Bench, clip: Any, is_global: bool) -> None:
    """If the first clipping hook computes another norm, the global one is read before it."""
    entry = {"name": "clip_norm", "max_norm": 0.5, **clip}
    if entry["name"] != "clip_norm":
        del entry["max_norm"]
    second = {"name": "clip_norm", "as": "second", "max_norm": 0.1}
    bench.registry.load({"update": [{"name": "scale", "factor": 2.0}, entry, second]})
    args = ran(bench)
    globally = [norm for norm, spans_all in args.norms if spans_all]
    assert globally[0] == pytest.approx(2 * 10**0.5)
    assert len(args.norms) == (2 if is_global else 3) and args.norms[-2][1] == is_global


def test_every_listener_of_on_update_intervenes(bench: Bench) -> None:
    """Functions and lifecycle hooks with that method intervene as update hooks do, unless they declare otherwise."""

    class Both(TrainingHook):
        def on_update(self, grads: Grads) -> Grads:
            return grads

    bench.registry.register(zero_all, event="update", on_error="warn")
    bench.registry.register(Both())
    bench.registry.register(make_hook(lambda grads: grads, "watches", intervenes=False))
    marks = {record.name: record.intervenes for record in bench.registry.list_hooks()}
    assert marks == {"zero_all": True, "both": True, "watches": False}


HOOKS: list[dict[str, Any]] = [
    {"name": "centralize"},
    {"name": "scale", "factor": 0.5, "params": "matrix"},
    {"name": "normalize", "by": "parameter"},
    {"name": "sign", "params": ["matrix", "vector"]},
    {"name": "clip_norm", "max_norm": 0.5},
    {"name": "clip_norm", "max_norm": 0.5, "params": "kernel"},
    {"name": "clip_value", "max_value": 0.1},
    {"name": "clip_adaptive"},
    {"name": "noise", "eta": 1.0, "seed": 0},
    {"name": "grokfast"},
    {"name": "mask", "params": "vector"},
    {"name": "freeze", "params": "vector"},
]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda entry: entry["name"])
def test_norms_from_before_a_hook_are_not_used_after_it(rig: Any, params: Any, hook: dict[str, Any]) -> None:
    """Whatever the hook writes, and also if another hook ran between two measurements."""
    first, again = {"name": "measure", "as": "first"}, {"name": "measure", "as": "again"}
    made = rig(params(), first, hook, again, {"name": "scale", "as": "half", "factor": 0.5}, {"name": "measure"})
    made.step()
    left = torch.stack([param.grad.norm() for param in made.params.values() if param.grad is not None]).norm()
    torch.testing.assert_close(made.trainer.logged["gradients/measure/norm"], left)
    torch.testing.assert_close(made.trainer.logged["gradients/again/norm"], left * 2)


@pytest.mark.parametrize("way", ["in place", "new"])
def test_norms_are_right_after_a_listener_of_on_gradient_clip_wrote(rig: Any, params: Any, way: str) -> None:
    """It may write into the gradients or assign other ones to the parameters."""
    made = rig(params(), {"name": "clip_norm", "max_norm": 1.0}, "measure")

    def double() -> None:
        for param in made.params.values():
            if param.grad is not None:
                param.grad = param.grad.mul_(2) if way == "in place" else param.grad * 2

    made.registry.register(double, "double", event="gradient_clip")
    made.step()
    torch.testing.assert_close(made.trainer.logged["gradients/measure/norm"], torch.tensor(2.0))


def test_a_users_hook_may_write_between_two_norms(rig: Any, params: Any) -> None:
    """The hook's second norm is that of what it has written, and so is that of a later measurement."""
    incidents: list[float] = []

    class Halves(UpdateHook):
        inplace, on_error = True, "raise"

        def on_update(self, grads: Any) -> None:
            incidents.append(grads.norm().item())
            for grad in grads.values():
                grad.mul_(0.5)
            incidents.append(grads.norm().item())

    made = rig(params(), "measure")
    made.registry.register(Halves())
    made.registry.load({"update": [{"name": "measure", "as": "after"}]})
    made.step()
    assert incidents[1] == pytest.approx(incidents[0] / 2)
    assert made.trainer.logged["gradients/after/norm"].item() == pytest.approx(incidents[1])


@pytest.mark.hooks_fail(raises=ValueError)
def test_inference_tensors_do_not_make_an_innocent_hook_suspect(caplog: pytest.LogCaptureFixture) -> None:
    """A write into an inference tensor cannot be noticed, so a hook that fails is not accused of one."""

    class Fails(UpdateHook):
        on_error = "warn"

        def on_update(self, grads: Any) -> Any:
            raise ValueError("not today")

    model = torch.nn.Linear(3, 1)
    trainer = make_trainer(Fails(), model=model, data=make_batches(1))
    caplog.set_level(logging.WARNING, "hookline")

    @trainer.on("after_backward")
    def replace() -> None:
        with torch.inference_mode():
            for param in model.parameters():
                param.grad = torch.ones(param.shape)

    before = model.weight.detach().clone()
    trainer.train()
    assert "not today" in caplog.text and "already written" not in caplog.text
    assert torch.equal(model.weight, before - 0.1)  # the step was not skipped
