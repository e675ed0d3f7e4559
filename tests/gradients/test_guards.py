"""Guards: which steps they leave out, what they remember, and that their waits are told."""

import math
from typing import Any

import pytest
import torch

from hookline.errors import HooklineError, TrainingError
from hookline.gradients.transforms import SkipNonfinite, SpikeGuard


def chain_of(rig: Any, *links: Any) -> Any:
    """A chain over one parameter of four elements."""
    return rig({"w": torch.nn.Parameter(torch.zeros(4))}, *links)


def of_norm(norm: float) -> dict[str, torch.Tensor]:
    """A gradient of that norm."""
    return {"w": torch.full((4,), norm / 2)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_with_one_bad_element_is_left_out(rig: Any, bad: float) -> None:
    """A finite step passes, one with a NaN or an infinity is skipped and says why."""
    chain = chain_of(rig, "skip_nonfinite")
    chain.step(of_norm(1.0))
    assert chain.trainer.skipped == []
    chain.step({"w": torch.tensor([1.0, bad, 1.0, 1.0])})
    assert chain.trainer.skipped == ["non-finite gradients"]
    assert chain.chain.states["skip_nonfinite"] == {"in_a_row": 1, "total": 1}
    chain.step(of_norm(1.0))
    assert chain.chain.states["skip_nonfinite"] == {"in_a_row": 0, "total": 1}


def test_it_gives_up_when_told_to(rig: Any) -> None:
    """A run that only skips trains nothing; the count begins anew after a good step."""
    chain = chain_of(rig, {"name": "skip_nonfinite", "give_up_after": 2})
    for norm in (math.nan, 1.0, math.nan):
        chain.step(of_norm(norm))
    with pytest.raises(TrainingError, match=r"skipped 2 steps in a row, .*: non-finite gradients"):
        chain.step(of_norm(math.nan))


def test_a_spike_guard_gives_up_when_told_to(rig: Any) -> None:
    """Spikes and what is not finite count together."""
    entry = {"name": "spike_guard", "factor": 2.0, "warmup": 2, "window": 8, "give_up_after": 3}
    chain = chain_of(rig, entry)
    for norm in (1.0, 1.0, 9.0, 1.0, 9.0, math.nan):
        chain.step(of_norm(norm))
    assert chain.chain.states["spike_guard"]["in_a_row"] == 2 and chain.chain.states["spike_guard"]["total"] == 3
    with pytest.raises(TrainingError, match=r"skipped 3 steps in a row, .* more than 2 x its running median"):
        chain.step(of_norm(9.0))


def test_a_spike_is_left_out_and_ordinary_steps_are_not(rig: Any) -> None:
    """More than factor times the running median; nothing is judged before the warm-up is over."""
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


def test_a_median_of_nothing_judges_nothing(rig: Any) -> None:
    """After steps without any gradient to speak of, the first real ones pass, and the median finds its level."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 2.0, "warmup": 2, "window": 5})
    for norm in (0.0, 0.0, 0.0, 1.0, 1.0, 1.0):
        chain.step(of_norm(norm))
    assert chain.trainer.skipped == []
    chain.step(of_norm(5.0))
    assert len(chain.trainer.skipped) == 1


@pytest.mark.parametrize("window", [3, 5, 9])
def test_another_window_takes_over_the_last_norms(rig: Any, window: int) -> None:
    """A run may go on with a shorter or a longer one; the newest norms are kept, in their order."""
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


def test_its_median_is_that_of_what_it_has_counted(rig: Any) -> None:
    """Accepted norms as they were, spikes as large as the limit was, what is not finite not at all."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 2.0, "warmup": 3, "window": 5})
    for norm in (1.0, 2.0, 3.0, 100.0, math.inf):
        chain.step(of_norm(norm))
    assert torch.equal(
        chain.chain.states["spike_guard"]["norms"].nan_to_num(-1.0), torch.tensor([1.0, 2.0, 3.0, 4.0, -1.0])
    )


def test_a_level_that_has_risen_for_good_is_accepted_in_time(rig: Any) -> None:
    """A guard that compared with accepted norms only would skip for ever."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 2.0, "warmup": 4, "window": 8})
    for norm in [1.0] * 8 + [20.0] * 60:
        chain.step(of_norm(norm))
    skipped = len(chain.trainer.skipped)
    assert 0 < skipped < 40
    chain.step(of_norm(20.0))
    assert len(chain.trainer.skipped) == skipped


def test_clipping_a_spike_scales_it_to_the_limit_and_asks_nothing(rig: Any) -> None:
    """The step is made, with a gradient as long as the limit; the host never waits."""
    chain = chain_of(rig, {"name": "spike_guard", "factor": 2.0, "warmup": 2, "window": 4, "action": "clip"})
    for norm in (1.0, 1.0):
        chain.step(of_norm(norm))
    assert chain.step(of_norm(10.0))["w"].norm().item() == pytest.approx(2.0)
    assert chain.step(of_norm(1.5))["w"].norm().item() == pytest.approx(1.5)
    assert chain.trainer.skipped == [] and chain.registry.get("spike_guard").wait_cost.calls == 0
    spoiled = chain.step({"w": torch.tensor([math.inf, 1.0, 1.0, 1.0])})["w"]
    assert torch.equal(spoiled, torch.tensor([math.inf, 1.0, 1.0, 1.0]))  # scaled by zero it would be NaN


@pytest.mark.parametrize("link", ["skip_nonfinite", {"name": "spike_guard", "warmup": 1}])
def test_its_wait_for_the_device_has_a_row_in_the_cost_table(rig: Any, link: Any) -> None:
    """Nothing is hidden: one account, one call for each question."""
    chain = chain_of(rig, link)
    for _ in range(3):
        chain.step(of_norm(1.0))
    name = next(iter(chain.registry))
    account = chain.registry.desk.arguments[f"the verdict of {name}"]
    assert account.calls == (3 if name == "skip_nonfinite" else 2) and account.ns > 0
    account.ns += 10**9
    rows = {row["hook"]: row["kind"] for row in chain.registry.costs()}
    assert rows[f"reading the verdict of {name}"] == "argument"


def test_wrong_choices_are_refused() -> None:
    """With the choices."""
    with pytest.raises(HooklineError, match=r"spike_guard.action: invalid value 'stop'"):
        SpikeGuard(action="stop")  # type: ignore[arg-type]
    for wrong in (0, 0.5, True, "3"):
        with pytest.raises(HooklineError, match="give_up_after: expected an integer of at least 1"):
            SkipNonfinite(give_up_after=wrong)  # type: ignore[arg-type]
    for key, value in {"factor": 1.0, "window": 0.5, "warmup": math.inf, "give_up_after": 2.5}.items():
        with pytest.raises(HooklineError, match=f"spike_guard.{key}: expected"):
            SpikeGuard(**{key: value})  # type: ignore[arg-type]
    with pytest.raises(HooklineError, match="action='clip' skips none"):
        SpikeGuard(action="clip", give_up_after=3)
