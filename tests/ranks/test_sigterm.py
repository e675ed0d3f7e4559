"""SIGTERM to every process of a run, and once more from the launcher, ends it with a checkpoint and an outcome."""

import json
import os
import signal
from pathlib import Path

import pytest
from rank_processes import run_on_ranks
from rank_runs import make_trainer

from hookline.trainer import signals


def terminated(rank: int, folder: str, first: list[int], again: str) -> None:
    signals.REPEAT_SECONDS = 1e9
    trainer = make_trainer("ddp", rank, 2, folder)

    def send() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    trainer.on("after_backward", name="first", at=3)(lambda: send() if rank in first else None)
    trainer.on(again, name="again")(lambda step: send() if step >= 3 else None)
    trainer.train()


@pytest.mark.parametrize("first", [[0, 1], [1]], ids=["to all ranks", "to one rank first"])
@pytest.mark.parametrize("again", ["before_optimizer_step", "checkpoint_save", "train_end"])
def test_two_sigterms_are_one_request(first: list[int], again: str, tmp_path: Path) -> None:
    """Whenever the second one comes: in the step, after the save, or while the record is closed."""
    results = run_on_ranks(terminated, 2, str(tmp_path), first, again, check=False)
    assert [one.exit_code for one in results] == [143, 143], "\n".join(one.error + one.output for one in results)
    (run,) = tmp_path.iterdir()
    described = json.loads((run / "run.json").read_text())
    assert (described["outcome"], described["reason"]) == ("interrupted", "SIGTERM")
    assert len(list((run / "checkpoints").iterdir())) == 1
