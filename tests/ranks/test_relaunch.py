"""A launcher that starts failed processes again continues their run, in its directory."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_processes import DEVICE, run_on_ranks
from rank_runs import make_trainer

from hookline import read_metrics


def launched(rank: int, folder: str, restarts: int, kill_at: int | None, launch: str) -> dict[str, list[int]]:
    os.environ.update(TORCHELASTIC_RUN_ID=launch, TORCHELASTIC_RESTART_COUNT=str(restarts))
    steps: dict[str, list[int]] = {}
    for name in ("first", "second"):  # the launcher's script makes two runs
        trainer = make_trainer("ddp", rank, 2, folder)
        trainer.add_hook("checkpoint", every=2)
        done = steps[name] = []

        def collect(step: int, name: str = name, done: list[int] = done) -> None:
            done.append(step)
            if name == "second" and step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.on("step_end")(collect)
        trainer.train()
    return steps


@pytest.mark.parametrize("launch", ["none", "job-7"])  # torchrun's default, and one that --rdzv-id gave
def test_processes_that_are_started_again_continue_their_run(launch: str, tmp_path: Path) -> None:
    killed = run_on_ranks(launched, 2, str(tmp_path), 0, 5, launch, check=False)
    assert [one.exit_code for one in killed] == [-9, -9]
    runs = sorted(tmp_path.iterdir())
    again = run_on_ranks(launched, 2, str(tmp_path), 1, None, launch)
    for result in again:
        assert result.value == {"first": [], "second": [5, 6, 7, 8]}
    assert sorted(tmp_path.iterdir()) == runs
    described = [json.loads((run / "run.json").read_text()) for run in runs]
    assert [len(run["attempts"]) for run in described] == [1, 2]  # the first had completed, and stays as it is
    assert all(run["outcome"] == "completed" for run in described)


def test_another_launch_starts_another_run(tmp_path: Path) -> None:
    run_on_ranks(launched, 2, str(tmp_path), 0, None, "job-1")
    run_on_ranks(launched, 2, str(tmp_path), 1, None, "job-2")
    assert len(list(tmp_path.iterdir())) == 4


SCRIPT = """
import os, signal, sys
import torch
from torch import distributed, nn
from hookline import get_trainer

rank, restart = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
# With torchrun's own store, restarted processes now and then wait for each other forever.
store = f"file://{os.path.dirname(__file__)}/store-{restart}"
distributed.init_process_group("gloo", store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.full((2, 3), float(rank + step)), torch.ones(2, 1)) for step in range(8)]
trainer = get_trainer("simple", model, batches, optimizer, "cpu", loss_fn=nn.MSELoss(), output_dir=sys.argv[1])
trainer.add_hook("checkpoint", every=2)

@trainer.on("step_end")
def fail_once(step):
    if step == 5 and rank == 1 and restart == "0":
        os.kill(os.getpid(), signal.SIGKILL)

trainer.train()
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the launched script trains on the CPU")
@pytest.mark.soak
def test_torchrun_starts_a_run_again_that_lost_a_rank(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "runs"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2", "--standalone"]
    command = [*launcher, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = folder.iterdir()
    described = json.loads((run / "run.json").read_text())
    assert described["outcome"] == "completed"
    assert len(described["attempts"]) >= 2
    assert [row["step"] for row in read_metrics(run) if "train/loss" in row] == list(range(1, 9))


def start_again(rank: int, folder: str, launch: str, restarts: int, seed: int, launcher: int | None) -> int:
    """Train for 8 steps, started by the process `launcher`, by default its own parent; return how many were left."""
    if launcher is not None:
        os.getppid = lambda: launcher
    os.environ.update(TORCHELASTIC_RUN_ID=launch, TORCHELASTIC_RESTART_COUNT=str(restarts if rank else 0))
    trainer = make_trainer("ddp", rank, 2, folder, seed=seed)
    trainer.add_hook("checkpoint", every=2)
    steps: list[int] = []
    trainer.on("step_end")(lambda step: steps.append(step))
    trainer.train()
    return len(steps)


@pytest.mark.parametrize("launch", ["none", "job-7"])
@pytest.mark.parametrize(
    ("seed", "is_other_launcher", "trained"),
    [(3, False, 0), (4, False, 8), (3, True, 8)],
    ids=["the same run", "another config", "another launch with the same id"],
)
def test_a_run_is_continued_by_its_own_launch_and_config_only(
    launch: str, seed: int, is_other_launcher: bool, trained: int, tmp_path: Path
) -> None:
    """The first start of a launch may have failed before it had a run; only rank 1's machine counts the restart."""
    run_on_ranks(start_again, 2, str(tmp_path), launch, 0, 3, None)
    launcher = os.getpid() if is_other_launcher else None
    again = run_on_ranks(start_again, 2, str(tmp_path), launch, 1, seed, launcher)
    assert [one.value for one in again] == [trained, trained]
    assert len(list(tmp_path.iterdir())) == (2 if trained else 1)
    said = "starting a new run" if trained else "continuing"
    assert f"the processes were started again (restart 1): {said}" in again[0].output


@pytest.mark.parametrize(
    ("edit", "is_continued"),
    [
        (lambda launch: launch, True),
        (lambda launch: {key: launch[key] for key in ("id", "run")}, False),
        (lambda launch: {**launch, "launchers": 3}, False),
        (lambda launch: {**launch, "launchers": [[]]}, False),
        (lambda launch: ["job-7"], False),
    ],
    ids=["its launch", "no launchers", "a number", "a list", "another shape"],
)
def test_a_run_with_an_unknown_launch_is_not_continued(
    edit: Callable[[Any], Any], is_continued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version began it, or it was edited."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    for restart in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        make_trainer("none", 0, 1, tmp_path, max_steps=2).train()
        if restart == 0:
            (path,) = tmp_path.glob("*/run.json")
            run = json.loads(path.read_text())
            launch = run["attempts"][0]["launch"]
            launch["run"] += 1  # the second run of this process
            run["attempts"][0]["launch"] = edit(launch)
            path.write_text(json.dumps(run))
    assert len(list(tmp_path.iterdir())) == (1 if is_continued else 2)


def resumed_or_started(rank: int, folder: str, kill_at: int | None) -> list[int]:
    trainer = make_trainer("ddp", rank, 2, folder, resume="auto")
    trainer.add_hook("checkpoint", every=2)
    steps: list[int] = []

    def collect(step: int) -> None:
        steps.append(step)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.on("step_end")(collect)
    trainer.train()
    return steps


def test_resume_or_start_is_decided_for_all_ranks(tmp_path: Path) -> None:
    """A launch of its own continues the killed run on every rank, and the next launch begins another."""
    killed = run_on_ranks(resumed_or_started, 2, str(tmp_path), 5, check=False)
    assert [one.exit_code for one in killed] == [-9, -9]
    (run,) = tmp_path.iterdir()
    assert [one.value for one in run_on_ranks(resumed_or_started, 2, str(tmp_path), None)] == [[5, 6, 7, 8]] * 2
    assert json.loads((run / "run.json").read_text())["outcome"] == "completed"
    started = run_on_ranks(resumed_or_started, 2, str(tmp_path), None)
    assert [one.value for one in started] == [[*range(1, 9)]] * 2
    assert len(list(tmp_path.iterdir())) == 2
