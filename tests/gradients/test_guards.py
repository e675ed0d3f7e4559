"""Test which steps guards skip, what they store, and that their waits are in the cost table."""

import math
from typing import Any

import pytest
import torch

from hookline import HooklineError
from hookline.errors import TrainingError
from hookline.gradients.transforms import SkipNonfinite, SpikeGuard


def chain_of(rig: Any, *entries: Any) -> Any:
    """Make a chain over one parameter of four elements."""
    return rig({"w": torch.nn.Parameter(torch.zeros(4))}, *entries)


def of_norm(norm: float) -> dict[str, torch.Tensor]:
    """Make a gradient of that norm."""
    return {"w": torch.full((4,), norm / 2)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_with_one_bad_element_is_skipped(rig: Any, bad: float) -> None:
    """A finite step passes; one with a NaN or an infinity is skipped, with the reason."""
    chain = chain_of(rig, "skip_nonfinite")
    chain.step(of_norm(1.0))
    assert chain.trainer.skipped == []
    chain.step({"w": torch.tensor([1.0, bad, 1.0, 1.0])})
    assert chain.trainer.skipped == ["non-finite gradients"]
    assert chain.chain.states["skip_nonfinite"] == {"in_a_row": 1, "total": 1}
    chain.step(of_norm(1.0))
    assert chain.chain.states["skip_nonfinite"] == {"in_a_row": 0, "total": 1}


def test_skip_nonfinite_gives_up(rig: Any) -> None:
    """A run that only skips trains nothing; a good step resets the count."""
    chain = chain_of(rig, {"name": "skip_nonfinite", "give_up_after": 2})
    for norm in (math.nan, 1.0, math.nan):
        chain.step(of_norm(norm))
    with pytest.raises(TrainingError, match=r"skipped 2 steps in a row, .*non-finite gradients"):
        chain.step(of_norm(math.nan))


def test_spike_guard_gives_up(rig: Any) -> None:
    """Spikes and non-finite gradients count together."""
    entry = {"name": "spike_guard", "factor": 2.0, "warmup": 2, "window": 8, "give_up_after": 3}
    chain = chain_of(rig, entry)
    for norm in (1.0, 1.0, 9.0, 1.0, 9.0, math.nan):
        chain.step(of_norm(norm))
    assert chain.chain.states["spike_guard"]["in_a_row"] == 2 and chain.chain.states["spike_guard"]["total"] == 3
    with pytest.raises(TrainingError, match=r"skipped 3 steps in a row, .* more than 2 x its running median"):
        chain.step(of_norm(9.0))


def test_a_spike_is_skipped_and_ordinary_steps_are_not(rig: Any) -> None:
    """Norms above factor times the running median are skipped, from the end of the warm-up on."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 3.0, "warmup": 4, "window": 8})
    for norm in (1.0, 50.0, 1.2, 0.8, 1.0, 2.9):
        chain.step(of_norm(norm))
    assert chain.trainer.skipped == []
    chain.step(of_norm(3.5))
    assert chain.trainer.skipped == ["the gradient norm is more than 3 x its running median"]
    chain.step(of_norm(math.nan))
    assert chain.trainer.skipped[1:] == ["non-finite gradients"]
    chain.step(of_norm(1.0))
    assert len(chain.trainer.skipped) == 2


def test_a_median_of_zero_skips_nothing(rig: Any) -> None:
    """While the median is 0 every step passes, and the median rises to the new level."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 2.0, "warmup": 2, "window": 5})
    for norm in (0.0, 0.0, 0.0, 1.0, 1.0, 1.0):
        chain.step(of_norm(norm))
    assert chain.trainer.skipped == []
    chain.step(of_norm(5.0))
    assert len(chain.trainer.skipped) == 1


@pytest.mark.parametrize("window", [3, 5, 9])
def test_another_window_keeps_the_last_norms(rig: Any, window: int) -> None:
    """A run may resume with a shorter or longer window; the newest norms are kept in order."""
    old = chain_of(rig, {"name": "spike_guard", "warmup": 1, "window": 5})
    for norm in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6):
        old.step(of_norm(norm))
    new = chain_of(rig, {"name": "spike_guard", "warmup": 1, "window": window})
    new.chain.restore(old.chain.states)
    newest = [1.2, 1.3, 1.4, 1.5, 1.6]
    for norm in (1.7, 1.8):
        new.step(of_norm(norm))
        newest.append(norm)
        norms = new.chain.states["spike_guard"]["norms"]
        assert len(norms) == window
        assert sorted(norms[~norms.isnan()].tolist()) == pytest.approx(newest[-window:])
    assert new.trainer.skipped == []


def test_the_median_is_that_of_the_counted_norms(rig: Any) -> None:
    """Accepted norms enter as they are, spikes as the limit, and non-finite norms do not."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 2.0, "warmup": 3, "window": 5})
    for norm in (1.0, 2.0, 3.0, 100.0, math.inf):
        chain.step(of_norm(norm))
    assert torch.equal(
        chain.chain.states["spike_guard"]["norms"].nan_to_num(-1.0), torch.tensor([1.0, 2.0, 3.0, 4.0, -1.0])
    )


def test_a_level_that_has_risen_for_good_is_accepted_later(rig: Any) -> None:
    """If only accepted norms entered the median, every later step would be skipped."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 2.0, "warmup": 4, "window": 8})
    for norm in [1.0] * 8 + [20.0] * 60:
        chain.step(of_norm(norm))
    skipped = len(chain.trainer.skipped)
    assert 0 < skipped < 40
    chain.step(of_norm(20.0))
    assert len(chain.trainer.skipped) == skipped


def test_clipping_a_spike_scales_it_to_the_limit_without_waiting(rig: Any) -> None:
    """The step uses a gradient whose norm is the limit; the host does not wait."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 2.0, "warmup": 2, "window": 4, "action": "clip"})
    for norm in (1.0, 1.0):
        chain.step(of_norm(norm))
    assert chain.step(of_norm(10.0))["w"].norm().item() == pytest.approx(2.0)
    assert chain.step(of_norm(1.5))["w"].norm().item() == pytest.approx(1.5)
    assert chain.trainer.skipped == [] and chain.registry.get("spike_guard").wait_cost.calls == 0
    spoiled = chain.step({"w": torch.tensor([math.inf, 1.0, 1.0, 1.0])})["w"]
    assert torch.equal(spoiled, torch.tensor([math.inf, 1.0, 1.0, 1.0]))  # scaled by zero it would be NaN


@pytest.mark.parametrize("hook", ["skip_nonfinite", {"name": "spike_guard", "warmup": 1}])
def test_the_wait_for_the_device_has_a_row_in_the_cost_table(rig: Any, hook: Any) -> None:
    """Each read of the device is one call in the table."""
    chain = chain_of(rig, hook)
    for _ in range(3):
        chain.step(of_norm(1.0))
    name = next(iter(chain.registry))
    account = chain.registry.dispatch_table.argument_costs[f"the verdict of {name}"]
    assert account.calls == (3 if name == "skip_nonfinite" else 2) and account.ns > 0
    account.ns += 10**9
    rows = {row["hook"]: row["kind"] for row in chain.registry.costs()}
    assert rows[f"reading the verdict of {name}"] == "argument"


def test_invalid_choices_raise() -> None:
    """The error lists the choices."""
    with pytest.raises(HooklineError, match=r"spike_guard.action: invalid value 'stop'"):
        SpikeGuard(action="stop")
    for wrong in (0, 0.5, True, "3"):
        with pytest.raises(HooklineError, match="give_up_after: expected an integer of at least 1"):
            SkipNonfinite(give_up_after=wrong)
    for key, value in {"factor": 1.0, "window": 0.5, "warmup": math.inf, "give_up_after": 2.5}.items():
        with pytest.raises(HooklineError, match=f"spike_guard.{key}: expected"):
            SpikeGuard(**{key: value})
    with pytest.raises(HooklineError, match="action='clip' skips none"):
        SpikeGuard(action="clip", give_up_after=3)
