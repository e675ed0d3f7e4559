"""Options as users write them: `make types` checks that mypy accepts the right ones and refuses the misspelt ones.

An unused ``type: ignore`` is an error under mypy --strict, so each one below says that its line is refused.
"""

from __future__ import annotations

import torch

from hookline import GenericTrainer, HookManager, SimpleTrainer, get_trainer

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.zeros(1, 2), torch.zeros(1, 1))]

trainer = get_trainer("simple", model, loader, optimizer, "cpu", max_steps=3, loss_fn=torch.nn.functional.mse_loss)
get_trainer("simple", model, loader, optimizer, "cpu", max_stepz=3)  # type: ignore[call-arg]
get_trainer("simple", model, loader, optimizer, "cpu", precision="fp8")  # type: ignore[arg-type]
get_trainer("generic", model, loader, optimizer, "cpu", config={}, accumulate=2)
get_trainer("generic", model, loader, optimizer, "cpu", accumulation=2)  # type: ignore[call-arg]
get_trainer("my_own_kind", model, loader, optimizer, "cpu", seed=2)

SimpleTrainer(model, loader, optimizer, validate_every="2 epochs", val_loaders=loader)
SimpleTrainer(model, loader, optimizer, validate_evry="2 epochs")  # type: ignore[call-arg]
SimpleTrainer(model, loader, optimizer, max_steps="3")  # type: ignore[arg-type]
GenericTrainer({}, model, optimizer, train_loaders=loader, debug=True)
GenericTrainer({}, model, optimizer, debugging=True)  # type: ignore[call-arg]

manager: HookManager = trainer.hooks
manager.register_capture_hook(model, "capture")
