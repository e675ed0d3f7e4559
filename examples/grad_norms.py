"""Log each parameter's gradient norm, before clipping, to a tracker."""

from collections.abc import Mapping

import torch

from hookline import TrainingHook, get_trainer


class FakeTracker:
    """A stand-in for a tracker such as Weights & Biases: it takes a dict and a step."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Print what a tracker would plot."""
        print(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))


class GradHistogramHook(TrainingHook):
    """Log the norm of every gradient.

    At `on_gradients_ready` the gradients are complete, unscaled and not clipped yet; at `on_step_end` they are gone.
    The norms are copied to the host together, because each copy waits for the device.
    """

    def __init__(self, tracker: FakeTracker) -> None:
        self.tracker = tracker

    def on_gradients_ready(self, grads: Mapping[str, torch.Tensor], step: int) -> None:
        norms = torch.stack([grad.norm() for grad in grads.values()]).tolist()
        self.tracker.log({f"grad_norm/{name}": norm for name, norm in zip(grads, norms, strict=True)}, step)


def main() -> None:
    """Train one epoch and log every fifth step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(20)]
    trainer = get_trainer(
        "simple", model, batches, optimizer, "cpu",
        loss_fn=torch.nn.functional.mse_loss, max_grad_norm=0.1, record=False,
    )  # fmt: skip
    trainer.add_hook(GradHistogramHook(FakeTracker()), every=5)
    trainer.train()


if __name__ == "__main__":
    main()
