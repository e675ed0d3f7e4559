"""Several ranks are one run: one directory, one record, one console; the same hooks, filtered by rank."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_on_ranks
from rank_runs import DEVICE, agree_each_step, make_batches, make_model, make_trainer, whole_weights, wrap

from hookline import read_layers, read_metrics
from hookline.record import read_events
from hookline.run import progress

KINDS = ["ddp", "fsdp2"]


def train(rank: int, kind: str, world_size: int, folder: str) -> list[float]:
    trainer = make_trainer(kind, rank, world_size, folder, console=True)
    trainer.add_hook("console_log", every=1)
    trainer.train()
    return whole_weights(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_process_and_write_one_record(kind: str, tmp_path: Path, capfd: Any) -> None:
    alone = train(0, "none", 1, str(tmp_path / "one"))
    results = run_on_ranks(train, 2, kind, 2, str(tmp_path / "two"))
    for result in results:
        assert result.value == pytest.approx(alone, rel=1e-5, abs=1e-5)  # single weights are near zero
    files = [sorted(p.name for p in next((tmp_path / count).iterdir()).rglob("*")) for count in ("one", "two")]
    assert files[0] == files[1]
    run = json.loads(next((tmp_path / "two").glob("*/run.json")).read_text())
    assert run["attempts"][0]["world_size"] == 2
    assert list(run["attempts"][0]["ranks"].values()) == [[0, 1]]
    assert results[1].output == ""
    assert results[0].output.count("completed") == 1


def called_on(rank: int) -> dict[str, int]:
    from hookline import TrainingHook, register_hook

    calls: dict[str, int] = {}

    class Count(TrainingHook):
        def __init__(self, label: str) -> None:
            self.label = label
            calls[label] = 0

        def on_step_end(self, step: int) -> None:
            calls[self.label] += 1

    class OnZero(Count):
        ranks = "zero"

    register_hook("count")(Count)
    config = {"lifecycle": [{"name": "count", "label": "config", "ranks": "local-zero"}]}
    trainer = make_trainer("ddp", rank, 2, None, hooks=config)
    trainer.add_hook(Count("all"), "all")
    trainer.add_hook(Count("zero"), "zero", ranks="zero")
    trainer.add_hook(Count("one"), "one", ranks=1)
    trainer.add_hook(Count("both"), "both", ranks=[0, 1])
    trainer.add_hook(OnZero("class"), "class")
    trainer.train()
    return calls


def test_a_hook_is_called_on_the_ranks_that_code_class_or_config_name() -> None:
    first, second = (one.value for one in run_on_ranks(called_on, 2))
    assert first == {"config": 8, "all": 8, "zero": 8, "one": 0, "both": 8, "class": 8}
    assert second == {"config": 0, "all": 8, "zero": 0, "one": 8, "both": 8, "class": 0}


def names_of(rank: int, kind: str, world_size: int, folder: str) -> dict[str, list[str]]:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from hookline import SimpleTrainer, read_layers

    model = make_model()
    if kind == "compile":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif kind == "checkpoint":
        model[2] = checkpoint_wrapper(model[2])  # type: ignore[operator]
    model = wrap(model, ("fsdp2" if kind == "fsdp2" else "ddp") if world_size > 1 else "none")
    hooks = {
        "lifecycle": [{"name": "checkpoint", "every": 8}],
        "forward": [{"name": "activation_stats", "modules": ["0", "2"]}],
        "update": [{"name": "clip_norm", "max_norm": 1.0}, {"name": "scale", "factor": 1.0, "params": ["2.weight"]}],
    }
    trainer = SimpleTrainer(
        model, make_batches(rank, world_size), torch.optim.SGD(model.parameters(), lr=0.01), DEVICE,
        loss_fn=torch.nn.MSELoss(), hooks=hooks, output_dir=folder, console=False, seed=1,
    )  # fmt: skip
    trainer.train()
    if rank:
        return {}
    from saved_checkpoints import list_checkpoints

    from hookline.checkpoints.store import read_checkpoint

    sections, _ = read_checkpoint(list_checkpoints(Path(trainer.checkpoint_dir))[0])
    (series,) = [one for one in read_layers(trainer.run_dir).values() if one.names]
    return {"layers": list(series.names), "checkpoint": list(sections["model"]), "params": list(trainer.params)}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "compile", "checkpoint"])
def test_one_config_gives_the_same_names_however_the_model_is_wrapped(kind: str, tmp_path: Path) -> None:
    alone = names_of(0, "none", 1, str(tmp_path / "one"))
    assert alone["layers"] == ["0", "2"]
    assert run_on_ranks(names_of, 2, kind, 2, str(tmp_path / "two"))[0].value == alone


def log_apart(rank: int, folder: str) -> None:
    trainer = make_trainer("ddp", rank, 2, folder, batches=make_batches(rank, 2, 55))

    @trainer.on("step_end")
    def log(step: int, trainer: Any) -> None:
        # Other reductions come when the numbers of 50 steps are already on their way, with names that agree.
        trainer.log("apart", 1 + rank, reduce="max" if rank == 1 and step > 50 else "sum")
        trainer.log("nan", math.nan if rank == 1 else 3, reduce="sum")

    trainer.train()


def test_ranks_that_reduce_a_metric_differently_take_rank_0s_way_and_a_nan_stays_one(tmp_path: Path) -> None:
    run_on_ranks(log_apart, 2, str(tmp_path))
    rows = [row for row in read_metrics(next(tmp_path.iterdir())) if "apart" in row]
    assert [row["apart"] for row in rows] == [3] * 55
    assert all(math.isnan(row["nan"]) for row in rows)


def train_without_fsync(rank: int, folder: str) -> None:
    trainer, fsync = make_trainer("ddp", rank, 2, folder), os.fsync
    trainer.add_hook("checkpoint", every=3)

    @trainer.on("step_end", ranks=1)
    def fail(step: int) -> None:
        raise ValueError("boom")

    def refuse(file: int) -> None:
        events = trainer.run_dir / "ranks" / "1" / "events.jsonl"  # type: ignore[operator]
        if os.path.samestat(os.fstat(file), events.stat()):
            raise OSError("no space left")
        fsync(file)

    if rank == 1:
        os.fsync = refuse
    trainer.train()


def test_a_disk_that_refuses_the_events_of_a_rank_ends_nothing(tmp_path: Path) -> None:
    results = run_on_ranks(train_without_fsync, 2, str(tmp_path))
    assert "rank 1: its record is losing data; training continues" in results[1].output


def log_layers(rank: int, folder: str) -> list[bool]:
    import torch

    from hookline import _device

    agree_each_step()
    _device.HostCopy.is_ready = lambda copy: False  # type: ignore[method-assign] # a device that is always busy
    trainer, written = make_trainer("ddp", rank, 2, folder, batches=make_batches(rank, 2, 55)), []

    @trainer.on("step_end")
    def log(step: int, trainer: Any) -> None:
        trainer.log_layers("mine", ["layer"], ["value"], torch.tensor([[float(step)]]))

    @trainer.on("train_batch_start", at=52)
    def look(trainer: Any) -> None:
        written.extend([bool(read_metrics(trainer.run_dir)), (trainer.run_dir / "layers.jsonl").exists()])

    trainer.train()
    return written


def test_an_exchange_does_not_wait_for_the_layers_of_its_step(tmp_path: Path) -> None:
    assert run_on_ranks(log_layers, 2, str(tmp_path))[0].value == [True, False]
    assert read_layers(next(tmp_path.iterdir()))["mine"].steps == tuple(range(1, 56))


class Rows:
    """A sink that counts what it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.kinds: list[str] = []

    def write_metrics(self, rows: Any) -> None:
        self.steps += [row["step"] for row in rows]

    def write_layers(self, rows: Any) -> None:
        pass

    def write_events(self, rows: Any) -> None:
        self.kinds += [row["kind"] for row in rows]


def train_by_clock(rank: int, folder: str) -> list[Any]:
    """Train while rank 0's clock moves by a second a step and rank 1's by an hour; return what is written when."""
    trainer, sink, written, now = make_trainer("ddp", rank, 2, folder), Rows(), [], [0.0]
    progress.monotonic = lambda: now[0]  # type: ignore[attr-defined]
    trainer.record.add_sink(sink)

    @trainer.on("train_batch_start")
    def look(trainer: Any) -> None:
        written.append([len(read_metrics(trainer.run_dir)), len(sink.steps), sink.kinds.count("noted")])

    @trainer.on("step_end")
    def move(step: int, trainer: Any) -> None:
        now[0] += 1.0 if rank == 0 else 3600.0
        if step == 2:
            trainer.note("noted")
            trainer.record.flush()

    trainer.train()
    return written


def test_numbers_are_exchanged_when_rank_0s_clock_has_moved_by_two_seconds_and_sinks_get_them(tmp_path: Path) -> None:
    first, second = (one.value for one in run_on_ranks(train_by_clock, 2, str(tmp_path)))
    assert [row[:2] for row in first] == [[count, count] for count in (0, 0, 0, 0, 3, 3, 5, 5)]
    assert [row[2] for row in first] == [row[2] for row in second] == [0, 0, 1, 1, 1, 1, 1, 1]


def train_on_nan(rank: int, folder: str) -> list[Any]:
    batches = make_batches(rank, 2)
    if rank == 1:
        batches[2][0][0, 0] = math.nan
    trainer, seen = make_trainer("ddp", rank, 2, folder, batches=batches), []
    trainer.add_hook("skip_nonfinite")

    @trainer.on("train_batch_start", at=4)
    def look(trainer: Any) -> None:
        events = read_events(trainer.run_dir) if rank else []
        seen.extend([one["step"], one.get("rank")] for one in events if one["kind"] == "non_finite_loss")

    trainer.train()
    return seen


@pytest.mark.skipif(DEVICE == "cuda", reason="losses on a device are read when the record is written")
def test_a_rank_announces_a_loss_that_is_not_finite_at_its_step(tmp_path: Path) -> None:
    results = run_on_ranks(train_on_nan, 2, str(tmp_path))
    assert results[1].value == [[3, 1]]
    assert results[1].output.count("rank 1: step 3: the loss is nan") == 1
    assert "the loss is nan" not in results[0].output
    (event,) = [one for one in read_events(next(tmp_path.iterdir())) if one["kind"] == "non_finite_loss"]
    assert event["rank"] == 1


def validate(rank: int, folder: str) -> list[Any]:
    progress.monotonic = lambda: 0.0  # type: ignore[attr-defined] # the clock makes no exchange due
    options = {"val_loaders": make_batches(rank, 2, 1), "validate_every": 2}
    trainer, written = make_trainer("ddp", rank, 2, folder, **options), []

    @trainer.on("train_batch_start", at=3)
    def look(trainer: Any) -> None:
        written.extend([row["step"], "train/loss" in row, "val/loss" in row] for row in read_metrics(trainer.run_dir))

    trainer.train()
    return written


def test_numbers_are_exchanged_at_a_validation(tmp_path: Path) -> None:
    written = run_on_ranks(validate, 2, str(tmp_path))[0].value
    assert written == [[1, True, False], [2, True, True]]
    rows = read_metrics(next(tmp_path.iterdir()))
    assert {row["step"] for row in rows if "ranks/slowest" in row} <= {8}  # times are those of many steps


def log_a_huge_number(rank: int, folder: str) -> str:
    trainer = make_trainer("ddp", rank, 2, folder)
    trainer.on("step_end", at=2)(lambda trainer: trainer.log("huge", 10**400 if rank else 1.0))
    trainer.on("step_end", at=3)(lambda trainer: trainer.log("highest", -(10**400) if rank else 1, reduce="min"))
    return str(trainer.train()["status"])


def test_a_number_that_no_float_holds_does_not_end_the_exchange(tmp_path: Path) -> None:
    assert [result.value for result in run_on_ranks(log_a_huge_number, 2, str(tmp_path))] == ["completed"] * 2
    rows = read_metrics(next(tmp_path.iterdir()))
    assert len([row for row in rows if "train/loss" in row]) == 8
    assert [row["huge"] for row in rows if "huge" in row] == [math.inf]
    assert [row["highest"] for row in rows if "highest" in row] == [-math.inf]
