"""Ranks decide alike: by numbers of all of them, and by agreement where one alone has a reason."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import FEATURES, agree_each_step, make_batches, make_trainer, whole_weights
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline import TrainingHook, UpdateHook, read_metrics
from hookline.errors import RankError
from hookline.record import read_events
from hookline.trainer import stragglers

# ---- metrics of all ranks --------------------------------------------------------------------------------------------


def stop_early(rank: int, world_size: int, options: dict[str, Any]) -> list[Any]:
    trainer = make_trainer("ddp", rank, world_size, None, max_epochs=6)
    trainer.add_hook("early_stopping", **options)
    trainer.train()
    hook = trainer.get_hook("early_stopping")
    return [trainer.progress.steps_done, hook.best_step, hook.best]


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "train/loss", "check_every_n_steps": 1, "patience": 2},
        {"monitor": "train/loss", "check_on_train_epoch_end": True, "target": 0.5},
        {"monitor": "train/epoch_loss", "target": 0.8},
    ],
)
def test_early_stopping_follows_the_loss_of_all_ranks(options: dict[str, Any]) -> None:
    first, second = (one.value for one in run_on_ranks(stop_early, 2, 2, options))
    assert first == second
    steps, best_step, best = run_on_ranks(stop_early, 1, 1, options)[0].value
    assert first[:2] == [steps, best_step]
    assert steps < 48
    assert first[2] == pytest.approx(best, rel=1e-5)


# ---- skipped steps ---------------------------------------------------------------------------------------------------


class Skip(TrainingHook):
    """Skip step 3 on rank 1, at an event."""

    may_skip = True

    def __init__(self, event: str) -> None:
        setattr(self, event, self._act)

    def _act(self, step: int, trainer: Any) -> None:
        if step == 3 and trainer.ranks.rank == 1:
            trainer.skip_step("a bad batch")


class SkipInChain(UpdateHook):
    may_skip = True

    def on_update(self, grads: Any, step: int, trainer: Any) -> Any:
        if step == 3 and trainer.ranks.rank == 1:
            trainer.skip_step("a bad batch")
        return grads


def skip(rank: int, kind: str, event: str, folder: str) -> list[Any]:
    trainer = make_trainer(kind, rank, 2, folder)
    trainer.add_hook(SkipInChain() if event == "on_update" else Skip(event), "skip")
    trainer.add_hook("clip_norm", max_norm=0.5)
    trainer.train()
    return [trainer.skipped_steps, sum(whole_weights(trainer))]


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("ddp", "on_train_batch_start"),
        ("fsdp2", "on_gradients_ready"),
        ("fsdp2", "on_update"),  # the others run the rest of the chain, which has collectives
        ("ddp", "on_before_optimizer_step"),
    ],
)
def test_a_step_that_one_rank_skips_is_skipped_by_all(kind: str, event: str, tmp_path: Path) -> None:
    first, second = (one.value for one in run_on_ranks(skip, 2, kind, event, str(tmp_path)))
    assert first == second
    assert first[0] == 1
    (row,) = [one for one in read_events(next(tmp_path.iterdir())) if one["kind"] == "step_skipped"]
    assert (row["step"], row["reason"]) == (3, "a bad batch (rank 1)")


def skip_undeclared(rank: int) -> str:
    trainer = make_trainer("ddp", rank, 2, None)

    @trainer.on("gradients_ready", name="careless")
    def careless(step: int, trainer: Any) -> None:
        if step == 3:
            trainer.skip_step("a bad batch")

    try:
        trainer.train()
    except RankError as error:
        return f"{trainer.progress.steps_done} {error}"
    return "nothing"


def test_a_hook_that_does_not_declare_that_it_may_skip_ends_the_run() -> None:
    for rank, one in enumerate(run_on_ranks(skip_undeclared, 2)):
        assert one.value.startswith(f"2 hook 'careless' skips a step on rank {rank}, but the other ranks do not know")
        assert "may_skip = True" in one.value


def count_decisions(rank: int) -> list[int]:
    counts = []
    for hook in ("skip_nonfinite", Skip("on_gradients_ready")):
        trainer = make_trainer("ddp", rank, 2, None)
        trainer.add_hook(hook, "skip")
        with patch.object(trainer.ranks, "decide", wraps=trainer.ranks.decide) as decide:
            trainer.train()
        counts.append(decide.call_count)
    return counts


def test_only_hooks_that_may_skip_cost_a_decision_of_all_ranks() -> None:
    assert [one.value for one in run_on_ranks(count_decisions, 2)] == [[0, 8], [0, 8]]


def guard(rank: int, kind: str) -> list[Any]:
    found = []
    for name, factor, options in (("skip_nonfinite", float("nan"), {}), ("spike_guard", 1e4, {"warmup": 2})):
        batches = make_batches(rank, 2)
        if rank == 1:
            batches[4] = (batches[4][0], batches[4][1] * factor)
        trainer = make_trainer(kind, rank, 2, None, batches=batches)
        trainer.add_hook(name, **options)
        trainer.train()
        found += [trainer.skipped_steps, sum(whole_weights(trainer))]
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_guards_decide_by_the_gradients_of_all_ranks(kind: str) -> None:
    first, second = (one.value for one in run_on_ranks(guard, 2, kind))
    assert first == second
    assert (first[0], first[2]) == (1, 1)


# ---- slow ranks ------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that moves only by `move`, so that the load of the machine does not matter."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def straggle(rank: int, slow: int, where: str, folder: str) -> str:
    clock = stragglers.perf_counter = Clock()

    class Batches(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                clock.move(3.0 if rank == slow and where == "data" else 1.0)
                yield batch

    trainer = make_trainer("ddp", rank, 2, folder, max_epochs=6, batches=Batches(make_batches(rank, 2, 2)))

    @trainer.on("train_batch_start")
    def before(step: int) -> None:
        clock.move(3.0 if rank == slow and where == "hook" else 1.0)

    @trainer.on("after_backward")
    def after(step: int) -> None:
        clock.move(1.0 if rank == slow else 3.0)  # as the backward pass of a rank that waits for the other

    trainer.train()
    return ""


@pytest.mark.parametrize(("slow", "where", "data", "compute"), [(1, "data", 3.0, 2.0), (0, "hook", 1.0, 4.0)])
def test_the_record_shows_the_slowest_rank_and_a_warning_names_it(
    slow: int, where: str, data: float, compute: float, tmp_path: Path
) -> None:
    results = run_on_ranks(straggle, 2, slow, where, str(tmp_path))
    run = next(tmp_path.iterdir())
    rows = [row for row in read_metrics(run) if "ranks/slowest" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    for row in rows[1:]:  # the first batch of a run is compared before the clock starts
        found = {name: value for name, value in row.items() if name.startswith("ranks/")}
        assert found == {
            "ranks/slowest": slow,
            "ranks/slowest_data_seconds": data,
            "ranks/slowest_forward_backward_seconds": compute,
            "ranks/slowest_waiting_seconds": 0.0,
            "ranks/mean_waiting_seconds": 1.0,
        }
    assert results[0].output.count(f"rank {slow} is slower than the others") == 1
    assert results[1].output.count("is slower than") == 0
    (event,) = [one for one in read_events(run) if one["kind"] == "slow_rank"]
    assert (event["step"], event["slow_rank"]) == (10, slow)


def spike(rank: int, folder: str) -> list[Any]:
    agree_each_step()
    batches = make_batches(rank, 2)
    if rank == 1:
        batches[4] = (batches[4][0], batches[4][1] + 1e3)
    trainer = make_trainer("ddp", rank, 2, folder, batches=batches)
    trainer.add_hook("loss_spike", warmup=3, factor=20.0, stop_run=True)
    trainer.train()
    return [trainer.progress.steps_done, trainer.stopped_by]


def test_a_loss_spike_on_one_rank_is_reported_by_that_rank_and_stops_all(tmp_path: Path) -> None:
    results = run_on_ranks(spike, 2, str(tmp_path))
    assert [one.value for one in results] == [[6, "loss_spike"]] * 2
    assert "rank 1: hook 'loss_spike': step 5" in results[1].output
    events = [one for one in read_events(next(tmp_path.iterdir())) if one["kind"] == "loss_spike" and one["step"] == 5]
    assert [one["rank"] for one in events] == [1]


def rank_by_validation(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Validate on shares whose losses move in other directions on the two ranks, and keep the best checkpoint."""
    shares = [[(torch.zeros(4, FEATURES), torch.full((4, 1), float(10 * share)))] for share in (0, 1)]
    val_loader = shares[rank] if world_size > 1 else shares[0] + shares[1]
    trainer = make_trainer("ddp", rank, world_size, folder, val_loaders=val_loader, validate_every=2)
    trainer.schedulers.append(ReduceLROnPlateau(trainer.optimizers[0], factor=0.5, patience=0))
    trainer.add_hook(
        "checkpoint", monitor="val/loss", save_top_k=2, filename="{step}-{val/loss:.4f}", save_every_n_epochs=None
    )
    rates: list[float] = []
    trainer.on("step_end")(lambda trainer: rates.append(trainer.lr))
    trainer.train()
    found = sorted(path.name for path in Path(str(trainer.run_dir), "checkpoints").iterdir() if not path.is_symlink())
    return {"rates": rates, "saved": found}


def test_plateau_schedulers_and_the_best_checkpoints_follow_the_validation_of_all_ranks(tmp_path: Path) -> None:
    ((alone,), (first, second)) = (
        [result.value for result in run_on_ranks(rank_by_validation, count, count, str(tmp_path / str(count)))]
        for count in (1, 2)
    )
    assert first == second
    assert first["saved"] == alone["saved"]
    assert first["rates"] == pytest.approx(alone["rates"])
    assert len(set(first["rates"])) > 1  # else nothing was decided
