"""The verdict on real runs, small and seeded: sick ones are recognized, and healthy ones of many kinds stay healthy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_trainer
from commands import json_of, output_of
from live_summary import LiveSummary
from records import close_record, start_record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline.gradients.gradient_flow import gradient_flow
from hookline.record.format import SeriesHeader
from hookline.record.layers import LayerRow
from hookline.runs.alerts import find_alerts
from hookline.runs.stories import tell_stories
from hookline.runs.summary import RunSummary
from hookline.runs.verdict import Alert, Verdict, judge

CLASSES = 4


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Draw the same weights and batches whatever ran before, with the sums of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def images(count: int, noise: float = 0.7, seed: int = 0) -> TensorDataset:
    """Make noisy pictures of a few classes."""
    shapes = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(shapes[labels] + noise * torch.randn(count, 1, 8, 8, generator=generator), labels)


def loader(data: TensorDataset, size: int = 16) -> DataLoader[Any]:
    return DataLoader(data, size, shuffle=True)


def make_cnn() -> nn.Sequential:
    """Make a classifier whose convolutions have biases before batch norms."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def run(model: nn.Module, optimizer: Any, *hooks: Any, data: Any = None, steps: int = 120, **options: Any) -> Path:
    """Train a classifier of pictures, with a validation every tenth of the run, and return the run's directory."""
    classifies = "step_fn" not in options
    defaults: dict[str, Any] = {"loss_fn": F.cross_entropy, "metrics": ["accuracy"]} if classifies else {}
    if classifies and "val_dataloader" not in options:
        defaults["val_dataloader"] = DataLoader(images(64, seed=5), 64)
    if "val_dataloader" in {**defaults, **options}:
        defaults["validate_every"] = steps // 10
    trainer = make_trainer(
        *hooks, model=model, optimizer=optimizer, data=data or loader(images(400)), record=True, max_epochs=1000,
        max_steps=steps, **{**defaults, **options},
    )  # fmt: skip
    trainer.train()
    assert trainer.run_dir is not None
    return trainer.run_dir


def verdict_of(path: Path) -> tuple[Verdict, list[Alert]]:
    alerts = find_alerts(RunSummary.read(path))
    return judge(alerts), alerts


def trained_cnn() -> nn.Sequential:
    model = make_cnn()
    run(model, torch.optim.Adam(model.parameters(), 3e-3))
    return model


# ---- healthy runs ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A small causal transformer with separate projections; the gradient of the keys' bias is zero but for rounding."""

    def __init__(self, symbols: int = 8, width: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(symbols, width), nn.Parameter(0.1 * torch.randn(16, width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.embed(symbols) + self.place
        mixed = F.scaled_dot_product_attention(self.query(hidden), self.key(hidden), self.value(hidden), is_causal=True)
        out: Tensor = self.head(self.norm(hidden + mixed))
        return out.flatten(0, 1)


class LowRank(nn.Module):
    """A frozen layer with two trained factors, of which the second begins at zero, as LoRA's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(layer.in_features, 4) / 10)
        self.up = nn.Parameter(torch.zeros(4, layer.out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs) + inputs @ self.down @ self.up
        return out


def cnn() -> Path:
    model = make_cnn()
    return run(model, torch.optim.Adam(model.parameters(), 3e-3), hookline.GradientMonitor(every=10))


def transformer() -> Path:
    symbols = torch.randint(8, (3000,)).repeat_interleave(2)
    inputs = torch.stack([symbols[i : i + 16] for i in range(0, 5000, 9)])
    targets = torch.stack([symbols[i + 1 : i + 17] for i in range(0, 5000, 9)])
    model, data = Attention(), TensorDataset(inputs, targets)
    return run(
        model, torch.optim.Adam(model.parameters(), 1e-2), hookline.GradientMonitor(every=10), data=loader(data),
        loss_fn=lambda out, target: F.cross_entropy(out, target.flatten()), metrics=[],
        val_dataloader=DataLoader(data, 64),
    )  # fmt: skip


def low_rank() -> Path:
    model = trained_cnn().requires_grad_(False)
    model[-1] = LowRank(model[-1])
    trained = [param for param in model.parameters() if param.requires_grad]
    data = loader(images(400, noise=1.5, seed=7))
    return run(model, torch.optim.Adam(trained, 1e-3), hookline.GradientMonitor(every=10), data=data)


def fine_tuning() -> Path:
    """The model is good at the beginning, and hardly improves."""
    model = trained_cnn()
    return run(model, torch.optim.Adam(model.parameters(), 1e-6), data=loader(images(400, seed=7)))


def short() -> Path:
    model = make_cnn()
    return run(model, torch.optim.Adam(model.parameters(), 1e-3), steps=10)


def gan() -> Path:
    """The losses of a generator and a discriminator rise and fall against each other."""
    model = nn.ModuleDict({
        "makes": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)),
        "judges": nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    })  # fmt: skip

    def step(model: Any, batch: Any) -> Tensor:
        fake = model["makes"](torch.randn(len(batch[0]), 4))
        real, false = model["judges"](batch[0]), model["judges"](fake.detach())
        judged = F.softplus(-real).mean() + F.softplus(false).mean()
        model["judges"].requires_grad_(False)
        made = F.softplus(-model["judges"](fake)).mean()
        model["judges"].requires_grad_(True)
        return judged + made

    angles = 6.28 * torch.rand(1000)
    data = loader(TensorDataset(torch.stack([angles.cos(), angles.sin()], 1)), 32)
    optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in model.values()]
    return run(model, optimizers, data=data, step_fn=step, steps=300)


@pytest.mark.parametrize("train", [cnn, transformer, low_rank, fine_tuning, short, gan])
def test_a_healthy_run_stays_healthy(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = train()
    verdict, alerts = verdict_of(path)
    assert verdict == Verdict("healthy"), alerts
    assert [alert for alert in alerts if alert.severity != "info"] == []
    assert json_of(capsys, "show", str(path))["verdict"]["health"] == "healthy"
    assert output_of(capsys, ["show", str(path)]).startswith("healthy\n")


def test_a_bias_before_a_batch_norm_gets_no_gradient_and_is_healthy() -> None:
    """Its gradient is zero but for rounding; a weight without a gradient beside its bias is in trouble."""
    model = make_cnn()
    inputs, labels = images(64).tensors
    F.cross_entropy(model(inputs), labels).backward()
    gradient, weight = model[0].bias.grad, model[0].weight.grad
    assert gradient is not None and weight is not None and gradient.norm() < 1e-4 * weight.norm()
    assert gradient_flow(model).troubled == {}
    model[-1].weight.grad.zero_()
    assert gradient_flow(model).troubled == {"7.weight": "vanishing"}
    model[3].weight.grad.zero_()
    assert gradient_flow(model).troubled == {"3.weight": "vanishing", "3.bias": "vanishing", "7.weight": "vanishing"}


def test_the_classes_of_the_optimizers_are_recorded() -> None:
    assert json.loads((gan() / "run.json").read_text())["optimizers"] == ["Adam", "Adam"]


# ---- sick runs -------------------------------------------------------------------------------------------------------


class Raises(hookline.TrainingHook):
    """Sets a learning rate at a step."""

    def __init__(self, at: int, lr: float) -> None:
        self.at, self.lr = at, lr

    def on_step_end(self, step: int, trainer: Any) -> None:
        if step == self.at:
            trainer.optimizers[0].param_groups[0]["lr"] = self.lr


def never_learned() -> Path:
    model = make_cnn()
    return run(model, torch.optim.SGD(model.parameters(), 1e-9), steps=200)


def diverged() -> Path:
    model = make_cnn()
    return run(model, torch.optim.SGD(model.parameters(), 0.05), Raises(100, 30.0), steps=200)


def overfitting() -> Path:
    """There is nothing to learn but the labels of single pictures."""
    noise = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(CLASSES, (64,)))
    model = make_cnn()
    return run(model, torch.optim.Adam(model.parameters(), 1e-2), data=loader(noise), steps=200)


def worse_than_best() -> Path:
    """The accuracy falls to chance and does not come back, without a training loss to tell."""

    class Forgets(hookline.TrainingHook):
        def on_step_end(self, step: int, trainer: Any) -> None:
            if step == 80:
                with torch.no_grad():
                    trainer.model[-1].weight.zero_()
                trainer.optimizers[0].param_groups[0]["lr"] = 0.0

    model = make_cnn()
    return run(model, torch.optim.Adam(model.parameters(), 3e-3), Forgets(), steps=160)


@pytest.mark.parametrize(
    ("train", "kind", "health", "steps"),
    [
        (never_learned, "never_learned", "broken", None),
        (diverged, "diverged", "broken", (100, 115)),
        (overfitting, "overfitting", "look at this", (20, 120)),
        (worse_than_best, "worse_than_best", "broken", (80, 96)),
    ],
)
def test_a_run_whose_curves_are_sick_is_not_healthy(
    train: Any, kind: str, health: str, steps: tuple[int, int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train()
    verdict, alerts = verdict_of(path)
    worst, *others = alerts
    assert kind in (worst.kind, *(part.kind for part in worst.parts))
    assert {other.kind for other in others} <= {"hook_wrote"}  # one cause, one alert
    assert verdict.health == health and worst.severity == ("error" if health == "broken" else "warning")
    assert worst.step is None if steps is None else steps[0] <= (worst.step or 0) <= steps[1]
    (listed,) = [row for row in json_of(capsys, "runs", str(path.parent)) if row["run_id"] == path.name]
    assert listed["verdict"]["health"] == health and listed["outcome"] == "completed"


def test_spikes_behind_a_divergence_belong_to_it() -> None:
    _, alerts = verdict_of(diverged())
    (story,) = [alert for alert in alerts if alert.severity == "error"]
    assert {"diverged", "spike"} <= {part.kind for part in story.parts}
    assert not any(alert.kind == "spike" for alert in alerts)


def test_a_nan_is_one_story_from_its_layer_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A weight that becomes NaN ruins outputs, losses, validations and weights, which is told in their order."""

    class Ruins(hookline.TrainingHook):
        def on_step_end(self, step: int, trainer: Any) -> None:
            if step == 32:
                with torch.no_grad():
                    trainer.model[3].weight[0] = float("nan")

    model = make_cnn()
    path = run(
        model, torch.optim.Adam(model.parameters(), 1e-3), Ruins(), hookline.GradientMonitor(every=1), steps=60,
        console=True, hooks={"forward": [{"name": "monitor", "every": 1}]},
    )  # fmt: skip
    verdict, alerts = verdict_of(path)
    story, *others = alerts
    assert not [alert for alert in others if alert.severity == "error"]
    assert (verdict.health, verdict.step, story.step) == ("broken", 33, 33)
    assert story.place["series"] == "activations" and story.place["name"] == "3"
    assert story.parts[0].text.startswith("activations: NaN in module '3' ")
    kinds = [part.kind for part in story.parts]
    assert {"non_finite", "non_finite_loss", "non_finite_weights"} <= {*kinds}
    assert all((a.step or 1000) <= (b.step or 1000) for a, b in pairwise(story.parts))
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3].startswith("broken: step 33: activations: NaN in module '3' ")
    assert printed[-2].startswith("non-finite weights (")
    shown = output_of(capsys, ["show", str(path)])
    assert shown.startswith("broken\n    step 33    activations: NaN in module '3' ")
    assert json_of(capsys, "show", str(path))["alerts"][0]["parts"][0]["place"]["name"] == "3"


def test_a_run_that_stopped_because_of_nan_is_broken_and_leads_to_the_module() -> None:
    """Its weights are good, and its outcome says non-finite."""

    class Poisons(nn.Module):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return inputs * float("nan") if self.calls > 20 and self.training else inputs

    model = make_cnn()
    model.insert(4, Poisons())
    path = run(model, torch.optim.Adam(model.parameters(), 1e-3), hookline.NanForensics(), steps=60)
    verdict, (story, *others) = verdict_of(path)
    assert json.loads((path / "run.json").read_text())["outcome"] == "non_finite"
    assert verdict.health == "broken" and not [alert for alert in others if alert.severity == "error"]
    assert "the first bad output came from module '4'" in story.text


def test_gradients_come_last_among_what_a_step_shows() -> None:
    """A backward pass spreads a NaN to layers before the one where it began, to which the story leads."""
    parts = [
        Alert("non_finite", "error", 3, "gradients: NaN in '0.weight'", {"series": "gradients", "name": "0.weight"}),
        Alert("non_finite_loss", "error", 3, "the loss is nan", {"curve": "train/loss"}),
        Alert("non_finite", "error", 3, "activations: NaN in module '4'", {"series": "activations", "name": "4"}),
    ]
    (story,) = tell_stories(parts)
    assert story.parts[-1] is parts[0] and story.place["name"] == "4"


def test_all_metrics_that_a_nan_ruins_belong_to_its_story() -> None:
    """A training metric that is missing for a batch is a notice, but not if the loss was ruined before."""
    summary = LiveSummary({})
    good, bad = (
        {"train/loss": 0.5, "train/grad_norm": 1.0},
        dict.fromkeys(("train/loss", "train/grad_norm"), float("nan")),
    )
    summary.write_metrics({"step": step, **(good if step < 5 else bad)} for step in range(1, 9))
    (story,) = find_alerts(summary)
    assert [part.place["curve"] for part in story.parts] == ["train/loss", "train/grad_norm"]


def test_what_ended_a_run_with_bad_weights_is_told_once() -> None:
    """The reason in run.json repeats what the events say."""

    class Poisons(hookline.TrainingHook):
        intervenes = True

        def on_step_end(self, step: int, trainer: Any) -> None:
            if step == 20:
                with torch.no_grad():
                    trainer.model[3].weight.view(-1)[0] = float("nan")

    model = make_cnn()
    path = run(model, torch.optim.Adam(model.parameters(), 1e-3), Poisons(), hookline.NanForensics(), steps=60)
    assert "stopped by nan_forensics" in json.loads((path / "run.json").read_text())["reason"]
    story, *others = verdict_of(path)[1]
    assert [part.kind for part in story.parts] == ["crash", "non_finite_loss", "non_finite_weights"]
    assert not [alert for alert in others if alert.severity == "error"]


# ---- rules -----------------------------------------------------------------------------------------------------------


def alerts_of(
    *events: dict[str, Any], run: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> list[Alert]:
    summary = LiveSummary(run)
    summary.files.config = config or {}
    summary.write_events(events)
    return find_alerts(summary)


def test_a_stall_that_is_not_over_is_an_error() -> None:
    stall = {"kind": "stall", "step": 7, "by": "stall_watchdog", "seconds": 300.0}
    over = {"kind": "stall_over", "step": 7, "by": "stall_watchdog", "seconds": 400.0}
    (alert,) = alerts_of(stall)
    assert (alert.severity, alert.step) == ("error", 7) and alert.text.endswith("and the stall is not over")
    (alert,) = alerts_of(stall, over)
    assert (alert.severity, alert.text) == ("warning", "stall_watchdog: no progress for 300 s")
    (alert,) = alerts_of(stall, over, {**stall, "step": 9, "seconds": 500.0}, over)
    assert (alert.step, alert.text) == (9, "stall_watchdog: no progress for 500 s; the longest of 2 stalls")


def test_a_run_that_did_not_come_to_its_end_says_how_to_go_on() -> None:
    saved = {"kind": "checkpoint_saved", "step": 40, "path": "checkpoints/step-40"}
    (LiveSummary().files.path / "checkpoints" / "step-40").mkdir(parents=True)
    parts = {"model": {}, "data": {}, "optimizer": {}}
    (killed,) = alerts_of(saved, run={"run_id": "abc", "outcome": None}, config=parts)
    assert (killed.kind, killed.severity) == ("killed", "warning")
    assert killed.text.endswith("; resume it from its checkpoint of step 40: `hookline resume abc`")
    (killed,) = alerts_of(saved, run={"run_id": "abc", "outcome": None}, config={"model": {}, "optimizers": []})
    assert killed.text.endswith(" of step 40, in your code: `fit(resume=…)`, or `hl.load(…)`")
    error = {"kind": "exception", "step": 41, "error": "ValueError: x"}
    (failed,) = alerts_of(error, run={"run_id": "abc", "outcome": "failed", "reason": "ValueError: x"})
    assert failed.severity == "error"
    assert failed.text == "the run failed: ValueError: x; it has no checkpoint, so start it again"
    (resumed,) = alerts_of(error, run={"run_id": "abc", "outcome": "completed"})
    assert resumed.severity == "info"


def test_a_run_that_was_killed_deserves_a_look_in_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = start_record(tmp_path, "abc")
    record.log(1, 0, "train/loss", 0.5)
    close_record(record)
    path = tmp_path / "abc" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "outcome": None}))
    assert "look at this  killed" in output_of(capsys, ["runs", str(tmp_path)])


def test_the_list_says_of_a_killed_run_what_show_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is killed writes no verdict. Of one that is too long to read for a list, nothing is said."""
    record = start_record(tmp_path, "abc")
    record.log(1, 0, "train/loss", 0.5)
    record.event("stall", step=1, seconds=300.0, by="stall_watchdog")
    close_record(record)
    path = tmp_path / "abc" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "outcome": None}))
    assert "broken" in output_of(capsys, ["runs", str(tmp_path)])
    (listed,) = json_of(capsys, "runs", str(tmp_path))
    shown = json_of(capsys, "show", str(tmp_path / "abc"))
    assert listed["verdict"] == shown["verdict"] and shown["verdict"]["health"] == "broken"

    with (tmp_path / "abc" / "metrics.jsonl").open("a") as file:
        for step in range(2, 60_000):
            file.write(f'{{"step": {step}, "epoch": 0, "time": 1.5, "train/loss": 0.5, "val/loss": 0.5}}\n')
    assert json_of(capsys, "runs", str(tmp_path))[0]["verdict"] is None
    assert "broken" not in output_of(capsys, ["runs", str(tmp_path)])


def test_a_run_that_writes_nothing_for_long_may_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process is alive, and nothing in it watches for stalls."""
    record = start_record(tmp_path, "abc")
    for quiet, health in ((60, "healthy"), (3600, "look at this")):
        rows = [{"step": step, "epoch": 0, "time": time.time() - quiet + step, "train/loss": 0.5} for step in range(5)]
        (tmp_path / "abc" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        shown = json_of(capsys, "show", str(tmp_path / "abc"))
        assert (shown["outcome"], shown["verdict"]["health"]) == ("running", health)
    assert "no numbers for 59 m 5" in shown["verdict"]["reason"]
    close_record(record)


def test_weights_that_were_restored_are_no_reason_to_look() -> None:
    """Early stopping that goes back to the best weights is the remedy."""
    for events, severity in (([], "warning"), ([{"kind": "best_weights_restored", "step": 200}], "info")):
        summary = LiveSummary()
        for step in range(200):
            rising = 1 + 0.01 * abs(step - 40) if step % 5 == 0 else None
            row = {"step": step, "train/loss": 2 * 0.98**step}
            summary.write_metrics([row if rising is None else {**row, "val/loss": rising}])
        summary.write_events(events)
        (alert,) = find_alerts(summary)
        assert (alert.kind, alert.severity) == ("overfitting", severity)


def test_a_run_that_continues_another_one_need_not_improve() -> None:
    for run, kinds in (({}, ["never_learned"]), ({"lineage": {"run_id": "a", "step": 9}}, [])):
        summary = LiveSummary(run)
        summary.write_metrics({"step": step, "train/loss": 0.3 + 0.01 * (step * 7 % 5)} for step in range(200))
        assert [alert.kind for alert in find_alerts(summary)] == kinds


def summary_of(losses: Sequence[float], run: dict[str, Any] | None = None, **metrics: Sequence[float]) -> RunSummary:
    """Return a summary of a training loss at each step, and of validations in equal distances."""
    summary = LiveSummary(run)
    summary.write_metrics({"step": step, "train/loss": loss} for step, loss in enumerate(losses, start=1))
    for name, values in metrics.items():
        every = len(losses) // len(values)
        rows = [{"step": every * (place + 1), f"val/{name}": value} for place, value in enumerate(values)]
        summary.write_metrics(rows)
    return summary


def noise(count: int, size: float = 0.01) -> list[float]:
    numbers: list[float] = (size * torch.randn(count, generator=torch.Generator().manual_seed(1))).tolist()
    return numbers


def kinds_of(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the kinds and severities of what is more than a notice."""
    return [(alert.kind, alert.severity) for alert in find_alerts(summary) if alert.severity != "info"]


FALLING = [2.3 * 0.98**step for step in range(200)]


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.8] * 8 + [0.3] * 8, [("worse_than_best", "error")]),  # as good as ever from the first validation on
        ([0.25, 0.5, 0.7] + [0.8] * 5 + [0.6] * 8, [("worse_than_best", "warning")]),
        ([0.8] * 8 + [0.3] + [0.8] * 7, []),  # once
        ([0.8] * 8 + [0.3] * 4 + [0.8] * 4, []),  # and back
        ([0.8, 0.78, 0.82, 0.76] * 4, []),
    ],
)
def test_an_accuracy_that_falls_for_good_is_noticed_wherever_it_began(
    accuracies: list[float], expected: list[tuple[str, str]]
) -> None:
    assert kinds_of(summary_of(FALLING, accuracy=accuracies)) == expected


@pytest.mark.parametrize(
    ("later", "severity"),
    [([400.0 + 9 * (step % 7) for step in range(199)], "error"), ([60 * 0.98**step for step in range(199)], "warning")],
)
def test_a_learning_rate_that_ruins_the_first_steps_is_a_divergence(later: list[float], severity: str) -> None:
    """The first level of a long curve has many steps, of which all but one may be ruined already."""
    alert, *others = find_alerts(summary_of([2.9, *later]))
    assert (alert.kind, alert.severity, alert.step) == ("diverged", severity, 2) and not others
    assert alert.text.startswith("diverged: train/loss was 2.9 at first, rose to ")


def test_labels_that_mean_nothing_are_noticed_though_the_loss_falls_to_chance() -> None:
    """Bad first weights are worse than chance; the accuracy tells that nothing else was learned."""
    losses = [1.39 + 1.5 * 0.95**step + more for step, more in enumerate(noise(200))]
    at_chance, learning = [0.25, 0.24, 0.26, 0.25, 0.24] * 2, [0.25, 0.3, 0.35, 0.4, 0.42, 0.44, 0.46, 0.48, 0.5, 0.5]
    assert kinds_of(summary_of(losses, accuracy=at_chance)) == [("never_learned", "warning")]
    assert kinds_of(summary_of(losses, accuracy=learning)) == []


def test_a_run_that_still_learns_has_learned_though_its_batches_are_noisy() -> None:
    """A short run's validation loss falls all the time, of which its batches show nothing; an accuracy may say more."""
    flat, rising = [1.62 + more for more in noise(45, 0.02)], [0.14, 0.16, 0.18, 0.22, 0.28]
    falling = [1.62, 1.59, 1.56, 1.53, 1.5]
    summary = summary_of(flat, loss=falling, accuracy=rising)
    summary.write_metrics({"step": step + 1, "train/accuracy": 0.2 + more} for step, more in enumerate(noise(45)))
    assert kinds_of(summary) == []
    assert kinds_of(summary_of(flat, accuracy=rising)) == [("never_learned", "error")]
    assert kinds_of(summary_of(flat, loss=falling, accuracy=[0.2, 0.21, 0.2, 0.19, 0.2])) == [
        ("never_learned", "error")
    ]
    assert kinds_of(summary_of(flat, loss=[1.62 - 1e-4 * step for step in range(9)])) == [("never_learned", "warning")]


@pytest.mark.parametrize(
    ("losses", "run"),
    [
        ([-0.2 + more for more in noise(200, 0.05)], {}),  # of a policy
        ([-0.4] * 40 + [-0.1 + more for more in noise(160)], {}),
        ([abs(1.4 + more) for more in noise(200, 1.5)], {}),  # too much noise to tell
        ([1.4 + more for more in noise(200)], {"begins_trained": True}),
    ],
)
def test_a_loss_that_need_not_fall_is_no_reason_to_look(losses: list[float], run: dict[str, Any]) -> None:
    assert kinds_of(summary_of(losses, run)) == []
    assert kinds_of(summary_of([1.4 + more for more in noise(200)])) == [("never_learned", "warning")]


def test_the_loss_of_a_critic_rises_with_the_rewards() -> None:
    losses = [1.0 + step / 20 + more for step, more in enumerate(noise(200))]
    assert kinds_of(summary_of(losses)) == [("diverged", "error")]
    summary = summary_of(losses)
    summary.write_metrics({"step": step, "rollout/episode_reward": step / 2} for step in range(1, 200, 10))
    assert kinds_of(summary) == []


def test_a_little_may_be_all_that_can_be_known_about_two_classes() -> None:
    """An accuracy of 57 % of two classes is not guessed, which a curve that begins there cannot tell; 30 % is poor."""
    losses = [0.68 + more for more in noise(200)]
    for accuracy, severity in ((0.57, "warning"), (0.3, "error")):
        summary = summary_of(losses, accuracy=[accuracy + more for more in noise(10, 0.002)])
        assert kinds_of(summary) == [("never_learned", severity)]


def test_a_model_that_fits_perfectly_may_lose_a_little_of_nothing() -> None:
    """A validation loss of 0.0001 is as good as one of 0.0003; far above that it is not."""
    low = [3e-4, 1e-4, 1e-4, *[3e-4] * 12]
    assert kinds_of(summary_of([2.3 * 0.9**step for step in range(200)], loss=low)) == []
    high = [0.3, 0.1, 0.1, *[0.3] * 12]
    assert kinds_of(summary_of([2.3 * 0.9**step for step in range(200)], loss=high)) == [("overfitting", "warning")]


@pytest.mark.parametrize(
    ("vanishing", "steps", "expected"),
    [
        ("ab", (20, 30), []),  # all of them, after they had gradients: the loss has none
        ("a", (20, 30), [("gradient_flow", "warning")]),
        ("ab", (10, 20, 30), [("gradient_flow", "warning")]),  # from the beginning on
    ],
)
def test_a_loss_without_a_gradient_is_not_one_whose_gradients_vanish(
    vanishing: str, steps: Sequence[int], expected: list[tuple[str, str]]
) -> None:
    """As that of a margin that is kept, of equal rewards, and of a model that fits perfectly."""
    summary, header = summary_of(FALLING), SeriesHeader("gradients", ("a", "b"), ("norm",))
    for step in (10, 20, 30):
        norms = [0.0 if step in steps and name in vanishing else 1.0 for name in "ab"]
        summary.write_layers([LayerRow(step, header, torch.tensor(norms)[:, None])])
    event = {"kind": "gradient_flow", "by": "gradient_monitor", "verdict": "…"}
    summary.events.append({**event, "step": steps[0], "parameters": dict.fromkeys(vanishing, "vanishing")})
    assert kinds_of(summary) == expected


def test_the_record_knows_whether_a_model_was_trained_before() -> None:
    def begins_trained(model: nn.Module) -> bool:
        path = run(model, torch.optim.SGD([next(iter(model.parameters()))], 1e-6), steps=2, validate_every=None)
        return bool(json.loads((path / "run.json").read_text()).get("begins_trained"))

    assert not begins_trained(make_cnn())
    assert begins_trained(trained_cnn())
    frozen = make_cnn()
    frozen[-1].requires_grad_(False)  # most of its parameters
    assert begins_trained(frozen)
    normalized = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES), nn.LayerNorm(CLASSES))
    assert not begins_trained(normalized)
    with torch.no_grad():
        normalized[-1].weight[0] = 1.1
    assert begins_trained(normalized)


def test_what_happens_after_the_last_good_validation_belongs_to_the_fall() -> None:
    """A validation notices late what spikes have shown at once."""
    summary = summary_of(FALLING, accuracy=[0.8] * 10 + [0.2] * 10)
    spike = {"kind": "loss_spike", "by": "loss_spike", "spreads": 9.0, "median": 0.1}
    summary.events += [{**spike, "step": 103 + place, "loss": 20.0 + place} for place in range(9)]
    (story,) = find_alerts(summary)
    assert (story.kind, story.step, story.severity) == ("loss_spike", 103, "error")
    assert {"loss_spike", "worse_than_best"} == {part.kind for part in story.parts}
    summary.events[0]["step"] = 99  # before it
    assert [alert.step for alert in find_alerts(summary)] == [104, 99]


def test_a_nan_is_traced_to_its_layer_by_statistics_that_do_not_count_nan() -> None:
    """Such as the means of `activation_stats`; a layer that is left out of steps has no numbers, either."""
    nan, header = float("nan"), SeriesHeader("activations", ("0", "1", "2", "3"), ("mean", "std"))
    summary = summary_of([0.5] * 20 + [nan] * 20)
    for step in range(1, 41):
        rows = torch.ones(4, 2)
        rows[0] = nan if step % 3 else 1.0  # a layer that is skipped at random
        rows[2:] = nan if step >= 21 else 1.0
        rows[1] = nan if step >= 22 else 1.0
        summary.write_layers([LayerRow(step, header, rows)])
    (story,) = find_alerts(summary)
    assert (story.step, story.text.partition(";")[0]) == (21, "activations: not finite in module '2' and 1 more")
    assert story.place == {"series": "activations", "name": "2", "column": "mean"}


def test_a_loss_that_falls_late_has_learned() -> None:
    """A trend is not noise."""
    summary = LiveSummary()
    falling = [2.3 * min(1.0, 0.99 ** (step - 150)) + 0.01 * (step * 7 % 5) for step in range(400)]
    summary.write_metrics({"step": step, "train/loss": loss} for step, loss in enumerate(falling))
    assert find_alerts(summary) == []


def test_only_a_spike_that_is_unlike_those_before_it_is_one() -> None:
    """Single samples give losses with heavy tails."""
    for highs, steps in (([8.0] * 40, []), ([2.0] * 39 + [8.0], [390])):
        summary = LiveSummary()
        losses = [2 * 0.99**step + 0.01 * (step * 7 % 5) for step in range(400)]
        losses[::10] = [loss * high for loss, high in zip(losses[::10], highs, strict=True)]
        summary.write_metrics({"step": step, "train/loss": loss} for step, loss in enumerate(losses))
        assert [alert.step for alert in find_alerts(summary)] == steps


def test_spikes_and_waiting_for_data_say_nothing_against_a_run_that_completed() -> None:
    """The loss came back, and what is slow may be right; a run that a spike has stopped deserves a look."""
    spike = {"kind": "loss_spike", "by": "loss_spike", "step": 40, "loss": 3.0, "spreads": 9.0, "median": 1.0}
    for outcome, severity in (("completed", "info"), ("stopped", "warning"), (None, "warning")):
        summary = summary_of(FALLING, {"outcome": outcome})
        summary.events.append(spike)
        summary.write_metrics([{"step": 200, "throughput/data_wait_share": 0.4}])
        severities = {alert.kind: alert.severity for alert in find_alerts(summary)}
        assert severities["loss_spike"] == severity and severities["input_bound"] == "info"


def test_the_reason_of_a_verdict_is_short_however_long_an_exception_is() -> None:
    run = {"run_id": "abc", "outcome": "failed", "reason": "x" * 10**6}
    assert len(judge(alerts_of(run=run)).reason) == 1000
