"""A launcher that starts failed processes again continues their run, in its directory."""

import json
import os
import signal
from pathlib import Path

import pytest
from rank_processes import run_on_ranks
from rank_runs import make_trainer


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
    assert [len(run["attempts"]) for run in described] == [2, 2]
    assert all(run["outcome"] == "completed" for run in described)


def test_another_launch_starts_another_run(tmp_path: Path) -> None:
    run_on_ranks(launched, 2, str(tmp_path), 0, None, "job-1")
    run_on_ranks(launched, 2, str(tmp_path), 1, None, "job-2")
    assert len(list(tmp_path.iterdir())) == 4
