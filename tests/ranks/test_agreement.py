"""What one rank requests, all ranks do at the same step; the record says which hook on which rank."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_on_ranks
from rank_runs import agree_each_step, make_batches, make_trainer
from torch import nn

from hookline import Trainer, TrainingHook
from hookline.checkpoints.store import read_checkpoint
from hookline.errors import RankError, TrainingError
from hookline.record import read_events
from hookline.run import progress


class StopAt(TrainingHook):
    """Stop at an event on one rank, in or after step 3."""

    def __init__(self, event: str, rank: int) -> None:
        setattr(self, event, self._act)
        self.on_rank, self.done = rank, False

    def _act(self, step: int, trainer: Any) -> None:
        if trainer.ranks.rank == self.on_rank and not self.done and (step >= 3 or self.early):
            self.done = True
            trainer.request_stop("enough", by="stop_at")

    early = False


def stop(rank: int, event: str, on_rank: int, folder: str) -> list[Any]:
    agree_each_step()
    trainer = make_trainer("ddp", rank, 2, folder, max_epochs=2, val_loaders=make_batches(rank, 2, 2), validate_every=4)
    hook = StopAt(event, on_rank)
    hook.early = event in ("on_train_start", "on_epoch_start")
    trainer.add_hook(hook, "stop_at")
    trainer.train()
    return [trainer.progress.steps_done, trainer.stopped_by, trainer.stop_reason]


@pytest.mark.parametrize(
    ("event", "steps"),
    [
        ("on_train_start", 0),
        ("on_epoch_start", 2),
        ("on_step_end", 4),  # one step later than in one process: nothing waits for the other ranks
        ("on_train_batch_start", 4),
        ("on_validation_end", 5),
        ("on_epoch_end", 8),
    ],
)
def test_a_stop_of_one_rank_stops_all_at_the_same_step(event: str, steps: int, tmp_path: Path) -> None:
    results = run_on_ranks(stop, 2, event, 1, str(tmp_path))
    assert [one.value for one in results] == [[steps, "stop_at", "enough"]] * 2
    run = json.loads(next(tmp_path.glob("*/run.json")).read_text())
    assert (run["outcome"], run["reason"]) == ("stopped", "stopped by stop_at on rank 1: enough")
    (event_row,) = [one for one in read_events(next(tmp_path.iterdir())) if one["kind"] == "stop_requested"]
    assert (event_row["rank"], event_row["by"], event_row["reason"]) == (1, "stop_at", "enough")


def test_a_stop_of_rank_0_is_recorded_once(tmp_path: Path) -> None:
    """When it is requested, which is before all ranks know of it."""
    results = run_on_ranks(stop, 2, "on_step_end", 0, str(tmp_path))
    assert [one.value for one in results] == [[4, "stop_at", "enough"]] * 2
    (event,) = [one for one in read_events(next(tmp_path.iterdir())) if one["kind"] == "stop_requested"]
    assert (event["step"], event["by"], event.get("rank", 0)) == (3, "stop_at", 0)


def stop_by_clock(rank: int, seconds: float) -> int:
    """Stop in step 3 of rank 1; by rank 0's clock a step takes some seconds, by that of rank 1 an hour."""
    trainer, now = make_trainer("ddp", rank, 2, None, batches=make_batches(rank, 2, 24)), [0.0]
    progress.monotonic = lambda: now[0]  # type: ignore[attr-defined]
    trainer.add_hook(StopAt("on_step_end", 1), "stop_at")

    @trainer.on("step_end")
    def move() -> None:
        now[0] += seconds if rank == 0 else 3600.0

    trainer.train()
    return trainer.progress.steps_done


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        (1.0, 4),  # the ranks agree after every step, and read what was said one step later
        (0.03, 6),  # after steps 1, 5, 9, …: about 100 ms apart
        (0.0, 12),  # after steps 1, 11, 21, …
    ],
)
def test_ranks_agree_every_100_ms_or_10_steps_by_rank_0s_clock(seconds: float, steps: int) -> None:
    assert [result.value for result in run_on_ranks(stop_by_clock, 2, seconds)] == [steps, steps]


def due_by_tokens(rank: int, seconds: float) -> list[int]:
    trainer, now, due = make_trainer("ddp", rank, 2, None, max_epochs=3, count_tokens=lambda batch: 10), [0.0], []
    progress.monotonic = lambda: now[0]  # type: ignore[attr-defined]
    trainer.on("step_end")(lambda: now.append(now.pop() + seconds))
    trainer.on("step_end", every="60 tokens")(lambda step: due.append(step))
    trainer.train()
    return due


def test_a_hook_by_tokens_is_due_at_the_same_steps_however_fast_a_run_is() -> None:
    fast, slow = (run_on_ranks(due_by_tokens, 2, seconds)[0].value for seconds in (0.0, 1.0))
    assert fast == slow
    assert len(fast) == 7


def end_by_signal(rank: int, folder: str) -> None:
    agree_each_step()
    trainer = make_trainer("ddp", rank, 2, folder, max_epochs=20)
    trainer.add_hook("checkpoint", every=100)

    @trainer.on("step_end")
    def send(step: int) -> None:
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.train()


def test_a_signal_to_one_rank_saves_and_ends_all_with_143(tmp_path: Path) -> None:
    results = run_on_ranks(end_by_signal, 2, str(tmp_path), check=False)
    assert [one.exit_code for one in results] == [143, 143], results[0].error + results[1].error
    run = json.loads(next(tmp_path.glob("*/run.json")).read_text())
    assert (run["outcome"], run["counters"]["step"]) == ("interrupted", 6)
    assert next(tmp_path.glob("*/checkpoints/step-00000006"))


def save_on_request(rank: int, folder: str) -> list[str]:
    trainer = make_trainer("ddp", rank, 2, folder)

    @trainer.on("step_end")
    def ask(step: int, trainer: Any) -> None:
        if step == 3 and rank == 1:
            trainer.save("mine")

    trainer.train()
    return sorted(path.name for path in Path(trainer.checkpoint_dir).iterdir())


def test_a_save_that_one_rank_requests_is_written_once(tmp_path: Path) -> None:
    results = run_on_ranks(save_on_request, 2, str(tmp_path))
    assert [one.value for one in results] == [["mine"], ["mine"]]


def save_at_the_end_of_an_epoch(rank: int, folder: str) -> None:
    trainer = make_trainer("ddp", rank, 2, folder, max_epochs=2, count_tokens=lambda batch: 10 + rank)

    @trainer.on("epoch_end")
    def ask(epoch: int, trainer: Any) -> None:
        if epoch == 0 and rank == 1:
            trainer.save("mine")

    trainer.train()


def test_a_save_that_one_rank_requests_at_the_end_of_an_epoch_is_of_that_epoch(tmp_path: Path) -> None:
    run_on_ranks(save_at_the_end_of_an_epoch, 2, str(tmp_path))
    sections, meta = read_checkpoint(next(tmp_path.glob("*/checkpoints/mine")))
    assert (meta["step"], sections["progress"]["epoch_over"]) == (8, True)
    assert sections["progress"]["tokens_seen"] == 8 * (10 + 11)  # those of the last step and of all ranks included


def save_each_step(rank: int, folder: str) -> None:
    trainer = make_trainer("ddp", rank, 2, folder, max_steps=3, count_tokens=lambda batch: 10 + rank)
    trainer.add_hook("checkpoint", every=1)
    trainer.train()


def test_a_checkpoint_inside_an_epoch_has_counted_the_last_step_of_all_ranks(tmp_path: Path) -> None:
    run_on_ranks(save_each_step, 2, str(tmp_path))
    for step in (1, 2, 3):
        sections, _ = read_checkpoint(next(tmp_path.glob(f"*/checkpoints/step-{step:08d}")))
        assert sections["progress"]["tokens_seen"] == step * (10 + 11)


def train_twice(rank: int) -> list[Any]:
    """Train, and again with batches that are the same on all ranks."""
    trainer = make_trainer("ddp", rank, 2, None)
    trainer.train()
    with pytest.raises(TrainingError) as failed:
        trainer.fit(make_batches(0, 2), max_epochs=2)
    return [trainer.progress.steps_done, str(failed.value)]


def test_the_batches_of_the_ranks_are_compared_in_each_run_of_a_trainer() -> None:
    for result in run_on_ranks(train_twice, 2):
        steps, said = result.value
        assert steps == 8
        assert said.startswith("the first batch is the same on all 2 ranks")


def change_on_one(rank: int, what: str) -> str:
    agree_each_step()
    trainer = make_trainer("ddp", rank, 2, None)

    class Mine(TrainingHook):
        def on_step_end(self, step: int) -> None: ...

    trainer.add_hook(Mine(), "mine")

    def assign() -> None:
        trainer.lr, trainer.loss_fn = 0.5, nn.L1Loss()

    @trainer.on("step_end", name="changer")
    def change(step: int, trainer: Any) -> None:
        if step == 1 and what == "assign":
            trainer.lr = 0.04
        if step == 3 and rank == 1:
            {
                "assign": assign,
                "add": lambda: trainer.add_hook(Mine(), "other"),
                "disable": lambda: trainer.disable_hook("mine"),
                "remove": lambda: trainer.remove_hook("mine"),
            }[what]()

    try:
        trainer.train()
    except RankError as error:
        return f"{trainer.step} {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("add", "hook 'other' is enabled on rank 1 only"),
        ("disable", "hook 'mine' is enabled on rank 0 only; hook 'mine' is disabled on rank 1 only"),
        ("remove", "hook 'mine' is enabled on rank 0 only"),
        (
            "assign",
            "lr was set to 0.04 in step 1 by hook 'changer' on rank 0 only; "
            "loss_fn was set to L1Loss in step 3 by hook 'changer' on rank 1 only; "
            "lr was set to 0.5 in step 3 by hook 'changer' on rank 1 only",
        ),
    ],
)
def test_what_one_rank_alone_changes_is_named(what: str, said: str) -> None:
    for result in run_on_ranks(change_on_one, 2, what):
        assert result.value.startswith(f"4 the ranks differ: {said};")


class FailOnRank1(TrainingHook):
    """Fails once on rank 1, in step 2."""

    def on_step_end(self, step: int, trainer: Any) -> None:
        if step == 2 and trainer.ranks.rank == 1:
            raise ValueError("boom")


def switch_after_failures(rank: int) -> list[Any]:
    agree_each_step()
    trainer = make_trainer("ddp", rank, 2, None)
    for name, policy in (("first", "warn"), ("second", "disable"), ("third", "disable"), ("fourth", "warn")):
        trainer.add_hook(FailOnRank1(), name, on_error=policy)

    @trainer.on("step_end", name="changer")
    def change(step: int, trainer: Any) -> None:
        if step == 5:  # on all ranks
            trainer.disable_hook("first")
            trainer.disable_hook("second")
        elif step == 13 and rank == 1:
            trainer.disable_hook("fourth")

    trainer.fit(max_epochs=1)
    switched = [trainer.hooks.is_enabled(name) for name in ("first", "second", "third")]
    try:
        trainer.fit(max_epochs=2)  # the third is off on rank 1 alone
    except RankError as error:
        return [switched, trainer.step, str(error)]
    return [switched, trainer.step, "nothing"]


def test_failures_of_a_hook_on_one_rank_are_not_taken_for_a_switch_of_the_user() -> None:
    for rank, result in enumerate(run_on_ranks(switch_after_failures, 2)):
        switched, step, said = result.value
        assert switched == [False, False, rank == 0]
        assert step == 14
        assert said.startswith(
            "the ranks differ: hook 'fourth' is enabled on rank 0 only; hook 'fourth' is disabled on rank 1 only;"
        )


def differ(rank: int, what: str) -> str:
    options: dict[str, Any] = {"options": {"max_epochs": 1 + rank}, "metrics": {"metrics": ["mse", "mae"][: 1 + rank]}}
    trainer = make_trainer("ddp", rank, 2, None, **options.get(what, {}))
    if what == "hooks":
        trainer.add_hook("throughput", every=10 + rank)
    try:
        trainer.train()
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("options", "the ranks differ in the options: max_epochs is 1 on rank 0, 2 on rank 1"),
        ("hooks", "log_every_n_steps is 10 on rank 0, 11 on rank 1"),
        ("metrics", "the ranks differ in the metrics: "),
    ],
)
def test_ranks_that_differ_end_before_the_first_step_with_the_difference(what: str, said: str) -> None:
    for result in run_on_ranks(differ, 2, what):
        assert said in result.value


def by_clock(rank: int) -> list[int]:
    import time

    trainer = make_trainer("ddp", rank, 2, None, max_epochs=4)
    due: list[int] = []

    @trainer.on("train_batch_start")
    def slow(step: int) -> None:
        time.sleep(0.01 + 0.02 * rank)

    @trainer.on("step_end", every="0.1 s")
    def count(step: int) -> None:
        due.append(step)

    trainer.train()
    return due


def test_a_hook_on_a_clock_is_due_at_the_same_steps_on_all_ranks() -> None:
    first, second = (one.value for one in run_on_ranks(by_clock, 2))
    assert first == second
    assert len(first) > 2


def assign_in_turn(rank: int) -> str:
    """Assign the learning rate on rank 1 in one step, and on both ranks in the next."""
    agree_each_step()
    trainer = make_trainer("ddp", rank, 2, None)

    @trainer.on("step_end")
    def assign(step: int, trainer: Trainer) -> None:
        if step == 4 or (step == 3 and rank == 1):
            trainer.lr = 0.25

    try:
        trainer.train()
    except RankError as error:
        return str(error)
    return "nothing"


def test_what_differed_is_named_also_if_it_no_longer_does() -> None:
    for result in run_on_ranks(assign_in_turn, 2):
        assert "lr" in result.value.partition(";")[0], result.value
        assert "on rank 1 only" in result.value
