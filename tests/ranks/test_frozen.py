"""A process that is frozen is noticed by the others, rank 0 too, which hosts the store that they ask."""

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from threading import Thread, get_ident

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import make_trainer

from hookline import rank_watch, ranks
from hookline.errors import RankError


def stop_when_in_backward(main: int) -> None:
    """Stop this process once its main thread waits for the other rank in a backward pass, and its beats say so."""
    while "_engine_run_backward" not in [frame.name for frame in traceback.extract_stack(sys._current_frames()[main])]:
        time.sleep(0.05)
    time.sleep(5 * rank_watch.BEAT_SECONDS)
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.05)


def freeze(rank: int, folder: str, frozen: int, where: str) -> None:
    """Train until a rank stops itself: after step 3, in the next backward pass, or while the record is closed.

    When the other one has ended, the stopped process is ended, too.
    """
    rank_watch.BEAT_SECONDS, rank_watch.GRACE_SECONDS = 0.1, 0.5
    trainer = make_trainer("ddp", rank, 2, folder, rank_timeout=5.0)
    pids = trainer.ranks.gather(os.getpid())
    if rank == frozen and os.fork() == 0:  # the helper process
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pids[1 - frozen], 0)
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[frozen], signal.SIGKILL)
        os._exit(0)

    def stop() -> None:
        if rank != frozen:
            if where == "backward":
                wait_until_stopped(pids[frozen])
        elif where == "backward":
            Thread(target=stop_when_in_backward, args=(get_ident(),), daemon=True).start()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    if where == "close":
        trainer.change_audit.finish = stop  # called after the last hook
    else:
        trainer.on("step_end", at=3)(stop)
    trainer.train()


@pytest.mark.parametrize(("frozen", "where"), [(0, "step"), (1, "step"), (1, "backward"), (0, "close"), (1, "close")])
def test_a_frozen_rank_is_noticed(frozen: int, where: str, tmp_path: Path) -> None:
    """Also if the ranks wait for each other, at the same place; the frozen one no longer beats."""
    results = run_on_ranks(freeze, 2, str(tmp_path), frozen, where, check=False)
    other = results[1 - frozen]
    assert other.exit_code == 1, other.error + other.output
    why = "its process has not answered for 5 s" if frozen == 0 else "no batch for 5 s"
    assert re.search(rf"rank {frozen} failed at step \d: {why} \(rank_timeout\)", other.error + other.output)


def wait_for_all(rank: int) -> str:
    """Return what the ranks are told if rank 0 makes no trainer."""
    ranks.CONNECT_SECONDS = 1.0
    if rank == 0:
        return ""
    with pytest.raises(RankError) as raised:
        ranks.find_ranks(0.5)
    os._exit(3 if "rank 1 has waited 1 s for the other ranks to make a trainer" in str(raised.value) else 4)


def test_the_start_does_not_wait_forever_for_a_rank() -> None:
    assert [one.exit_code for one in run_on_ranks(wait_for_all, 2, check=False)] == [0, 3]


def freeze_before_training(rank: int, where: str) -> None:
    """Freeze rank 1 before `train()` of the first or the second run, or when it connects to rank 0's store."""
    ranks.CONNECT_SECONDS = 1.0
    trainer = make_trainer("ddp", rank, 2, None, max_steps=2, rank_timeout=5.0)
    pids = trainer.ranks.gather(os.getpid())
    if where == "second run":
        trainer.train()
        trainer = make_trainer("ddp", rank, 2, None, max_steps=2, rank_timeout=5.0)
    if rank == 1 and where == "connection":
        torch.distributed.TCPStore = lambda *_, **__: (os.kill(os.getpid(), signal.SIGSTOP), time.sleep(600))
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        trainer.train()
    except RankError as error:
        is_right = "rank 0 has waited 5 s for the other ranks to begin the run; raise rank_timeout" in str(error)
        try:  # as at the end of a process, which waits for every collective that has begun
            rank_watch.call_within(60.0, torch.distributed.destroy_process_group)
        finally:
            os.kill(pids[1], signal.SIGKILL)
        os._exit(3 if is_right else 4)


@pytest.mark.parametrize("where", ["first run", "second run", "connection"])
def test_a_rank_that_freezes_before_its_run_begins_is_noticed(where: str) -> None:
    codes = [one.exit_code for one in run_on_ranks(freeze_before_training, 2, where, check=False)]
    assert codes == [3, -signal.SIGKILL]
