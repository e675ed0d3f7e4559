"""Several ranks are one run: one directory, one record, one console; the same hooks, filtered by rank."""

import json
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_on_ranks
from rank_runs import make_trainer, whole_weights

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
        assert result.value == pytest.approx(alone, rel=1e-5)
    files = [sorted(p.name for p in next((tmp_path / count).iterdir()).rglob("*")) for count in ("one", "two")]
    assert files[0] == files[1]
    run = json.loads(next((tmp_path / "two").glob("*/run.json")).read_text())
    assert run["attempts"][0]["world_size"] == 2
    assert list(run["attempts"][0]["ranks"].values()) == [[0, 1]]
    assert results[1].output == ""
    assert results[0].output.count("completed") == 1
