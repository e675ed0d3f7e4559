"""The gradient monitor records every layer's true gradient, reports layers in trouble, and changes nothing."""

import io
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import Batch, make_batches, make_model, weights_of
from run_control import PlainRun
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookline import GenericTrainer, GradientMonitor, HooklineError, Trainer, read_layers, read_metrics

Rows = dict[str, dict[str, float]]

DATA = make_batches(6, 16, 6, 3)
make_layers = partial(make_model, 6, 8, 3, between=nn.Tanh)
make_trainer = partial(builders.make_trainer, model=make_layers, data=DATA)
train = partial(builders.train, model=make_layers, data=DATA)


def metrics_of(trainer: Trainer) -> dict[int, dict[str, float]]:
    """Return the metrics of each step."""
    steps: dict[int, dict[str, float]] = {}
    for record in trainer.record.metrics:
        steps.setdefault(record["step"], {}).update(record)
    return steps


def flow_events(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what the monitor wrote into events.jsonl."""
    return [event for event in trainer.record.events if event["kind"] == "gradient_flow"]


def layers_of(trainer: Trainer, series: str = "gradients") -> dict[int, Rows]:
    """What the record in memory holds: step -> layer -> column -> value."""
    return {
        layers.step: {
            name: dict(zip(layers.header.columns, row.tolist(), strict=True))
            for name, row in zip(layers.header.names, layers.values, strict=True)
        }
        for layers in trainer.record.layer_rows
        if layers.header.series == series
    }


def watch(trainer: Trainer, event: str) -> list[dict[str, torch.Tensor]]:
    """Copies of the gradients at every firing of an event."""
    seen: list[dict[str, torch.Tensor]] = []
    copy = lambda grads: seen.append({name: grad.clone() for name, grad in grads.items()})  # noqa: E731
    trainer.on(event, name=f"witness_{event}")(copy)
    return seen


# ---- what it measures ------------------------------------------------------------------------------------------------


@pytest.mark.req("002-10", "002-12", "002-15", "002-18")
def test_every_layers_statistics_at_the_steps_that_are_due() -> None:
    """Every second step each layer has its norm and moments, as torch computes them from the gradients of that step."""
    trainer = make_trainer(GradientMonitor(log_frequency=2, log_moments=True))
    seen = watch(trainer, "gradients_ready")
    trainer.train()
    layers = layers_of(trainer)
    assert list(layers) == [2, 4, 6]
    for step, rows in layers.items():
        for name, grad in seen[step - 1].items():
            row = rows[name]
            assert row["norm"] == pytest.approx(grad.norm().item(), rel=1e-5)
            assert row["mean"] == pytest.approx(grad.mean().item(), rel=1e-4, abs=1e-8)
            assert row["std"] == pytest.approx(grad.std().item(), rel=1e-5)
            assert (row["min"], row["max"]) == (grad.min().item(), grad.max().item())
            assert [row[name] for name in ("zeros", "nans", "infs")] == [0, 0, 0]


@pytest.mark.req("002-16")
def test_layers_are_in_the_order_of_the_model() -> None:
    """The names keep the order of the network, so that a plot along them shows the flow."""
    trainer = train(GradientMonitor(log_frequency=1))
    assert list(layers_of(trainer)[1]) == [name for name, _ in trainer.model.named_parameters()]


@pytest.mark.req("002-12")
def test_global_norm_before_and_after_clipping() -> None:
    """`gradients/norm` is the norm before the chain, `gradients/final_norm` what the optimizer gets."""
    trainer = make_trainer(GradientMonitor(log_frequency=1), max_grad_norm=0.01)
    before, after = watch(trainer, "gradients_ready"), watch(trainer, "before_optimizer_step")
    trainer.train()
    metrics, layers = metrics_of(trainer), layers_of(trainer)
    for step in range(1, 7):
        norm, final = metrics[step]["gradients/norm"], metrics[step]["gradients/final_norm"]
        assert norm == pytest.approx(total_norm(before[step - 1]), rel=1e-5)
        assert norm == pytest.approx(metrics[step]["train/grad_norm"], rel=1e-5)
        assert final == pytest.approx(0.01, rel=1e-3) == pytest.approx(total_norm(after[step - 1]), rel=1e-5)
        assert layers[step]["0.weight"]["final_norm"] == pytest.approx(after[step - 1]["0.weight"].norm().item())


def total_norm(grads: dict[str, torch.Tensor]) -> float:
    """The norm of all gradients as one vector."""
    return float(torch.nn.utils.get_total_norm(list(grads.values())))


class SquareCounter(TorchDispatchMode):
    """Counts the operations that square gradients for their norms, one for each shape."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "pow" in func.__name__
        return func(*args, **(kwargs or {}))


def test_untouched_gradients_are_read_once() -> None:
    """If nothing changes them, the final norm is known; after a chain that replaces them they are read again."""
    trainer, doubling = (make_trainer(GradientMonitor(log_frequency=1)) for _ in range(2))
    doubling.on("update")(lambda grads: {name: grad * 2 for name, grad in grads.items()})
    with SquareCounter() as once:
        trainer.train()
    with SquareCounter() as twice:
        doubling.train()
    assert (once.count, twice.count) == (6 * 4, 2 * 6 * 4)  # in six steps, four shapes
    metrics = metrics_of(trainer)[3]
    assert metrics["gradients/final_norm"] == metrics["gradients/norm"]
    metrics = metrics_of(doubling)[3]
    assert metrics["gradients/final_norm"] == pytest.approx(2 * metrics["gradients/norm"])


def test_gradients_that_the_chain_removes_have_a_final_norm_of_zero() -> None:
    """A frozen layer is measured before the chain; the optimizer gets nothing of it, and the total excludes it."""
    trainer = make_trainer(GradientMonitor(log_frequency=1))
    trainer.add_hook("freeze", params="0.*")
    trainer.train()
    rows, metrics = layers_of(trainer)[1], metrics_of(trainer)[1]
    assert rows["0.weight"]["norm"] > 0 and rows["0.weight"]["final_norm"] == 0
    rest = math.hypot(rows["2.weight"]["norm"], rows["2.bias"]["norm"])
    assert metrics["gradients/final_norm"] == pytest.approx(rest, rel=1e-5)


@pytest.mark.req("002-14")
def test_percentiles_are_those_of_the_signed_gradient() -> None:
    """Within five percent of torch.quantile, or of the spread where a percentile is near zero."""
    model = nn.Linear(200, 100)
    batches = [(torch.randn(4, 200), torch.randn(4, 100))]
    trainer = make_trainer(GradientMonitor(log_frequency=1, percentiles=[10, 50, 99.5]), model=model, data=batches)
    seen = watch(trainer, "gradients_ready")
    trainer.train()
    for name, grad in seen[0].items():
        row = layers_of(trainer)[1][name]
        wanted = torch.quantile(grad.double(), torch.tensor([0.1, 0.5, 0.995], dtype=torch.float64))
        percentiles = torch.tensor([row["p10"], row["p50"], row["p99.5"]], dtype=torch.float64)
        torch.testing.assert_close(percentiles, wanted, rtol=0.05, atol=1e-3 * grad.std().item())


@pytest.mark.req("002-11")
@pytest.mark.parametrize("per_octave", [8, 1])
def test_histograms_count_every_element(per_octave: int) -> None:
    """Each layer's bins add up to its size, zeros have their own, and the window's end is beside the statistics."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    trainer = make_trainer(model=model)
    trainer.add_hook(GradientMonitor(log_frequency=3, log_histogram=True, bins_per_octave=per_octave))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # all units are dead
    trainer.train()
    histograms = [layers for layers in trainer.record.layer_rows if layers.header.series == "gradient_histograms"]
    assert [layers.step for layers in histograms] == [3, 6]
    assert histograms[0].values.shape == (4, 1, {8: 512, 1: 68}[per_octave])
    assert histograms[0].values.sum(dim=(1, 2)).tolist() == [param.numel() for param in model.parameters()]
    zero = {8: 255, 1: 33}[per_octave]
    assert histograms[0].values[0, 0, zero] == 48 and histograms[0].values[3, 0, zero] == 0
    top = layers_of(trainer)[3]["2.bias"]
    assert 2 ** top["top_octave"] <= top["absmax"] < 2 ** (top["top_octave"] + 1)


@pytest.mark.req("002-11")
def test_histograms_count_values_that_are_not_finite() -> None:
    """NaN has the last bin and the infinities the outermost bins of their sign, so that every element is counted."""
    trainer = make_trainer(GradientMonitor(log_frequency=1, log_histogram=True))

    @trainer.on("after_backward", name="sabotage")
    def sabotage(model: Any) -> None:
        model[2].bias.grad[:] = torch.tensor([math.nan, math.inf, -math.inf])
        model[2].weight.grad[0, :2] = math.nan

    trainer.train()
    histograms = [layers for layers in trainer.record.layer_rows if layers.header.series == "gradient_histograms"]
    rows = dict(zip(histograms[0].header.names, histograms[0].values[:, 0], strict=True))
    assert [rows[name][511].item() for name in ("0.weight", "2.weight", "2.bias")] == [0, 2, 1]
    assert rows["2.bias"].nonzero().flatten().tolist() == [0, 510, 511]
    assert [row.sum().item() for row in rows.values()] == [param.numel() for param in trainer.model.parameters()]


@pytest.mark.req("002-11")
def test_histograms_are_recorded_only_on_request() -> None:
    """Without `log_histogram` there is no series of histograms, and nothing about them beside the statistics."""
    trainer = train(GradientMonitor(log_frequency=3, log_moments=True))
    assert {layers.header.series for layers in trainer.record.layer_rows} == {"gradients"}
    assert "top_octave" not in layers_of(trainer)[3]["0.weight"]


def test_update_ratio_needs_no_learning_rate() -> None:
    """It is the size of what the optimizer added against the size of the weights before, per layer and in all."""
    optimizer = partial(torch.optim.AdamW, lr=0.03)
    trainer = make_trainer(GradientMonitor(log_frequency=1, log_update_ratio=True), optimizer=optimizer)
    weights = [weights_of(trainer.model)]
    trainer.on("after_optimizer_step", name="witness")(lambda model: weights.append(weights_of(model)))
    trainer.train()
    for step in range(1, 7):
        old, new = weights[step - 1 : step + 1]
        moved = {name: new[name] - old[name] for name in new}
        for name, row in layers_of(trainer)[step].items():
            assert row["update_ratio"] == pytest.approx((moved[name].norm() / old[name].norm()).item(), rel=1e-4)
        assert metrics_of(trainer)[step]["gradients/update_ratio"] == pytest.approx(
            total_norm(moved) / total_norm(old), rel=1e-4
        )


def test_an_optimizer_that_skips_the_step_has_no_update_ratio() -> None:
    """Parameters of a skipped optimizer have no ratio, and the total leaves them out; others have one each."""
    model = make_layers()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2)]
    monitor = GradientMonitor(log_frequency=1, log_update_ratio=True)
    trainer = make_trainer(monitor, model=model, data=DATA[:2], optimizer=optimizers)
    trainer.on("after_optimizer_step", at=1, name="skip")(lambda trainer: trainer.skip_step("enough"))
    trainer.train()
    rows = layers_of(trainer)
    assert rows[1]["0.weight"]["update_ratio"] > 0 and math.isnan(rows[1]["2.weight"]["update_ratio"])
    assert metrics_of(trainer)[1]["gradients/update_ratio"] > 0
    assert all(row["update_ratio"] > 0 for row in rows[2].values())


def test_norms_without_moments() -> None:
    """Without moments there is nothing but norms, read by the cheaper way, and they are the same."""
    results = []
    for moments in (True, False):
        trainer = train(GradientMonitor(log_frequency=2, log_moments=moments))
        results.append(layers_of(trainer)[4])
    assert all(set(row) == {"norm", "final_norm"} for row in results[1].values())
    for name, row in results[1].items():
        assert row["norm"] == pytest.approx(results[0][name]["norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("given", "recorded"),
    [({}, False), ({"percentiles": [50]}, True), ({"log_histogram": True}, True), ({"log_norm": False}, True),
     ({"percentiles": [50], "log_moments": False}, False), ({"log_moments": True}, True)],
    ids=str,
)  # fmt: skip
def test_moments_by_default_where_they_cost_nothing(given: dict[str, Any], recorded: bool) -> None:
    """On the CPU that is beside what reads all anyway; what is asked for is there, and what is not wanted is not."""
    trainer = train(GradientMonitor(log_frequency=2, **given))
    assert ("mean" in layers_of(trainer)[2]["0.weight"]) is recorded
    assert ("gradients/zeros" in metrics_of(trainer)[2]) is recorded


@pytest.mark.req("002-12")
def test_norms_can_be_left_out_of_the_record() -> None:
    """`log_norm: false` leaves the norms out of the record; layers in trouble are still counted."""
    trainer = train(GradientMonitor(log_frequency=2, log_norm=False))
    assert "norm" not in layers_of(trainer)[2]["0.weight"]
    metrics = metrics_of(trainer)[2]
    assert "gradients/norm" not in metrics and metrics["gradients/layers_vanishing"] == 0


# ---- which layers ----------------------------------------------------------------------------------------------------


@pytest.mark.req("002-13")
def test_param_filter_is_a_substring() -> None:
    """Only layers whose names contain one of the words are watched."""
    trainer = train(GradientMonitor(log_frequency=1, param_filter=["0.", "2.bias"]))
    assert list(layers_of(trainer)[1]) == ["0.weight", "0.bias", "2.bias"]
    single = train(GradientMonitor(log_frequency=1, param_filter="weight"))
    assert list(layers_of(single)[1]) == ["0.weight", "2.weight"]


def test_a_filter_that_matches_nothing_ends_the_run_before_its_first_step() -> None:
    """A misspelt filter is an error that names the nearest parameters, whatever the policy."""
    trainer = make_trainer(GradientMonitor(param_filter=["weight", "wieght"]))
    with pytest.raises(HooklineError, match=r"param_filter: no parameter's name contains 'wieght'.*0\.weight"):
        trainer.train()
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"log_frequency": 0}, "log_frequency: 0 is never due"),
        ({"log_frequency": "often"}, "log_frequency: 'often' is not a schedule"),
        ({"percentiles": [10, 101]}, "percentiles: expected a finite number, at least 0 and at most 100, got 101"),
        ({"percentiles": 50}, "percentiles: expected a list, each item a finite number, .*, got 50"),
        ({"percentiles": "50"}, "percentiles: expected a list, each item a finite number, .*, got '50'"),
        ({"percentiles": [True]}, "percentiles: expected a finite number, .*, got True"),
        ({"param_filter": 3}, "param_filter: expected a substring of parameter names or a list of substrings, got 3"),
        ({"param_filter": ["a", 3]}, r"param_filter: expected a substring .*, got \['a', 3\]"),
        ({"vanishing": "x"}, "vanishing: expected a finite number, got 'x'"),
        ({"exploding": None}, "exploding: expected a finite number, got None"),
        ({"median_ratio": 2}, "median_ratio: expected a finite number, above 0 and below 1, got 2"),
        ({"log_update_ratio": "no"}, "log_update_ratio: expected true or false, got 'no'"),
        ({"log_histogram": True, "bins_per_octave": 3}, "bins_per_octave: expected 1, 2, 4 or 8, got 3"),
        ({"vanishing": 1.0, "exploding": 0.5}, "vanishing=1.0 must be"),
    ],
    ids=str,
)
def test_invalid_parameters_are_rejected(parameters: dict[str, Any], message: str) -> None:
    """Each with its name, the value and what would be right."""
    with pytest.raises(HooklineError, match=message):
        GradientMonitor(**parameters)


@pytest.mark.req("002-09")
def test_the_configuration_of_document_002(tmp_path: Path) -> None:
    """Document 002's block as it stands, and what it promises is in the run's directory."""
    from hookline import HooksConfig  # here, so that the rest runs without pydantic

    config = HooksConfig(
        enable_gradient_monitor=True,
        gradient_monitor_config={
            "log_frequency": 100,  # Log every N steps
            "log_histogram": True,  # Log gradient histograms
            "log_norm": True,  # Log gradient norms
            "param_filter": ["encoder", "decoder"],  # Monitor specific layers
            "percentiles": [10, 50, 90],  # Gradient percentiles to track
        },
    )
    model = nn.Sequential()
    for name in ("encoder", "decoder", "head"):
        model.add_module(name, nn.Linear(6, 6))
    batches = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(200)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"device": "cpu", "loss_fn": nn.functional.mse_loss, "output_dir": str(tmp_path)}
    trainer = GenericTrainer(config, model, optimizer, **options)
    trainer.fit(batches, max_epochs=1)
    series = read_layers(trainer.run_dir)
    assert series["gradients"].steps == series["gradient_histograms"].steps == (100, 200)
    assert series["gradients"].names == ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")
    assert {"norm", "p10", "p50", "p90"} <= set(series["gradients"].columns)
    assert series["gradient_histograms"].values[0].sum(dim=(1, 2)).tolist() == [36, 6, 36, 6]
    logged = [record for record in read_metrics(trainer.run_dir) if "gradients/norm" in record]
    assert [record["step"] for record in logged] == [100, 200]


# ---- trouble ---------------------------------------------------------------------------------------------------------


class Faint(nn.Module):
    """A layer that scales the gradient of its input by `through`."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(6, 6), nn.Linear(6, 3)
        self.never = nn.Linear(2, 2)
        self.through = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.below(x)
        out: torch.Tensor = self.above(hidden * self.through + (hidden * (1 - self.through)).detach())
        return out


@pytest.mark.req("002-17")
def test_trouble_is_reported_once_when_it_starts_and_once_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Vanishing layers are named in the record at the step they begin and the step they recover, not every step."""
    torch.manual_seed(0)
    model = Faint()
    trainer = make_trainer(GradientMonitor(log_frequency=1), model=model, data=make_batches(8, 16, 6, 3))
    through = {3: 1e-9, 4: 1e-9, 5: 1e-9, 6: 1.0, 7: 1e-9, 8: 1e-9}
    trainer.on("train_batch_start", name="valve")(lambda step: setattr(model, "through", through.get(step, 1.0)))
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer.train()
    events = [(event["measured_at"], event["parameters"], event["over"]) for event in flow_events(trainer)]
    vanishing = {"below.weight": "vanishing", "below.bias": "vanishing"}
    assert events == [
        (1, {"never.weight": "never arrived", "never.bias": "never arrived"}, []),
        (3, vanishing, []),
        (6, {}, ["below.weight", "below.bias"]),
        (7, vanishing, []),
    ]
    assert all(event["by"] == "gradient_monitor" for event in flow_events(trainer))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 1", "step 3"]  # 7 repeats 3
    metrics = metrics_of(trainer)
    assert [metrics[step]["gradients/layers_vanishing"] for step in (2, 4, 6, 8)] == [0, 2, 0, 2]
    assert metrics[1]["gradients/layers_missing"] == 2


@pytest.mark.req("002-17")
def test_exploding_and_non_finite_layers_are_named() -> None:
    """A layer far above the others and one with NaN inside have their verdicts, and the counts say how many."""
    trainer = make_trainer(monitor := GradientMonitor(log_frequency=1, log_moments=True))

    @trainer.on("after_backward", name="sabotage")
    def sabotage(model: Any, step: int) -> None:
        if step == 2:
            model[0].weight.grad[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
            model[2].bias.grad.mul_(1e6)

    trainer.train()
    assert flow_events(trainer)[0]["parameters"] == {"0.weight": "non-finite", "2.bias": "exploding"}
    metrics = metrics_of(trainer)[2]
    assert (metrics["gradients/nans"], metrics["gradients/infs"]) == (1, 2)
    assert (metrics["gradients/layers_exploding"], metrics["gradients/layers_non_finite"]) == (1, 1)
    assert monitor.latest is not None and "0.weight" in str(monitor.latest)


@pytest.mark.req("002-17")
@pytest.mark.parametrize(
    ("options", "named"),
    [({}, [{"0.weight": "vanishing", "2.bias": "exploding"}]), ({"median_ratio": 1e-9}, [])],
    ids=str,
)
def test_layers_far_from_the_others_are_named(options: dict[str, float], named: list[dict[str, str]]) -> None:
    """Norms inside the absolute limits vanish or explode if they are far from the median of the others."""
    trainer = make_trainer(GradientMonitor(log_frequency=1, **options))

    @trainer.on("after_backward", name="rescale")
    def rescale(model: Any) -> None:
        norms = {"0.weight": 5e-7, "2.bias": 200.0}
        for name, param in model.named_parameters():
            param.grad.fill_(norms.get(name, 1e-2) / math.sqrt(param.numel()))

    trainer.train()
    assert [event["parameters"] for event in flow_events(trainer)] == named


class Overflows(nn.Module):
    """Its gradients are too large for half precision at a large scale, or at every one."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 3), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x * self.factor)
        return out


def test_steps_that_a_scaler_skips_while_it_finds_its_scale_are_not_reported() -> None:
    """Skipped steps are recorded and not judged; gradients that overflow at every scale are reported."""
    options: dict[str, Any] = {"data": make_batches(20, 16, 6, 3), "precision": "fp16"}
    monitor = GradientMonitor(log_frequency=1, exploding=1e9, log_moments=True)
    settling = train(monitor, model=Overflows(30.0), lr=0.0, **options)
    assert 0 < settling.skipped_steps <= 16 and flow_events(settling) == []
    assert metrics_of(settling)[1]["gradients/infs"] + metrics_of(settling)[1]["gradients/nans"] > 0
    hopeless = train(GradientMonitor(log_frequency=1, exploding=1e9), model=Overflows(math.inf), **options)
    assert [event["measured_at"] for event in flow_events(hopeless)] == [17]


def test_writes_through_data_by_a_users_update_hook_are_measured() -> None:
    """A write through `.data` changes no version; with a user's update hook the gradients are always read again."""
    trainer = make_trainer(GradientMonitor(log_frequency=1))

    @trainer.on("update")
    def secretly(grads: Any) -> Any:
        for grad in grads.values():
            grad.data.mul_(3)
        return grads

    trainer.train()
    for values in metrics_of(trainer).values():
        if "gradients/norm" in values:
            assert values["gradients/final_norm"] == pytest.approx(3 * values["gradients/norm"], rel=1e-5)


def test_writes_that_no_version_counts_are_measured() -> None:
    """Lifecycle hooks may write to gradients too."""
    trainer = make_trainer()

    @trainer.on("before_optimizer_step")
    def secretly(model: Any) -> None:
        for param in model.parameters():
            param.grad.data.mul_(3)

    trainer.add_hook(GradientMonitor(log_frequency=1))
    trainer.train()
    for values in metrics_of(trainer).values():
        if "gradients/norm" in values:
            assert values["gradients/final_norm"] == pytest.approx(3 * values["gradients/norm"], rel=1e-5)


def test_a_users_hook_that_is_enabled_during_a_run_is_noticed() -> None:
    """Whether hooks may write to gradients is decided again after every change."""

    trainer = make_trainer(GradientMonitor(log_frequency=1), data=DATA[:3])

    @trainer.on("update", name="secretly")
    def secretly(grads: Any) -> Any:
        for grad in grads.values():
            grad.data.mul_(3)
        return grads

    trainer.disable_hook("secretly")
    trainer.on("step_end", name="switch")(lambda step: step == 1 and trainer.enable_hook("secretly"))
    trainer.train()
    firsts = {step: next(iter(rows.values())) for step, rows in layers_of(trainer).items()}
    ratios = {step: row["final_norm"] / row["norm"] for step, row in firsts.items()}
    assert ratios == {1: 1.0, 2: pytest.approx(3.0), 3: pytest.approx(3.0)}


def test_layers_in_trouble_are_saved() -> None:
    """A resumed run does not report them again."""
    monitor = GradientMonitor()
    assert monitor.saves == ("troubled",)
    trainer = make_trainer(model=Faint())
    trainer.add_hook(GradientMonitor(log_frequency=1), "first")
    trainer.train()
    state = trainer.hooks.state_dict()["first"]
    second = make_trainer(model=Faint())
    second.add_hook(GradientMonitor(log_frequency=1), "first")
    second.hooks.load_state_dict({"first": state})
    second.train()
    assert flow_events(trainer) and not flow_events(second)


# ---- every kind of training ------------------------------------------------------------------------------------------


def norms_of_both(trainer: Trainer) -> list[tuple[float, float]]:
    """What the monitor says and what the gradients are at on_gradients_ready, by step."""
    trainer.add_hook(GradientMonitor(log_frequency=1))
    seen = watch(trainer, "gradients_ready")
    trainer.train()
    return [(metrics_of(trainer)[step + 1]["gradients/norm"], total_norm(grads)) for step, grads in enumerate(seen)]


def test_scaled_gradients_are_seen_unscaled() -> None:
    """Under fp16 with a GradScaler the values are the true ones, near those of fp32; skipped steps are not finite."""
    full = norms_of_both(make_trainer())
    half = norms_of_both(make_trainer(precision="fp16"))
    for (norm, true_norm), (exact, _) in zip(half[1:], full[1:], strict=True):
        assert norm == pytest.approx(true_norm, rel=1e-4)
        assert not math.isfinite(norm) or norm == pytest.approx(exact, rel=0.2)


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    """The norm agrees with that of the gradients in float32."""
    batches = [(x.bfloat16(), y.bfloat16()) for x, y in DATA]
    for norm, true_norm in norms_of_both(make_trainer(model=make_layers().bfloat16(), data=batches)):
        assert norm == pytest.approx(true_norm, rel=0.01)


def test_accumulated_gradients_are_measured_once_a_step() -> None:
    """A window of three is measured once, with complete gradients."""
    pairs = norms_of_both(make_trainer(accumulate=3))
    assert len(pairs) == 2 and all(norm == pytest.approx(true_norm, rel=1e-5) for norm, true_norm in pairs)


def test_layers_of_a_compiled_model_have_the_names_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are the model's own, and the values those of its gradients."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    trainer = make_trainer(compile=True)
    assert all(norm == pytest.approx(true_norm, rel=1e-5) for norm, true_norm in norms_of_both(trainer))
    assert list(layers_of(trainer)[1]) == ["0.weight", "0.bias", "2.weight", "2.bias"]


class Tied(nn.Module):
    """A language model whose head is its embedding, with sparse gradients if asked for."""

    def __init__(self, tied: bool, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 4, sparse=sparse)
        self.head = nn.Linear(4, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(tokens)).flatten(0, 1)
        return out


def token_batches() -> list[Batch]:
    """Tokens and the tokens after them."""
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(0, 40, (2, 6), generator=generator) for _ in range(4)]
    return [(some[:, :-1], some[:, 1:].flatten()) for some in tokens]


def test_tied_weights_are_one_layer() -> None:
    """A shared parameter is measured once, under its first name."""
    trainer = make_trainer(model=Tied(True, False), data=token_batches(), loss_fn=nn.functional.cross_entropy)
    assert all(norm == pytest.approx(true_norm, rel=1e-5) for norm, true_norm in norms_of_both(trainer))
    assert list(layers_of(trainer)[1]) == ["embed.weight"]


def test_sparse_gradients_are_those_of_the_dense_ones() -> None:
    """Statistics, percentiles and histograms count the zeros that a sparse gradient leaves out."""
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        monitor = GradientMonitor(1, log_histogram=True, percentiles=[5, 95], log_update_ratio=True)
        options = {"model": Tied(False, sparse), "data": token_batches(), "loss_fn": nn.functional.cross_entropy}
        results.append(train(monitor, **options))
    steps = [trainer.record.layer_rows for trainer in results]
    assert len(steps[0]) == len(steps[1]) == 8
    for sparse_step, dense_step in zip(*steps, strict=True):
        torch.testing.assert_close(sparse_step.values, dense_step.values, rtol=1e-4, atol=1e-7)


def test_parameters_that_begin_to_be_trained() -> None:
    """A layer that is unfrozen during a run is measured from then on; frozen ones are left out, not missing."""
    model = make_layers()
    model[0].requires_grad_(False)
    trainer = make_trainer(GradientMonitor(log_frequency=1), model=model)
    trainer.on("step_end", at=3, name="thaw")(lambda model: model[0].requires_grad_(True))
    trainer.train()
    layers = layers_of(trainer)
    assert list(layers[3]) == ["2.weight", "2.bias"]
    assert list(layers[4]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert flow_events(trainer) == []


def test_a_step_without_gradients_is_recorded_without_values() -> None:
    """It is not a failure."""
    trainer = make_trainer()
    trainer.add_hook(GradientMonitor(log_frequency=1, percentiles=[50], log_histogram=True, log_update_ratio=True))
    trainer.on("after_backward", name="thief")(lambda model: model.zero_grad(set_to_none=True))
    trainer.train()
    assert all(math.isnan(row["norm"]) for row in layers_of(trainer)[1].values())
    assert [hook.failures for hook in trainer.hooks.list_hooks()] == [0] * len(trainer.hooks)
    assert "parameters has a gradient" in flow_events(trainer)[0]["verdict"]


# ---- harmless --------------------------------------------------------------------------------------------------------


def result_of(*hooks: Any) -> list[torch.Tensor]:
    """Return the parameters, the optimizer's state and the random stream after a run with dropout."""
    model = make_model(6, 8, 3, between=partial(nn.Dropout, 0.3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(*hooks, model=model, optimizer=optimizer, max_grad_norm=0.1, max_epochs=2)
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [*model.state_dict().values(), *moments, torch.get_rng_state()]


def test_training_is_bit_for_bit_the_same() -> None:
    """With everything on, at every step, nothing of the training changes."""
    everything = {"log_histogram": True, "percentiles": [10, 50, 90], "log_update_ratio": True}
    plain, watched = result_of(), result_of(GradientMonitor(log_frequency=1, **everything))
    assert len(plain) == len(watched) and all(map(torch.equal, plain, watched))


def test_gradients_are_not_kept_alive() -> None:
    """After the step nothing of it is held: the next backward finds the memory free."""
    from weakref import ref

    trainer = make_trainer(GradientMonitor(log_frequency=1, log_update_ratio=True))
    kept: list[Any] = []
    alive: list[int] = []
    trainer.on("gradients_ready", name="mark")(lambda grads: kept.extend(ref(grad) for grad in grads.values()))
    trainer.on("train_batch_start", name="look")(lambda: alive.append(sum(grad() is not None for grad in kept)))
    trainer.train()
    assert alive == [0] * 6


def test_a_healthy_run_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither to standard output nor to the log."""
    trainer = train(GradientMonitor(log_frequency=1))
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""
    assert io.StringIO(str(trainer.hooks.get("gradient_monitor").latest)).readline().startswith("parameter")


# ---- on a device -----------------------------------------------------------------------------------------------------


def monitored_run(device: str, guard: Callable[[Callable[[], Any]], Any]) -> PlainRun:
    """Three steps of the same model, with each event of the hook inside the guard."""
    model = make_layers().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = GradientMonitor(1, log_histogram=True, percentiles=[10, 90], log_update_ratio=True)
    run = PlainRun(model=model)
    for step, (inputs, targets) in enumerate(DATA[:3], 1):
        nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
        guard(partial(monitor.on_gradients_ready, run, step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        guard(partial(monitor.on_before_optimizer_step, optimizer))
        optimizer.step()
        guard(monitor.on_after_optimizer_step)
        guard(partial(monitor.on_step_end, run))
        optimizer.zero_grad()
    monitor.on_train_end(run)
    return run


def test_its_events_can_be_called_by_any_loop() -> None:
    """Called directly, it records the same as in a trainer."""
    run = monitored_run("cpu", lambda call: call())
    assert set(run.layers) == {(name, step) for name in ("gradients", "gradient_histograms") for step in (1, 2, 3)}
    assert run.logged["gradients/final_norm", 2] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("moments", [True, False])
def test_gradients_made_in_inference_mode_are_measured_again(moments: bool) -> None:
    """They have no version that could tell of a write between the two measurements."""
    run, hook = PlainRun(), GradientMonitor(log_frequency=1, log_moments=moments)
    with torch.inference_mode():
        for param in run.params.values():
            param.grad = torch.full_like(param, 2.0)
        hook.on_gradients_ready(run, 1)
        run.model.weight.grad.mul_(3)
    hook.on_before_optimizer_step(run.optimizers[0])
    hook.on_step_end(run)
    hook.on_train_end(run)
    assert run.logged["gradients/norm", 1] == pytest.approx(4)  # of three weights and a bias
    assert run.logged["gradients/final_norm", 1] == pytest.approx(math.sqrt(3 * 36 + 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_moments_are_there_by_default() -> None:
    """One launch gives all statistics."""
    trainer = train(GradientMonitor(log_frequency=2), model=make_layers().cuda(), device="cuda")
    assert {"norm", "mean", "zeros"} <= set(layers_of(trainer)[2]["0.weight"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device() -> None:
    """No event of a step that is due makes a host sync, and what arrives is what the CPU finds."""

    def without_waiting(call: Callable[[], Any]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    on_gpu, on_cpu = monitored_run("cuda", without_waiting), monitored_run("cpu", lambda call: call())
    assert on_gpu.logged.keys() == on_cpu.logged.keys()
    for step in (1, 2, 3):
        torch.testing.assert_close(
            on_gpu.layers["gradients", step], on_cpu.layers["gradients", step], rtol=0.1, atol=1e-4
        )
        assert torch.equal(
            on_gpu.layers["gradient_histograms", step].sum(2), on_cpu.layers["gradient_histograms", step].sum(2)
        )


def test_two_monitors_log_under_different_names() -> None:
    """The second does not overwrite the first one's."""
    norms: dict[str, float] = {}
    trainer = make_trainer()
    trainer.on("gradients_ready", name="norms", at=1)(
        lambda model: norms.update({name: param.grad.norm().item() for name, param in model.named_parameters()})
    )
    trainer.add_hook("gradient_monitor", log_frequency=1)
    trainer.add_hook("gradient_monitor", name="heads", log_frequency=1, param_filter="2.")
    trainer.train()
    metrics = metrics_of(trainer)[1]
    of_heads = [norm for name, norm in norms.items() if name.startswith("2.")]
    assert metrics["gradients/norm"] == pytest.approx(math.hypot(*norms.values()), rel=1e-5)
    assert metrics["gradients/heads/norm"] == pytest.approx(math.hypot(*of_heads), rel=1e-5)
    assert metrics["gradients/heads/layers_vanishing"] == 0


def test_trouble_is_reported_as_soon_as_values_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device has measured is picked up at the end of the first step at which it has arrived, due or not."""
    trainer = make_trainer(data=make_batches(20, 16, 6, 3))
    monkeypatch.setattr("hookline._device.HostCopy.is_ready", lambda copy: trainer.step >= 12)
    monitor = GradientMonitor(log_frequency=10, exploding=1e-6)
    monitor.events_when_not_due = ("on_step_end",)  # as where torch knows CUDA
    trainer.add_hook(monitor)
    noticed: list[tuple[int, bool]] = []
    trainer.on("step_end", name="look", last=True)(lambda step: noticed.append((step, bool(monitor.troubled))))
    trainer.train()
    assert [(event["measured_at"], event["step"]) for event in flow_events(trainer)] == [(10, 12)]
    assert next(step for step, troubled in noticed if troubled) == 12
    assert list(layers_of(trainer)) == [10, 20]
