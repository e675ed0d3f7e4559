"""The monitor: every number equals torch's, arrives under its step, and leaves training as it was."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer
from torch import nn
from watched_models import watch

from hookline import HooklineError, HookManager, SimpleTrainer, read_layers, read_metrics
from hookline.activations import monitor as monitor_module
from hookline.activations.monitor import Monitor
from hookline.ranks import Ranks
from hookline.stats import collector
from hookline.stats.histograms import percentiles


class Shared(nn.Module):
    """A model that runs one module twice, and has one that writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.relu = nn.Linear(4, 6), nn.Linear(6, 6), nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.twice(self.relu(self.twice(self.first(x)) + 0)))


def plain_model() -> nn.Module:
    """Four modules, one of which draws random numbers."""
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))


def monitored_trainer(make: Callable[[], nn.Module] = plain_model, batches: int = 4, **options: Any) -> SimpleTrainer:
    """A small run, the same each time."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    return make_trainer(model=model, data=make_batches(batches, 3, 4, 2), optimizer=optimizer, **options)


def in_memory(trainer: SimpleTrainer, columns: tuple[str, ...]) -> dict[int, torch.Tensor]:
    """By step, what a run that kept no record on disk logged for these columns."""
    return {layers.step: layers.values for layers in trainer.record.layer_rows if layers.header.columns == columns}


@pytest.mark.req("003-24", "000-12")
def test_a_run_writes_its_layers() -> None:
    """Every step of a run can be read from layers.jsonl, under the modules' names and equal to torch's."""
    trainer = monitored_trainer(record=True)
    expected: list[torch.Tensor] = []
    trainer.on("forward", name="true")(lambda name, output: expected.append(output.clone()) if name == "3" else None)
    trainer.add_hook("monitor", modules=["0", "3"], metrics=["mean", "std", "l2"])
    trainer.train()
    series = read_layers(trainer.run_dir)["activations"]
    assert (series.names, series.columns, series.steps) == (("0", "3"), ("mean", "std", "l2"), (1, 2, 3, 4))
    true = torch.stack([torch.stack([output.mean(), output.std(), output.norm()]) for output in expected])
    torch.testing.assert_close(series.values[:, 1], true, rtol=1e-4, atol=1e-6)


def test_metrics_have_totals_only() -> None:
    """A NaN anywhere shows as one number in metrics.jsonl; there is no metric per module."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.aside = nn.Linear(4, 2), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> Any:
            self.aside(x)  # its output is not in the loss
            return self.head(x)

    trainer = monitored_trainer(Aside, record=True, batches=2)
    trainer.add_hook("monitor", gradients=True)
    trainer.on("train_batch_end", name="poison")(lambda model: model.aside.bias.data.fill_(float("nan")))
    trainer.train()
    records = read_metrics(trainer.run_dir)
    assert [record["activations/non_finite"] for record in records] == [0, 15]
    assert [record["activations/grad_non_finite"] for record in records] == [0, 0]
    assert {key for record in records for key in record if "activations" in key} == {
        "activations/non_finite", "activations/grad_non_finite",
    }  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_calls_of_a_step_are_one_row(accumulate: int) -> None:
    """Micro-batches of a window and repeated calls of a module are merged: the statistics are of all their values."""
    trainer = monitored_trainer(Shared, batches=6, accumulate=accumulate)
    trainer.add_hook(Monitor("twice", ["count", "mean", "std"]))
    seen: dict[int, list[torch.Tensor]] = {}

    @trainer.on("forward", name="true")
    def keep(name: str, output: torch.Tensor, step: int) -> None:
        if name == "twice":
            seen.setdefault(step, []).append(output.clone())

    trainer.train()
    logged = in_memory(trainer, ("count", "mean", "std"))
    assert list(logged) == list(seen) == list(range(1, 6 // accumulate + 1))
    for step, outputs in seen.items():
        together = torch.cat(outputs).double()
        true = torch.tensor([[together.numel(), together.mean(), together.std()]])
        torch.testing.assert_close(logged[step], true.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_torchs(dtype: torch.dtype) -> None:
    """Statistics of each output's gradient equal those that autograd gives for the same output."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    monitor = Monitor(["0", "1"], ["mean", "absmax", "l2"], gradients=True)
    watch(model, monitor)
    batch = torch.randn(5, 4, dtype=dtype)
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model[0].register_forward_hook(keep)
    model[1].register_forward_hook(keep)
    model(batch).square().sum().backward()
    latest = monitor.latest()
    for name, output in zip("01", kept, strict=True):
        gradient = output.grad.double()
        true = {"grad_mean": gradient.mean(), "grad_absmax": gradient.abs().max(), "grad_l2": gradient.norm()}
        found = {key: latest[name][key] for key in true}
        assert found == pytest.approx({key: value.item() for key, value in true.items()}, rel=1e-5, abs=1e-9)
    assert {"mean", "absmax", "l2"} <= set(latest["0"])


def test_gradients_of_an_output_used_twice_and_written_in_place() -> None:
    """The gradient is that of all uses, and a module may still write into a monitored output."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    monitor = Monitor("0", ["l2"], gradients=True)
    watch(model, monitor)
    batch = torch.randn(5, 4)
    output = model(batch)
    (output + 2 * output).sum().backward()
    true = 3 * (output > 0).float().norm()  # with respect to the values before the write
    assert monitor.latest()["0"]["grad_l2"] == pytest.approx(true.item())
    assert "l2" not in monitor.latest()["0"]  # overwritten before it was read; next time it is read at once
    model(batch)
    before_the_write = nn.functional.linear(batch, model[0].weight, model[0].bias)
    assert monitor.latest()["0"]["l2"] == pytest.approx(before_the_write.norm().item())


def test_outputs_without_gradient() -> None:
    """Under no_grad, and for outputs that require no gradient, there are only statistics of the output."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    monitor = Monitor(["0", "1"], ["mean"], gradients=True)
    watch(model, monitor)
    with torch.no_grad():
        model(torch.randn(2, 4))
    model(torch.randn(2, 4)).sum().backward()
    assert set(monitor.latest()["0"]) == {"mean"}
    assert set(monitor.latest()["1"]) == {"mean", "grad_mean"}


def test_gradients_in_a_run() -> None:
    """They are recorded with the outputs' statistics, once per optimizer step."""
    trainer = monitored_trainer(record=True, batches=4, accumulate=2)
    trainer.add_hook("monitor", modules="3", metrics=["count", "l2"], gradients=True)
    trainer.train()
    series = read_layers(trainer.run_dir)["activations"]
    assert series.columns == ("count", "l2", "grad_count", "grad_l2")
    assert series.steps == (1, 2)
    assert series.of("3", "grad_count").tolist() == [12, 12]
    assert (series.of("3", "grad_l2") > 0).all()


EVERYTHING: dict[str, Any] = {
    "metrics": ["mean", "std", "absmax", "zeros", "nans", "infs", "time", "memory", "histogram", "dead_units"],
    "percentiles": [1, 50, 99],
    "gradients": True,
    "dead_window": 2,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [Shared, plain_model])
def test_training_is_bit_for_bit_the_same(precision: str, make: Callable[[], nn.Module]) -> None:
    """With all metrics, losses, parameters, optimizer state and random streams equal those of a run without."""
    results = []
    for monitored in (True, False):
        trainer = monitored_trainer(make, precision=precision, accumulate=2)
        if monitored:
            trainer.add_hook(Monitor(**EVERYTHING))
        trainer.train()
        state = [value for group in trainer.optimizers[0].state.values() for value in group.values()]
        losses = [torch.tensor(record["train/loss"]) for record in trainer.record.metrics]
        results.append([*trainer.model.state_dict().values(), *state, *losses, torch.get_rng_state()])
        assert trainer.hooks.list_hooks()[0].failures == 0
    assert all(torch.equal(on, off) for on, off in zip(*results, strict=True))


def test_percentiles_are_torchs() -> None:
    """Within 5 % of the true ones, of all calls of a step together."""
    monitor = Monitor(metrics=[], percentiles=[5, 50, 99.5])
    outputs = [torch.randn(2000) * 3 + 1, torch.randn(2000)]
    for output in outputs:
        monitor.on_forward("a", output, 1, "train")
    found = monitor.latest()["a"]
    assert list(found) == ["p5", "p50", "p99.5"]
    true = torch.quantile(torch.cat(outputs), torch.tensor([0.05, 0.5, 0.995]))
    torch.testing.assert_close(torch.tensor(list(found.values())), true, rtol=0.05, atol=0.02)


def test_histograms_are_counted_recorded_and_read_back() -> None:
    """The newest is available from the monitor; the record has counts from which percentiles can be computed."""
    trainer = monitored_trainer(record=True)
    monitor = Monitor("0", ["histogram", "max"], gradients=True)
    trainer.add_hook(monitor)
    trainer.train()
    assert monitor.histogram("0").counts.sum() == 18
    assert monitor.histogram("0", gradient=True).counts.sum() == 18
    layers = read_layers(trainer.run_dir)
    counts = layers["activation_histograms"].of("0", "counts")
    tops = layers["activations"].of("0", "histogram_top")
    assert counts.shape == (4, 512) and (counts.sum(1) == 18).all()
    highest = percentiles(type(monitor.histogram("0"))(counts.long(), tops), [100])[:, 0]
    torch.testing.assert_close(highest.float(), layers["activations"].of("0", "max"), rtol=0.05, atol=1e-6)
    assert (layers["activation_histograms"].of("0", "grad_counts").sum(1) == 18).all()


def test_dead_units_over_windows() -> None:
    """A unit that is never above zero in a window is dead: counted in the record, listed by its index."""
    trainer = monitored_trainer(record=True, batches=6)
    layer: Any = trainer.model[0]
    layer.bias.data[[1, 4]] = -1e6
    trainer.on("step_end", name="revive")(lambda step: layer.bias.data.fill_(1e6) if step == 2 else None)
    monitor = Monitor("1", ["dead_units"], dead_window=2)
    trainer.add_hook(monitor)
    seen: list[list[int]] = []
    trainer.on("train_batch_end", name="look")(lambda step: seen.append(monitor.dead_units("1")))
    trainer.train()
    series = read_layers(trainer.run_dir)["activations"]
    assert (series.columns, series.steps) == (("dead_units", "units"), (2, 4, 6))
    assert series.of("1", "dead_units")[0] >= 2 and series.of("1", "dead_units")[1:].tolist() == [0, 0]
    assert series.of("1", "units").tolist() == [6, 6, 6]
    assert {1, 4} <= set(seen[0])
    assert monitor.dead_units("1") == []
    assert monitor.latest()["1"] == {"dead_units": 0, "units": 6}


def test_gradients_of_gradients() -> None:
    """With create_graph the monitor gets detached gradients, and the second derivative is right."""
    model = nn.Sequential(nn.Identity())
    monitor = Monitor("0", ["max"], gradients=True)
    watch(model, monitor)
    leaf = torch.tensor([3.0], requires_grad=True)
    (first,) = torch.autograd.grad(model(leaf * 1) ** 3, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first, leaf)
    assert second == 18
    assert [values["grad_max"] for _, values in monitor.history("0") if "grad_max" in values] == [27, 18]


def test_a_window_of_dead_units_is_saved_with_the_run() -> None:
    """A resumed monitor continues the window."""
    first, second = (Monitor("0", ["dead_units"], dead_window=4) for _ in range(2))
    first.on_forward("0", torch.tensor([[1.0, -1.0, -1.0]]), 1, "train")
    second.load_state_dict(first.state_dict())
    second.on_forward("0", torch.tensor([[-1.0, 1.0, -1.0]]), 2, "train")
    assert second.dead_units("0") == [2]
    assert Monitor().state_dict() == {}


@pytest.mark.req("003-25")
def test_costs_add_up_in_a_step() -> None:
    """Time and memory of a module that runs twice in a step are those of both calls."""
    trainer = monitored_trainer(Shared, batches=2)
    trainer.add_hook(Monitor("twice", ["memory", "time"]))
    trainer.train()
    logged = in_memory(trainer, ("memory", "time"))
    assert list(logged) == [1, 2]
    assert logged[1][0, 0] == 2 * 3 * 6 * 4 and logged[1][0, 1] > 0


def test_without_a_run_there_is_an_entry_for_each_call() -> None:
    """History has the calls in order, running their mean, latest the last one."""
    monitor = Monitor("0", ["mean", "time"])
    model = nn.Sequential(nn.Identity())
    watch(model, monitor)
    for value in (1.0, 2.0, 6.0):
        model(torch.full((2,), value))
    assert [values["mean"] for _, values in monitor.history("0") if "mean" in values] == [1, 2, 6]
    assert monitor.running("0")["mean"] == 3
    assert monitor.latest()["0"]["mean"] == 6 and monitor.latest()["0"]["time"] > 0
    assert monitor.history("unknown") == [] and monitor.running("unknown") == {}


def test_a_repeated_step_is_a_new_entry() -> None:
    """After a rewind, the numbers of a step do not replace those from before; a call in another step ends a step."""
    monitor, model = Monitor("0", ["mean", "memory"]), nn.Sequential(nn.Identity())
    manager = watch(model, monitor)
    for value, step in enumerate([1, 1, 2, 1]):
        manager.dispatcher.run.step = step
        model(torch.full((2,), float(value)))
    assert monitor.history("0") == [
        (1, {"mean": 0.5, "memory": 16}), (2, {"mean": 2, "memory": 8}), (1, {"mean": 3, "memory": 8}),
    ]  # fmt: skip


def test_the_mean_over_steps_ignores_nan() -> None:
    """A step without a finite value does not count."""
    monitor, model = Monitor("0", ["mean"]), nn.Sequential(nn.Identity())
    watch(model, monitor)
    for value in (1.0, float("nan"), 3.0):
        model(torch.full((2,), value))
    assert monitor.running("0") == {"mean": 2}


def test_the_newest_histogram() -> None:
    """Of the last call without steps, of the current step in one; before the first call there is none."""
    monitor, model = Monitor("0", ["histogram"]), nn.Sequential(nn.Identity())
    manager = watch(model, monitor)
    with pytest.raises(HooklineError, match="no histogram of '0' yet; there are none"):
        monitor.histogram("0")
    for size in (1, 2):
        model(torch.ones(size))
    assert monitor.histogram("0").counts.sum() == 2
    manager.dispatcher.run.step = 1
    model(torch.ones(5))
    assert monitor.histogram("0").counts.sum() == 5
    assert set(monitor.latest()["0"]) == set(monitor.history("0")[-1][1]) == {"histogram_top"}


@pytest.mark.parametrize("metrics", [["mean"], ["time"], ["mean", "time"]])
def test_without_a_run_memory_is_bounded(metrics: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Old results are dropped although nothing reads them, and the newest of every kind are there."""
    monkeypatch.setattr(monitor_module, "MAX_PENDING_CALLS", 4)
    monkeypatch.setattr(collector, "MOST_COLLECTED", 4)
    monkeypatch.setattr(monitor_module, "HISTORY_LIMIT", 10)
    monitor, model = Monitor("0", metrics), nn.Sequential(nn.Identity())
    watch(model, monitor)
    kept = [len(gc.get_objects())]
    for _ in range(3):
        for value in range(400):
            model(torch.full((2,), float(value)))
        gc.collect()
        kept.append(len(gc.get_objects()))
    assert kept[3] - kept[1] < 200, "as many objects after 1200 calls as after 400"
    assert set(monitor.latest()["0"]) == set(metrics)
    assert len(monitor.history("0")) == 10
    assert monitor.latest()["0"].get("mean", 399) == 399


def test_reading_in_mid_run_loses_nothing() -> None:
    """A hook that reads the monitor during a step removes nothing from the record."""
    trainer = monitored_trainer(batches=4, accumulate=2)
    monitor = Monitor("0", ["count"])
    trainer.add_hook(monitor)
    counts: list[float] = []
    trainer.on("after_backward", name="look")(lambda: counts.append(monitor.latest()["0"]["count"]))
    trainer.train()
    assert counts == [18, 36, 18, 36]
    assert {step: values.item() for step, values in in_memory(trainer, ("count",)).items()} == {1: 36, 2: 36}
    assert [(step, values["count"]) for step, values in monitor.history("0")] == [(1, 36), (2, 36)]


def test_a_module_that_runs_in_some_steps_keeps_its_row() -> None:
    """Names are written once; a step in which a module did not run has NaN."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rarely, self.calls = nn.Linear(4, 2), nn.Linear(4, 2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            output: torch.Tensor = self.always(x)
            return output + self.rarely(x) if self.calls == 2 else output

    trainer = monitored_trainer(Sometimes, record=True, batches=3)
    trainer.add_hook(Monitor(["always", "rarely"], ["count"]))
    trainer.train()
    series = read_layers(trainer.run_dir)["activations"]
    assert series.names == ("rarely", "always") or series.names == ("always", "rarely")
    assert series.of("rarely", "count").isnan().tolist() == [True, False, True]
    text = (trainer.run_dir / "layers.jsonl").read_text()
    assert text.count('"names"') == 2


def test_a_failing_step_is_recorded() -> None:
    """The record has what was measured before the run failed."""
    trainer = monitored_trainer(record=True, batches=3)
    trainer.add_hook("monitor", modules="0", metrics=["mean"])

    @trainer.on("before_backward", name="break", on_error="raise")
    def break_down(step: int) -> None:
        assert step < 2, "broken"

    with pytest.raises(AssertionError, match="broken"):
        trainer.train()
    assert read_layers(trainer.run_dir)["activations"].steps == (1, 2)


def test_values_arrive_a_flush_later_under_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event waits for a busy device; the end of the run records every step."""
    waited: list[bool] = []
    monkeypatch.setattr("hookline._device.HostCopy.is_ready", lambda copy: False)
    trainer = monitored_trainer(record=True)
    trainer.add_hook("monitor", modules="0", metrics=["mean"], gradients=True)
    record = trainer.record
    trainer.on("step_end", name="look")(lambda trainer: waited.append((trainer.run_dir / "layers.jsonl").exists()))
    trainer.train()
    assert record is not trainer.record and waited == [False] * 4
    assert read_layers(trainer.run_dir)["activations"].steps == (1, 2, 3, 4)


def test_in_training_everything_is_read_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that autograd keeps do not count towards the limit of collected memory."""
    launches: list[int] = []
    summarize = collector.summarize
    monkeypatch.setattr(collector.StepCollector, "limit_bytes", 64)

    def counted(tensors: Any, names: Any) -> torch.Tensor:
        launches.append(len(tensors))
        return summarize(tensors, names)

    monkeypatch.setattr("hookline.activations.series.summarize", counted)
    model = nn.Sequential(nn.Linear(8, 8), *[nn.Tanh() for _ in range(8)], nn.Linear(8, 2))  # tanh keeps its output
    make_trainer(Monitor("re:^[1-8]$", ["mean"]), model=model, data=make_batches(1, 16, 8, 2)).train()
    assert launches == [8]


@pytest.mark.req("003-24")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics": ["maen"]}, "unknown metric 'maen'; did you mean 'mean'"),
        ({"percentiles": [120]}, "expected a finite number, at least 0 and at most 100, got 120"),
        ({"percentiles": ["50"]}, "at most 100, got '50'"),
        ({"percentiles": [True]}, "at most 100, got True"),
        ({"percentiles": [float("nan")]}, "at most 100, got nan"),
        ({"metrics": ["time"], "gradients": True}, "no statistic to compute; add one"),
        ({"metrics": ["dead_units"], "dead_window": 0}, "dead_window: expected an integer of at least 1, got 0"),
    ],
)
def test_invalid_parameters_are_rejected(options: dict[str, Any], said: str) -> None:
    """When the monitor is made."""
    with pytest.raises(HooklineError, match=said):
        Monitor(**options)


def test_columns_have_the_requested_order() -> None:
    """Statistics as given and once each, then percentiles, then the top of the histogram."""
    model, manager = nn.Sequential(nn.Identity()), HookManager()
    metrics = ["max", "histogram", "mean", "max", "zeros"]
    manager.register_monitoring_hook(model[0], "it", metrics, percentiles=[50, 99.5])
    model(torch.tensor([-4.0, 0.0, 4.0]))
    found = manager.get("it").latest()["it"]
    assert list(found) == ["max", "mean", "zeros", "p50", "p99.5", "histogram_top"]
    assert (found["max"], found["mean"], found["zeros"], found["p50"], found["histogram_top"]) == (4, 0, 1, 0, 2)


@pytest.mark.parametrize(
    ("options", "only"),
    [
        ({"metrics": ["mean", "nans"]}, True),
        ({"metrics": ["mean"], "percentiles": [50]}, False),
        ({"metrics": ["mean", "histogram"]}, False),
        ({"metrics": ["mean", "dead_units"]}, False),
        ({"metrics": ["mean", "time"]}, False),
        ({"metrics": ["mean"], "gradients": True}, False),
        ({"metrics": ["time"]}, False),
    ],
)
def test_compiled_code_can_accumulate_statistics_only(options: dict[str, Any], only: bool) -> None:
    """Everything else needs the tensors."""
    assert Monitor(**options).statistics_only is only


def test_metrics_that_were_not_requested_cannot_be_read() -> None:
    """The error says how to request them; for an unknown module it lists the valid ones."""
    with pytest.raises(HooklineError, match="needs 'histogram' among its metrics"):
        Monitor().histogram("0")
    with pytest.raises(HooklineError, match="gradients=True and 'histogram'"):
        Monitor(metrics=["histogram"]).histogram("0", gradient=True)
    with pytest.raises(HooklineError, match="needs 'dead_units' among its metrics"):
        Monitor().dead_units("0")
    monitor = Monitor(metrics=["histogram", "dead_units"])
    monitor.on_forward("blocks.0", torch.ones(2, 2), 0, "train")
    with pytest.raises(HooklineError, match=r"did you mean 'blocks\.0'"):
        monitor.histogram("block.0")
    with pytest.raises(HooklineError, match=r"did you mean 'blocks\.0'"):
        monitor.dead_units("block.0")


def test_options_go_through_the_manager() -> None:
    """register_monitoring_hook takes the monitor's options beside those of a registration."""
    model, manager = nn.Sequential(nn.Linear(4, 3)), HookManager()
    manager.register_monitoring_hook(model[0], "head", ["mean"], percentiles=[50], gradients=True, every=1)
    model(torch.randn(2, 4)).sum().backward()
    assert set(manager.get("head").latest()["head"]) == {"mean", "p50", "grad_mean", "grad_p50"}


def test_several_threads_run_and_read() -> None:
    """While some threads run the model and one reads, every call is counted once."""
    model = nn.Sequential(nn.Linear(4, 4))
    monitor = Monitor("0", ["count"])
    watch(model, monitor)
    threads = [threading.Thread(target=lambda: [model(torch.ones(1, 4)) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        monitor.latest()
    assert len(monitor.history("0")) == 200


def test_a_removed_monitor_releases_tensors() -> None:
    """After its removal no tensor is kept, and gradients that arrive later do no harm."""
    model = nn.Sequential(nn.Linear(4, 4))
    monitor = Monitor("0", ["mean"], gradients=True)
    manager = watch(model, monitor)
    output = model(torch.ones(2, 4))
    manager.remove("monitor")
    output.sum().backward()
    assert "mean" not in monitor.latest().get("0", {})


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, at a graph break
@pytest.mark.parametrize("gradients", [False, True])
def test_compiled_code_has_the_same_statistics(gradients: bool) -> None:
    """Every number is the same as in eager code, also those of gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    batch = torch.randn(5, 4)
    found = []
    for run in (torch.compile(model, backend="aot_eager"), model):
        monitor = Monitor(metrics=["mean", "l2", "histogram", "dead_units"], percentiles=[50], gradients=gradients)
        manager = watch(model, monitor)
        run(batch).square().sum().backward()
        found.append(monitor.latest())
        manager.remove("monitor")
    assert set(found[0]["1"]) >= {"p50", "grad_l2" if gradients else "l2"}
    for name in ("0", "1", "2"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5, abs=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_monitored_step_never_waits_for_the_device() -> None:
    """With all metrics, forward, backward and the step's events make no host sync."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    monitor = Monitor(**EVERYTHING)
    watch(model, monitor)
    trainer = MemoryRun()
    for step in range(1, 6):
        trainer.step = step
        if step > 2:  # the first steps compile kernels and pin memory
            torch.cuda.set_sync_debug_mode("error")
        try:
            monitor.on_train_batch_start()
            loss = model(torch.ones(16, 64, device="cuda")).square().mean()
            monitor.on_before_backward()
            loss.backward()
            monitor.on_after_backward()
            monitor.on_step_end(step, trainer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    monitor.on_train_end(trainer)
    assert {layers[0] for layers in trainer.logged} >= {"activations", "activation_histograms"}


class MemoryRun:
    """The part of RunControl that a monitor uses."""

    def __init__(self) -> None:
        self.step, self.ranks = 0, Ranks()
        self.logged: list[tuple[Any, ...]] = []

    def log_layers(self, *layers: Any) -> None:
        self.logged.append(layers)

    def log(self, *metric: Any) -> None:
        self.logged.append(metric)


def test_two_monitors_of_the_same_modules_do_not_disturb_each_other() -> None:
    """Both measure each output, also where a module only returns that of another."""
    trainer = monitored_trainer(lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 2)), 1)
    every, some = Monitor("*", ["mean", "absmax"]), Monitor(["0", "1"], ["std"])
    trainer.add_hook(every, name="every")
    trainer.add_hook(some, name="some")
    seen: dict[str, torch.Tensor] = {}
    for name, module in trainer.model.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output.detach()}))
    trainer.train()
    assert every.latest()["0"] == every.latest()["0.1"]
    for name, values in every.latest().items():
        assert values["mean"] == pytest.approx(seen[name].mean().item(), rel=1e-5)
    assert {name: values["std"] for name, values in some.latest().items()} == {
        name: pytest.approx(seen[name].std().item(), rel=1e-5) for name in ("0", "1")
    }


def test_calls_are_counted_under_the_registered_name() -> None:
    """In the fire report."""
    model = plain_model()
    manager = watch(model)
    manager.register(Monitor(["0", "3"]), name="mine")
    model(torch.randn(3, 4))
    model(torch.randn(3, 4))
    assert [(row.module, row.fired) for row in manager.fire_report().of("mine")] == [("0", 2), ("3", 2)]


# ---- functions -------------------------------------------------------------------------------------------------------


def sparsity(output: torch.Tensor) -> torch.Tensor:
    """Return the share of small values."""
    return (output.abs() < 0.1).float().mean()


@pytest.mark.req("003-09")
def test_a_metric_may_be_a_function() -> None:
    """It gets the output without its graph; what it returns is measured under its name, one row per call."""
    model, manager, graphs = nn.Linear(4, 3), HookManager(), []
    alone = manager.register_monitoring_hook(model, "alone", metrics=sparsity)
    mixed = manager.register_monitoring_hook(
        model, "mixed", metrics=["max", sparsity, lambda output: graphs.append(output.requires_grad) or 2, torch.max]
    )
    outputs = [model(torch.randn(5, 4)).detach() for _ in range(2)]
    for state, output in zip(manager.get_captured_states(alone), outputs, strict=True):
        assert state.values == {"sparsity": pytest.approx(sparsity(output).item())}
    states = manager.get_captured_states(mixed)
    assert [set(state.values) for state in states] == [{"max", "sparsity", "lambda", "max_2"}] * 2
    assert all(state.values["max"] == state.values["max_2"] and state.values["lambda"] == 2 for state in states)
    assert graphs == [False, False]


@pytest.mark.hooks_fail(raises=HooklineError)
@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.ones(2), "got tensor([1., 1.]) (Tensor)"), ("high", "got 'high' (str)"), (None, "got None (NoneType)")],
    ids=["two numbers", "text", "nothing"],
)
def test_a_function_that_returns_no_number_is_named(value: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """With what it returned."""

    def spread(output: torch.Tensor) -> Any:
        return value

    trainer = monitored_trainer(Shared)
    trainer.add_hook("monitor", modules="head", metrics=spread)
    trainer.train()
    assert f"HooklineError: metrics: the function 'spread' must return one number, {said}" in caplog.text


def test_a_function_is_averaged_over_the_calls_of_a_step_and_recorded() -> None:
    """As time and memory are added up; training is what it is without."""
    plain, trainer = monitored_trainer(Shared), monitored_trainer(Shared, record=True)
    outputs: list[float] = []
    trainer.on("forward", name="true")(
        lambda name, output: outputs.append(sparsity(output).item()) if name == "twice" else None
    )
    trainer.add_hook("monitor", modules=["twice", "head"], metrics=[sparsity])
    plain.train()
    trainer.train()
    series = read_layers(trainer.run_dir)["activations"]
    expected = [(first + second) / 2 for first, second in zip(outputs[::2], outputs[1::2], strict=True)]
    assert (set(series.names), series.columns) == ({"twice", "head"}, ("sparsity",))
    recorded = series.values[:, series.names.index("twice"), 0].tolist()
    assert recorded == pytest.approx(expected, abs=1e-6)
    assert all(map(torch.equal, plain.model.parameters(), trainer.model.parameters()))


@pytest.mark.hooks_fail(raises=(ZeroDivisionError, HooklineError, ValueError, TypeError, RuntimeError))
def test_a_function_that_fails_is_the_hooks_failure() -> None:
    """The model runs on; a function that returns several numbers fails, too."""
    for wrong in (lambda output: 1 / 0, lambda output: output):
        model, manager = nn.Linear(4, 3), HookManager()
        manager.register_monitoring_hook(model, "fails", metrics=wrong)
        assert model(torch.ones(2, 4)).shape == (2, 3)
        assert manager.entry("fails").failures.total == 1 and manager.get_captured_states("fails") == []
