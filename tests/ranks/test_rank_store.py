"""The store through which ranks report failures takes no message of a stranger."""

import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import make_trainer

from hookline import rank_watch, ranks


def server_of(store: Any) -> Any:
    """Return the store without the prefixes of its keys."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def listening_addresses(port: int) -> set[str]:
    """Return the addresses at which this machine listens to a port, in hexadecimal as the kernel writes them."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in local if int(number, 16) == port}


def train_and_look(rank: int) -> list[str]:
    trainer, found = make_trainer("ddp", rank, 2, None), set[str]()
    trainer.on("step_end", at=1)(lambda: found.update(listening_addresses(server_of(trainer.ranks._store).port)))
    trainer.train()
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_ranks_of_one_machine_listen_to_that_machine_only() -> None:
    assert [one.value for one in run_on_ranks(train_and_look, 2)] == [["0100007F"]] * 2


def train_with_a_stranger(rank: int) -> int:
    """Train as on two machines; a stranger reports a failure to the store, and the watch looks twice for one."""
    rank_watch.BEAT_SECONDS, os.environ["MASTER_ADDR"] = 0.02, "127.0.0.1"
    ranks.host = lambda: f"machine-{rank}"
    trainer = make_trainer("ddp", rank, 2, None)

    def interfere() -> None:
        address = "127.0.0.1", server_of(trainer.ranks._store).port
        stranger = torch.distributed.TCPStore(*address, None, False, timedelta(seconds=60), False)
        if hasattr(stranger, "list_keys"):
            keys = set(map(str, stranger.list_keys())) - {"run 1/failed"}
            assert all(re.match("[0-9a-f]{32,}/run 1/", key) for key in keys), keys
        stranger.set("run 1/failed", '{"rank": 5, "step": 1, "error": "forged"}')
        seen = trainer.ranks._watch._beats
        while trainer.ranks._watch._beats < seen + 3 and trainer.ranks._watch.failure is None:
            time.sleep(0.01)

    trainer.on("step_end", at=2, on_error="raise")(interfere)
    trainer.train()
    return trainer.step


def test_a_message_of_a_stranger_does_not_end_a_run() -> None:
    assert [one.value for one in run_on_ranks(train_with_a_stranger, 2)] == [8, 8]
