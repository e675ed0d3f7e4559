"""A run on several processes ends on all of them when one fails, and its record says which one and where."""

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankResult, run_on_ranks
from rank_runs import PATIENCE, make_batches, make_trainer, make_watch_patient, whole_weights

from hookline import NanForensics, TrainingHook, UpdateHook, rank_watch, read_metrics
from hookline.record import read_events
from hookline.run.epoch_stats import EpochStats
from hookline.trainer import agreement


class Witness(TrainingHook):
    """Writes what ends the run, as a notification would."""

    def on_exception(self, trainer: Any, exception: BaseException) -> None:
        (trainer.run_dir.parent / f"rank-{trainer.ranks.rank}.txt").write_text(str(exception))


class Trouble(TrainingHook):
    """Does something bad on one rank, at the end of step 3 or before the first step."""

    def __init__(self, rank: int, kind: str) -> None:
        self.rank, self.kind = rank, kind

    def on_train_start(self, trainer: Any) -> None:
        if self.kind == "early":
            if trainer.ranks.rank == self.rank:
                raise ValueError("boom")
            while True:  # not in a collective
                trainer.ranks.check()
                time.sleep(0.01)

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step != 3 or trainer.ranks.rank != self.rank:
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "hang":
            Path("hangs").touch()
            signal.pause()
        else:
            raise ValueError("boom")


class AgreedTrouble(Trouble):
    same_on_all_ranks = True


class TroubleInChain(UpdateHook):
    """Fails on one rank before it has changed a gradient, at step 3."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_update(self, grads: Any, trainer: Any, step: int) -> Any:
        if step == 3 and trainer.ranks.rank == self.rank:
            raise ValueError("boom")
        return {name: 0.5 * grad for name, grad in grads.items()}


def seconds_since(path: Path) -> Callable[[], float]:
    """Return a clock that stands still until a file is there, so that a busy machine is not taken for a hang."""
    return lambda: time.time() - path.stat().st_mtime if path.exists() else 0.0


def train(rank: int, world_size: int, folder: str, bad_rank: int, kind: str, stays_alive: bool) -> None:
    make_watch_patient()
    agreement.EXCHANGE_EVERY = 2  # so that an exchange is due in step 3
    if stays_alive and kind != "early":
        rank_watch.GRACE_SECONDS = 0.5 / PATIENCE  # else the main thread loses the connection and ends the run itself
    if kind == "hang":
        os.chdir(folder)
        rank_watch.GRACE_SECONDS, rank_watch.monotonic = 0.5, seconds_since(Path("hangs"))  # type: ignore[attr-defined]
    trainer = make_trainer("ddp", rank, world_size, folder, rank_timeout=3.0 if kind == "hang" else 60.0)
    trainer.add_hook(Witness(), on_error="raise")
    other = trainer.ranks.gather(os.getpid())[1 - bad_rank]
    if kind == "step_fn":
        compute = trainer.forward.compute

        def fail(batch: Any) -> Any:
            if trainer.step == 3 and rank == bad_rank:
                raise ValueError("boom")
            return compute(batch)

        trainer.forward.compute = fail
    elif kind == "agreed":
        trainer.add_hook(AgreedTrouble(bad_rank, "raise"), "trouble", on_error="warn")
    elif kind == "update":
        trainer.add_hook(TroubleInChain(bad_rank), "trouble", on_error="disable")
    else:
        trainer.add_hook(Trouble(bad_rank, kind), "trouble", on_error="raise")
    if stays_alive and rank == bad_rank:
        with contextlib.suppress(ValueError):
            trainer.train()
        with contextlib.suppress(ProcessLookupError):
            while True:  # until the other process has ended
                os.kill(other, 0)
                time.sleep(0.02)
        raise SystemExit(7)
    trainer.train()


def run_of(folder: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(next(folder.glob("*/run.json")).read_text())
    return run


def fails(tmp_path: Path, *how: Any, world_size: int = 2) -> tuple[dict[str, Any], list[RankResult]]:
    results = run_on_ranks(train, world_size, world_size, str(tmp_path), *how, check=False)
    run = run_of(tmp_path)
    said = "\n".join(f"{one.exit_code}: {one.error}\n{one.output}" for one in results)
    assert run["outcome"] == run["attempts"][-1]["outcome"] == "failed", said
    assert all(one.exit_code not in (0, None) for one in results), said
    if how[1] in ("hook", "hang"):  # rank 0's own numbers, if the other one no longer takes part
        steps = [row["step"] for row in read_metrics(next(tmp_path.glob("*/run.json")).parent)]
        assert steps == [1, 2, 3], said
    return run, results


@pytest.mark.parametrize(
    ("kind", "bad_rank", "stays_alive"),
    [
        ("hook", 0, False), ("hook", 0, True), ("hook", 1, False), ("hook", 1, True),
        ("step_fn", 1, False), ("early", 1, True), ("agreed", 1, False), ("update", 1, False),
    ],
)  # fmt: skip
def test_an_exception_on_one_rank_ends_all(kind: str, bad_rank: int, stays_alive: bool, tmp_path: Path) -> None:
    run, results = fails(tmp_path, bad_rank, kind, stays_alive)
    assert f"rank {bad_rank}" in run["reason"]
    assert "ValueError: boom" in run["reason"]
    if kind in ("hook", "agreed", "update"):
        event = "on_update" if kind == "update" else "on_step_end"
        assert f"hook 'trouble' in {event}, step 3" in run["reason"]
    other = results[1 - bad_rank]
    expected = f"rank {bad_rank} failed at step {0 if kind == 'early' else 3}"
    assert expected in other.error + other.output
    assert expected in (tmp_path / f"rank-{1 - bad_rank}.txt").read_text()
    if not stays_alive or kind == "early":  # else it may be blocked in a collective, and its process is ended
        assert "RankError" in other.error
    assert results[bad_rank].exit_code == (7 if stays_alive else 1)


@pytest.mark.parametrize(("bad_rank", "world_size"), [(0, 2), (2, 4)])
def test_a_killed_process_ends_the_others_and_one_of_them_closes_the_record(
    bad_rank: int, world_size: int, tmp_path: Path
) -> None:
    run, results = fails(tmp_path, bad_rank, "kill", False, world_size=world_size)
    assert f"rank {bad_rank} failed" in run["reason"]
    assert "is gone" in run["reason"]
    for rank, result in enumerate(results):
        if rank == bad_rank:
            assert result.exit_code == -signal.SIGKILL
        else:  # raised in the main thread, which had lost a connection
            assert f"RankError: rank {bad_rank} failed" in result.error


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_hang_names_the_rank_and_the_hook_it_is_in(bad_rank: int, tmp_path: Path) -> None:
    run, _ = fails(tmp_path, bad_rank, "hang", False)
    assert f"rank {bad_rank} failed at step 3: no batch for 3 s (rank_timeout)" in run["reason"]
    assert "hook 'trouble', on_step_end" in run["reason"]


def warn_once(rank: int, folder: str, fails: bool) -> list[float]:
    trainer = make_trainer("ddp", rank, 2, folder)
    trainer.add_hook(Trouble(1 if fails else 5, "raise"), "trouble", on_error="warn")
    trainer.train()
    return whole_weights(trainer)


def test_a_hook_that_fails_under_warn_leaves_an_event_of_its_rank_and_the_same_weights(tmp_path: Path) -> None:
    failed, plain = (run_on_ranks(warn_once, 2, str(tmp_path / name), name == "a") for name in ("a", "b"))
    assert [one.value for one in failed] == [one.value for one in plain]
    assert run_of(tmp_path / "a")["outcome"] == "completed"
    lines = next((tmp_path / "a").glob("*/ranks/1/events.jsonl")).read_text().splitlines()
    (event,) = [json.loads(line) for line in lines]
    assert [event[key] for key in ("kind", "rank", "hook", "step")] == ["hook_failed", 1, "trouble", 3]
    assert not list((tmp_path / "b").glob("*/ranks"))


def fail_once(rank: int, folder: str) -> None:
    trainer = make_trainer("ddp", rank, 2, folder)

    @trainer.on("step_end", name="bad", at=2, on_error="warn")
    def bad() -> None:
        if rank == 1:
            raise ValueError("boom")

    trainer.train()
    trainer.fit(max_epochs=2)


def test_the_record_says_on_which_ranks_a_hook_failed(tmp_path: Path) -> None:
    """Rank 0 writes it and counts the failures of all; the next run of the trainer repeats both."""
    run_on_ranks(fail_once, 2, str(tmp_path))
    runs = (json.loads(path.read_text()) for path in tmp_path.glob("*/run.json"))
    first, second = sorted(runs, key=lambda run: run["started"])
    assert first["counters"]["hook_failures"] == second["counters"]["hook_failures"] == 1
    for run in (first, second):
        (hook,) = [hook for hook in run["hooks"] if hook["name"] == "bad"]
        assert hook["failed_on_ranks"] == [1]


def switch_off(rank: int) -> list[Any]:
    weights = []
    for fails in (True, False):
        trainer = make_trainer("fsdp2", rank, 2, None, max_epochs=2)  # its norm is a sum over the ranks, too

        @trainer.on("step_end", name="always", on_error="disable")
        def read_tokens(tokens_seen: int, fails: bool = fails) -> None:
            assert not fails or rank == 0

        @trainer.on("step_end", name="scheduled", on_error="disable", every=2)
        def read_norm(ctx: Any, fails: bool = fails) -> None:
            assert not fails or rank == 0

        trainer.train()
        assert [trainer.hooks.is_enabled(name) for name in ("always", "scheduled")] == [not fails or rank == 0] * 2
        weights.append(whole_weights(trainer))
    return weights


def test_a_hook_that_failures_switch_off_on_one_rank_does_not_keep_the_others_waiting() -> None:
    first, second = (one.value for one in run_on_ranks(switch_off, 2))
    assert first == second
    assert first[0] == first[1]


def train_on_nan(rank: int, folder: str, kind: str) -> list[Any]:
    batches = make_batches(rank, 2)
    if rank == 1:
        batches[2][0][0, 0] = float("nan")
    trainer = make_trainer(kind, rank, 2, folder, batches=batches)
    hook = NanForensics()
    trainer.add_hook(hook, on_error="raise")
    trainer.train()
    assert all(math.isfinite(one) for one in whole_weights(trainer))
    return [trainer.step, trainer.stop_reason, hook.crash, hook.autopsy and hook.autopsy.module]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_nan_in_one_ranks_batch_is_found_there_and_noted_by_the_others(kind: str, tmp_path: Path) -> None:
    first, second = (one.value for one in run_on_ranks(train_on_nan, 2, str(tmp_path), kind))
    assert first == [3, second[1], None, None]
    assert second[0] == 3
    assert second[1].startswith("rank 1: loss nan: the batch")
    assert second[3] == "0"
    (crash,) = tmp_path.glob("*/crashes/*")
    assert crash.name == "step-00000003-rank-1"
    assert str(crash) == second[2]
    assert json.loads((crash / "crash.json").read_text())["autopsy"]["module"] == "0"
    events = [json.loads(line) for line in (crash.parents[1] / "events.jsonl").read_text().splitlines()]
    (noted,) = [one for one in events if one["kind"] == "non_finite"]
    assert noted["reason"] == second[1]
    assert noted["path"] == second[2]


def spoil_shard(rank: int, folder: str, is_restored: bool) -> str:
    trainer, reasons = make_trainer("fsdp2", rank, 2, folder), []

    def fill(value: float) -> None:
        with torch.no_grad():
            trainer.params["2.weight"].to_local().fill_(value)  # type: ignore[attr-defined]

    @trainer.on("step_end", ranks=1, at=8)
    def spoil(step: int) -> None:
        fill(math.nan)

    @trainer.on("train_end")
    def note(reason: str) -> None:
        reasons.append(reason)
        if rank == 1 and is_restored:
            fill(0.0)

    trainer.train()
    return reasons[0]


@pytest.mark.parametrize("is_restored", [False, True])
def test_bad_weights_in_the_shard_of_one_rank_are_the_outcome(is_restored: bool, tmp_path: Path) -> None:
    found = "1 of 6 parameters are not finite, first '2.weight'"
    assert [one.value for one in run_on_ranks(spoil_shard, 2, str(tmp_path), is_restored)] == [found] * 2
    run = run_of(tmp_path)
    assert (run["outcome"], run["reason"]) == (("completed", None) if is_restored else ("non_finite", found))
    kinds = [event["kind"] for event in read_events(next(tmp_path.iterdir()))]
    assert kinds.count("non_finite_weights") == (not is_restored)


def lose_device(rank: int, folder: str) -> None:
    def lose(stats: EpochStats) -> int:
        raise RuntimeError("the device is gone")

    if rank == 1:
        EpochStats.take_non_finite = lose  # type: ignore[method-assign]
    make_trainer("ddp", rank, 2, folder, max_steps=3).train()


def test_a_rank_that_cannot_count_its_losses_at_the_end_ends_with_the_others(tmp_path: Path) -> None:
    run_on_ranks(lose_device, 2, str(tmp_path))
    assert run_of(tmp_path)["outcome"] == "completed"
