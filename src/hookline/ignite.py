"""Hooks in Ignite: `hookline.ignite.attach(engine, model, optimizer, "hooks.yaml")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookline.errors import HooklineError
from hookline.hosts.adapter import HostedHooks, replace_method
from hookline.hosts.truth import IGNITE
from hookline.hosts.versions import check_version

check_version("pytorch-ignite", (0, 5))

from ignite.engine import Engine, Events  # noqa: E402 - our own error says what is missing

__all__ = ["Hooks", "attach"]


class Hooks(HostedHooks):
    """Hooks in an engine, for each of its runs; `hookline events --host ignite` explains the events there.

    >>> hl = hookline.ignite.attach(engine, model, optimizer, "hooks.yaml", evaluator=evaluator)
    >>> engine.run(loader, max_epochs=3)

    Ignite's `Checkpoint` can save them: ``to_save={"engine": engine, "hooks": hl, …}``.

    Args:
        engine: The engine that trains.
        model: The model.
        optimizer: Its optimizer, or several as `hookline.attach` takes them.
        config: A hooks config: the path of a YAML file, or a dict.
        evaluator: An engine that only validates: its runs are validations, its metrics are ``val/…``.
        scaler: The GradScaler of the engine, if it has one.
        **options: Options of `hookline.attach`: hooks, step_fn, output_dir and allow.
    """

    host = IGNITE

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        optimizer: Any,
        config: Any = None,
        *,
        evaluator: Engine | None = None,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(engine, Engine):
            raise HooklineError(f"hookline.ignite.attach: expected an Engine first, got {type(engine).__name__}")
        super().__init__(config, **options)
        self._engine, self._model, self._optimizer, self._scaler = engine, model, optimizer, scaler
        self._evaluator = evaluator
        self._knows_loss = False  # whether `backward` has reported the loss of this iteration
        for event, handler in (
            (Events.STARTED, self._start),
            (Events.EPOCH_STARTED, self._begin_epoch),
            (Events.ITERATION_STARTED, self._begin_iteration),
            (Events.ITERATION_COMPLETED, self._end_iteration),
            (Events.TERMINATE, lambda: self.end_run()),  # Ignite passes the engine to handlers that take an argument.
            (Events.COMPLETED, lambda: self.end_run()),
        ):
            engine.add_event_handler(event, handler)
        if evaluator is not None:
            evaluator.add_event_handler(Events.STARTED, self.begin_validation)
            evaluator.add_event_handler(Events.COMPLETED, lambda: self.end_validation(evaluator.state.metrics))
        # A handler of EXCEPTION_RAISED would have to raise again, and then no handler after it is called.
        replace_method(engine, "run", self.watch)

    def _start(self) -> None:
        lacks = () if self._evaluator is not None else ("can_validate",)
        run = self.begin_run(self._model, self._optimizer, scaler=self._scaler, lacks=lacks)
        run.losses_add_up = False

    def _begin_epoch(self) -> None:
        """End the last epoch, whose handlers at EPOCH_COMPLETED may have validated, and begin the next."""
        self.attached.end_epoch()
        self.obey()
        if not self.run.should_stop:
            self.attached.begin_epoch(self._engine.state.epoch - 1)

    def _begin_iteration(self) -> None:
        self._knows_loss = False
        self.run.next_batch(self._engine.state.batch)

    def _end_iteration(self) -> None:
        """End the micro-batch, with the loss that the engine's function has returned, unless `backward` reported it."""
        if not self._knows_loss:
            output = self._engine.state.output
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, (int, float)) or (isinstance(loss, torch.Tensor) and loss.numel() == 1):
                self.run.take_loss(torch.as_tensor(loss).detach())
        self.run.settle()
        self.obey()

    # ---- what the engine's function may call -------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward pass of a loss, scaled if you passed a scaler, with the events around it.

        Args:
            loss: The loss, a tensor with one element.
            **options: The options of `Tensor.backward`.
        """
        self._knows_loss = True
        self.run.losses_add_up = True  # as your function has divided it
        self.attached.backward(loss, **options)

    def optimizer_step(self, optimizer: Any = None) -> None:
        """Step an optimizer through your scaler, so steps that the scaler skips are recorded."""
        self.attached.optimizer_step(optimizer)

    # ---- what the host does ------------------------------------------------------------------------------------------

    def stop_host(self) -> None:
        """Terminate the engine."""
        self._engine.terminate()

    def send_to_host(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers to the engine's metrics, which its loggers read."""
        self._engine.state.metrics.update(numbers)


attach = Hooks
