"""Wiring: the one place where parts become a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from hookline.activations.manager import HookManager
from hookline.errors import HooklineError, TrainingError
from hookline.record.memory_record import MemoryRecord
from hookline.record.run_record import Record, RunRecord
from hookline.registry.names import TRAINERS as TRAINER_NAMES
from hookline.trainer.engines import Engine, find_device
from hookline.trainer.forward import StepFunction, count_tokens
from hookline.trainer.loaders import Loaders
from hookline.trainer.options import TrainerOptions
from hookline.trainer.trainer import Parts, Trainer, as_list

TRAINERS = {"simple": "hookline.build:SimpleTrainer", "generic": "hookline.build:generic_trainer"}


class SimpleTrainer(Trainer):
    """One model, one dataloader, one optimizer. Trains one epoch unless told otherwise."""

    def __init__(
        self,
        model: torch.nn.Module,
        dataloader: Loaders = None,
        optimizer: Any = None,
        device: Any = None,
        *,
        val_dataloader: Loaders = None,
        hooks: Any = None,
        allow: Iterable[str] = (),
        **more: Any,
    ) -> None:
        manager = make_manager(hooks, allow)
        parts = make_parts(
            model, optimizer, device, manager, train_loaders=dataloader, val_loaders=val_dataloader, **more
        )
        super().__init__(parts)
        attach(self, manager)


class GenericTrainer(Trainer):
    """Many loaders, many optimizers, everything from a config: a `TrainerConfig`, or a `HooksConfig` alone.

    >>> trainer = GenericTrainer(config, model, optimizers)
    >>> trainer.fit(train_loaders, val_loaders, max_epochs=3)
    """

    def __init__(
        self,
        config: Any,
        model: torch.nn.Module,
        optimizers: Any,
        schedulers: Any = None,
        *,
        device: Any = None,
        allow: Iterable[str] = (),
        **more: Any,
    ) -> None:
        from hookline.config.schemas import as_trainer_config

        settings = as_trainer_config(config)
        manager = make_manager(settings.hooks, allow)
        options = {**asdict(settings.options()), **{k: v for k, v in more.items() if k in asdict(settings.options())}}
        rest = {key: value for key, value in more.items() if key not in options}
        parts = make_parts(model, optimizers, device, manager, scheduler=schedulers, config=settings, **rest, **options)
        super().__init__(parts)
        attach(self, manager)


def generic_trainer(model: Any, dataloader: Any, optimizer: Any, device: Any, *, config: Any = None, **more: Any) -> Trainer:
    """`get_trainer("generic", …)`: the generic trainer with the simple one's argument order."""
    trainer_config = {} if config is None else config
    return GenericTrainer(trainer_config, model, optimizer, device=device, train_loaders=dataloader, **more)


def get_trainer(kind: str, model: Any, dataloader: Any, optimizer: Any, device: Any = None, **options: Any) -> Trainer:
    """A trainer by name: 'simple', 'generic', or one registered with `hookline.register_trainer`."""
    made = TRAINER_NAMES.find(kind)(model, dataloader, optimizer, device, **options)
    if not isinstance(made, Trainer):
        raise HooklineError(f"the trainer {kind!r} made a {type(made).__name__}, not a hookline Trainer")
    return made


def make_manager(hooks: Any, allow: Iterable[str] = (), from_file: bool = False) -> HookManager:
    """The hooks of a config, or of none: then only the default update hook."""
    if isinstance(hooks, HookManager):
        return hooks
    return HookManager({} if hooks is None else hooks, allow=allow, from_file=from_file)


def make_parts(
    model: torch.nn.Module,
    optimizers: Any,
    device: Any,
    manager: HookManager,
    *,
    scheduler: Any = None,
    train_loaders: Loaders = None,
    val_loaders: Loaders = None,
    step_fn: StepFunction | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer_step: Callable[..., Any] | None = None,
    count_tokens: Callable[[Any], int] = count_tokens,
    config: Any = None,
    resolved: Mapping[str, Any] | None = None,
    **options: Any,
) -> Parts:
    """Check what a constructor was given and finish the parts."""
    if not isinstance(model, torch.nn.Module):
        raise TrainingError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    settings = TrainerOptions.make(options)
    engine = Engine(find_device(device), settings.precision)
    written = resolved if resolved is not None else describe(model, optimizers, settings, manager)
    return Parts(
        model=engine.prepare(model),
        optimizers=checked_optimizers(optimizers),
        hooks=manager,
        engine=engine,
        options=settings,
        schedulers=as_list(scheduler),
        train_loaders=train_loaders,
        val_loaders=val_loaders,
        step_fn=step_fn,
        loss_fn=loss_fn,
        optimizer_step=optimizer_step,
        count_tokens=count_tokens,
        config=settings if config is None else config,
        resolved=written,
        make_record=lambda: make_record(settings, written),
    )


def attach(trainer: Trainer, manager: HookManager) -> None:
    """Tie the finished trainer and its hooks together."""
    manager.watch(trainer.model, trainer.moment)
    if trainer.options.max_grad_norm is not None and "clip_norm" not in manager:
        manager.register("clip_norm", origin="max_grad_norm", last=True, max_norm=trainer.options.max_grad_norm)


def make_record(options: TrainerOptions, resolved: Mapping[str, Any]) -> Record:
    """The run's record, on disk unless told otherwise."""
    if not options.record:
        return MemoryRecord(config=resolved, seed=options.seed)
    return RunRecord.create(options.output_dir, config=resolved, seed=options.seed)


def checked_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """One optimizer, a list or a dict of them, as a list."""
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else as_list(optimizers)
    if not found or not all(callable(getattr(one, "step", None)) for one in found):
        raise TrainingError(f"optimizers: expected an optimizer or a list of them, got {type(optimizers).__name__}")
    return found


def describe(model: torch.nn.Module, optimizers: Any, options: TrainerOptions, manager: HookManager) -> dict[str, Any]:
    """The configuration of a trainer that was put together in code, for the record and its hash."""
    return {
        "model": {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        "optimizers": [
            {"class": type(one).__name__, **{k: v for k, v in one.defaults.items() if isinstance(v, (int, float, str, tuple))}}
            for one in checked_optimizers(optimizers)
        ],
        "trainer": asdict(options),
        "hooks": [{"name": hook.name, "enabled": hook.enabled, **hook.parameters} for hook in manager.list_hooks()],
    }
