"""Use hooks in your own training loop, by firing the events by hand."""

import torch

from hookline import HookRunner, StepContext, StopTraining, TrainingHook


class Progress(TrainingHook):
    """Print the progress; it is registered with a schedule."""

    def on_step_end(self, ctx: StepContext) -> None:
        print(f"step {ctx.step}: loss {ctx.loss:.3f}, norm {ctx.grad_norm:.3f}")

    def on_train_end(self, step: int, tokens_seen: int) -> None:
        print(f"done after {step} steps and {tokens_seen} tokens")


class Enough(TrainingHook):
    """End the loop: in your own loop, StopTraining is raised by the call that fires the event."""

    def on_step_end(self, step: int) -> None:
        if step == 30:
            raise StopTraining("30 steps are enough")


def main() -> None:
    """Run a plain loop that fires three events."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = HookRunner([Enough()])
    hooks.register(Progress(), every=10)
    step = 0
    hooks.on_train_begin({"lr": 0.1})
    try:
        for step in range(1, 101):
            loss = torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1))
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            hooks.on_step_end(StepContext(step, loss.item(), norm.item(), 0.1, 0, model, optimizer))
    except StopTraining as stop:
        print(f"stopped: {stop}")
    finally:
        hooks.on_train_end(step, 0)
        hooks.close()


if __name__ == "__main__":
    main()
