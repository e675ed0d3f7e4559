"""Models that are pickled and copied while they are watched."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookline import HookManager, SimpleTrainer

INPUT = torch.randn(2, 4)


def make_model() -> nn.Module:
    """Small."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def watched(model: nn.Module, *more: str) -> HookManager:
    """With a clock before its modules if asked, and the torch hook that waits for a compiler."""
    manager = HookManager()
    manager.watch(model)
    manager.register_monitoring_hook("*", "costs", metrics=["mean", *more])
    manager.register_capture_hook("0", "first")
    return manager


def unwatch(manager: HookManager) -> None:
    """No torch hook is left."""
    for name in ("costs", "first"):
        manager.remove_hook(name)


def test_a_watched_model_can_be_pickled() -> None:
    """What comes back computes the same, and nobody hears it."""
    model = make_model()
    manager = watched(model, "time", "memory")
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(INPUT), model(INPUT))
    assert len(manager.get_captured_states("first")) == 1
    again(INPUT)
    assert len(manager.get_captured_states("first")) == 1
    unwatch(manager)


def test_a_watched_model_can_be_saved_inside_a_block_that_captures() -> None:
    """Modules are called in a shorter way there."""
    model = make_model()
    file = io.BytesIO()
    with HookManager().capturing(model) as cache:
        output = model(INPUT)
        torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(INPUT), output) and len(cache) == 3


def test_where_it_is_loaded_nobody_needs_hookline(tmp_path: Path) -> None:
    """The file names nothing of ours, and torch compiles the model in one piece."""
    model = make_model()
    manager = watched(model, "time")
    torch.save(model, tmp_path / "model.pt")
    unwatch(manager)
    program = f"""
import sys, torch
from torch._dynamo.testing import CompileCounter
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
counter = CompileCounter()
torch.compile(model, backend=counter)(torch.ones(2, 4))
assert counter.frame_count == 1, counter.frame_count
assert not [name for name in sys.modules if name.startswith("hookline")]
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True, timeout=120)


def test_a_copy_is_not_watched() -> None:
    """What it computes is the same, and nobody takes it for the original's."""
    model = make_model()
    manager = watched(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(INPUT), model(INPUT))
    assert len(manager.get_captured_states("first")) == 1
    unwatch(manager)


def test_a_hook_may_save_the_model_of_a_run(tmp_path: Path) -> None:
    """While a monitor of the same run watches it."""
    model = make_model()
    data = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(2)]
    saved: list[Any] = []
    trainer = SimpleTrainer(
        model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu",
        loss_fn=nn.functional.mse_loss, record=False, console=False,
    )  # fmt: skip
    trainer.add_hook("monitor", modules="*")
    trainer.on("train_batch_end", name="saves", on_error="raise")(lambda model: saved.append(pickle.dumps(model)))
    trainer.train()
    assert torch.equal(pickle.loads(saved[-1])(INPUT), model(INPUT))


def test_compiled_and_watched_it_can_be_pickled() -> None:
    """The compiled call stays behind, as torch has it."""
    model = make_model()
    manager = watched(model)
    model[0].compile(backend="eager")
    expected = model(INPUT)
    assert torch.equal(pickle.loads(pickle.dumps(model))(INPUT), expected)
    unwatch(manager)
