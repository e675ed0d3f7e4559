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
manager.register_capture_hook(model, "capture", dtype=torch.float16, every=10, on_error="raise")
manager.register_capture_hook(model, "capture", capture_inputs=True)  # type: ignore[call-arg]
manager.register_monitoring_hook(model, "monitor", metrics=["mean"], gradients=True, at=[1, "2 epochs"])
manager.register_monitoring_hook(model, "monitor", metrcs=["mean"])  # type: ignore[call-arg]
manager.register_debug_hook(model, "debug", "nan", keep=5, before="monitor")
manager.register_debug_hook(model, "debug", on_eror="raise")  # type: ignore[call-arg]
manager.register_debug_hook(model, "debug", on_error="rais")  # type: ignore[arg-type]
manager.capturing(model, what="both", clone=True)
manager.capturing(model, every=2)  # type: ignore[call-arg]
manager.attention_maps(model, reduce="mean")
manager.attention_maps(model, redeuce="mean")  # type: ignore[call-arg]

trainer.add_checkpointing(save_every_n_steps=5, monitor="val/loss", mode="max", every="1 epoch")
trainer.add_checkpointing(save_every_n_epochz=1)  # type: ignore[call-arg]
trainer.add_checkpointing(mode="maximum")  # type: ignore[arg-type]
trainer.add_console_logging(every=3, costs=False)
trainer.add_console_logging(evry=3)  # type: ignore[call-arg]
trainer.add_json_logging(path="log.jsonl", enabled=False)
trainer.add_json_logging(file="log.jsonl")  # type: ignore[call-arg]
trainer.on("step_end", name="mine", every=3)
trainer.on("step_end", evry=3)  # type: ignore[call-arg]
