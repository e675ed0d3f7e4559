"""The contenders: Hookline and the trainers it is compared with, each as lean as it can fairly be made.

Every builder takes a number of no-op hooks and returns a contender. With hooks, each hook listens to four events
of a step: before it, after backward, before the optimizer and at its end, or the trainer's nearest. A trainer
that is not installed raises ImportError from its builder, which the table reports.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench import bare
from bench.interleave import Contender, Direct, HandOver, Threaded
from bench.tiny import Endless, layers, loss_fn, make_batches, make_model, make_optimizer

STEPS_WITHOUT_END = 1_000_000_000

Builder = Callable[[int], Contender]


def do_nothing(*_: object, **__: object) -> None:
    """A hook that does nothing."""


def bare_direct(_: int) -> Contender:
    """Make the bare loop, stepped in the measuring thread: the baseline of the direct contenders."""
    model = make_model()
    training = bare.steps(model, Endless(), make_optimizer(model))
    return Direct(training.__next__)


def bare_threaded(_: int) -> Contender:
    """Make the bare loop in a separate thread: the baseline of the trainers that own their loop."""
    model = make_model()
    optimizer = make_optimizer(model)

    def loop(loader: HandOver) -> None:
        for _ in bare.steps(model, loader, optimizer):
            pass

    return Threaded(loop, make_batches())


def hookline_trainer(hooks: int, loader: object) -> Any:
    """Make Hookline's trainer with console output off; it still writes its record."""
    from hookline import SimpleTrainer, TrainingHook

    class Noop(TrainingHook):
        """Four events of a step, one cheap argument each, as the other trainers pass theirs unasked."""

        def on_train_batch_start(self, batch_idx: int) -> None: ...
        def on_after_backward(self, batch_idx: int) -> None: ...
        def on_before_optimizer_step(self, batch_idx: int) -> None: ...
        def on_train_batch_end(self, batch_idx: int) -> None: ...

    model = make_model()
    optimizer = make_optimizer(model)
    trainer = SimpleTrainer(
        model, loader, optimizer, "cpu", loss_fn=loss_fn, max_steps=STEPS_WITHOUT_END, console=False
    )
    for index in range(hooks):
        trainer.add_hook(Noop(), name=f"noop_{index}")
    return trainer


def hookline_direct(hooks: int) -> Contender:
    """Make Hookline stepped in the measuring thread: each `next()` is one iteration of its real loop."""
    trainer = hookline_trainer(hooks, Endless())
    if not hasattr(trainer, "stepper"):
        raise NotImplementedError("this Hookline has no stepper()")
    stepper = trainer.stepper()
    return Direct(stepper.__next__, getattr(stepper, "close", None))


def hookline_threaded(hooks: int) -> Contender:
    """Make Hookline with its own loop, as users run it."""
    return Threaded(lambda loader: hookline_trainer(hooks, loader).train(), make_batches())


def ignite(hooks: int) -> Contender:
    """Make Ignite's engine; events that it does not fire by itself are fired as its documentation shows."""
    from ignite.engine import Engine, EventEnum, Events

    class Backprop(EventEnum):
        AFTER_BACKWARD = "after_backward"
        BEFORE_OPTIMIZER = "before_optimizer"

    model = make_model()
    optimizer = make_optimizer(model)

    def update(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        inputs, targets = batch
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        if hooks:  # without hooks a user has no reason to fire events of their own
            engine.fire_event(Backprop.AFTER_BACKWARD)
            engine.fire_event(Backprop.BEFORE_OPTIMIZER)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    silence("ignite")
    engine = Engine(update)
    engine.register_events(*Backprop)
    points = (Events.ITERATION_STARTED, *Backprop, Events.ITERATION_COMPLETED)
    for point in points * hooks:
        engine.add_event_handler(point, lambda engine: None)
    # The loader has no length, so Ignite needs the length of the one epoch.
    return Threaded(lambda loader: engine.run(loader, epoch_length=STEPS_WITHOUT_END), make_batches())


def lightning(hooks: int) -> Contender:
    """Make Lightning in its `barebones` mode for measurements: no logger, checkpoint, progress bar or checks."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            loss: torch.Tensor = loss_fn(self.net(inputs), targets)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    class Noop(pl.Callback):
        on_train_batch_start = on_after_backward = do_nothing
        on_before_optimizer_step = on_train_batch_end = do_nothing

    def loop(loader: HandOver) -> None:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            barebones=True,
            max_epochs=1,
            limit_val_batches=0,
            callbacks=[Noop() for _ in range(hooks)],
        )
        trainer.fit(Module(), loader)

    silence("lightning.pytorch", "lightning.fabric")
    return Threaded(loop, make_batches())


class NetWithLoss(nn.Module):
    """The same layers, returning the loss as the HF Trainer expects it, without an additional module call."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.ModuleList(layers())

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs and targets in, the loss out."""
        for layer in self.layers:
            inputs = layer(inputs)
        return {"loss": loss_fn(inputs, targets)}


def hf_arguments() -> Any:
    """Training arguments with everything optional off.

    Off: logging, saving, evaluation, reporting, progress bar, gradient clipping (the bare loop has none) and
    the check of the loss for nan, which would read it back at every step. The constant schedule cannot be
    left out: the Trainer always steps one.
    """
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir="hf",
        max_steps=STEPS_WITHOUT_END,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0.0,
        logging_nan_inf_filter=False,
        lr_scheduler_type="constant",
    )


def hf_trainer(hooks: int) -> Contender:
    """Make the HF Trainer, with batches prepared beforehand."""
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    class Noop(TrainerCallback):
        on_step_begin = on_pre_optimizer_step = on_optimizer_step = on_step_end = do_nothing

    class ReadyMade(Trainer):
        loader: HandOver

        def get_train_dataloader(self) -> Any:
            return self.loader

    def loop(loader: HandOver) -> None:
        model = NetWithLoss()
        trainer = ReadyMade(model, hf_arguments(), optimizers=(make_optimizer(model), None))
        trainer.remove_callback(PrinterCallback)
        for _ in range(hooks):
            trainer.add_callback(Noop())
        trainer.loader = loader
        trainer.train()

    silence("transformers")
    dicts = [{"inputs": inputs, "targets": targets} for inputs, targets in make_batches()]
    return Threaded(loop, dicts)


def accelerate(hooks: int) -> Contender:
    """Accelerate in a hand-written loop, the hooks called by that loop at four points of a step.

    About 60 % of what version 1.15 adds is its optimizer wrapper asking twice a step whether `lomo_optim` is
    installed (251 µs above bare, 97 with that question answered); the cost grows with the length of sys.path.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = make_model()
    model, optimizer = accelerator.prepare(plain, make_optimizer(plain))
    batches = iter(Endless())
    callables = [do_nothing] * hooks

    def step() -> None:
        inputs, targets = next(batches)
        for one in callables:
            one()
        loss = loss_fn(model(inputs), targets)
        accelerator.backward(loss)
        for one in callables * 2:  # after backward, and again before the optimizer
            one()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for one in callables:
            one()

    return Direct(step)


def silence(*loggers: str) -> None:
    """Disable a trainer's advice about faster settings, which would be printed between the rows."""
    warnings.filterwarnings("ignore", module="lightning")
    for name in loggers:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # ending a loop by an exception is not an error here
