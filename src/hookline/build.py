"""Wiring: the one place where parts become a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.activations.manager import HookManager
from hookline.errors import ConfigError, HooklineError, TrainingError
from hookline.jobs.components import Component, check_name, find_factory
from hookline.record.memory_record import MemoryRecord
from hookline.record.run_record import Record, RunRecord
from hookline.registry.loading import Gate, is_from_file, read_hooks
from hookline.registry.names import DATA, LOSSES, MODELS, OPTIMIZERS, SCHEDULERS
from hookline.registry.names import TRAINERS as TRAINER_NAMES
from hookline.trainer.engines import Engine, find_device
from hookline.trainer.forward import StepFunction, count_tokens
from hookline.trainer.loaders import Loaders, epoch_length, to_train_on
from hookline.trainer.options import TrainerOptions
from hookline.trainer.parts import Parts
from hookline.trainer.rng import seed_everything
from hookline.trainer.trainer import Trainer

if TYPE_CHECKING:
    from hookline.config.schemas import RunConfig

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
        val_loaders: Loaders = None,
        hooks: Any = None,
        allow: Iterable[str] = (),
        **more: Any,
    ) -> None:
        manager = make_manager(hooks, allow, intervene=more.get("enable_intervention", False))
        loaders = val_dataloader if val_loaders is None else val_loaders
        parts = make_parts(model, optimizer, device, manager, train_loaders=dataloader, val_loaders=loaders, **more)
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
        known = asdict(settings.options())
        options = {**known, **{key: value for key, value in more.items() if key in known}}
        manager = make_manager(settings.hooks, allow, is_from_file(config), options["enable_intervention"])
        rest = {key: value for key, value in more.items() if key not in options}
        parts = make_parts(model, optimizers, device, manager, scheduler=schedulers, config=settings, **rest, **options)
        super().__init__(parts)
        attach(self, manager)


def generic_trainer(
    model: Any, dataloader: Any, optimizer: Any, device: Any, *, config: Any = None, **more: Any
) -> Trainer:
    """`get_trainer("generic", …)`: the generic trainer with the simple one's argument order."""
    trainer_config = {} if config is None else config
    return GenericTrainer(trainer_config, model, optimizer, device=device, train_loaders=dataloader, **more)


def get_trainer(kind: str, model: Any, dataloader: Any, optimizer: Any, device: Any = None, **options: Any) -> Trainer:
    """A trainer by name: 'simple', 'generic', or one registered with `hookline.register_trainer`."""
    made = TRAINER_NAMES.find(kind)(model, dataloader, optimizer, device, **options)
    if not isinstance(made, Trainer):
        raise HooklineError(f"the trainer {kind!r} made a {type(made).__name__}, not a hookline Trainer")
    return made


def trainer_from_config(
    config: Mapping[str, Any] | RunConfig, *, allow: Iterable[str] = (), from_file: bool = False, device: Any = None
) -> Trainer:
    """A trainer with everything in it that a run needs, made of a configuration.

    Every name in it is checked before anything is imported or made. From a file (`from_file`), dotted paths must lie
    under a prefix in `allow`. With `trainer.seed`, the model's first weights are seeded, too. The record gets the
    configuration with all defaults of the trainer, and references (``${env:NAME}``) as they were written.

    >>> config, from_file = load_config("run.yaml", ["trainer.max_steps=100"])
    >>> trainer_from_config(config, from_file=from_file).train()
    """
    from hookline.config.references import resolve_references, restore_references
    from hookline.config.schemas import RunConfig, as_run_config

    written = config.as_mapping() if isinstance(config, RunConfig) else config
    settings = as_run_config(resolve_references(written))
    from_file = from_file or is_from_file(config)  # a mapping read from a file stays one, also where nobody says so
    gate, options = Gate(tuple(allow), from_file), settings.trainer
    components = find_components(settings, gate)
    read_hooks(settings.hooks, allow=gate.allow, from_file=from_file)
    if options.seed is not None:
        seed_everything(options.seed)
    data = make_data(components["data"])
    vocab = getattr(data, "vocab", None)
    model = components["model"].make(**({} if vocab is None else {"vocab_size": len(vocab)}))
    optimizer = components["optimizer"].make(model.parameters())
    manager = make_manager_of_config(settings, gate)
    parts = make_parts(
        model,
        optimizer,
        device,
        manager,
        scheduler=make_scheduler(components.get("scheduler"), optimizer, options, data.train),
        train_loaders=data.train,
        val_loaders=getattr(data, "validation", None),
        loss_fn=components["loss"].make() if "loss" in components else None,
        config=settings,
        resolved=restore_references(settings.as_mapping(), written),
        **asdict(options),
    )
    trainer = Trainer(parts)
    attach(trainer, manager)
    if vocab is not None:
        trainer.hook_data["vocab"] = vocab
    return trainer


def find_components(settings: RunConfig, gate: Gate) -> dict[str, Component]:
    """Everything but the hooks that a configuration names; all names are checked before the first is imported."""
    tables = {"data": DATA, "model": MODELS, "optimizer": OPTIMIZERS, "scheduler": SCHEDULERS, "loss": LOSSES}
    given = {key: part for key in tables if (part := getattr(settings, key)) is not None}
    for key, part in given.items():
        check_name(part.name, tables[key], gate, f"{key}.name")
    return {
        key: Component(key, part.name, find_factory(part.name, tables[key], key), part.parameters)
        for key, part in given.items()
    }


def make_data(component: Component) -> Any:
    """What to train on: an object with `train`, and perhaps `validation` and `vocab`."""
    data = component.make()
    if getattr(data, "train", None) is None:
        raise ConfigError(
            "data", f"{component.name!r} made a {type(data).__name__}, which has no `train` to iterate over"
        )
    return data


def make_scheduler(component: Component | None, optimizer: Any, options: TrainerOptions, train: Loaders) -> Any:
    """The scheduler; one that asks for the length of the run gets it unless the config says otherwise."""
    if component is None:
        return None
    steps = planned_steps(options, train)
    if steps is None or options.scheduler_interval == "epoch":
        return component.make(optimizer)
    warmup = component.read().get("warmup_steps")
    if isinstance(warmup, int):  # a trial run may be shorter than the warm-up; it then ends inside it
        steps = max(steps, warmup + 1)
    return component.make(optimizer, total_steps=steps, T_max=steps)


def planned_steps(options: TrainerOptions, train: Loaders) -> int | None:
    """How many optimizer steps the options ask for, if that can be known."""
    length = epoch_length(to_train_on(train, options))
    if options.max_steps is not None or length is None or options.epochs is None:
        return options.max_steps
    return -(-length // options.accumulate) * options.epochs


def make_manager_of_config(settings: RunConfig, gate: Gate) -> HookManager:
    """The hooks of a configuration; what a hook's constructor cannot digest is a fault of the configuration."""
    try:
        return make_manager(settings.hooks, gate.allow, gate.from_file, settings.trainer.enable_intervention)
    except (TypeError, ValueError) as error:
        raise ConfigError("hooks", f"a hook cannot be made with its parameters: {error}") from error


def make_manager(
    hooks: Any, allow: Iterable[str] = (), from_file: bool = False, intervene: bool = False
) -> HookManager:
    """The hooks of a config, or a list of hooks made in code; the default update hook where there is none."""
    if isinstance(hooks, HookManager):
        return hooks
    listed = hooks if isinstance(hooks, (list, tuple)) else []
    manager = HookManager(enable_intervention=intervene)
    for hook in listed:
        manager.register(hook)
    manager.load({} if hooks is None or hooks is listed else hooks, allow=allow, from_file=from_file)
    return manager


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
    metrics: Mapping[str, Any] | None = None,
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
    return Parts(
        model=engine.prepare(model),
        optimizers=checked_optimizers(optimizers),
        hooks=manager,
        engine=engine,
        options=settings,
        schedulers=checked_schedulers(scheduler),
        train_loaders=train_loaders,
        val_loaders=val_loaders,
        step_fn=checked_function(step_fn, "step_fn"),
        loss_fn=checked_function(loss_fn, "loss_fn"),
        optimizer_step=checked_function(optimizer_step, "optimizer_step"),
        metrics=metrics,
        count_tokens=count_tokens,
        config=settings if config is None else config,
        describe=lambda: (
            describe(model, optimizers, settings, manager)
            if resolved is None
            else {**resolved, "trainer": {**resolved.get("trainer", {}), **asdict(settings)}}
        ),
        make_record=lambda described, run_dir: make_record(settings, described, run_dir),
    )


def attach(trainer: Trainer, manager: HookManager) -> None:
    """Tie the finished trainer and its hooks together."""
    manager.watch(trainer.model, trainer.moment)
    add_clipping(manager, trainer.options)


def add_clipping(manager: HookManager, options: TrainerOptions) -> None:
    """`max_grad_norm` is a clip link at the end of the chain."""
    if options.max_grad_norm is not None:
        if "clip_norm" in manager:
            raise ConfigError("trainer.max_grad_norm", "there is a clip_norm hook already; keep one of the two")
        manager.register("clip_norm", origin="max_grad_norm", last=True, max_norm=options.max_grad_norm)


def make_record(options: TrainerOptions, resolved: Mapping[str, Any], run_dir: Path | None) -> Record:
    """The run's record, on disk unless told otherwise; a run that goes on keeps its directory and its id."""
    if not options.record:
        return MemoryRecord(config=resolved, seed=options.seed)
    if run_dir is not None:
        return RunRecord.create(run_dir.parent, config=resolved, seed=options.seed, run_id=run_dir.name)
    return RunRecord.create(options.output_dir, config=resolved, seed=options.seed)


def as_list(value: Any) -> list[Any]:
    """One thing or several, as a list."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, Iterable) else [value]


def checked_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """One optimizer, a list or a dict of them, as a list."""
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else as_list(optimizers)
    if not found or not all(callable(getattr(one, "step", None)) for one in found):
        odd = next((one for one in found if not callable(getattr(one, "step", None))), optimizers)
        raise TrainingError(f"optimizers: expected an optimizer or a list of them, got {odd!r} ({type(odd).__name__})")
    return found


def checked_schedulers(schedulers: Any) -> list[Any]:
    """One scheduler or several, as a list."""
    found = as_list(schedulers) if isinstance(schedulers, (list, tuple, dict)) or schedulers is None else [schedulers]
    for one in found:
        if not callable(getattr(one, "step", None)):
            raise TrainingError(
                f"scheduler: expected a scheduler or a list of them, got {one!r} ({type(one).__name__})"
            )
    return found


def checked_function(function: Any, name: str) -> Any:
    """A function or a module, but not the class of one: that would be called with the batch."""
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise TrainingError(f"{name}: got the class {function.__name__}; give an instance, {function.__name__}()")
    if function is not None and not callable(function):
        raise TrainingError(f"{name}: expected a function, got {function!r} ({type(function).__name__})")
    return function


def describe(model: torch.nn.Module, optimizers: Any, options: TrainerOptions, manager: HookManager) -> dict[str, Any]:
    """The configuration of a trainer that was put together in code, for the record and its hash."""
    return {
        "model": {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        "optimizers": [
            {
                "class": type(one).__name__,
                **{k: v for k, v in getattr(one, "defaults", {}).items() if isinstance(v, (int, float, str, tuple))},
            }
            for one in checked_optimizers(optimizers)
        ],
        "trainer": asdict(options),
        "hooks": [{"name": hook.name, "enabled": hook.enabled, **hook.parameters} for hook in manager.list_hooks()],
    }
