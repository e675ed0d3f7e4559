"""Checkpoints of several ranks: what they hold, exact resuming, and loading with any number of ranks."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import DEVICE, make_batches, make_model, make_trainer, whole, wrap
from safetensors.torch import load_file
from saved_checkpoints import verify_checkpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import ResumableSampler, SimpleTrainer, Trainer, TrainingHook
from hookline.checkpoints.store import read_checkpoint, temporary_name
from hookline.cli import main

KINDS = ["ddp", "fsdp2"]
STEPS = 8


class Counter(TrainingHook):
    """Has a state that differs between ranks."""

    name = "counter"

    def __init__(self) -> None:
        self.seen = torch.zeros(2, dtype=torch.int64)

    def on_step_end(self, trainer: Any) -> None:
        self.seen += 1 + trainer.ranks.rank

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def make(kind: str, rank: int, world_size: int, folder: str | None, **options: Any) -> Trainer:
    """Make a trainer whose ranks draw different random numbers in each step, with dropout and batch norm."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*make_model().children(), nn.BatchNorm1d(1), nn.Dropout(0.3))
    model = wrap(model, kind if world_size > 1 else "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.rand(1 + rank)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    where = {"record": False} if folder is None else {"output_dir": folder}
    options = {"seed": 3, "console": False, "max_epochs": 1, "warn_above": None, "step_fn": step_fn, **where, **options}
    trainer = SimpleTrainer(model, make_batches(rank, world_size, STEPS), optimizer, DEVICE, **options)
    trainer.add_hook("ema", decay=0.5)
    trainer.add_hook("grokfast")
    trainer.add_hook(Counter())
    return trainer


def only_run(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if (path / "run.json").exists())


def digest(tree: Any) -> Any:
    """Return a tree with hashes in place of tensors, of DTensors those of the whole ones."""
    if isinstance(tree, dict):
        return {str(key): digest(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [digest(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return hashlib.sha256(whole(tree).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return tree


def state_of(trainer: Trainer) -> dict[str, Any]:
    model = trainer.model.module if hasattr(trainer.model, "module") else trainer.model
    return {
        "model": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()["state"]),
        "ema": digest(trainer.get_hook("ema").average),
        "grokfast": digest(trainer.chain.states["grokfast"]),
    }


# ---- the files -------------------------------------------------------------------------------------------------------


def save(rank: int, kind: str, world_size: int, folder: str, async_save: bool = False) -> dict[str, Any]:
    pickles: list[str] = []
    sys.addaudithook(lambda event, _: pickles.append(event) if event == "pickle.find_class" else None)
    trainer = make(kind, rank, world_size, folder, async_save=async_save)
    trainer.add_hook("checkpoint")
    trainer.train()
    assert trainer.run_dir is not None
    again = make(kind, rank, world_size, None)
    again.load_checkpoint(trainer.run_dir)
    assert state_of(again) == state_of(trainer)
    assert again.get_hook("counter").seen.tolist() == [STEPS * (1 + rank)] * 2
    assert not pickles
    return state_of(trainer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The end of an epoch, saved by one process and by two ranks of each kind, and what was in memory then."""
    found = {}
    for kind in ("none", *KINDS):
        folder, world_size = tmp_path_factory.mktemp(kind), 1 if kind == "none" else 2
        state = run_on_ranks(save, world_size, kind, world_size, str(folder))[0].value
        found[kind] = next((only_run(folder) / "checkpoints").glob("step-*")), state
    return found


def test_ddp_writes_one_copy_with_the_names_of_a_bare_model(saved: Any) -> None:
    path, one = saved["ddp"][0], saved["none"][0]
    for name in ("model", "optimizers", "hooks", "update_state"):
        ours, alone = load_file(path / f"{name}.safetensors"), load_file(one / f"{name}.safetensors")
        assert ours.keys() == alone.keys()
    # The other rank wrote what differs there: random streams, its share of batch norm's statistics, its own hook.
    others = {file.name: load_file(file).keys() for file in path.glob("*.rank-*.safetensors")}
    assert set(others) == {f"{name}.rank-00001.safetensors" for name in ("model", "hooks", "rng")}
    assert all("running" in name for name in others["model.rank-00001.safetensors"])
    assert list(others["hooks.rank-00001.safetensors"]) == ["counter.seen@rank-1"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_shards_that_ranks_write(saved: Any) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    path, state = saved["fsdp2"]
    assert {file.name for file in path.glob("model*")} >= {f"model.rank-0000{rank}.safetensors" for rank in (0, 1)}
    files = [load_file(path / f"model.rank-0000{rank}.safetensors") for rank in (0, 1)]
    whole = sum(param.numel() for param in make("none", 0, 1, None).model.parameters())
    # No rank has all of it; rank 1 has its own statistics of batch norm, too.
    assert sum(one.numel() for file in files for one in file.values()) == whole + 2
    read = {name: torch.zeros_like(one) for name, one in make("none", 0, 1, None).model.named_parameters()}
    load(read, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert {name: digest(one) for name, one in read.items()} == {name: state["model"][name] for name in read}


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_checkpoint_is_read_whole_in_one_process(kind: str, saved: Any) -> None:
    path, state = saved[kind]
    sections = read_checkpoint(path)[0]
    assert not verify_checkpoint(path)
    assert digest(sections["model"]) == state["model"]
    assert digest(sections["hooks"]["ema"]["average"]) == state["ema"]


def load_all(rank: int, kind: str, world_size: int, paths: list[str]) -> list[dict[str, Any]]:
    states = []
    for path in paths:
        trainer = make(kind, rank, world_size, None)
        trainer.load_checkpoint(path)
        if kind == "fsdp2":
            assert all(hasattr(one, "full_tensor") for one in trainer.get_hook("ema").average.values())
        states.append(state_of(trainer))
    return states


@pytest.mark.parametrize(("kind", "world_size"), [("none", 1), ("ddp", 2), ("fsdp2", 2), ("ddp", 4), ("fsdp2", 4)])
def test_any_number_of_ranks_loads_a_checkpoint_exactly(kind: str, world_size: int, saved: Any) -> None:
    paths = [str(path) for path, _ in saved.values()]
    expected = [state for _, state in saved.values()]
    results = run_on_ranks(load_all, world_size, kind, world_size, paths)
    assert results[0].value == expected
    if world_size == 4:
        assert all(result.value == expected for result in results)
        assert results[0].output.count("random numbers (dropout) and the order of samples are not") == 3
        assert results[1].output == ""


@pytest.mark.parametrize("name", ["model.rank-00001.safetensors", "state.rank-00001.json"])
def test_a_missing_part_is_named_with_its_rank(name: str, saved: Any, tmp_path: Path, capsys: Any) -> None:
    import shutil

    path = tmp_path / "step-1"
    shutil.copytree(saved["fsdp2"][0], path)
    (path / name).unlink()
    with pytest.raises(Exception, match=f"{name}: is missing, the part of rank 1"):
        make("none", 0, 1, None).load_checkpoint(path)
    assert main(["verify-checkpoint", str(path)]) == 1
    assert "the part of rank 1" in capsys.readouterr().out


# ---- resuming --------------------------------------------------------------------------------------------------------


def train(
    rank: int, kind: str, folder: str, resume: str | None, kill_at: int | None, async_save: bool
) -> list[list[float]]:
    trainer = make(kind, rank, 2, folder, async_save=async_save, max_epochs=2)
    trainer.add_hook("checkpoint", every=3)
    losses = []

    @trainer.on("step_end")
    def collect(step: int, loss: float, trainer: Any) -> None:
        losses.append([step, loss, *trainer.get_hook("counter").seen.tolist()])
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.fit(resume=resume)
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_killed_ranks_resume_the_same_curve_in_the_middle_of_an_epoch(kind: str, tmp_path: Path) -> None:
    whole = run_on_ranks(train, 2, kind, str(tmp_path / "whole"), None, None, False)
    is_async = kind == "fsdp2"
    killed = run_on_ranks(train, 2, kind, str(tmp_path / "killed"), None, 8, is_async, check=False)
    assert [one.exit_code for one in killed] == [-9, -9]
    run = only_run(tmp_path / "killed")
    resumed = run_on_ranks(train, 2, kind, str(tmp_path / "killed"), str(run), None, is_async)
    for before, after in zip(whole, resumed, strict=True):
        began = int(after.value[0][0])
        assert began in (4, 7)
        assert after.value == before.value[began - 1 :]
    assert whole[0].value != whole[1].value  # each rank has its own numbers
    assert not list((run / "checkpoints").glob(".tmp-*"))


def read_samples(rank: int, world_size: int, folder: str, resume: str | None, max_steps: int | None) -> list[int]:
    data = TensorDataset(torch.arange(58.0).unsqueeze(1))
    model = wrap(nn.Linear(1, 1), "ddp" if world_size > 1 else "none")
    samples: list[int] = []

    def step_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        samples.extend(int(one) for one in batch[0])
        return model(batch[0] / 58).sum()  # type: ignore[no-any-return]

    loader = DataLoader(data, batch_size=3, sampler=ResumableSampler(data, seed=5))
    options: Any = {"step_fn": step_fn, "output_dir": folder, "console": False, "max_steps": max_steps}
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.01), DEVICE, **options)
    trainer.add_hook("checkpoint", every=3)
    trainer.fit(resume=resume, fork=resume is not None)
    return samples


@pytest.mark.parametrize("world_size", [1, 4])
def test_another_number_of_ranks_reads_each_remaining_sample_once(world_size: int, tmp_path: Path) -> None:
    before = run_on_ranks(read_samples, 2, 2, str(tmp_path), None, 3)
    done = [sample for result in before for sample in result.value]
    path = str(next((only_run(tmp_path) / "checkpoints").glob("step-*")))
    after = run_on_ranks(read_samples, world_size, world_size, str(tmp_path / "other"), path, None)
    rest = [sample for result in after for sample in result.value]
    assert len(done) == 18
    assert sorted(done + rest) == list(range(58))


class Scores(TrainingHook):
    """Keeps what is validated, gathered from all ranks, and gives it a score."""

    collective = True

    def __init__(self, validated: dict[str, Any]) -> None:
        self.validated = validated

    def on_validation_end(self, step: int, model: nn.Module, metrics: Any) -> None:
        self.validated[str(step)] = digest(model.state_dict())
        metrics["val/score"] = float(abs(step - 4))  # the second of four is the best


def best_weights(rank: int, folder: str, resume: str | None, max_steps: int) -> dict[str, Any]:
    trainer = make("fsdp2", rank, 2, folder, max_steps=max_steps, validate_every=2)
    trainer.val_loaders = {"val": make_batches(0, 1, 2)}
    validated: dict[str, Any] = {}
    trainer.add_hook(Scores(validated), before="early_stopping")
    trainer.add_hook("early_stopping", monitor="val/score", mode="min", restore_best_weights=True, patience=9)
    trainer.add_hook("checkpoint", every=6)
    trainer.fit(resume=resume)
    return {"validated": validated, "now": digest(trainer.model.state_dict())}


def test_the_best_weights_of_shards_are_those_of_one_validation(tmp_path: Path) -> None:
    """Also if they come from a checkpoint; they are the averaged ones, which were validated."""
    whole = run_on_ranks(best_weights, 2, str(tmp_path / "whole"), None, 8)[0].value
    params = [name for name in whole["now"] if "running" not in name]
    assert [whole["now"][name] for name in params] == [whole["validated"]["4"][name] for name in params]
    assert whole["now"] != whole["validated"]["8"]
    run_on_ranks(best_weights, 2, str(tmp_path / "part"), None, 6)
    resumed = run_on_ranks(best_weights, 2, str(tmp_path / "part"), str(only_run(tmp_path / "part")), 8)[0].value
    assert list(resumed["validated"]) == ["8"]
    assert resumed["now"] == whole["now"]


def replicas(rank: int, folder: str) -> dict[str, Any]:
    trainer = make_trainer("hsdp", rank, 4, folder)
    trainer.add_hook("checkpoint")
    trainer.train()
    return digest(trainer.model.state_dict())  # type: ignore[no-any-return]


def test_of_replicated_shards_one_copy_is_saved(tmp_path: Path) -> None:
    state = run_on_ranks(replicas, 4, str(tmp_path))[0].value
    path = next((only_run(tmp_path) / "checkpoints").glob("step-*"))
    files = sorted(file.name for file in path.glob("model*"))
    assert files == ["model.rank-00000.safetensors", "model.rank-00001.safetensors"]
    assert digest(read_checkpoint(path)[0]["model"]) == state


# ---- failures while saving -------------------------------------------------------------------------------------------


def save_with_failures(rank: int, folder: str, failing: int, error: str, on_save_error: str, background: bool) -> Any:
    """Save three times; the second save fails on one rank."""
    import errno
    import threading

    from torch import distributed

    off_main: list[str] = []
    for name in ("all_reduce", "all_gather", "broadcast"):
        call = getattr(distributed, name)

        def checked(*args: Any, call: Any = call, name: str = name, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                off_main.append(name)
            return call(*args, **kwargs)

        setattr(distributed, name, checked)
    trainer = make("fsdp2", rank, 2, folder, on_save_error=on_save_error, async_save=background)
    trainer.add_hook("checkpoint", every=2)
    saved: list[int] = []
    write, is_failing = os.write, False

    def write_or_fail(fd: int, data: Any) -> int:
        if is_failing and ".tmp-" in os.readlink(f"/proc/self/fd/{fd}"):  # noqa: PTH115
            if error == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)))
        return write(fd, data)

    @trainer.on("step_end", before="checkpoint")
    def switch(step: int) -> None:
        nonlocal is_failing
        for thread in threading.enumerate():
            if thread.name.startswith("hookline-save"):
                thread.join()
        is_failing = rank == failing and step in (4, 5)

    os.write = write_or_fail  # type: ignore[assignment]
    trainer.on("checkpoint_save")(lambda step: saved.append(step))
    raised = ""
    try:
        trainer.train()
    except Exception as failure:
        raised = str(failure)
    return {"saved": saved, "raised": raised, "failed": trainer.failed_saves, "off_main": off_main}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(only_run(folder) / "checkpoints"))  # noqa: PTH208 - hidden ones, too


@pytest.mark.parametrize(
    ("failing", "error", "on_save_error", "background"),
    [(1, "ENOSPC", "warn", False), (0, "EIO", "warn", True), (1, "EIO", "stop", True)],
)
def test_if_one_rank_cannot_write_no_rank_has_saved(
    failing: int, error: str, on_save_error: str, background: bool, tmp_path: Path
) -> None:
    results = run_on_ranks(save_with_failures, 2, str(tmp_path), failing, error, on_save_error, background)
    saved = [2, 6, 8] if on_save_error == "warn" else [2]
    for result in results:
        assert result.value["saved"] == saved
        assert result.value["failed"] == 1
        assert not result.value["off_main"]
        assert (f"rank {failing}: " in result.value["raised"]) == (on_save_error == "stop")
    assert names(tmp_path) == [f"step-{step:08d}" for step in saved]
    assert all(not verify_checkpoint(only_run(tmp_path) / "checkpoints" / name) for name in names(tmp_path))
    events = [json.loads(line) for line in (only_run(tmp_path) / "events.jsonl").read_text().splitlines()]
    failed = [event for event in events if event["kind"] == "checkpoint_failed"]
    assert [event["step"] for event in failed] == [4]
    assert failed[0]["error"].startswith(f"rank {failing}: ")


def test_a_rank_that_dies_while_it_saves_leaves_the_older_checkpoints(tmp_path: Path) -> None:
    results = run_on_ranks(save_with_failures, 2, str(tmp_path), 1, "death", "warn", False, check=False)
    assert results[1].exit_code == -9
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["step-00000002"]
    # What the dead processes left is swept by the next save; what a process of another host has there is not.
    folder = only_run(tmp_path) / "checkpoints"
    (folder / ".tmp-step-1-999999999-0a@elsewhere").mkdir()
    here = temporary_name(folder / "step-1").name.partition("@")[2]
    (folder / f".tmp-step-1-999999999-0a@{here}").mkdir()
    run_on_ranks(save_again, 2, str(only_run(tmp_path)))
    assert [name for name in names(tmp_path) if name.startswith(".")] == [".tmp-step-1-999999999-0a@elsewhere"]


def save_again(rank: int, run: str) -> None:
    trainer = make("fsdp2", rank, 2, str(Path(run).parent))
    trainer.add_hook("checkpoint", every=2)
    trainer.fit(resume=run)


def save_every_step(rank: int, kind: str, folder: str) -> list[int]:
    trainer = make(kind, rank, 2, folder, async_save=True, max_epochs=7)
    trainer.add_hook("checkpoint", every=1, save_top_k=2)
    saved: list[int] = []
    trainer.on("checkpoint_save")(lambda step: saved.append(step))
    trainer.train()
    return saved


def test_fifty_saves_in_the_background_do_not_deadlock(tmp_path: Path) -> None:
    results = run_on_ranks(save_every_step, 2, "fsdp2", str(tmp_path))
    for result in results:
        assert result.value == list(range(1, 7 * STEPS + 1))
    assert names(tmp_path) == ["step-00000055", "step-00000056"]


class SavesAtTheEnd(TrainingHook):
    """Asks for a checkpoint when the run closes, on one rank."""

    def on_train_end(self, trainer: Trainer) -> None:
        if trainer.ranks.rank == 1:
            trainer.save("last")


def save_by_tokens(rank: int, folder: str) -> dict[str, Any]:
    """Train and resume with hooks that are due by tokens and at the end."""
    due: list[list[int]] = []
    resume = None
    for steps in (3, 8):
        trainer = make_trainer("ddp", rank, 2, folder, count_tokens=lambda batch: 10, max_steps=steps)
        trainer.add_hook("checkpoint", every="40 tokens")
        trainer.add_hook(SavesAtTheEnd())
        seen: list[int] = []
        trainer.on("step_end", every="50 tokens")(lambda step, seen=seen: seen.append(step))
        trainer.fit(resume=resume)
        due.append(seen)
        resume = str(trainer.run_dir)
    return {"due": due, "saved": sorted(path.name for path in Path(str(resume), "checkpoints").iterdir())}


def test_schedules_by_tokens_and_saves_at_the_end_are_the_same_on_all_ranks_after_a_resume(tmp_path: Path) -> None:
    first, second = (result.value for result in run_on_ranks(save_by_tokens, 2, str(tmp_path)))
    assert first == second
    assert first["due"][1]
    assert "last" in first["saved"]
    run = json.loads(next(tmp_path.glob("*/run.json")).read_text())
    assert run["counters"]["tokens_seen"] == 8 * 2 * 10  # of all ranks, those before the resume once
