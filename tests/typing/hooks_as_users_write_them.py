"""Hooks as users write them: `make types` checks that mypy --strict accepts every one of these signatures."""

from __future__ import annotations

from typing import Any

import torch

from hookline import ForwardHook, RunControl, StepContext, TrainerHooks, TrainingHook, UpdateHook


class A(TrainingHook):
    def on_batch_end(self, batch_idx: int, loss: float, state: dict[str, Any]) -> None: ...
    def on_train_begin(self, config: object) -> None: ...
    def on_step_end(self, ctx: StepContext) -> None: ...
    def on_eval_end(self, metrics: dict[str, float], step: int) -> None: ...
    def on_train_end(self, step: int, tokens_seen: int) -> None: ...


class B(TrainerHooks):
    def on_train_batch_end(
        self, trainer: RunControl, batch: Any, loader_idx: int, loader_name: str, metrics: dict[str, float]
    ) -> None:
        super().on_train_batch_end()
        trainer.request_stop("x")

    def on_training_end(self, trainer: RunControl) -> None: ...


class C(ForwardHook):
    modules = "blocks.*"

    def on_forward(self, name: str, output: torch.Tensor) -> None: ...


class D(UpdateHook):
    def init(self, params: Any) -> dict[str, Any]:
        return {}

    def on_update(self, grads: dict[str, torch.Tensor], state: dict[str, Any]) -> dict[str, torch.Tensor]:
        return grads
