"""Keep your own training loop: attach hooks, record and report to it."""

import torch

import hookline
from hookline import StopTraining, TrainingHook


class Progress(TrainingHook):
    """Print the progress; it is registered with a schedule."""

    def on_step_end(self, step: int, loss: float, grad_norm: float) -> None:
        print(f"step {step}: loss {loss:.3f}, norm {grad_norm:.3f}")


class Enough(TrainingHook):
    """End the loop."""

    def on_step_end(self, step: int) -> None:
        if step == 30:
            raise StopTraining("30 steps are enough")


def main() -> None:
    """Run a plain loop with hooks in it; their events are fired by `attach`."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [(torch.randn(8, 4), torch.zeros(8, 1)) for _ in range(100)]
    hooks = hookline.HookManager([hookline.ClipNorm(1.0), Enough()])
    hooks.register(Progress(), every=10)
    with hookline.attach(model, optimizer, hooks=hooks, output_dir=None) as hl:
        for inputs, target in hl.batches(loader):
            loss = torch.nn.functional.mse_loss(model(inputs), target)
            hl.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(f"stopped after step {hl.run.step}: {hl.run.stop_reason}")


if __name__ == "__main__":
    main()
