"""`attach` in published scripts: at most five lines differ, and none of the output and no bit of the weights."""

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
EDITS: dict[str, list[tuple[str, str]]] = {
    "mnist": [
        ("import argparse\n", "import argparse\nimport hookline\n"),
        ("        loss.backward()\n", "        args.hl.backward(loss)\n"),
        (
            "    for epoch in range(1, args",
            "    args.hl = hookline.attach(model, optimizer)\n    args.hl.begin()\n    for epoch in range(1, args",
        ),
        ("    torch.save(", "    args.hl.end()\n    torch.save("),
    ],
    "nanogpt": [
        ("import torch\n", "import torch\nimport hookline\n"),
        ("for iter_num in", "hl = hookline.attach(model, optimizer)\nhl.begin()\nfor iter_num in"),
        ("        scaler.scale(loss).backward()\n", "        hl.backward(loss)\n"),
        ("\ntorch.save(", "\nhl.end()\ntorch.save("),
    ],
    "dcgan": [
        ("import torch\n", "import torch\nimport hookline\n"),
        (
            "for i, real in enumerate(dataset.split(batch_size)):\n",
            'hl = hookline.attach(nn.ModuleList([netG, netD]), {"D": optimizerD, "G": optimizerG})\nhl.begin()\n'
            "for i, real in enumerate(hl.batches(dataset.split(batch_size))):\n",
        ),
        ("\ntorch.save(", "\nhl.end()\ntorch.save("),
    ],
}  # fmt: skip
STEPS = {"mnist": (50, True), "nanogpt": (30, True), "dcgan": (60, False)}
"""The steps that a script makes, and whether the lines report its losses."""


def run(directory: Path, code: str) -> tuple[str, list[torch.Tensor]]:
    """Run a script; return what it prints, and its weights."""
    directory.mkdir()
    (directory / "script.py").write_text(code)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    printed = subprocess.check_output([sys.executable, "script.py"], cwd=directory, env=environment, text=True)
    saved: dict[str, Any] = torch.load(directory / "model.pt")
    states = saved.values() if isinstance(next(iter(saved.values())), dict) else [saved]
    return printed, [tensor for state in states for tensor in state.values()]


@pytest.mark.parametrize("name", EDITS)
def test_five_lines_are_enough(name: str, tmp_path: Path) -> None:
    """The script prints and trains what it did, and the record has all of its steps."""
    before = after = (SCRIPTS / f"{name}.py").read_text()
    for old, new in EDITS[name]:
        assert after.count(old) == 1, old
        after = after.replace(old, new)
    different = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("+ ")]
    assert len(different) <= 5
    printed, weights = run(tmp_path / "plain", before)
    printed_by_both, weights_attached = run(tmp_path / "attached", after)
    ours = [line for line in printed_by_both.splitlines() if line not in printed.splitlines()]
    assert printed_by_both.splitlines() == [*printed.splitlines(), *ours]
    assert all(line.startswith(("completed", "report: ", "not judged: ")) for line in ours)
    assert all(map(torch.equal, weights, weights_attached))
    (directory,) = (tmp_path / "attached" / "runs").iterdir()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps, has_loss = STEPS[name]
    assert sum("train/lr" in row for row in rows) == steps
    assert sum("train/loss" in row for row in rows) == (steps if has_loss else 0)
