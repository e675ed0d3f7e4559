"""Test hooks that change nothing: the default hook, and what those that measure log."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import Identity
from hookline.errors import ConfigError
from hookline.gradients.transforms import Measure

Make = Callable[..., Any]
STATISTICS = ("mean", "std", "min", "max", "absmax", "l2", "zeros", "nans", "infs", "count")


def flat(params: Any) -> torch.Tensor:
    """Return all gradients as one vector."""
    return torch.cat([param.grad.reshape(-1).double() for param in params.values() if param.grad is not None])


@pytest.mark.req("000-21")
def test_identity_returns_what_it_got_and_does_not_count_as_intervening() -> None:
    """The same mapping is returned, and nothing is copied."""
    grads = {"weight": torch.ones(2)}
    assert Identity().on_update(grads) is grads and not Identity.intervenes


def test_measure_logs_the_global_norm_under_its_name(params: Make, rig: Any) -> None:
    """The metric is gradients/<as>/norm, a tensor on the device."""
    chain = rig(params(), {"name": "measure", "as": "before_clip"})
    chain.step()
    assert list(chain.trainer.logged) == ["gradients/before_clip/norm"]
    norm = chain.trainer.logged["gradients/before_clip/norm"]
    assert isinstance(norm, torch.Tensor) and norm.dim() == 0
    assert norm.item() == pytest.approx(flat(params()).norm().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_metrics_are_those_of_all_elements_together(params: Make, rig: Any, dtype: torch.dtype) -> None:
    """They equal torch's on one vector of all elements."""
    chain = rig(params(dtype), {"name": "measure", "metrics": ["norm", *STATISTICS]})
    chain.params["vector"].grad[0] = 0.0
    chain.step()
    everything = flat(chain.params)
    wanted = {
        "norm": everything.norm(), "l2": everything.norm(), "mean": everything.mean(), "std": everything.std(),
        "min": everything.min(), "max": everything.max(), "absmax": everything.abs().max(), "zeros": 1, "nans": 0,
        "infs": 0, "count": everything.numel(),
    }  # fmt: skip
    for metric, value in wanted.items():
        found = chain.trainer.logged[f"gradients/measure/{metric}"].item()
        assert found == pytest.approx(float(value), rel=1e-5), metric


def test_measure_depends_on_its_place_in_the_chain(params: Make, rig: Any) -> None:
    """A hook before a factor and one after it differ, and `params` selects some parameters."""
    entries = [{"name": "measure", "as": "one"}, {"name": "scale", "factor": 3.0}, {"name": "measure", "as": "two"}]
    chain = rig(params(), *entries, {"name": "measure", "as": "part", "params": "vector"})
    after = chain.step()
    one, two, part = (chain.trainer.logged[f"gradients/{name}/norm"].item() for name in ("one", "two", "part"))
    assert two == pytest.approx(3 * one, rel=1e-6) and part == pytest.approx(after["vector"].norm().item(), rel=1e-6)


@pytest.mark.parametrize("metrics", [["norm"], ["norm", "absmax"]])
def test_measuring_changes_no_bit_of_any_chain(params: Make, rig: Any, metrics: list[str]) -> None:
    """With hooks that measure before, between and after, the gradients are the same bit for bit."""
    entries = [{"name": "scale", "factor": 0.3}, "centralize", {"name": "clip_norm", "max_norm": 1.0},
             {"name": "clip_norm", "as": "again", "max_norm": 0.5}, {"name": "normalize"}]  # fmt: skip
    measures = [{"name": "measure", "as": f"measure_{n}", "metrics": metrics} for n in range(6)]
    mixed = [entry for pair in zip(measures, [*entries, None], strict=True) for entry in pair if entry is not None]
    plain, watched = rig(params(), *entries).step(), rig(params(), *mixed, "link_norms").step()
    assert all(torch.equal(plain[name], watched[name]) for name in plain if plain[name] is not None)


def test_without_gradients_it_logs_nothing(rig: Any) -> None:
    """A model without gradients has no norm."""
    chain = rig({"w": torch.nn.Parameter(torch.zeros(2))}, "measure")
    chain.step()
    assert chain.trainer.logged == {}


def test_an_unknown_metric_names_the_nearest() -> None:
    """The error comes when the hook is made."""
    with pytest.raises(ConfigError, match="did you mean 'absmax'"):
        Measure(metrics=["absmx"])


def test_link_norms_logs_the_norms_of_every_hook(params: Make, rig: Any) -> None:
    """`link_norms` logs norms before and after each hook that does something, of what that hook selects."""
    entries = [{"name": "scale", "factor": 2.0, "params": "vector"}, {"name": "clip_norm", "max_norm": 1.0}, "identity"]
    chain = rig(params(), *entries, "link_norms")
    chain.step()
    logged = {name: value.item() for name, value in chain.trainer.logged.items()}
    names = [f"update/{hook}/norm_{when}" for hook in ("scale", "clip_norm") for when in ("before", "after")]
    assert list(logged) == names
    assert logged["update/scale/norm_after"] == pytest.approx(2 * logged["update/scale/norm_before"], rel=1e-6)
    assert logged["update/clip_norm/norm_after"] == pytest.approx(1.0, rel=1e-5)
    chain.registry.disable("link_norms")
    chain.trainer.logged.clear()
    chain.step()
    assert chain.trainer.logged == {}
