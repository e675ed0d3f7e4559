"""Loops that are not one backward pass and one step: closures, several optimizers, a resume inside an epoch."""

import shutil
from typing import Any

import lightning
import pytest
import torch
from hosted_loops import ADAPTERS, Loop, Net, Recorder, digest, make_batches

import hookline
from hookline import TrainingHook
from hookline.lightning import Hooks

CLIP = {"update": [{"name": "clip_norm", "max_norm": 0.5}]}


def lbfgs(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def test_a_closure_that_runs_several_times() -> None:
    """LBFGS in Lightning: gradients are clipped at every call of the closure, and a step counts once, as in a loop."""
    model, mine = Net(), Recorder()
    optimizer = lbfgs(model)
    with hookline.attach(model, optimizer, CLIP, hooks=[mine]) as hl:
        for batch in hl.batches(make_batches()):

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(**batch)["loss"]
                hl.backward(loss)
                return loss

            optimizer.step(closure)
    loop = Loop("lightning", CLIP, [theirs := Recorder()], epochs=1, make_optimizer=lbfgs).run()
    assert digest(loop.model) == digest(model) and loop.control.step == 4
    assert theirs.losses == mine.losses


def test_two_optimizers_that_step_separately() -> None:
    """Lightning's manual optimization: each optimizer makes steps of its own, with its own gradients and losses."""

    class Pair(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = Net(), Net()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                loss = net(**batch)["loss"]
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(net.parameters(), lr=1e-2) for net in (self.first, self.second)]

    pair, recorder = Pair(), Recorder()
    callback = Hooks(CLIP, hooks=[recorder])
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], **options)
    trainer.fit(pair, torch.utils.data.DataLoader(make_batches(), batch_size=None))
    assert callback.run.step == 8 and digest(pair.first) == digest(pair.second)
    assert recorder.losses[::2] == recorder.losses[1::2] and recorder.norms[::2] == recorder.norms[1::2]


def test_transformers_resumes_inside_an_epoch() -> None:
    """The epoch goes on with its number and its batches, and ends with equal weights."""
    whole = Loop("transformers", CLIP, [Recorder()]).run()
    Loop("transformers", CLIP, [Recorder()], options={"save_strategy": "steps", "save_steps": 3}).run()
    for step in (6, 8):
        shutil.rmtree(f"hf/checkpoint-{step}", ignore_errors=True)
    loop = Loop("transformers", CLIP, [recorder := Recorder()], options={"resume": True}).run()
    assert digest(loop.model) == digest(whole.model)
    assert recorder.events[:3] == ["on_checkpoint_load", "on_train_start", "on_train_batch_start"]
    assert (loop.control.step, loop.control.epoch, loop.control.progress.batches) == (8, 1, 8)


def test_a_callback_that_is_added_to_a_trainer() -> None:
    """`add_callback` works as `callbacks=[…]` does, also if a training step fails."""
    usual = Loop("transformers", CLIP, [Recorder()]).run()
    assert digest(Loop("transformers", CLIP, [Recorder()], options={"late": True}).run().model) == digest(usual.model)
    data = make_batches()
    data[2]["labels"] = torch.zeros(3, 3)
    loop = Loop("transformers", CLIP, [recorder := Recorder()], data=data, options={"late": True})
    with pytest.raises(RuntimeError, match="must match"):
        loop.run()
    run = loop.callback.run
    assert run.record.run["outcome"] == "failed" and recorder.events[-2:] == ["on_exception", "on_train_end"]
    assert not {"compute_loss", "training_step"} & vars(loop.host_trainer).keys()
    assert not loop.optimizer._optimizer_step_pre_hooks


class Interrupt(TrainingHook):
    on_error = "raise"

    def on_step_end(self, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("host", ADAPTERS)
def test_ctrl_c_ends_the_record(host: str) -> None:
    """The record says that the run was interrupted, after the steps that it made."""
    loop = Loop(host, hooks=[Interrupt()])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        loop.run()
    assert loop.control.record.run["outcome"] == "interrupted" and loop.control.step == 3
