"""Captured states on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from hookline import HooklineError, HookManager, SimpleTrainer, Trainer

BATCHES = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]


def trained(hooks: dict[str, Any], **options: Any) -> Trainer:
    """One epoch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    options = {"loss_fn": nn.functional.mse_loss, "console": False, **options}
    trainer = SimpleTrainer(model, BATCHES, torch.optim.SGD(model.parameters(), 0.1), "cpu", hooks=hooks, **options)
    trainer.train()
    return trainer


def keys_of(path: Path) -> tuple[list[str], dict[str, str]]:
    """The names in a file, and what it says of each."""
    with safe_open(path, "pt") as file:
        return sorted(file.keys()), file.metadata()


def test_a_config_may_ask_for_what_is_kept_at_the_end() -> None:
    """The newest states, with module, call and step; other captures write nothing."""
    entry = {"name": "capture", "modules": "1", "max_captured_states": 2, "dtype": "bfloat16"}
    trainer = trained({"forward": [{**entry, "save": True}, {**entry, "as": "other"}]})
    assert trainer.run_dir is not None
    assert [path.name for path in (trainer.run_dir / "captures").iterdir()] == ["capture.safetensors"]
    keys, about = keys_of(trainer.run_dir / "captures" / "capture.safetensors")
    assert keys == ["1/4/outputs/0", "1/5/outputs/0"]
    assert about["1/5/outputs/0"].startswith("step=5 phase=train")


def test_a_hook_s_name_leads_nowhere_else() -> None:
    """Whatever it is."""
    trainer = trained({"forward": [{"name": "capture", "as": "../../away", "modules": "0", "save": True}]})
    assert trainer.run_dir is not None
    assert [path.name for path in (trainer.run_dir / "captures").iterdir()] == ["_away.safetensors"]


def test_a_run_that_fails_saves_too() -> None:
    """What was captured until then is what one wants to see."""
    model = nn.Sequential(nn.Linear(3, 4))
    trainer = SimpleTrainer(
        model, BATCHES, torch.optim.SGD(model.parameters(), 0.1), "cpu",
        hooks={"forward": [{"name": "capture", "save": True}]}, loss_fn=lambda output, target: 1 / 0, console=False,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trainer.run_dir is not None
    assert keys_of(trainer.run_dir / "captures" / "capture.safetensors")[0] == ["0/1/outputs/0"]


def test_without_a_record_there_is_nowhere_to_save(caplog: pytest.LogCaptureFixture) -> None:
    """Which is said."""
    trained({"forward": [{"name": "capture", "save": True}]}, record=False)
    assert "has nowhere to save what it captured" in caplog.text


@pytest.mark.parametrize("metrics", ["mean", [], ()])
def test_metrics_are_a_list(metrics: Any) -> None:
    """A word would be read letter by letter, and nothing is nothing to monitor."""
    with pytest.raises(HooklineError, match="is no list of metrics; give some of"):
        HookManager().register_monitoring_hook(nn.Linear(1, 1), "m", metrics=metrics)


def test_a_full_disk_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error; the old captures are still there, and nothing half-written is."""
    model = nn.Sequential(nn.Linear(3, 4))
    manager = HookManager()
    with manager.capturing(model) as cache:
        model(torch.randn(2, 3))
    path = cache.save(tmp_path / "captures.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(HooklineError, match=r"cannot write .*captures.safetensors: No space left on device; free"):
        cache.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
