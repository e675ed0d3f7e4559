"""The update chain: links in order, each on what the last one left, failures leaving everything as it was."""

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.errors import GradientError, HooklineError, MissingArgument
from hookline.events.policy import Incident
from hookline.gradients.chain import UpdateChain
from hookline.gradients.transforms import ClipNorm, Identity
from hookline.registry.base import UpdateHook
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
    with pytest.raises(HooklineError, match="did you mean 'encoder'"):
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
    bench.chain.states.update({"count": {"calls": 10}, "later": {"calls": 20}})
    bench.registry.register(Counting("later"))
    bench.step()
    assert bench.chain.states == {"count": {"calls": 11}, "later": {"calls": 21}}


def test_another_hook_of_the_same_name_gets_a_state_of_its_own(bench: Bench) -> None:
    """A removed hook leaves nothing to its successor."""
    bench.registry.register(Counting("count"))
    bench.step()
    bench.registry.remove("count")
    bench.registry.register(Counting("count"))
    bench.step()
    assert bench.chain.states["count"]["calls"] == 1


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


def test_nothing_of_a_step_is_held_on_to(bench: Bench) -> None:
    """Norms that links share are let go of when the chain is over, also when a link failed."""
    bench.registry.register(ClipNorm(1.0))
    bench.registry.register(link(lambda grads: 1 / 0, "fatal", on_error="raise"))
    with pytest.raises(ZeroDivisionError):
        bench.step()
    assert not bench.chain.known._kept and bench.chain.known._latest is None
