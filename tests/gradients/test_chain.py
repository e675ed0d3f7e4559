"""The update chain: links in order, each on what the last one left, failures leaving everything as it was."""

import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.errors import GradientError, HooklineError, MissingArgument, StopTraining
from hookline.events.policy import Incident
from hookline.gradients.chain import UpdateChain
from hookline.gradients.transforms import ClipNorm, Identity, Mask
from hookline.registry.base import TrainingHook, UpdateHook
from hookline.registry.registry import HookRegistry

Grads = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are expected here."""
    caplog.set_level(logging.CRITICAL, "hookline")


class Bench:
    """A registry with a chain over two parameters whose gradients are 1 and 2."""

    def __init__(self) -> None:
        self.registry = HookRegistry()
        self.params = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("encoder", "decoder")}
        self.chain = UpdateChain(self.registry, lambda: self.params)
        self.norms: list[torch.Tensor] = []
        self.told: list[Incident] = []
        self.registry.desk.watch(self.told.append)
        self.reset()

    def reset(self) -> None:
        for value, param in enumerate(self.params.values(), 1):
            param.grad = torch.full((2,), float(value))

    def step(self) -> list[float]:
        """Run the chain as a step does; returns the first element of each gradient."""
        if fired := self.registry.fire.on_update:
            fired(
                SimpleNamespace(
                    step=1, epoch=0, model=None, trainer=None, clipped=lambda norm, is_global: self.norms.append(norm)
                )
            )
        return [param.grad[0].item() if param.grad is not None else 0.0 for param in self.params.values()]


@pytest.fixture
def bench() -> Bench:
    """A fresh bench."""
    return Bench()


def link(function: Callable[[Grads], Any], name: str, **more: Any) -> UpdateHook:
    """An update hook made of a function."""
    return type("Made", (UpdateHook,), {"on_update": lambda self, grads: function(grads), **more})(name)


def scaled(factor: float) -> Callable[[Grads], dict[str, torch.Tensor]]:
    """Multiplies all gradients."""
    return lambda grads: {name: grad * factor for name, grad in grads.items()}


@pytest.mark.req("000-40", "000-07")
def test_links_run_in_registration_order_on_what_the_last_one_left(bench: Bench) -> None:
    """Plus one, then times ten is not times ten, then plus one."""
    bench.registry.register(link(lambda grads: {n: g + 1 for n, g in grads.items()}, "add"))
    bench.registry.register(link(scaled(10), "scale"))
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
def test_a_failing_link_leaves_the_gradients_as_they_were(bench: Bench, wrong: str) -> None:
    """The others run on, and the failure is reported under the link's name."""
    returns: dict[str, Callable[[Grads], Any]] = {
        "raises": lambda grads: 1 / 0,
        "none": lambda grads: None,
        "drops": lambda grads: {},
        "shape": lambda grads: {name: torch.zeros(3) for name in grads},
    }
    bench.registry.register(link(returns[wrong], "broken"))
    bench.registry.register(link(scaled(10), "scale"))
    assert bench.step() == [10.0, 20.0]
    assert [(one.kind, one.hook) for one in bench.told] == [("failed", "broken")]


def test_a_half_assigned_view_is_forgotten_when_its_link_fails(bench: Bench) -> None:
    """Assignments before the error do not leak into the gradients or into the next link."""

    def half(grads: Any) -> None:
        grads["encoder"] = torch.zeros(2)
        raise ValueError

    bench.registry.register(link(half, "half"))
    assert bench.step() == [1.0, 2.0]
    assert bench.step() == [1.0, 2.0]


@pytest.mark.parametrize("declared", ["warn", "raise"])
def test_a_link_that_writes_in_place_gets_a_backup_when_its_policy_isolates_it(bench: Bench, declared: str) -> None:
    """The policy that counts is the one it was registered with, not the one its class declares."""

    def half(grads: Grads) -> None:
        grads["encoder"].zero_()
        raise ValueError

    bench.registry.register(link(half, "half", inplace=True, on_error=declared), on_error="warn")
    assert bench.step() == [1.0, 2.0]


def test_a_link_that_writes_in_place_may_return_nothing(bench: Bench) -> None:
    """inplace=True says that the gradients it got are the answer."""
    bench.registry.register(link(lambda grads: [grad.mul_(3) for grad in grads.values()] and None, "x", inplace=True))
    assert bench.step() == [3.0, 6.0]


def test_a_link_whose_policy_is_raise_ends_the_step_with_its_own_exception(bench: Bench) -> None:
    """Annotated, with its cause, never replaced."""

    def broken(grads: Grads) -> None:
        raise ValueError("boom") from KeyError("why")

    bench.registry.register(link(broken, "fatal", on_error="raise"))
    with pytest.raises(ValueError, match="boom") as caught:
        bench.step()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__notes__ == ["raised by hook 'fatal' in on_update, step 1"]


def test_three_failures_in_a_row_switch_a_link_off_and_a_success_breaks_the_row(bench: Bench) -> None:
    """The chain counts as every other event does."""
    fails = iter([True, True, False, True, True, True])

    def sometimes(grads: Grads) -> Grads:
        if next(fails):
            raise ValueError
        return grads

    bench.registry.register(link(sometimes, "flaky"))
    for _ in range(5):
        bench.step()
    assert bench.registry.is_enabled("flaky")
    bench.step()
    assert not bench.registry.is_enabled("flaky")


@pytest.mark.req("000-06")
def test_a_link_that_is_off_does_nothing(bench: Bench) -> None:
    """Switched off, the gradients reach the optimizer as they were."""
    bench.registry.register(link(scaled(10), "scale"), enabled=False)
    assert bench.step() == [1.0, 2.0] and bench.registry.fire.on_update is None


def test_params_select_and_a_pattern_that_matches_nothing_is_an_error(bench: Bench) -> None:
    """A link may see part of the gradients only."""
    bench.registry.register(link(scaled(10), "part", params="enc*"))
    assert bench.step() == [10.0, 2.0]
    with pytest.raises(HooklineError, match=r"hook 'typo': parameter pattern 'encodr'.*did you mean 'encoder'"):
        bench.registry.register(link(scaled(10), "typo", params="encodr"))


class Counting(UpdateHook):
    """Counts its calls in its state."""

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        return {"calls": 0, "params": list(params)}

    def on_update(self, grads: Grads, state: dict[str, Any]) -> Grads:
        state["calls"] += 1
        return grads


def test_state_is_made_once_and_survives_changes_of_the_set(bench: Bench) -> None:
    """Registering another hook or switching this one off and on does not start it anew."""
    bench.registry.register(Counting("count"))
    bench.step()
    bench.registry.register(link(scaled(1), "other"))
    bench.registry.disable("count")
    bench.step()
    bench.registry.enable("count")
    bench.step()
    assert bench.chain.states["count"] == {"calls": 2, "params": ["encoder", "decoder"]}


def test_restored_state_is_used_also_by_a_chain_that_has_run(bench: Bench) -> None:
    """A checkpoint replaces the state of a link that is compiled already, and comes before init of a new one."""
    bench.registry.register(Counting("count"))
    bench.step()
    bench.chain.restore({"count": {"calls": 10}, "later": {"calls": 20}})
    bench.registry.register(Counting("later"))
    bench.step()
    assert bench.chain.states == {"count": {"calls": 11}, "later": {"calls": 21}}


def test_a_hook_that_comes_after_its_state_is_initialized_all_the_same(bench: Bench) -> None:
    """A mask prepares itself in init; with a restored state it would mask nothing."""
    bench.chain.restore({"mask": {}})
    bench.registry.register(Mask(masks={"encoder": torch.tensor([0, 1])}))
    assert bench.step() == [0.0, 2.0]


def test_a_removed_hook_takes_its_state_with_it(bench: Bench) -> None:
    """Nothing is saved of it; and what a checkpoint holds for a stranger is not saved either."""
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
    """Also the one that a checkpoint holds for it."""

    class Brings(Counting):
        def setup(self, registry: HookRegistry) -> None:
            registry.register(Counting("brought"))

    bench.chain.restore({"brings": {"calls": 5}})
    bench.registry.register(Brings("brings"))
    bench.step()
    assert bench.chain.states["brings"]["calls"] == 6 and bench.chain.states["brought"]["calls"] == 1


def test_another_hook_of_the_same_name_gets_a_state_of_its_own(bench: Bench) -> None:
    """A removed hook leaves nothing to its successor."""
    bench.registry.register(Counting("count"))
    bench.step()
    bench.registry.remove("count")
    bench.registry.register(Counting("count"))
    bench.step()
    assert bench.chain.states["count"]["calls"] == 1


class Sums(UpdateHook):
    """Adds up each parameter's gradients in its state."""

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        return {name: torch.zeros_like(param) for name, param in params.items()}

    def on_update(self, grads: Grads, state: dict[str, Any]) -> Grads:
        for name, grad in grads.items():
            state[name] += grad
        return grads


@pytest.mark.parametrize("registered_first", [True, False])
def test_a_run_may_go_on_with_more_parameters(bench: Bench, registered_first: bool) -> None:
    """What a checkpoint holds for some parameters is kept, and the others begin with what init makes for them."""
    saved = {"sums": {"encoder": torch.tensor([10.0, 10.0])}}
    if not registered_first:
        bench.chain.restore(saved)
    bench.registry.register(Sums(), "sums", on_error="raise")
    if registered_first:
        bench.chain.restore(saved)
    bench.step()
    sums = {name: total.tolist() for name, total in bench.chain.states["sums"].items()}
    assert sums == {"encoder": [11.0, 11.0], "decoder": [2.0, 2.0]}


def test_what_a_hook_has_taken_out_of_its_state_stays_out(bench: Bench) -> None:
    """A resumed run is the uninterrupted one: only parameters are completed, not what else init makes."""
    bench.registry.register(Counting("count"))
    bench.chain.restore({"count": {"calls": 4}})
    assert bench.chain.states["count"] == {"calls": 4}


def test_a_hook_whose_init_fails_is_named(bench: Bench) -> None:
    """At registration, which it ends: the registry is as it was."""

    class Fails(UpdateHook):
        def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
            raise ValueError("no room")

        def on_update(self, grads: Grads) -> Grads:
            return grads

    with pytest.raises(ValueError, match="no room") as caught:
        bench.registry.register(Fails(), "roomy")
    assert caught.value.__notes__ == ["raised by hook 'roomy' in init"]
    assert "roomy" not in bench.registry and not bench.chain.states


def test_a_clip_link_announces_its_norm_after_it_ran(bench: Bench) -> None:
    """on_gradient_clip comes between the clip link and the next one; not when the clip link failed."""
    heard: list[float] = []
    bench.registry.register(ClipNorm(1.0), on_error="warn")
    bench.registry.register(lambda grad_norm: heard.append(grad_norm), "clip", event="gradient_clip")
    fired = bench.registry.fire.on_update
    assert fired is not None
    moment = SimpleNamespace(step=1, clipped_norm=3.5, clipped=lambda norm, is_global: bench.norms.append(norm))
    fired(moment)
    assert heard == [3.5] and bench.norms[0].item() == pytest.approx(10**0.5)
    bench.registry.get("clip_norm").max_norm = "broken"
    fired(moment)
    assert heard == [3.5] and len(bench.norms) == 1


def test_a_value_that_is_not_there_is_not_the_links_failure(bench: Bench) -> None:
    """An event fired by hand without what a link names is the caller's error."""

    class NamesEpoch(UpdateHook):
        def on_update(self, grads: Grads, epoch: int) -> Grads:
            return grads

    bench.registry.register(NamesEpoch())
    with pytest.raises(MissingArgument, match="'names_epoch' names 'epoch'"):
        bench.registry.on_update(step=1)
    assert bench.registry.entry("names_epoch").failures.total == 0


def test_an_empty_chain_has_no_callable(bench: Bench) -> None:
    """No update hook, no cost."""
    assert bench.registry.fire.on_update is None and bench.chain.compile([], False) is None


def test_a_wrong_return_says_what_was_wrong(bench: Bench) -> None:
    """The reported error is a GradientError with the reason."""
    bench.registry.register(link(lambda grads: None, "silent"))
    bench.step()
    assert isinstance(bench.told[0].error, GradientError) and "returned None" in bench.told[0].message


def test_a_step_that_a_guard_leaves_out_goes_no_further(bench: Bench) -> None:
    """Links behind it are not called: nobody will use their work, and their memory stays clean."""
    called: list[str] = []

    class Guard(UpdateHook):
        inplace = True

        def on_update(self, trainer: Any) -> None:
            trainer.skip_step("bad")

    bench.registry.register(link(lambda grads: called.append("before") or grads, "before"))
    bench.registry.register(Guard())
    bench.registry.register(link(lambda grads: called.append("behind") or grads, "behind"))
    moment = SimpleNamespace(step=3, epoch=0, model=None, skip_asked_at=-1)
    moment.trainer = SimpleNamespace(skip_step=lambda reason: setattr(moment, "skip_asked_at", 3))
    fired = bench.registry.fire.on_update
    assert fired is not None
    fired(moment)
    assert called == ["before"]
    moment.step = 4
    moment.trainer.skip_step = lambda reason: None
    fired(moment)
    assert called == ["before", "before", "behind"]


def test_gradients_are_freed_after_the_chain(bench: Bench) -> None:
    """What hooks share about gradients keeps none of them alive once the chain is over, also if a hook failed."""
    bench.registry.register(ClipNorm(1.0))
    bench.registry.register(link(lambda grads: 1 / 0, "fatal", on_error="raise"))
    with pytest.raises(ZeroDivisionError):
        bench.step()
    bench.told.clear()  # its exception refers to the gradients
    grads = [weakref.ref(param.grad) for param in bench.params.values() if param.grad is not None]
    for param in bench.params.values():
        param.grad = None
    gc.collect()
    assert [one() for one in grads] == [None, None]


# ---- what a user's link may do behind our back -----------------------------------------------------------------------


class Skipping:
    """A moment whose trainer can leave the step out."""

    def __init__(self) -> None:
        self.step, self.epoch, self.model, self.trainer = 1, 0, None, self
        self.reasons: list[str] = []
        self.stops: list[str] = []
        self.norms: list[tuple[float, bool]] = []

    def skip_step(self, reason: str) -> None:
        self.reasons.append(reason)

    def request_stop(self, reason: str, by: str | None = None) -> None:
        self.stops.append(reason)

    def clipped(self, norm: Any, is_global: bool) -> None:
        self.norms.append((float(norm), is_global))


def ran(bench: Bench) -> Skipping:
    """The chain, run once where steps can be left out."""
    moment, fired = Skipping(), bench.registry.fire.on_update
    assert fired is not None
    fired(moment)
    return moment


def zero_half(grads: Grads) -> None:
    """Writes into the first gradient and then fails."""
    grads["encoder"].zero_()
    raise ValueError("half-way")


def zero_all(grads: Grads) -> None:
    """Writes into all of them and says nothing."""
    for grad in grads.values():
        grad.zero_()


def test_half_written_gradients_reach_no_optimizer(bench: Bench) -> None:
    """A link that did not say that it writes in place and fails half-way: the step is left out, nobody runs behind."""
    called: list[str] = []
    bench.registry.register(link(zero_half, "half"))
    bench.registry.register(link(lambda grads: called.append("behind") or grads, "behind"))
    assert ran(bench).reasons == ["half left half-written gradients"] and called == []
    assert isinstance(bench.told[0].error, ValueError)
    assert any("sets inplace = True" in note for note in bench.told[0].error.__notes__)


def test_writing_in_place_and_returning_nothing_must_be_declared(bench: Bench) -> None:
    """The message says what was done and how to say so; once it is said, it works, for functions too."""
    bench.registry.register(zero_all, event="update")
    assert ran(bench).reasons == ["zero_all left half-written gradients"]
    assert "wrote into the gradients in place and returned None" in bench.told[0].message
    bench.registry.remove("zero_all")
    bench.reset()

    def declared(grads: Grads) -> None:
        zero_all(grads)

    declared.inplace = True  # type: ignore[attr-defined]
    bench.registry.register(declared, event="update")
    assert bench.step() == [0.0, 0.0] and len(bench.told) == 1


def test_where_nobody_can_leave_a_step_out_the_failure_is_raised(bench: Bench) -> None:
    """A loop of one's own gets the exception instead of wrong gradients."""
    bench.registry.register(link(zero_half, "half"))
    with pytest.raises(ValueError, match="half-way"):
        bench.step()


def test_a_failing_link_that_wrote_nothing_costs_no_step(bench: Bench) -> None:
    """Only writes count, and those of an earlier failure are forgotten."""
    fail = iter([zero_half, lambda grads: 1 / 0])
    bench.registry.register(link(lambda grads: next(fail)(grads), "flaky"))
    assert len(ran(bench).reasons) == 1
    assert ran(bench).reasons == [] and len(bench.told) == 2


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_stop_from_the_middle_of_a_link_makes_no_half_step(bench: Bench, policy: str) -> None:
    """With a backup the step is made on the gradients as they were; without one it is left out."""

    def stops(grads: Grads) -> None:
        grads["encoder"].zero_()
        raise StopTraining("enough")

    bench.registry.register(link(stops, "stops", inplace=True), on_error=policy)
    moment = ran(bench)
    assert moment.stops == ["enough"]
    if policy == "raise":
        assert moment.reasons == ["stops left half-written gradients"]
    else:
        assert moment.reasons == [] and bench.params["encoder"].grad.tolist() == [1.0, 1.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("write", [lambda grad: grad.data.mul_(100), lambda grad: grad.numpy().__imul__(100)])
def test_norms_are_read_anew_behind_a_users_link(bench: Bench, write: Callable[[torch.Tensor], Any]) -> None:
    """What is written through .data or NumPy moves no version counter, and is clipped all the same."""
    bench.registry.register("measure", name="first", on_error="raise")
    bench.registry.register(link(lambda grads: [write(grad) for grad in grads.values()] and grads, "secretly"))
    bench.registry.register(ClipNorm(1.0))
    moment = Skipping()
    moment.log = lambda name, value: None  # type: ignore[attr-defined]
    fired = bench.registry.fire.on_update
    assert fired is not None
    fired(moment)
    assert moment.norms == [(pytest.approx(1000**0.5 * 10**0.5 * 10**0.5), True)]


def test_what_a_link_returns_stays_its_own(bench: Bench) -> None:
    """Links behind it write into copies: a state, a parameter, one tensor under two names, an expanded one."""
    kept = {name: torch.full((2,), 8.0) for name in bench.params}
    shared = torch.full((2,), 8.0)
    for returned in (kept, {name: param.detach() for name, param in bench.params.items()},
                     dict.fromkeys(kept, shared), {name: torch.tensor(8.0).expand(2) for name in kept}):  # fmt: skip
        values = [tensor.clone() for tensor in returned.values()]
        returns = link(lambda grads, new=returned: dict(new), "returns")
        with bench.registry.register(returns), bench.registry.register("scale", factor=0.5):
            assert bench.step() == [value[0].item() / 2 for value in values]
        assert all(torch.equal(one, before) for one, before in zip(returned.values(), values, strict=True))
        bench.reset()


def test_links_run_without_autograd(bench: Bench) -> None:
    """A gradient made from parameters carries no graph; hooks of on_gradient_clip run as at every event."""
    enabled: list[bool] = []
    bench.registry.register(
        link(lambda grads: {name: grad + bench.params[name] for name, grad in grads.items()}, "decay", on_error="raise")
    )
    bench.registry.register(ClipNorm(100.0))
    bench.registry.register(lambda: enabled.append(torch.is_grad_enabled()), "clip", event="gradient_clip")
    assert bench.step() == [1.0, 2.0] and enabled == [True]


def test_a_link_that_clips_must_tell_its_norm(bench: Bench) -> None:
    """If it does not, that is its failure by its policy, and its gradients are not taken."""
    bench.registry.register(link(scaled(0.1), "silent", clips=True))
    assert bench.step() == [1.0, 2.0]
    assert "set self.clipped_norm" in bench.told[0].message

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
    """Whatever the first clip link finds: where that is another norm, the global one is read before it."""
    entry = {"name": "clip_norm", "max_norm": 0.5, **clip}
    if entry["name"] != "clip_norm":
        del entry["max_norm"]
    second = {"name": "clip_norm", "as": "second", "max_norm": 0.1}
    bench.registry.load({"update": [{"name": "scale", "factor": 2.0}, entry, second]})
    moment = ran(bench)
    globally = [norm for norm, spans_all in moment.norms if spans_all]
    assert globally[0] == pytest.approx(2 * 10**0.5)
    assert len(moment.norms) == (2 if is_global else 3) and moment.norms[-2][1] == is_global


def test_whoever_hears_on_update_is_an_intervener(bench: Bench) -> None:
    """A function and a lifecycle hook with that method as much as an update hook; one that says otherwise is not."""

    class Both(TrainingHook):
        def on_update(self, grads: Grads) -> Grads:
            return grads

    bench.registry.register(zero_all, event="update")
    bench.registry.register(Both())
    bench.registry.register(link(lambda grads: grads, "watches", intervenes=False))
    marks = {record.name: record.intervenes for record in bench.registry.list_hooks()}
    assert marks == {"zero_all": True, "both": True, "watches": False}


LINKS: list[dict[str, Any]] = [
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


@pytest.mark.parametrize("link", LINKS, ids=lambda entry: entry["name"])
def test_norms_from_before_a_link_are_not_taken_for_those_behind_it(
    rig: Any, params: Any, link: dict[str, Any]
) -> None:
    """Whatever it writes, whoever has measured before it, and also if another link has run in between."""
    first, again = {"name": "measure", "as": "first"}, {"name": "measure", "as": "again"}
    made = rig(params(), first, link, again, {"name": "scale", "as": "half", "factor": 0.5}, {"name": "measure"})
    made.step()
    left = torch.stack([param.grad.norm() for param in made.params.values() if param.grad is not None]).norm()
    torch.testing.assert_close(made.trainer.logged["gradients/measure/norm"], left)
    torch.testing.assert_close(made.trainer.logged["gradients/again/norm"], left * 2)


@pytest.mark.parametrize("way", ["in place", "anew"])
def test_norms_are_right_behind_a_hook_that_writes_when_it_hears_of_clipping(rig: Any, params: Any, way: str) -> None:
    """Whether it writes into the gradients or gives the parameters other ones."""
    made = rig(params(), {"name": "clip_norm", "max_norm": 1.0}, "measure")

    def double() -> None:
        for param in made.params.values():
            if param.grad is not None:
                param.grad = param.grad.mul_(2) if way == "in place" else param.grad * 2

    made.registry.register(double, "double", event="gradient_clip")
    made.step()
    torch.testing.assert_close(made.trainer.logged["gradients/measure/norm"], torch.tensor(2.0))


def test_a_link_of_the_users_that_writes_between_two_questions(rig: Any, params: Any) -> None:
    """Its second answer is of what it has written, and so is what a measure behind it says."""
    told: list[float] = []

    class Halves(UpdateHook):
        inplace, on_error = True, "raise"

        def on_update(self, grads: Any) -> None:
            told.append(grads.norm().item())
            for grad in grads.values():
                grad.mul_(0.5)
            told.append(grads.norm().item())

    made = rig(params(), "measure")
    made.registry.register(Halves())
    made.registry.load({"update": [{"name": "measure", "as": "after"}]})
    made.step()
    assert told[1] == pytest.approx(told[0] / 2)
    assert made.trainer.logged["gradients/after/norm"].item() == pytest.approx(told[1])
