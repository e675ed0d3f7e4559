"""Test random chains: their result is the composition of pure functions, whichever hooks fail or only measure."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hookline import HooklineError, UpdateHook

Grads = dict[str, torch.Tensor]
Pure = Callable[[Grads], Grads]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
NAMES = ("matrix", "kernel", "vector", "scalar")


def each(function: Callable[[torch.Tensor], torch.Tensor]) -> Pure:
    """Apply a function to every gradient."""
    return lambda grads: {name: function(grad) for name, grad in grads.items()}


PURE: dict[str, Pure] = {
    "halve": each(lambda grad: grad / 2),
    "add_one": each(lambda grad: grad + 1),
    "square": each(lambda grad: grad * grad),
    "clamp": each(lambda grad: grad.clamp(-1, 1)),
    "flip": each(lambda grad: -grad),
}


def raises(grads: Grads) -> Grads:
    """Assign some gradients, then fail."""
    first = next(iter(grads))
    grads[first] = torch.zeros_like(grads[first])
    raise ValueError("boom")


def scribbles(grads: Grads) -> None:
    """Write in place, then fail."""
    for grad in list(grads.values())[:2]:
        grad.mul_(1000)
    raise ValueError("boom")


def overwrites(grads: Grads) -> None:
    """Write in place and return None."""
    for grad in grads.values():
        grad.fill_(1e9)


IN_PLACE = {"scribbles": scribbles, "overwrites": overwrites}
BROKEN: dict[str, Callable[[Grads], Any]] = {
    "raises": raises,
    "returns_none": lambda grads: None,
    "drops": lambda grads: dict(list(grads.items())[1:]),
    "reshapes": lambda grads: {name: grad.unsqueeze(0) for name, grad in grads.items()},
    "widens": lambda grads: {name: grad.double() for name, grad in grads.items()},
    "adds": lambda grads: {**grads, "stranger": torch.zeros(1)},
}


def make_hook(kind: str, in_place: bool) -> UpdateHook:
    """Make a user's hook; in place it writes what the pure function returns into the tensors it got."""
    function = {**PURE, **BROKEN}[kind]

    class Made(UpdateHook):
        inplace, on_error = in_place and kind in PURE, "warn"

        def on_update(self, grads: Grads) -> Any:
            result = function(grads)
            if not self.inplace:
                return result
            for name, grad in result.items():
                grads[name].copy_(grad)
            return None

    return Made()


def gradients(params: Any) -> Grads:
    return {name: param.grad.clone() for name, param in params.items() if param.grad is not None}


def composed(chain: list[tuple[str, bool]], grads: Grads) -> tuple[Grads, list[str]]:
    """Return the composition of the functions that work, and which do not: squares of squares overflow."""
    failed = []
    for place, (kind, _) in enumerate(chain):
        result = PURE[kind](grads) if kind in PURE else None
        if result is None or not all(grad.isfinite().all() for grad in result.values()):
            failed.append(f"{place}_{kind}")
        else:
            grads = result
    return grads, failed


CHAIN = st.lists(st.tuples(st.sampled_from([*PURE, *BROKEN]), st.booleans()), max_size=7)


@given(chain=CHAIN, seed=st.integers(0, 3))
@example(chain=[("square", True), ("square", False)] * 3 + [("halve", False)], seed=1)  # overflows
@QUICK
@pytest.mark.hooks_fail(raises=(HooklineError, ValueError))
def test_a_chain_is_the_composition_of_what_works(
    params: Callable[..., Any], rig: Any, chain: list[tuple[str, bool]], seed: int
) -> None:
    """The result is the composition, bit for bit, in place or not; a failing hook changes nothing and is reported."""
    made = rig(params(seed=seed))
    incidents: list[str] = []
    made.registry.failures.subscribe(lambda incident: incidents.append(incident.hook))
    for place, (kind, in_place) in enumerate(chain):
        made.registry.register(make_hook(kind, in_place), f"{place}_{kind}")
    wanted, failed = composed(chain, gradients(made.params))
    after = made.step()
    assert all(torch.equal(after[name], wanted[name]) for name in NAMES)
    assert incidents == failed


@given(before=CHAIN, later=CHAIN, kind=st.sampled_from(sorted(IN_PLACE)), seed=st.integers(0, 3))
@QUICK
@pytest.mark.hooks_fail(raises=(HooklineError, ValueError))
def test_wrong_writes_in_place_reach_no_optimizer(
    params: Callable[..., Any], rig: Any, before: Any, later: Any, kind: str, seed: int
) -> None:
    """Wherever in the chain a hook writes and fails: declared writes are undone, undeclared ones skip the step."""
    for declared in (True, False):
        made = rig(params(seed=seed))
        broken = type("Broken", (UpdateHook,), {"on_update": lambda self, grads: IN_PLACE[kind](grads)})()
        broken.inplace = declared and kind == "scribbles"  # what returns nothing is all right once it is declared
        for place, (other, in_place) in enumerate(before):
            made.registry.register(make_hook(other, in_place), f"{place}_{other}")
        made.registry.register(broken, "broken", on_error="warn")
        for place, (other, in_place) in enumerate(later, len(before)):
            made.registry.register(make_hook(other, in_place), f"{place}_{other}")
        wanted, _ = composed([*before, *later], gradients(made.params))
        after = made.step()
        if broken.inplace:
            assert all(torch.equal(after[name], wanted[name]) for name in NAMES) and made.trainer.skipped == []
        else:
            assert made.trainer.skipped == ["broken left half-written gradients"]


def total(grads: Grads) -> torch.Tensor:
    return torch.cat([grad.reshape(-1).double() for grad in grads.values()]).norm()


def scaled(grads: Grads, factor: Any) -> Grads:
    return {name: (grad.double() * factor).float() for name, grad in grads.items()}


def centralized(grads: Grads) -> Grads:
    return {
        name: grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else grad
        for name, grad in grads.items()
    }


READY: dict[str, tuple[dict[str, Any], Pure]] = {
    "scale": ({"factor": 0.3}, lambda grads: scaled(grads, 0.3)),
    "part": (
        {"name": "scale", "factor": 2.0, "params": "*e*"},
        lambda grads: {name: grad * 2 if "e" in name else grad for name, grad in grads.items()},
    ),
    "clip_norm": ({"max_norm": 1.0}, lambda grads: scaled(grads, min(1.0, 1.0 / (total(grads).item() + 1e-6)))),
    "clip_value": ({"max_value": 0.2}, each(lambda grad: grad.clamp(-0.2, 0.2))),
    "normalize": ({}, lambda grads: scaled(grads, 1 / (total(grads) + 1e-6))),
    "centralize": ({}, centralized),
    "sign": ({}, each(torch.sign)),
}
SMOOTH = [name for name in READY if name != "sign"]  # a sign turns a rounding error into a jump


@given(chain=st.lists(st.sampled_from(SMOOTH), max_size=6), seed=st.integers(0, 3))
@QUICK
def test_transforms_compose(params: Callable[..., Any], rig: Any, chain: list[str], seed: int) -> None:
    """Whatever norms a transform reuses, the result is that of the definitions one after the other."""
    made = rig(params(seed=seed), *entries(chain))
    wanted = gradients(made.params)
    for kind in chain:
        wanted = READY[kind][1](wanted)
    after = made.step()
    for name in NAMES:
        torch.testing.assert_close(after[name], wanted[name], rtol=1e-4, atol=1e-5)


@given(chain=st.lists(st.sampled_from(list(READY)), min_size=1, max_size=5), seed=st.integers(0, 3), data=st.data())
@QUICK
def test_measuring_changes_no_bit(
    params: Callable[..., Any], rig: Any, chain: list[str], seed: int, data: st.DataObject
) -> None:
    """Measure anything, anywhere in the chain, of any of the parameters."""
    watched: list[Any] = []
    for place, entry in enumerate(entries(chain)):
        if data.draw(st.booleans()):
            metrics = data.draw(st.sampled_from([["norm"], ["norm", "zeros"], ["absmax"]]))
            part = data.draw(st.sampled_from([None, "matrix", ["vector", "scalar"]]))
            watched.append({"name": "measure", "as": f"look_{place}", "metrics": metrics, "params": part})
        watched.append(entry)
    if data.draw(st.booleans()):
        watched.append("link_norms")
    plain, seen = rig(params(seed=seed), *entries(chain)).step(), rig(params(seed=seed), *watched).step()
    assert all(torch.equal(plain[name], seen[name]) for name in NAMES)


def entries(chain: list[str]) -> list[dict[str, Any]]:
    """Return the chain as a config has it."""
    return [{"name": kind, **READY[kind][0], "as": f"{place}_{kind}"} for place, kind in enumerate(chain)]


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OURS: list[dict[str, Any]] = [
    {"name": "centralize"},
    {"name": "centralize", "params": "kernel"},
    {"name": "scale", "factor": 0.5},
    {"name": "scale", "factor": 3.0, "params": ["matrix", "scalar"]},
    {"name": "clip_norm", "max_norm": 2.0},
    {"name": "clip_norm", "max_norm": 1.0, "params": "vector"},
    {"name": "clip_norm", "max_norm": 1.0, "norm_type": 1.0},
    {"name": "clip_value", "max_value": 0.7},
    {"name": "normalize", "params": "kernel"},
    {"name": "skip_nonfinite"},
]


def on_device(params: Any, device: str) -> Any:
    """Copy parameters and gradients to the device."""
    moved = {name: torch.nn.Parameter(param.detach().to(device)) for name, param in params.items()}
    for name, param in params.items():
        moved[name].grad = None if param.grad is None else param.grad.to(device)
    return moved


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@given(chosen=st.lists(st.sampled_from(OURS), min_size=1, max_size=6), seed=st.integers(0, 3))
@settings(QUICK, max_examples=30)
def test_norms_between_transforms_are_right(
    params: Callable[..., Any], rig: Any, chosen: list[dict[str, Any]], seed: int, device: str
) -> None:
    """Whether or not a transform reports its norms, the norm measured after it is that of the gradients."""
    hooks = [{**entry, "as": f"hook_{place}"} for place, entry in enumerate(chosen)]
    measures = [{"name": "measure", "as": f"measure_{place}"} for place in range(len(hooks))]
    everything = [entry for pair in zip(hooks, measures, strict=True) for entry in pair]
    measured = rig(on_device(params(seed=seed), device), *everything)
    after = measured.step()
    step_by_step = rig(on_device(params(seed=seed), device))
    for place, entry in enumerate(hooks):
        alone = rig(step_by_step.params, entry)
        left = [grad for grad in alone.step().values() if grad is not None]
        norm = torch.stack([grad.norm() for grad in left]).norm()
        torch.testing.assert_close(measured.trainer.logged[f"gradients/measure_{place}/norm"], norm, rtol=1e-5, atol=0)
    for name in NAMES:
        torch.testing.assert_close(after[name], step_by_step.params[name].grad, rtol=1e-5, atol=1e-6)
