"""Ranks read different batches, equally many of them, and draw different random numbers from equal first weights."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import DEVICE, FEATURES, make_batches, make_model, make_trainer, whole_weights
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from hookline import HooklineError, ResumableSampler, Trainer, TrainingHook, trainer_from_config


def shares(size: int, world_size: int, **options: Any) -> list[list[int]]:
    return [
        list(ResumableSampler(range(size), 3, rank=rank, world_size=world_size, **options))
        for rank in range(world_size)
    ]


def test_ranks_get_equally_many_samples_and_each_sample_once() -> None:
    found = shares(23, 3)
    assert [len(one) for one in found] == [7, 7, 7]
    assert len(set(chain(*found))) == 21  # the remainder is left out of this epoch
    assert sorted(chain(*shares(23, 3, even=False))) == list(range(23))


def test_the_first_batches_of_all_ranks_are_the_first_of_the_order() -> None:
    (order,) = shares(24, 1)
    assert sorted(chain(*(one[:4] for one in shares(24, 3)))) == sorted(order[:12])


@pytest.mark.parametrize(
    ("size", "place", "why"), [(2, {}, "2 samples cannot be shared"), (9, {"rank": 3}, "no rank 3")]
)
def test_a_share_that_does_not_exist_is_refused(size: int, place: dict[str, int], why: str) -> None:
    with pytest.raises(HooklineError, match=why):
        ResumableSampler(range(size), **{"rank": 0, "world_size": 3, **place})


class Epochs(DistributedSampler):
    """A DistributedSampler that notes the epochs it was set to."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        vars(self).setdefault("seen", []).append(epoch)


class Drawing(TrainingHook):
    """Draws at every step; given streams of its own, it draws again and again."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_end(self) -> None:
        self.drawn.append(float(torch.rand(1)))


class DrawingAlike(Drawing):
    same_on_all_ranks = True


def train_two_epochs(rank: int, kind: str) -> dict[str, Any]:
    """Train with dropout and hooks that draw, on a DistributedSampler inside of a BatchSampler."""
    data = [(one, one[:1]) for one in torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(2))]
    sampler = Epochs(data)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))
    torch.manual_seed(rank)  # an own loop may have drawn before the model is made
    model, streams = nn.Sequential(*make_model(), nn.Dropout(0.5)), []  # type: ignore[var-annotated]
    trainer = make_trainer(kind, rank, 2, None, model=model, batches=loader, max_epochs=2)
    first = whole_weights(trainer)
    hooks = [Drawing(), DrawingAlike()]
    for hook in hooks:
        trainer.add_hook(hook)
    trainer.add_hook("noise", eta=1e-6)

    @trainer.on("on_step_end")
    def note_streams() -> None:
        streams.append(torch.get_rng_state().sum().item())

    trainer.train()
    return {
        "first": first, "last": whole_weights(trainer), "streams": streams, "epochs": sampler.seen,
        "drawn": [hook.drawn[2:] for hook in hooks],
    }  # fmt: skip


def test_ranks_draw_differently_from_equal_first_weights() -> None:
    first, second = (result.value for result in run_on_ranks(train_two_epochs, 2, "ddp"))
    assert first["first"] == second["first"]
    assert first["last"] == second["last"]  # noise draws alike, or the replicas would drift apart
    assert first["epochs"] == second["epochs"] == [0, 1]
    assert not set(first["streams"]) & set(second["streams"])
    assert first["drawn"][0] != second["drawn"][0]
    assert first["drawn"][1] == second["drawn"][1]


def make_demo(**options: Any) -> Trainer:
    """Make a small trainer of the demo's data and model."""
    return trainer_from_config(
        {
            "data": {"name": "stdlib_text", "context": 16, "batch_size": 2, "max_bytes": 6_000},
            "model": {"name": "char_gpt", "context": 16, "width": 8, "layers": 1, "heads": 2},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "trainer": {"console": False, **options},
        }
    )


def train_demo(rank: int, parallel: str) -> dict[str, Any]:
    """Make the run of a config without a seed, and return its first weights and what it reads."""
    torch.manual_seed(rank)
    trainer = make_demo(parallel=parallel, record=False, max_steps=2, validate_every=2)
    batches = [batch["input_ids"].tolist() for batch in list(trainer.train_loaders["train"])[:3]]
    validated = [row for batch in trainer.val_loaders["val"] for row in batch["input_ids"].tolist()]
    first = whole_weights(trainer)
    trainer.train()
    return {"first": first, "last": whole_weights(trainer), "batches": batches, "validated": validated}


no_mesh_of_gloo = pytest.mark.skipif(
    DEVICE == "cuda", reason="the mesh that a config makes on GPUs may use NCCL, which refuses two ranks on one GPU"
)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=no_mesh_of_gloo)])
def test_the_job_of_a_config_shares_its_data_and_first_weights(parallel: str) -> None:
    first, second = (result.value for result in run_on_ranks(train_demo, 2, parallel))
    assert first["first"] == second["first"] == train_demo(0, "auto")["first"]  # rank 0's, in every shard
    assert first["last"] == second["last"] != first["first"]
    rows = [row for rank in (first, second) for batch in rank["batches"] for row in batch]
    assert len(rows) == len({str(row) for row in rows})
    assert abs(len(first["validated"]) - len(second["validated"])) <= 1
    assert not {str(row) for row in first["validated"]} & {str(row) for row in second["validated"]}


# ---- errors before the first step ------------------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Batches whose number is unknown; rank 1 has fewer."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def fail(rank: int, case: str) -> int:
    """Train with data that the ranks cannot share, and return how many steps there were."""
    own, whole = make_batches(rank, 2), make_batches()
    unknown = Stream(own[: 6 - rank])
    cases: dict[str, dict[str, Any]] = {
        "same": {"batches": whole},
        "lengths": {"batches": own[: 5 + rank]},
        "unknown": {"batches": unknown},
        "unknown, two epochs": {"batches": unknown, "max_steps": 9, "max_epochs": 2},
        "ends": {"batches": unknown, "max_steps": 9},
        "ends before the limit": {"batches": unknown, "limit_train_batches": 6},
        "limited": {"batches": own[: 5 + rank], "limit_train_batches": 5},
        "by steps": {"batches": unknown, "max_steps": 4},
    }
    trainer = make_trainer("ddp", rank, 2, None, **cases[case])
    try:
        trainer.train()
    except HooklineError as error:
        raise HooklineError(f"after {trainer.progress.steps_done} steps: {error}") from None
    return trainer.step


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("same", "after 0 steps: the first batch is the same on all 2 ranks.*ResumableSampler"),
        (
            "lengths",
            r"after 0 steps: .*number of training batches: train is 5 on rank 0, 6 on rank 1; .*limit_train_batches",
        ),
        (
            "unknown",
            "after 0 steps: the number of batches of the training loader 'train' is unknown.*limit_train_batches",
        ),
        ("unknown, two epochs", "after 0 steps: the number of batches"),
    ],
)
def test_data_that_ranks_cannot_share_is_refused_before_the_first_step(case: str, why: str) -> None:
    for result in run_on_ranks(fail, 2, case, check=False):
        assert re.search(why, result.error), result.error


@pytest.mark.parametrize(("case", "read"), [("ends", "no known end"), ("ends before the limit", "6")])
def test_a_rank_whose_data_ends_early_is_named(case: str, read: str) -> None:
    result = run_on_ranks(fail, 2, case, check=False)[1]
    assert f"rank 1 has read all 5 batches of an epoch, which has {read}" in result.error


def succeed(rank: int) -> list[int]:
    return [fail(rank, "limited"), fail(rank, "by steps")]


def test_a_limit_makes_ranks_end_together() -> None:
    assert [result.value for result in run_on_ranks(succeed, 2)] == [[5, 4]] * 2


def add_noise(rank: int) -> None:
    trainer = make_trainer("fsdp2", rank, 2, None)
    torch.distributed.barrier()  # a rank that has failed would break the other's connections
    trainer.add_hook("noise")


def test_noise_on_shards_is_refused_when_it_is_registered() -> None:
    for result in run_on_ranks(add_noise, 2, check=False):
        assert "noise: '0.weight' is sharded over processes" in result.error


# ---- another number of ranks -----------------------------------------------------------------------------------------


def train_in(
    rank: int, world_size: int, folder: str, resume: str | None, steps: int, batch_size: int
) -> dict[str, Any]:
    """Train some steps of an epoch of 48 samples, and return the samples that this rank has read."""
    data = [(torch.full((FEATURES,), float(index)), torch.zeros(1)) for index in range(48)]
    loader = DataLoader(data, batch_size, sampler=ResumableSampler(data, seed=4))
    trainer = make_trainer("ddp", rank, world_size, folder, batches=loader, max_epochs=1, max_steps=steps)
    trainer.add_hook("checkpoint", save_every_n_epochs=None, save_every_n_steps=2)
    seen: list[int] = []

    @trainer.on("on_train_batch_start")
    def note(batch: Any) -> None:
        seen.extend(int(value) for value in batch[0][:, 0])

    trainer.fit(resume=resume)
    return {"seen": seen, "run": str(trainer.run_dir), "epoch_over": trainer.progress.epoch_over}


@pytest.mark.parametrize(("before", "after", "batch_size"), [(1, 2, 4), (2, 1, 4), (2, 1, 8), (2, 2, 4)])
def test_another_number_of_ranks_reads_the_rest_of_an_epoch_once(
    before: int, after: int, batch_size: int, tmp_path: Path
) -> None:
    first = run(before, str(tmp_path), None, 2, 4)
    second = run(after, str(tmp_path), first[0]["run"], 100, batch_size)
    assert not first[0]["epoch_over"]
    assert second[0]["epoch_over"]
    seen = [sample for rank in (*first, *second) for sample in rank["seen"]]
    assert sorted(seen) == list(range(48))


def resume_demo(rank: int, folder: str, resume: str | None, steps: int | None) -> dict[str, Any]:
    """Train some steps of the demo's first epoch, and return the windows that this rank has read."""
    trainer = make_demo(output_dir=folder, max_epochs=1, max_steps=steps)
    trainer.add_hook("checkpoint", save_every_n_epochs=None, save_every_n_steps=2)
    seen: list[str] = []

    @trainer.on("on_train_batch_start")
    def note(batch: Any) -> None:
        seen.extend(map(str, batch["input_ids"].tolist()))

    trainer.fit(resume=resume)
    windows = [str(window["input_ids"].tolist()) for window in trainer.train_loaders["train"].dataset]  # type: ignore[attr-defined]
    return {"seen": seen, "windows": windows, "run": str(trainer.run_dir)}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_continues_an_epoch_of_the_demo(before: int, after: int, tmp_path: Path) -> None:
    first = run_on_ranks(resume_demo, before, str(tmp_path), None, 2)
    second = run_on_ranks(resume_demo, after, str(tmp_path), first[0].value["run"], None)
    left = Counter(first[0].value["windows"])
    left.subtract(window for rank in (*first, *second) for window in rank.value["seen"])
    assert min(left.values()) == 0
    assert left.total() < 4  # an epoch leaves out what does not fill a batch of every rank


def run(world_size: int, *arguments: Any) -> list[dict[str, Any]]:
    if world_size == 1:
        return [train_in(0, 1, *arguments)]
    return [result.value for result in run_on_ranks(train_in, world_size, world_size, *arguments)]


def read_whole_datasets(rank: int, kind: str) -> list[str]:
    """Train on a loader that shuffles a whole dataset on each rank; the datasets are one, or differ, or draw."""
    first = 16.0 * rank if kind == "own files" else 0.0
    data = [(torch.full((FEATURES,), first + index), torch.zeros(1)) for index in range(16)]
    if kind == "augmented":
        data = Augmented()
    torch.manual_seed(rank)
    drawn = RandomSampler(data, replacement=True) if kind == "drawn" else None
    shared = DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), 4, drop_last=True))
    loaders = {"shared": shared, "whole": DataLoader(data, 4, shuffle=drawn is None, sampler=drawn)}
    try:
        make_trainer("ddp", rank, 2, None, batches=loaders, max_steps=2, seed=None).train()
    except HooklineError as error:
        return [str(error)]
    return []


class Augmented:
    """A dataset whose samples draw."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((FEATURES,), float(index)) + torch.rand(FEATURES), torch.zeros(1)


@pytest.mark.parametrize("kind", ["one file", "augmented"])
def test_ranks_that_shuffle_one_whole_dataset_each_are_refused(kind: str) -> None:
    for result in run_on_ranks(read_whole_datasets, 2, kind):
        said = result.value[0]
        assert "the loader 'whole' gives each of 2 ranks all 16 samples of one dataset" in said
        assert "ResumableSampler" in said and "your own sampler" in said
        assert "samples of its dataset" not in result.output


@pytest.mark.parametrize("kind", ["own files", "drawn"])
def test_ranks_with_datasets_of_their_own_or_independent_draws_train(kind: str) -> None:
    for result in run_on_ranks(read_whole_datasets, 2, kind):
        assert result.value == [] and "samples of" not in result.output


def validate_on_one_rank(rank: int) -> None:
    val_loaders = make_batches(0, 1, 2) if rank == 0 else None
    make_trainer("ddp", rank, 2, None, val_loaders=val_loaders, validate_every=2).train()


def test_a_validation_loader_on_one_rank_only_is_refused() -> None:
    for result in run_on_ranks(validate_on_one_rank, 2, check=False):
        assert "the ranks differ in the loaders: validation is" in result.error


def resume_elsewhere(rank: int, folder: str, resume: str | None, steps: int) -> str:
    loader = DataLoader([(torch.full((FEATURES,), 1.0 + rank), torch.zeros(1))] * 40, 4)
    trainer = make_trainer("ddp", rank, 2, folder, batches=loader, max_steps=steps)
    trainer.add_hook("checkpoint", save_every_n_epochs=None, save_every_n_steps=2)
    trainer.fit(resume=resume)
    return str(trainer.run_dir)


def test_a_run_that_cannot_continue_inside_an_epoch_changes_nothing(tmp_path: Path) -> None:
    run_dir = Path(run_on_ranks(resume_elsewhere, 2, str(tmp_path), None, 6)[0].value)
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    loader = DataLoader([(torch.full((FEATURES,), 1.0), torch.zeros(1))] * 40, 4)
    trainer = make_trainer("none", 0, 1, tmp_path, batches=loader)
    trainer.load_checkpoint(run_dir / "checkpoints" / saved[0])  # which may be for its weights
    trainer = make_trainer("none", 0, 1, tmp_path, batches=loader)
    with pytest.raises(HooklineError, match="inside an epoch with 2 processes, and now with 1"):
        trainer.fit(resume=run_dir / "checkpoints" / saved[0])
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == saved
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics


class Differs:
    """Has another text in every process, as objects with an address have."""

    def __repr__(self) -> str:
        return f"<Differs {os.getpid()}>"


class Takes(TrainingHook):
    """Has parameters that are no plain values."""

    def __init__(self, thing: Any, names: Any) -> None:
        self.thing, self.names = thing, names

    def on_step_end(self) -> None:
        pass


def add_objects(rank: int) -> str:
    trainer = make_trainer("ddp", rank, 2, None, max_steps=2)
    trainer.add_hook(Takes(Differs(), {f"{rank}"}))
    return trainer.train()["status"]


def test_parameters_that_are_no_plain_values_are_not_compared() -> None:
    assert [result.value for result in run_on_ranks(add_objects, 2)] == ["completed"] * 2
