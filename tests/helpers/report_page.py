"""Read the data of a report, and write records with much or with hostile content."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookline.record import Record


def read_page(path: Path | str | bytes) -> dict[str, Any]:
    """Return the data of a report."""
    html = path.decode() if isinstance(path, bytes) else Path(path).read_text(encoding="utf-8")
    blocks = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert len(blocks) == 1
    return dict(json.loads(blocks[0]))


def curve_of(page: dict[str, Any], name: str, part: str = "mean", run: int = 0) -> list[float]:
    """Return the steps or the values of a curve in a page."""
    data = base64.b64decode(page["arrays"][page["runs"][run]["curves"][name][part]])
    return list(np.frombuffer(data, "<f8" if part == "steps" else "<f4").tolist())


def write_record(root: Path, run_id: str, steps: int = 60, *, lr: float = 0.1, text: str = "", layers: int = 6) -> Path:
    """Write the record of a run with everything that a report shows; `text` is added to every name and text."""
    hook = {"name": f"watch{text}", "kind": "lifecycle", "enabled": True, "policy": "warn", "schedule": f"always{text}",
            "failures": 1, "parameters": {f"key{text}": f"value{text}"}}  # fmt: skip
    config = {"optimizer": {"name": "sgd", "lr": lr}, "notes": text, "trainer": {"max_steps": steps}}
    record = Record.on_disk(root, config=config, seed=1, run_id=run_id)
    record.start([hook], lineage={"run_id": f"parent{text}", "step": 3})
    names = [f"blocks.{index}.mlp{text}" for index in range(layers)]
    draw = np.random.default_rng(int(lr * 100)).normal
    for step in range(1, steps + 1):
        record.log(step, 0, "train/loss", 4 * step**-0.3 + 0.05 * draw())
        record.log(step, 0, "lr", lr * min(step / 10, 1))
        record.log(step, 0, f"mine{text}/number", step / 7)
        if step % 10 == 0:
            record.log(step, 0, "val/loss", 4.2 * step**-0.3)
            record.log(step, 0, "throughput/step_seconds", 0.05)
            record.log(step, 0, "throughput/data_wait_seconds", 0.01)
            values = torch.rand(layers, 3) + 0.01
            values[:, 2] = 0
            if step == 40:
                values[1] = torch.tensor([float("nan"), float("nan"), 5.0])
            record.log_layers("gradients", step, names, [f"std{text}", "norm", "nans"], values)
    record.event("checkpoint_saved", 20, path=f"checkpoints/step-00000020{text}")
    record.event("hook_failed", 30, hook=f"watch{text}", on="on_step_end", message=f"raised{text}", error=f"E{text}")
    record.event("non_finite_loss", 40, value=float("nan"))
    record.event("stop_requested", 50, by=f"watch{text}", reason=f"done{text}")
    table = [[f"cell{text}", 1.5], ["b", float("nan")]]
    record.log_table(steps, 0, f"table{text}", [f"name{text}", "value"], table)
    record.log_image(steps, 0, f"image{text}", torch.rand(8, 8))
    costs = [{"hook": f"watch{text}", "kind": "lifecycle", "calls": steps, "seconds": 0.3}]
    record.close("stopped", f"reason{text}", [hook], costs, {"step": steps, "seconds": 3.2})
    labels = {"version": 1, "name": f"{run_id}{text}"[:150], "tags": [f"tag{text}"[:90]], "notes": f"note{text}"}
    (record.path / "labels.json").write_text(json.dumps(labels))
    return record.path
