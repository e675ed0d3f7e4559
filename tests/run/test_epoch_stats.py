"""The losses and metrics of an epoch are added up where they are, read only when needed, and saved in its middle."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from read_batches import make_reader

from hookline import SimpleTrainer
from hookline.ranks import Ranks
from hookline.run.engine import Engine
from hookline.run.epoch_stats import EpochStats, add_losses
from hookline.run.step_log import LOSS
from hookline.run.window import Window


def returns(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A step whose loss and metrics are what the batch says."""
    return {**batch, "loss": model.weight.sum() * 0.0 + batch["loss"]}


def make_trainer(losses: Any, accuracies: Any = None, **options: Any) -> SimpleTrainer:
    """Make a trainer whose steps have these losses and metrics."""
    batches = [{"loss": torch.as_tensor(loss)} for loss in losses]
    for batch, accuracy in zip(batches, accuracies or (), strict=False):
        batch["acc"] = accuracy
    return make_reader({"a": batches}, step_fn=returns, **options)


def recorded(trainer: SimpleTrainer, name: str) -> list[float]:
    """Return the recorded values of a metric."""
    return [line[name] for line in trainer.record.metrics if name in line]


def test_the_mean_is_that_of_all_losses() -> None:
    """Of half-precision losses, too, which are added in double precision."""
    trainer = make_trainer([0.1] * 300 + [0.3] * 300)
    trainer.train()
    assert recorded(trainer, "train/epoch_loss") == [pytest.approx(0.2)]
    trainer = make_trainer([0.1] * 600)
    trainer.step_fn = lambda model, batch: returns(model, batch)["loss"].bfloat16()
    trainer.train()
    assert recorded(trainer, "train/epoch_loss") == [pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)))]


@pytest.mark.parametrize("seed", range(4))
def test_no_bit_tells_when_losses_were_added(seed: int) -> None:
    """On the host, the mean has the same bits whether it was read often, now and then, or at the end."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(150, dtype=torch.float64, generator=generator) * 10.0 ** (torch.arange(150) % 9)
    means = set()
    for every in (1, 10, 1000):
        trainer = make_trainer(losses)
        trainer.on("step_end", every=every)(lambda trainer: trainer.epoch_metrics())
        trainer.train()
        means.update(recorded(trainer, "train/epoch_loss"))
    assert len(means) == 1


def test_the_sums_resume_in_another_process(tmp_path: Path) -> None:
    """Means, latest values and bad losses are those of the whole epoch."""
    losses, accuracies = [0.1, math.inf, 0.3, 0.7], [0.25, 0.5, 0.75, 1.0]
    first = make_trainer(losses, accuracies, record=True, output_dir=str(tmp_path), max_steps=3)
    first.on("step_end", at=3)(lambda trainer: trainer.save())
    first.train()
    again, latest = make_trainer(losses, accuracies), list[Any]()
    again.on("train_start")(lambda trainer: latest.append(trainer.latest_metrics(-1)))
    again.fit(resume=first.run_dir)
    assert latest == [{"train/acc": 0.75}]
    assert recorded(again, "train/epoch_loss") == [math.inf]
    assert recorded(again, "train/epoch_acc") == [0.625]
    assert again.non_finite_losses == 1


def test_losses_from_before_a_checkpoint_was_loaded_have_no_part_in_the_mean(tmp_path: Path) -> None:
    """Also those of steps by hand, which are added up later."""
    first = make_trainer([1.0, 3.0, 7.0], record=True, output_dir=str(tmp_path), max_steps=2)
    first.on("step_end", at=2)(lambda trainer: trainer.save())
    first.train()
    again = make_trainer([1.0, 3.0, 7.0])
    again.training_step({"loss": torch.tensor(100.0)})
    again.load_checkpoint(first.run_dir)
    assert again.epoch_metrics() == {"train/epoch_loss": 2.0}


def test_nothing_yet_is_nan() -> None:
    """Before the first batch the mean is nan, not an error and not zero."""
    trainer = make_trainer([1.0])
    assert math.isnan(trainer.epoch_metrics()["train/epoch_loss"]) and math.isnan(trainer.refresh_state()["avg_loss"])


def test_non_finite_losses_are_counted_once() -> None:
    """NaN and infinities are counted once, at the end of their epoch."""
    trainer = make_trainer([1.0, math.nan, math.inf, -math.inf], max_epochs=2)
    trainer.train()
    counts = [event["count"] for event in trainer.record.events if event["kind"] == "non_finite_losses"]
    assert counts == [3, 3] and trainer.non_finite_losses == 6


def test_numbers_of_any_kind_are_averaged() -> None:
    """Over those that came, in this epoch."""
    trainer = make_trainer([1.0] * 4, [torch.tensor(1.0), 2, torch.tensor([3]), True], max_epochs=2)
    trainer.train()
    assert recorded(trainer, "train/epoch_acc") == [1.75, 1.75]


def test_on_a_device_they_are_added_there() -> None:
    """A device without memory stands for one: to read it would be an error."""
    stats = EpochStats()
    for name in (LOSS, LOSS, "train/acc"):
        stats.add(name, torch.ones((), device="meta"))
    stats.fold()
    with pytest.raises(RuntimeError):
        stats.means()


def test_means_that_ranks_have_shared_are_those_until_the_next_loss() -> None:
    """A hook that asks after the next step gets the means of its own rank, with that step."""
    stats = EpochStats()
    stats.add(LOSS, 1.0)
    stats.add(LOSS, 3.0)
    stats.average_over_ranks(Ranks(), 2, 3.0, Window(Engine(torch.device("cpu"))))
    assert stats.means() == {"train/epoch_loss": 2.0}
    stats.add(LOSS, 8.0)
    assert stats.means() == {"train/epoch_loss": 4.0}


def test_losses_of_other_ranks_count_once() -> None:
    """If another number of ranks resumes, rank 0 has the losses of all, and the others have none."""
    ranks = [EpochStats(), EpochStats()]
    for rank, loss in ((0, 1.0), (0, 3.0), (1, math.inf)):
        ranks[rank].add(LOSS, loss)
    states = [stats.state_dict() for stats in ranks]
    for is_counted, expected in ((True, (3, math.inf, 1)), (False, (0, 0.0, 0))):
        resumed = EpochStats()
        resumed.load_state_dict(add_losses(states, is_counted))
        state = resumed.state_dict()
        assert (state["count"], state["sum"], resumed.take_non_finite()) == expected


def test_the_mean_loss_leaves_the_metrics_alone() -> None:
    """A hook may read the mean loss at every step; adding the metrics up then would cost several device operations."""

    class Unread(float):
        def __float__(self) -> float:
            raise RuntimeError("it was read")

    stats = EpochStats()
    stats.add(LOSS, torch.tensor(2.0))
    stats.add("train/acc", Unread())
    assert stats.mean_loss() == 2.0
    with pytest.raises(RuntimeError, match="it was read"):
        stats.means()


def test_latest_values_survive_the_end_of_an_epoch() -> None:
    """Means start again; without a step, only values of this epoch are returned."""
    trainer, seen = make_trainer([1.0, 2.0], [0.25, 0.5], max_epochs=2), list[Any]()

    @trainer.on("epoch_start", name="start")
    def start(trainer: Any, epoch: int) -> None:
        if epoch == 0:
            return
        metrics = trainer.epoch_metrics()
        assert list(metrics) == ["train/epoch_loss"] and math.isnan(metrics["train/epoch_loss"])
        seen.append((trainer.latest_metrics(), trainer.latest_metrics(1), trainer.latest_metrics(2)))

    trainer.on("step_end", at=3, name="step")(lambda trainer: seen.append(trainer.latest_metrics()))
    trainer.train()
    assert seen == [({}, {"train/acc": 0.5}, {}), {"train/acc": 0.25}]


def test_a_batch_without_weight_has_no_part_in_the_means_of_the_epoch() -> None:
    """Neither its loss nor what `step_fn` returns beside it."""
    weigh = {"loss_weight": "tokens", "count_tokens": lambda batch: int(batch["loss"] > 0)}
    trainer = make_trainer([1.0, 0.0, 3.0, 0.0], [0.5, 0.0, 0.7, 0.0], accumulate=2, **weigh)
    trainer.train()
    assert recorded(trainer, "train/epoch_loss") == [2.0]
    assert recorded(trainer, "train/epoch_acc") == [pytest.approx(0.6)]


def test_a_batch_without_weight_has_no_part_in_the_means_of_its_step() -> None:
    """What `step_fn` returns for a batch in which nothing counts may be NaN."""
    weigh = {"loss_weight": "tokens", "count_tokens": lambda batch: int(batch["loss"] > 0)}
    trainer = make_trainer([1.0, 0.0, 0.0, 3.0], [0.5, math.nan, math.nan, 0.75], accumulate=2, **weigh)
    trainer.train()
    assert recorded(trainer, "train/acc") == [0.5, 0.75]


def test_the_mean_of_a_loader_is_that_of_its_batches() -> None:
    """As that of all batches; only the loss of a step weighs them."""
    losses = {"a": [1.0, 3.0], "b": [4.0, 4.0]}
    loaders = {name: [{"loss": torch.tensor(loss)} for loss in own] for name, own in losses.items()}
    weigh = {"loss_weight": "tokens", "count_tokens": lambda batch: int(batch["loss"])}
    trainer = make_reader(loaders, step_fn=returns, accumulate=2, **weigh)
    trainer.train()
    assert recorded(trainer, "train/a/loss") == [2.5]
    assert recorded(trainer, "train/a/epoch_loss") == [2.0]
    assert recorded(trainer, "train/epoch_loss") == [3.0]
