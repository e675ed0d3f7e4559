"""On a CUDA device: hooks change nothing, a stopped run resumes bit for bit, and saves need not be waited for."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_trainer
from stopped_runs import SaveAndStop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import ForwardHook, SimpleTrainer, TrainingHook

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms are refused without it


class Draws(TrainingHook):
    """Draws on the device and on the host at every batch."""

    def on_train_batch_start(self) -> None:
        torch.randn(3, device="cuda"), torch.rand(2)

    def on_train_batch_end(self) -> None:
        torch.randn(5, device="cuda")


class DrawsInside(ForwardHook):
    """Draws on the device during the forward pass."""

    def on_forward(self, output: Any) -> None:
        torch.rand_like(output)


class Busy(TrainingHook):
    """Keeps the device busy for some milliseconds."""

    def on_train_batch_end(self) -> None:
        torch.cuda._sleep(5_000_000)


def shuffled_trainer(*hooks: Any, steps: int = 24, **options: Any) -> SimpleTrainer:
    """Make a run in which dropout draws on the device at every step, and the loader shuffles on the host."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 4)).cuda()
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    loader, optimizer = DataLoader(data, batch_size=8, shuffle=True), torch.optim.AdamW(model.parameters(), lr=1e-2)
    return make_trainer(
        *hooks, model=model, data=loader, optimizer=optimizer, device="cuda", loss_fn=nn.CrossEntropyLoss(),
        max_steps=steps, max_epochs=9, seed=5, deterministic=True, **{"record": True, **options},
    )  # fmt: skip


def trained(*hooks: Any, resume: Path | None = None, **options: Any) -> SimpleTrainer:
    trainer = shuffled_trainer(*hooks, **options)
    trainer.fit(resume=resume)
    return trainer


def outcome(trainer: SimpleTrainer) -> tuple[list[bytes], bytes, bytes]:
    """Return the parameters, and the state of the random streams of the device and of the host."""
    params = [param.detach().cpu().view(torch.uint8).numpy().tobytes() for param in trainer.model.parameters()]
    return params, torch.cuda.get_rng_state().numpy().tobytes(), torch.get_rng_state().numpy().tobytes()


def digest(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.suffix == ".safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_hooks_that_draw_change_nothing() -> None:
    """A hook's draws on the device do not change those of training."""
    plain = outcome(trained())
    assert outcome(trained(Draws())) == plain
    assert outcome(trained(DrawsInside())) == plain
    assert outcome(trained(Draws(), DrawsInside())) == plain


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stop_at", [5, 8, 13])
def test_a_stopped_run_resumes_bit_for_bit(precision: str, stop_at: int) -> None:
    """Parameters and random streams are those of the uninterrupted run."""
    unbroken = outcome(trained(precision=precision))
    stopped = trained(SaveAndStop(stop_at), precision=precision)
    assert outcome(trained(resume=stopped.run_dir, precision=precision)) == unbroken


def test_a_save_in_the_background_is_the_state_of_its_step() -> None:
    """Training continues while the state is copied; the files are those of a synchronous save."""
    waited = trained(SaveAndStop(8, stop_at=20))
    background = trained(SaveAndStop(8, stop_at=20), async_save=True)
    digests = [digest(trainer.run_dir / "checkpoints") for trainer in (waited, background)]
    assert digests[0]
    assert digests[0] == digests[1]
    assert outcome(trained(resume=background.run_dir)) == outcome(trained())


def test_what_hooks_cost_on_the_device_is_measured() -> None:
    """The cost of a hook that launches long kernels and returns at once is measured."""
    trainer = trained(Busy(), steps=60)
    row = next(row for row in trainer.hooks.costs() if row["hook"].lower().startswith("busy"))
    assert row["device_seconds"] > 60 * 1e-3
    assert row["device_seconds"] > 5 * row["seconds"]
