"""Gradient flow: which parameters' gradients vanish, explode or never arrive."""

import json
import logging
import math
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer
from torch import nn

from hookline import HooklineError, Trainer, TrainingHook
from hookline.gradients.gradient_flow import GradientFlow, GradientFlowHook, gradient_flow, gradient_norms


def with_gradients(**norms: float | None) -> nn.Module:
    """A model whose parameters have gradients of these norms; None for one that has none."""
    model = nn.Module()
    for name, norm in norms.items():
        parameter = nn.Parameter(torch.zeros(4))
        parameter.grad = None if norm is None else torch.tensor([norm, 0.0, 0.0, 0.0])
        model.register_parameter(name, parameter)
    return model


def verdicts(flow: GradientFlow) -> dict[str, str]:
    """The verdict of each parameter."""
    return {row.name: row.verdict for row in flow.rows}


@pytest.mark.req("003-29")
def test_a_deep_sigmoid_network_vanishes_by_name() -> None:
    """In a network whose gradients shrink layer by layer, the first layers are named, in the model's order."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(14):
        layers += [nn.Linear(8, 8), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    model(torch.randn(16, 8)).pow(2).mean().backward()
    flow = gradient_flow(model)
    assert [row.name for row in flow.rows] == [name for name, _ in model.named_parameters()]
    assert flow.rows[0].verdict == "vanishing" and flow.rows[-1].verdict == "ok" and not flow.ok
    assert flow.of("exploding") == []
    assert flow.verdict.startswith("gradients vanish in 0.weight (") and " and " in flow.verdict


@pytest.mark.req("003-29")
def test_norms_are_the_gradients_own() -> None:
    """Each row has the name, the size and the norm that torch computes, for a transformer layer."""
    layer = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0)
    layer(torch.randn(3, 2, 8)).pow(2).sum().backward()
    flow = gradient_flow(layer)
    for row, (name, param) in zip(flow.rows, layer.named_parameters(), strict=True):
        assert param.grad is not None and row.norm is not None
        assert (row.name, row.numel) == (name, param.numel())
        assert row.norm == pytest.approx(param.grad.norm().item(), rel=1e-5)


@pytest.mark.req("003-29")
def test_a_branch_that_is_not_used_never_gets_a_gradient() -> None:
    """A bypassed layer is named, a frozen one is not in trouble."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "bypassed": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    model["frozen"](model["used"](torch.randn(4, 2))).sum().backward()
    flow = gradient_flow(model)
    assert flow.verdict == "gradients never arrive at bypassed.weight, bypassed.bias"
    assert verdicts(flow)["frozen.weight"] == "frozen" and verdicts(flow)["used.weight"] == "ok"
    assert flow.troubled == {"bypassed.weight": "never arrived", "bypassed.bias": "never arrived"}


def test_every_verdict_in_one_sentence() -> None:
    """Verdicts are separated by semicolons; norms and the median are given where they say more."""
    flow = gradient_flow(with_gradients(a=1.2e-9, b=3e-3, c=5e3, d=None, e=math.nan, f=3e-3, g=math.inf, h=3e-3))
    assert flow.verdict == (
        "gradients are not finite in e, g; explode in c (5e+03, median 0.003); "
        "vanish in a (1.2e-09, median 0.003); never arrive at d"
    )
    assert flow.median == pytest.approx(3e-3)


def test_many_names_are_shortened() -> None:
    """The sentence names five of a kind and counts the others."""
    flow = gradient_flow(with_gradients(**{f"p{index}": 1e-9 for index in range(8)}, ok=1.0))
    assert flow.verdict.endswith("p4 (1e-09) and 3 more") and "p0 (1e-09, median 1e-09), p1 (1e-09)," in flow.verdict


@pytest.mark.req("003-29")
def test_norms_are_compared_with_a_healthy_median() -> None:
    """Far below or above the others counts as vanishing or exploding, though neither absolute limit is passed."""
    flow = gradient_flow(with_gradients(low=5e-7, a=1e-2, b=1e-2, c=1e-2, high=200.0))
    assert verdicts(flow) == {"low": "vanishing", "a": "ok", "b": "ok", "c": "ok", "high": "exploding"}


@pytest.mark.req("003-29")
def test_norms_are_not_compared_with_a_vanishing_median() -> None:
    """If most gradients have vanished, one that has not does not count as exploding."""
    flow = gradient_flow(with_gradients(a=1e-9, b=1e-9, c=1e-9, head=0.5))
    assert verdicts(flow) == {"a": "vanishing", "b": "vanishing", "c": "vanishing", "head": "ok"}


def test_a_gradient_of_zeros_vanishes_and_limits_can_be_set() -> None:
    """Even with vanishing=0; other limits give other verdicts."""
    model = with_gradients(zero=0.0, small=1e-5, large=50.0)
    assert verdicts(gradient_flow(model, vanishing=0, ratio=1e-12))["zero"] == "vanishing"
    strict = gradient_flow(model, vanishing=1e-4, exploding=10)
    assert verdicts(strict) == {"zero": "vanishing", "small": "vanishing", "large": "exploding"}


@pytest.mark.parametrize(
    "wrong", [{"vanishing": -1.0}, {"vanishing": 5.0, "exploding": 1.0}, {"ratio": 0.0}, {"ratio": 1.0}]
)
def test_contradicting_limits_are_rejected(wrong: dict[str, float]) -> None:
    """By the function and by the hook's constructor."""
    with pytest.raises(HooklineError, match="gradient flow: "):
        gradient_flow(nn.Linear(1, 1), **wrong)
    with pytest.raises(HooklineError, match="gradient flow: "):
        GradientFlowHook(**wrong)


def test_before_backward_and_without_parameters() -> None:
    """The sentence says what to do, or that no parameter requires a gradient."""
    assert gradient_flow(nn.Linear(2, 2)).verdict == (
        "none of the 2 parameters has a gradient: check after backward, before zero_grad"
    )
    assert gradient_flow(nn.ReLU()).verdict == "no parameter requires a gradient"


def test_healthy_gradients() -> None:
    """The sentence has the median."""
    flow = gradient_flow(with_gradients(a=1.0, b=2.0))
    assert flow.ok and flow.verdict == "gradients are healthy in all 2 parameters (median norm 1.5)"


def test_the_table() -> None:
    """A line per parameter under a header, the verdict last."""
    lines = str(gradient_flow(with_gradients(a=1.0, b=None))).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["parameter", "numel", "norm", "verdict"],
        ["a", "4", "1", "ok"],
        ["b", "4", "-", "never", "arrived"],
    ]
    assert lines[3] == "gradients never arrive at b"


def test_norms_of_unusual_gradients() -> None:
    """Half precision and squares of large floats do not overflow; sparse and empty gradients are read too."""
    half = torch.full((100,), 60000.0, dtype=torch.float16)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([3.0, 1.0]), (4,), check_invariants=True)
    huge = torch.full((2,), 1e30)
    found = gradient_norms([half, sparse, huge, torch.zeros(0), torch.tensor([2.0], dtype=torch.float64)])
    assert found == pytest.approx([6e5, 4.0, 1e30 * 2**0.5, 0.0, 2.0], rel=1e-3)
    empty = nn.Module()
    empty.register_parameter("none", nn.Parameter(torch.zeros(0)))
    empty.none.grad = torch.zeros(0)
    assert verdicts(gradient_flow(empty)) == {"none": "ok"}


class Branches(nn.Module):
    """Skips one layer while `bypass` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.side = nn.Linear(2, 1), nn.Linear(2, 1)
        self.bypass = False

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.body(data) if self.bypass else self.body(data) + self.side(data)


def trained(model: nn.Module, *hooks: Any, batches: int = 4, **options: Any) -> Trainer:
    """A trainer that has run."""
    trainer = make_trainer(model=model, data=make_batches(batches, features=2), lr=1e-3, record=True)
    for hook in hooks:
        trainer.add_hook(hook, **options)
    trainer.train()
    return trainer


def lines_of(trainer: Trainer, name: str) -> list[dict[str, Any]]:
    """The lines of a file of the run's record."""
    return [json.loads(line) for line in (trainer.run_dir / name).read_text().splitlines()]


@pytest.mark.req("003-29")
def test_the_hook_notes_each_change_once(caplog: pytest.LogCaptureFixture) -> None:
    """Counts are logged every time; a verdict is reported when the parameters in trouble change."""
    caplog.set_level(logging.WARNING, "hookline")
    model, hook = Branches(), GradientFlowHook()

    class Bypass(GradientFlowHook):
        name = "bypass"

        def on_train_batch_start(self, step: int) -> None:
            model.bypass = step in (2, 3, 5)

        on_gradients_ready = None

    trainer = trained(model, hook, Bypass(), batches=6, every=1)
    metrics = [line for line in lines_of(trainer, "metrics.jsonl") if "grad_flow/missing" in line]
    assert [line["grad_flow/missing"] for line in metrics] == [0, 2, 2, 0, 2, 0]
    assert {line[f"grad_flow/{key}"] for line in metrics for key in ("vanishing", "exploding", "non_finite")} == {0}
    noted = [line for line in lines_of(trainer, "events.jsonl") if line["kind"] == "gradient_flow"]
    assert [line["step"] for line in noted] == [2, 5]
    assert noted[0]["by"] == "gradient_flow" and noted[0]["parameters"]["side.bias"] == "never arrived"
    assert caplog.text.count("gradients never arrive at side.weight, side.bias") == 2
    assert hook.latest is not None and hook.latest.ok


def test_the_hook_runs_at_the_first_step_and_every_hundredth() -> None:
    """This is the default schedule, because it waits for the device."""
    steps: list[int] = []

    class Counts(GradientFlowHook):
        def on_gradients_ready(self, model: nn.Module, trainer: Any, step: int) -> None:
            steps.append(step)
            super().on_gradients_ready(model, trainer, step)

    trained(nn.Linear(2, 1), Counts(), batches=3)
    assert steps == [1]
    assert str(GradientFlowHook.schedule) == "every 100 steps, at 1 step"


def test_parameters_that_change_during_an_epoch_are_judged() -> None:
    """A replaced parameter is judged in place of the old one; a new one that gets no gradient is named."""

    class Changes(TrainingHook):
        def on_train_batch_start(self, model: nn.Linear, step: int, trainer: Any) -> None:
            if step == 2:
                model.weight = nn.Parameter(model.weight.detach().clone())
                trainer.optimizers[0].param_groups[0]["params"][0] = model.weight
                model.late = nn.Parameter(torch.ones(2))

    model, hook = nn.Linear(3, 1), GradientFlowHook()
    trainer = make_trainer(Changes(), model=model)
    trainer.add_hook(hook, every=1)
    trainer.train()
    assert hook.latest is not None
    assert verdicts(hook.latest) == {"weight": "ok", "bias": "ok", "late": "never arrived"}


def test_norms_of_gradients_of_every_kind() -> None:
    """None at all, and dense, sparse and complex ones together."""
    sparse = torch.sparse_coo_tensor([[0, 2]], [3.0, 4.0], (5,), check_invariants=True)
    kinds = [torch.tensor([3.0, 4.0]), sparse, torch.tensor([3 + 4j])]
    assert gradient_norms([]) == []
    assert gradient_norms(kinds) == pytest.approx([5.0, 5.0, 5.0])


def test_norms_are_those_of_the_gradients_at_the_hooks_turn() -> None:
    """A hook between a gradient monitor and this one may have written to them."""
    norms: list[float | None] = []

    class Doubles(TrainingHook):
        def on_gradients_ready(self, model: nn.Linear, step: int) -> None:
            if step == 2:
                model.weight.grad.mul_(2)

    class Watches(TrainingHook):
        def on_before_optimizer_step(self, model: nn.Linear, trainer: Any) -> None:
            norms.append(trainer.hooks.get("gradient_flow").latest.rows[0].norm)
            assert norms[-1] == pytest.approx(model.weight.grad.norm().item(), rel=1e-6)

    trainer = make_trainer(model=nn.Linear(3, 1), data=make_batches(3))
    trainer.add_hook("gradient_monitor", log_frequency=1)
    trainer.add_hook(GradientFlowHook(), every=1)
    trainer.add_hook(Doubles(), after="gradient_monitor", before="gradient_flow")
    trainer.add_hook(Watches(), on_error="raise")
    trainer.train()
    assert len(norms) == 3
