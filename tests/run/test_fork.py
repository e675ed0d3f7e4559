"""A process that a hook forks must not train on in the same run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import os, sys, torch
from hookline import get_trainer
model = torch.nn.Linear(4, 1)
batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
trainer = get_trainer(
    "simple", model, batches, torch.optim.SGD(model.parameters(), lr=0.1), "cpu", max_epochs=1, console=False,
    loss_fn=torch.nn.functional.mse_loss, output_dir="runs",
)

@trainer.on("step_end", at=2, name="forks")
def fork():
    child = os.fork()
    if child:
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    elif sys.argv[1] == "exits":
        sys.exit(7)

trainer.train()
print("trained", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("how", "status", "line"), [("exits", 7, ""), ("returns", 1, "it ends here")])
def test_a_forked_copy_of_a_run_writes_nothing(how: str, status: int, line: str, tmp_path: Path) -> None:
    """It had written every later row twice, and the outcome of whichever process came last."""
    script = [sys.executable, "-c", RUN, how]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == [f"child {status}", "trained"] and line in done.stderr
    (run,) = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(run.read_text())["outcome"] == "completed"
    rows = [json.loads(row) for row in (run.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
