"""Where the callbacks of hosts mean something else than our events: corrected, or refused by name with the reason."""

import warnings
from typing import Any

import lightning
import pytest
import torch
from hosted_loops import FOREIGN, Loop, Net, Recorder, make_batches
from lightning.pytorch.plugins import MixedPrecision
from transformers import TrainerCallback

from hookline import TrainingHook, UpdateHook
from hookline.errors import RegistrationError

SCALE = 1024.0


class Seen(TrainingHook):
    """What hooks are shown of losses and gradients."""

    on_error = "raise"

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.ready: list[float] = []
        self.skipped: list[str] = []

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())

    def on_gradients_ready(self, grads: Any) -> None:
        self.ready.append(norm(grads.values()))

    def on_before_optimizer_step(self, grads: Any) -> None:
        self.norms.append(norm(grads.values()))

    def on_step_skipped(self, reason: str) -> None:
        self.skipped.append(reason)


def norm(tensors: Any) -> float:
    return float(torch.nn.utils.get_total_norm([tensor for tensor in tensors if tensor is not None]))


def first_losses() -> list[float]:
    """Return the losses of the first two micro-batches, before any step."""
    model = Net()
    return [model(**batch)["loss"].item() for batch in make_batches()[:2]]


def scaled(scale: float = SCALE) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


class FullPrecision(MixedPrecision):
    """Lightning's scaling of losses without half precision, so that losses can be compared."""

    def autocast_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)


def scaled_lightning(scaler: Any) -> dict[str, Any]:
    return {"plugins": [FullPrecision("16-mixed", "cpu", scaler)]}


def test_lightning_shows_the_loss_scaled_and_divided() -> None:
    """A callback of Lightning's sees 512 times the loss; hooks see the loss of the micro-batch."""
    shown: list[float] = []

    class Native(lightning.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
            shown.append(loss.item())

    options = {"callbacks": [Native()], **scaled_lightning(scaled())}
    Loop("lightning", hooks=[seen := Seen()], accumulate=2, options=options).run()
    assert seen.losses[:2] == first_losses()
    assert shown[:2] == [loss * SCALE / 2 for loss in first_losses()]


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    """Lightning and transformers divide for accumulation; the recorded loss of a step is comparable everywhere."""
    for host in FOREIGN:
        Loop(host, hooks=[recorder := Recorder()], accumulate=2).run()
        assert recorder.losses[0] == pytest.approx(sum(first_losses()) / 2), host


def test_transformers_sums_the_losses_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes `num_items_in_batch` returns a share of the step's loss; the recorded loss is their sum."""

    def forward(self: Net, inputs: Any, labels: Any, num_items_in_batch: Any = None, **_: Any) -> dict[str, Any]:
        seen = plain(self, inputs, labels)
        if num_items_in_batch is not None:
            seen["loss"] = seen["loss"] * labels.numel() / num_items_in_batch
        return seen

    plain = Net.forward
    monkeypatch.setattr(Net, "forward", forward)
    loop = Loop("transformers", hooks=[recorder := Recorder(), seen := Seen()], accumulate=2).run()
    shown = [entry["loss"] for entry in loop.host_trainer.state.log_history if "loss" in entry]
    assert recorder.losses == pytest.approx(shown, rel=1e-4) and recorder.losses[0] > seen.losses[0]
    assert recorder.losses[0] == pytest.approx(sum(first_losses()) / 2)
    assert seen.losses[:2] == pytest.approx([loss / 2 for loss in first_losses()])


def test_lightning_steps_after_its_clipping() -> None:
    """A callback of Lightning's sees the gradients before clipping; hooks see those that the optimizer uses."""
    shown: list[float] = []

    class Native(lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            shown.append(norm(param.grad for param in pl_module.parameters()))

    Loop("lightning", hooks=[seen := Seen()], options={"callbacks": [Native()], "gradient_clip_val": 0.01}).run()
    assert min(shown) > 1
    assert seen.norms == pytest.approx([0.01] * 8, rel=1e-3)


def test_transformers_clips_before_hooks(caplog: pytest.LogCaptureFixture) -> None:
    """The Trainer's on_pre_optimizer_step comes after its clipping, as hooks do: a warning says what to set."""
    shown: list[float] = []

    class Native(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            shown.append(norm(param.grad for param in model.parameters()))

    options = {"max_grad_norm": 0.01, "callbacks": [Native()]}
    Loop("transformers", hooks=[seen := Seen()], options=options).run()
    assert seen.ready == shown == pytest.approx([0.01] * 8, rel=1e-3)
    assert "clips gradients at 0.01 before hooks get them; to see them before, set `max_grad_norm=0`" in caplog.text
    caplog.clear()
    Loop("transformers", hooks=[seen := Seen()]).run()
    assert min(seen.ready) > 1 and "clips" not in caplog.text


def test_transformers_ends_the_epoch_before_its_evaluation() -> None:
    """The Trainer's on_epoch_end comes before on_evaluate; the hooks' on_epoch_end comes after on_validation_end."""
    order: list[str] = []

    class Native(TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            order.append("epoch")

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            order.append("validation")

    data = make_batches(2, seed=2)
    Loop("transformers", hooks=[recorder := Recorder()], val_data=data, options={"callbacks": [Native()]}).run()
    assert order == ["epoch", "validation"] * 2
    ends = [event for event in recorder.events if event in ("on_validation_end", "on_epoch_end")]
    assert ends == ["on_validation_end", "on_epoch_end"] * 2


def scaler_options(host: str, scaler: Any) -> dict[str, Any]:
    if host == "lightning":
        return {"options": scaled_lightning(scaler)}
    if host == "transformers":
        return {"options": {"scaler": scaler}}
    return {"attach_options": {"scaler": scaler}, "options": {"scaler": scaler}}


class Doubled(UpdateHook):
    def on_update(self, grads: Any) -> Any:
        return {name: grad * 2 for name, grad in grads.items()}


@pytest.mark.parametrize("host", ["lightning", "transformers"])
def test_gradients_are_unscaled(host: str) -> None:
    """Under a GradScaler hooks get the gradients that they get without one."""
    Loop(host, hooks=[plain := Seen()]).run()
    Loop(host, hooks=[seen := Seen()], **scaler_options(host, scaled())).run()
    assert seen.ready[0] == pytest.approx(plain.ready[0], rel=1e-5)
    assert seen.losses[0] == plain.losses[0]


@pytest.mark.parametrize("host", ["lightning", "transformers"])
def test_a_step_that_the_scaler_skips_is_recorded(host: str) -> None:
    """The first step overflows: the optimizer is not called, and hooks are told why."""
    data = make_batches()
    data[0]["inputs"] = data[0]["inputs"] * 1e30
    loop = Loop(host, hooks=[seen := Seen()], data=data, epochs=1, **scaler_options(host, scaled())).run()
    assert seen.skipped == ["the GradScaler skipped the step: non-finite gradients"]
    assert loop.control.step == 4 and loop.control.skipped_steps == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_under_a_scaler_is_shown_scaled_gradients(fused: bool) -> None:
    """A step hook of torch's sees 1024 times the gradients of a fused optimizer, which unscales inside of its step."""
    model, scaler = Net(), scaled()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    shown: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: shown.append(norm(param.grad for param in model.parameters())))
    (batch,) = make_batches(1)
    plain = norm(torch.autograd.grad(model(**batch)["loss"], list(model.parameters())))
    scaler.scale(model(**batch)["loss"]).backward()
    scaler.step(optimizer)
    assert shown == [pytest.approx(plain * SCALE if fused else plain, rel=1e-5)]


@pytest.mark.parametrize("host", ["lightning", "transformers", "ignite", "attach"])
def test_a_fused_optimizer_under_a_scaler_is_refused(host: str) -> None:
    """Its gradients are scaled when hooks get them, so hooks that read or change them are refused before a step."""
    loop = Loop(
        host, hooks=[Doubled()], make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        **scaler_options(host, scaled()),
    )  # fmt: skip
    loop.options = {} if host in ("ignite", "attach") else loop.options
    with warnings.catch_warnings(), pytest.raises(RegistrationError, match="fused=False") as caught:
        warnings.simplefilter("ignore")
        loop.run()
    assert "'doubled' needs a run that has unscaled gradients" in str(caught.value)
