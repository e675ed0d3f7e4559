"""Build trainers from objects or from a config: where components, options and hooks become a `Trainer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Unpack

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline._device import find_device
from hookline._parameters import parameters_of
from hookline.checkpoints.find import checkpoints_of, find_checkpoint, run_directory
from hookline.checkpoints.store import SavedCheckpoint, checkpoints_in
from hookline.config.factory import COMPONENTS, Factory, ImportPolicy, find_factory
from hookline.config.hooks import is_from_file, read_hook_specs, register_specs
from hookline.config.load import load_config
from hookline.config.metrics import make_metrics
from hookline.config.recorded import check_secrets, read_recorded
from hookline.core.plugins import TRAINERS as TRAINER_NAMES
from hookline.errors import CheckpointError, ConfigError, HooklineError, TrainingError, with_article
from hookline.hooks.ema import EMAHook
from hookline.ranks import find_ranks
from hookline.run.manager import HookManager
from hookline.run.rng import preserve_rng, seed_everything
from hookline.runs.named import BEST, LAST, find_run
from hookline.trainer.accelerate import (
    PRECISIONS,
    check_launcher,
    find_accelerator,
    prepare_loaders,
    prepare_model,
    prepared_engine,
    unwrap_optimizer,
    unwrap_scheduler,
)
from hookline.trainer.data.loaders import Loaders, TrainLoaders, epoch_length
from hookline.trainer.options import TrainerOptions, check_keywords
from hookline.trainer.parallel import make_engine, shard, start_processes
from hookline.trainer.step_fn import StepFunction
from hookline.trainer.trainer import Components, Trainer

if TYPE_CHECKING:
    from hookline._keywords import AnyTrainerKeywords, TrainingKeywords
    from hookline.config.schema import RunConfig


TRAINERS = {
    "simple": "hookline.build:SimpleTrainer",
    "generic": "hookline.build:generic_trainer",
    "accelerate": "hookline.build:AccelerateTrainer",
}


_ORDER = "check the argument order: get_trainer(kind, model, dataloader, optimizer, device)"


class SimpleTrainer(Trainer):
    """One model, one dataloader, one optimizer. Trains one epoch by default.

    Args:
        model: The model to train.
        dataloader: One loader of training batches, or several by name.
        optimizer: One optimizer, or several.
        device: Device to train on (default: cuda if available, otherwise cpu).
        val_dataloader: One loader of validation batches, or several by name.
        val_loaders: The same as `val_dataloader`.
        hooks: A list of hooks, a hooks config, or a `HookManager`.
        allow: Prefixes under which a hooks config that was read from a file may name dotted paths.
        **more: Options of every trainer; `hookline help options` lists them.
    """

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
        **more: Unpack[TrainingKeywords],
    ) -> None:
        # `get_trainer` takes a config for any kind of trainer; here it is only what hooks get as `trainer.config`.
        check_keywords(SimpleTrainer, [key for key in more if key != "config"])
        loaders = val_dataloader if val_loaders is None else val_loaders
        super().__init__(
            make_parts(model, optimizer, device, hooks, allow, train_loaders=dataloader, val_loaders=loaders, **more)
        )


class AccelerateTrainer(Trainer):
    """A `SimpleTrainer` whose objects a Hugging Face `Accelerator` prepares. It determines device and precision.

    Objects that it has already prepared are used unchanged. Accumulation and clipping are options, as for every
    trainer, and schedulers move once a step. Batches of DataLoaders are divided between the processes; in a validation
    each sample counts once.

    Args:
        model: The model to train.
        dataloader: One loader of training batches, or several by name.
        optimizer: One optimizer, or several.
        device: The Accelerator's device; any other raises an error.
        accelerator: An `accelerate.Accelerator`; by default, a new one is created.
        val_dataloader: One loader of validation batches, or several by name.
        val_loaders: The same as `val_dataloader`.
        hooks: A list of hooks, a hooks config, or a `HookManager`.
        allow: Prefixes under which a hooks config that was read from a file may name dotted paths.
        **more: Options of every trainer; `hookline help options` lists them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dataloader: Loaders = None,
        optimizer: Any = None,
        device: Any = None,
        *,
        accelerator: Any = None,
        val_dataloader: Loaders = None,
        val_loaders: Loaders = None,
        hooks: Any = None,
        allow: Iterable[str] = (),
        **more: Unpack[TrainingKeywords],
    ) -> None:
        if "train_loaders" in more:
            raise ConfigError("trainer.train_loaders", "AccelerateTrainer takes training loaders as `dataloader`")
        self.accelerator = find_accelerator(accelerator, device, more)
        more = {**more, "precision": PRECISIONS[self.accelerator.mixed_precision]}
        loaders = val_dataloader if val_loaders is None else val_loaders
        super().__init__(make_parts(
            model, optimizer, device, hooks, allow, train_loaders=dataloader, val_loaders=loaders,
            accelerator=self.accelerator, **more,
        ))  # fmt: skip

    def fit(
        self,
        train_loaders: Loaders = None,
        val_loaders: Loaders = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        resume: str | Path | None = None,
        fork: bool = False,
        **unknown: Never,
    ) -> dict[str, Any]:
        """Train; loaders that are not prepared are prepared first. The arguments are those of `Trainer.fit`."""
        training = prepare_loaders(self.accelerator, train_loaders, self.options.seed)
        validating = prepare_loaders(self.accelerator, val_loaders, self.options.seed, each_once=True)
        return super().fit(training, validating, max_epochs, max_steps, resume, fork, **unknown)

    def validate(self, loaders: Loaders = None, **unknown: Never) -> dict[str, float]:
        """Validate now, with the validation events, and return the metrics."""
        prepared = prepare_loaders(self.accelerator, loaders, self.options.seed, each_once=True)
        return super().validate(prepared, **unknown)

    def step_schedulers(self, stepped: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Step the schedulers of the optimizers that stepped, prepared ones or those inside of them."""
        inside = [] if stepped is None else [unwrap_optimizer(optimizer) for optimizer in stepped]
        super().step_schedulers(None if stepped is None else [*stepped, *inside])


class GenericTrainer(Trainer):
    """Several loaders and optimizers, and all that a config can describe: a `TrainerConfig`, or a `HooksConfig` alone.

    >>> trainer = GenericTrainer(config, model, optimizers)
    >>> trainer.fit(train_loaders, val_loaders, max_epochs=3)

    Args:
        config: A `TrainerConfig`, a `HooksConfig`, a `RunConfig`, or a dict with the keys of one of the first two.
        model: The model to train.
        optimizers: One optimizer, or several.
        schedulers: One learning-rate scheduler, or several.
        device: Device to train on (default: cuda if available, otherwise cpu).
        hooks: A list of hooks, a hooks config, or a `HookManager`, unless the config lists hooks.
        allow: Prefixes under which a config that was read from a file may name dotted paths.
        train_loaders: One loader of training batches, or several by name; `fit` takes them, too.
        val_loaders: One loader of validation batches, or several by name; `fit` takes them, too.
        **more: Options of every trainer; `hookline help options` lists them. They override those of the config.
    """

    def __init__(
        self,
        config: Any,
        model: torch.nn.Module,
        optimizers: Any,
        schedulers: Any = None,
        *,
        device: Any = None,
        hooks: Any = None,
        allow: Iterable[str] = (),
        train_loaders: Loaders = None,
        val_loaders: Loaders = None,
        **more: Unpack[TrainingKeywords],
    ) -> None:
        from hookline.config.schema import as_trainer_config

        check_keywords(GenericTrainer, more)
        settings = as_trainer_config(config)
        if hooks is not None and settings.hooks.model_fields_set:
            raise ConfigError("hooks", "the config also lists hooks; pass them in only one place")
        if schedulers is not None:
            more["scheduler"] = schedulers
        hooks, from_file = (settings.hooks, is_from_file(config)) if hooks is None else (hooks, False)
        super().__init__(make_parts(
            model, optimizers, device, hooks, allow, from_file, settings.options(), train_loaders, val_loaders,
            config=settings, **more,
        ))  # fmt: skip


def generic_trainer(
    model: Any,
    dataloader: Any,
    optimizer: Any,
    device: Any,
    *,
    schedulers: Any = None,
    config: Any = None,
    hooks: Any = None,
    allow: Iterable[str] = (),
    val_loaders: Loaders = None,
    **more: Any,
) -> Trainer:
    """Make a `GenericTrainer` with the argument order of `SimpleTrainer`, for `get_trainer("generic", …)`."""
    check_keywords(generic_trainer, more)
    more |= {"device": device, "hooks": hooks, "allow": allow, "train_loaders": dataloader, "val_loaders": val_loaders}
    return GenericTrainer(config, model, optimizer, schedulers, **more)


def get_trainer(
    kind: str,
    model: torch.nn.Module,
    dataloader: Loaders,
    optimizer: Any,
    device: Any = None,
    **options: Unpack[AnyTrainerKeywords],
) -> Trainer:
    """Make a trainer by name: 'simple', 'generic', 'accelerate', or one registered with `hookline.register_trainer`.

    Args:
        kind: The trainer's name.
        model: The model to train.
        dataloader: One loader of training batches, or several by name.
        optimizer: One optimizer, or several.
        device: Device to train on (default: cuda if available, otherwise cpu).
        **options: Other options of that trainer; `hookline help options` lists them.

    Raises:
        HooklineError: If no trainer has that name, or its factory does not return a `Trainer`.
    """
    if not isinstance(kind, str):
        raise TrainingError(f"kind: expected a trainer's name, got {with_article(type(kind).__name__)}; {_ORDER}")
    trainer = TRAINER_NAMES.find(kind)(model, dataloader, optimizer, device, **options)
    if not isinstance(trainer, Trainer):
        raise HooklineError(f"the trainer {kind!r} made {with_article(type(trainer).__name__)}, not a hookline Trainer")
    return trainer


def trainer_from_config(
    config: Mapping[str, Any] | RunConfig, *, allow: Iterable[str] = (), from_file: bool = False, device: Any = None
) -> Trainer:
    """Make a trainer, and everything that its run needs, from a config.

    Every name in the config is checked before anything is imported or created. With `trainer.seed`, the model's initial
    weights are seeded, too. The record gets the config with references (``${env:NAME}``) as they were written, except
    under `trainer`: there it gets the values of all options, because arguments of `fit` may have changed some.

    >>> config, from_file = load_config("run.yaml", ["trainer.max_steps=100"])
    >>> trainer_from_config(config, from_file=from_file).train()

    Args:
        config: The config of a run.
        allow: Prefixes under which a config from a file may name dotted paths.
        from_file: Whether the config comes from a file; results of `load_config` are marked already.
        device: Device to train on (default: cuda if available, otherwise cpu).

    Raises:
        ConfigError: If a key, a name or a value of the config is wrong.
    """
    return _make_trainer(config, ImportPolicy(allow, from_file or is_from_file(config)), device)


def _make_trainer(
    config: Mapping[str, Any] | RunConfig, policy: ImportPolicy, device: Any, trained_on: Any = None
) -> Trainer:
    """Make a trainer from a config; `trained_on` is the section `data` of the model's training, if different."""
    from hookline.config.references import resolve_references, restore_references
    from hookline.config.schema import RunConfig, as_run_config

    written = config.as_mapping() if isinstance(config, RunConfig) else config
    settings = as_run_config(resolve_references(written))
    specs = read_hook_specs(settings, allow=policy.allow, from_file=policy.from_file)
    factories = find_factories(settings, policy)
    metrics = make_metrics([metric.model_dump() for metric in settings.metrics or ()], policy)
    check_launcher(settings.trainer)
    options = start_processes(settings.trainer)
    if options.seed is not None:
        seed_everything(options.seed)
    data = factories["data"].make()
    if trained_on is not None and getattr(data, "vocab", None) is not None:
        former = as_run_config({**settings.as_mapping(), "data": resolve_references(trained_on)})
        data = _with_vocab(factories["data"], data, find_factories(former, policy)["data"].make())
    if getattr(data, "train", None) is None:
        kind = with_article(type(data).__name__)
        remedy = "return an object with `train`, such as SimpleNamespace(train=loader, validation=other_loader)"
        raise ConfigError("data", f"{settings.data.name!r} made {kind}, which has no `train` to iterate over; {remedy}")
    vocab = getattr(data, "vocab", None)
    model = factories["model"].make(**({} if vocab is None else {"vocab_size": len(vocab)}))
    if options.parallel == "fsdp2" and find_ranks().world_size > 1:
        model = shard(model, find_device(device), options)  # replaces the parameters that the optimizer will own
    optimizer = factories["optimizer"].make(model.parameters())
    manager = HookManager(enable_intervention=options.enable_intervention)
    register_specs(manager, specs)
    scheduler = factories.get("scheduler")
    parts = make_parts(
        model, optimizer, device, manager, options=options, config=settings,
        scheduler=None if scheduler is None else make_scheduler(scheduler, optimizer, options, data.train),
        loss_fn=factories["loss"].make() if "loss" in factories else None, metrics=metrics,
        train_loaders=data.train, val_loaders=getattr(data, "validation", None),
        resolved=restore_references(settings.as_mapping(), written),
    )  # fmt: skip
    trainer = Trainer(parts)
    if vocab is not None:
        trainer.hook_data["vocab"] = vocab
    return trainer


def _with_vocab(factory: Factory, data: Any, former: Any) -> Any:
    """Return data with the vocabulary of the data that the model was trained on: ids mean nothing without it.

    Raises:
        ConfigError: If the data has a different one, and its function does not take a vocabulary.
    """
    vocab = getattr(former, "vocab", None)
    if data.vocab == vocab or getattr(data.vocab, "__dict__", None) == getattr(vocab, "__dict__", ()):
        return data
    if "vocab" not in (parameters_of(factory.function) or {}):
        why = "builds a different vocabulary from the one the model was trained with"
        raise ConfigError("data", f"{factory.name!r} {why}; add a parameter `vocab`, which receives that vocabulary")
    return factory.make(vocab=vocab)


def load_trainer(
    run: str | Path,
    overrides: Iterable[str] = (),
    checkpoint: str | int | Path | None = None,
    allow: Iterable[str] = (),
    device: Any = None,
    data: Mapping[str, Any] | None = None,
) -> tuple[Trainer, SavedCheckpoint]:
    """Make a trainer from the config that a run has recorded, with the weights of a checkpoint; return both.

    `Trainer.load` describes it. `data` is a section `data` to use instead of the recorded one.
    """
    path = find_run(run)
    directory = run_directory(path)
    if directory is None:
        remedy = f"build the trainer as your script does, then call trainer.load_checkpoint({str(path)!r})"
        raise HooklineError(f"{path} does not belong to a run, so there is no config to build a trainer from; {remedy}")
    is_run = path.resolve() == directory
    saved = choose_checkpoint(directory, checkpoint) if is_run or checkpoint is not None else find_checkpoint(path)[0]
    recorded = read_recorded(directory, f"trainer.load_checkpoint({str(saved.path)!r})")
    former = recorded["data"]
    config, _ = load_config(recorded if data is None else {**recorded, "data": data}, overrides)
    # Keep the hooks that a validation needs, and take nothing but the weights from the run.
    hooks = config.get("hooks") or {}
    entries = [entry for entry in hooks.get("lifecycle") or () if isinstance(entry, dict)]
    disabled = [str(entry.get("as", entry.get("name"))) for entry in entries if not entry.get("enabled", True)]
    settings = dict(config.get("trainer") or {})
    kept = hooks.get("forward") if settings.get("enable_intervention") else []
    settings.update(name=None, tags=None, notes=None)
    if not settings.get("trainable_only"):  # otherwise the frozen weights may come from it
        settings["init_from"] = None
    config.update(trainer=settings, hooks={"forward": kept or [], "update": []}, trackers=[])
    check_secrets(config)
    with preserve_rng():
        trained_on = None if config["data"] == former else former
        trainer = _make_trainer(config, ImportPolicy(allow, True), device, trained_on)
        for entry in trainer.hooks.entries():
            if not entry.intervenes:
                trainer.hooks.remove(entry.name)
        trainer.load_weights(saved)
        trainer.loaded_from = directory
        states = saved.section("hooks")
    for name, state in states.items():
        if isinstance(state, dict) and {*state} == {"updates", "average"} and name not in disabled:
            average = EMAHook(buffers=True)
            average.load_state_dict(state)
            average.copy_to(trainer.model)
            break  # validations have measured the first one
    return trainer, saved


def choose_checkpoint(run: Path, which: str | int | Path | None) -> SavedCheckpoint:
    """Return a checkpoint of a run: "best", "last", a step, a name or a path; None for the best, otherwise the last.

    Raises:
        HooklineError: If there is none.
    """
    if which is None:
        is_ranked = (run / "checkpoints" / BEST).exists()
        return find_checkpoint(find_run(run / (BEST if is_ranked else LAST)))[0]
    text = str(which)
    if text.isdecimal():
        saved = checkpoints_in(checkpoints_of(run))
        steps = {checkpoint.manifest["meta"].get("step"): checkpoint for checkpoint in reversed(saved)}
        if int(text) not in steps:
            listed = ", ".join(map(str, sorted(steps))) or "none"
            raise CheckpointError(f"{run} has no checkpoint of step {text}; it has {listed}")
        return steps[int(text)]
    is_path = text not in (BEST, LAST) and Path(text).exists()
    return find_checkpoint(Path(text) if is_path else find_run(run / text))[0]


def find_factories(settings: RunConfig, policy: ImportPolicy) -> dict[str, Factory]:
    """Return the factory of every component that a config names; all names are checked before the first import."""
    components = {key: component for key in COMPONENTS if (component := getattr(settings, key)) is not None}
    for key, component in components.items():
        policy.check_name(component.name, COMPONENTS[key], f"{key}.name")
    factories: dict[str, Factory] = {}
    for key, component in components.items():
        try:
            function = find_factory(component.name, COMPONENTS[key])
        except HooklineError as error:
            raise ConfigError(f"{key}.name", str(error)) from error
        factories[key] = Factory(key, component.name, function, component.parameters)
    return factories


def make_scheduler(factory: Factory, optimizer: Any, options: TrainerOptions, train: Loaders) -> Any:
    """Create the scheduler; if it takes the length of the run, it gets that unless the config sets another."""
    steps = options.max_steps
    if steps is None and options.epochs is not None:
        length = epoch_length(TrainLoaders(train, options))
        steps = None if length is None else -(-length // options.accumulate) * options.epochs
    if steps is None or options.scheduler_interval == "epoch":
        return factory.make(optimizer)
    warmup = factory.read("warmup_steps")
    if isinstance(warmup, int):  # a trial run may be shorter than the warm-up; it then ends inside it
        steps = max(steps, warmup + 1)
    return factory.make(optimizer, total_steps=steps, T_max=steps)


def make_manager(
    hooks: Any, allow: Iterable[str] = (), from_file: bool = False, intervene: bool = False
) -> HookManager:
    """Make a `HookManager` with the hooks of a config or a list, and with the default update hook if there is none.

    Args:
        hooks: A hooks config, a list of hooks, None, or a manager, which is returned as it is.
        allow: Prefixes under which a config from a file may name dotted paths.
        from_file: Whether the config comes from a file.
        intervene: Whether forward hooks may change activations.
    """
    if isinstance(hooks, HookManager):
        return hooks
    manager = HookManager(hooks, enable_intervention=intervene, allow=allow, from_file=from_file)
    if hooks is None or isinstance(hooks, (list, tuple, Iterator)):  # a config already includes the default update hook
        manager.load({})
    return manager


def make_parts(
    model: torch.nn.Module,
    optimizers: Any,
    device: Any,
    hooks: Any,
    allow: Iterable[str] = (),
    from_file: bool = False,
    /,
    options: TrainerOptions | None = None,
    train_loaders: Loaders = None,
    val_loaders: Loaders = None,
    config: Any = None,
    resolved: Mapping[str, Any] | None = None,
    accelerator: Any = None,
    *,
    scheduler: Any = None,
    step_fn: StepFunction | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer_step: Callable[[torch.optim.Optimizer], Any] | None = None,
    metrics: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] | None = None,
    count_tokens: Callable[[Any], int] | None = None,
    **changes: Any,
) -> Components:
    """Check the arguments of a constructor, and return the parts of a trainer.

    The constructors of all trainers take the keyword-only parameters and the options of a run.

    Args:
        model: The model.
        optimizers: One optimizer, or several.
        device: Device to train on (default: cuda if available, otherwise cpu).
        hooks: A hooks config, a list of hooks, None, or a manager.
        allow: Prefixes under which a hooks config from a file may name dotted paths.
        from_file: Whether the hooks config comes from a file.
        options: The options of the run, unless they are among the keywords.
        train_loaders: One loader of training batches, or several by name.
        val_loaders: One loader of validation batches, or several by name.
        config: The object that hooks get as `trainer.config`; by default the options.
        resolved: The run's configuration for the record.
        accelerator: The Accelerator that prepares model, optimizers and loaders, if there is one.
        scheduler: One learning-rate scheduler, or several.
        step_fn: Computes the loss, ``(model, batch) -> loss`` or a dict with it; otherwise `loss_fn` or the model does.
        loss_fn: Computes the loss from the model's output and the target.
        optimizer_step: Replaces ``optimizer.step()``; gets the optimizer.
        metrics: A list of metrics that are registered, or a dict of functions and objects by name.
        count_tokens: Counts the tokens of a batch.
        **changes: Options, which replace those above.

    Raises:
        TrainingError: If the model, an optimizer, a scheduler or a function is not one.
        ConfigError: If an option is wrong or unknown.
    """
    check_model(model)
    made_metrics = make_metrics(metrics, ImportPolicy(from_file=False))
    # A copy, because the trainer may change its options.
    options = TrainerOptions.make({**(vars(options) if options else {}), **changes})
    manager = make_manager(hooks, allow, from_file, options.enable_intervention)
    for name, loaders in (("train_loaders", train_loaders), ("val_loaders", val_loaders)):
        if isinstance(loaders, (torch.optim.Optimizer, torch.nn.Module)):
            raise TrainingError(f"{name}: expected loaders, got {with_article(type(loaders).__name__)}; {_ORDER}")
    listed = checked_list(optimizers, "optimizers", "an optimizer", "model.parameters(), lr=…", at_least=1)
    schedulers = checked_list(scheduler, "scheduler", "a scheduler", "optimizer, …")
    functions = {"step_fn": step_fn, "loss_fn": loss_fn, "optimizer_step": optimizer_step, "count_tokens": count_tokens}
    for name, function in functions.items():
        check_function(function, name)
    if accelerator is None:
        engine = make_engine(model, find_device(device), options)
        prepared = engine.prepare(model)
    else:
        prepared, listed = prepare_model(accelerator, model, listed)
        engine = prepared_engine(accelerator, prepared)
        schedulers = [unwrap_scheduler(scheduler) for scheduler in schedulers]
        train_loaders = prepare_loaders(accelerator, train_loaders, options.seed)
        val_loaders = prepare_loaders(accelerator, val_loaders, options.seed, each_once=True)
    check_owners(schedulers, listed)
    add_clipping(manager, options)
    return Components(
        prepared, listed, manager, engine, options, schedulers, train_loaders, val_loaders, step_fn, loss_fn,
        optimizer_step, made_metrics, count_tokens, options if config is None else config, resolved,
    )  # fmt: skip


def check_model(model: Any) -> None:
    """Reject objects that are not models, and the stages of a pipeline.

    Raises:
        TrainingError: If the model is not a module, or a part of one that several processes run in turn.
    """
    # Accelerate marks a model that it has split (`prepare_pippy`) by this attribute.
    if type(model).__module__.startswith("torch.distributed.pipelining") or hasattr(model, "hf_split_points"):
        raise TrainingError(
            f"model: {type(model).__name__} is split into pipeline stages, which is not supported; use data "
            "parallelism, FSDP2 or tensor parallelism"
        )
    if isinstance(model, type):
        raise TrainingError(f"model: got the class {model.__name__}; pass an object, {model.__name__}(…)")
    if not isinstance(model, torch.nn.Module):
        raise TrainingError(f"model: expected a torch.nn.Module, got {type(model).__name__}; {_ORDER}")


def add_clipping(manager: HookManager, options: TrainerOptions) -> None:
    """Append a `clip_norm` hook to the end of the update chain if `max_grad_norm` is set."""
    if options.max_grad_norm is not None:
        if "clip_norm" in manager:
            raise ConfigError("trainer.max_grad_norm", "there is already a clip_norm hook; keep one of the two")
        manager.register("clip_norm", origin="max_grad_norm", last=True, max_norm=options.max_grad_norm)


def checked_list(given: Any, name: str, kind: str, arguments: str, at_least: int = 0) -> list[Any]:
    """Return one optimizer or scheduler, or a list or dict of them, as a list.

    Args:
        given: The value that the user passed.
        name: The parameter.
        kind: The kind that each must be, for messages.
        arguments: The arguments of its constructor, for messages.
        at_least: How many there must be.
    """
    if isinstance(given, Mapping):
        items = list(given.values())
    elif given is None or callable(getattr(given, "step", None)) or not isinstance(given, Iterable):
        items = [] if given is None else [given]
    else:
        items = list(given)
    for item in items:
        if isinstance(item, type):
            remedy = f"pass an object, {item.__name__}({arguments})"
            raise TrainingError(f"{name}: got the class {item.__name__}; {remedy}")
        if not callable(getattr(item, "step", None)):
            got = with_article(type(item).__name__)
            raise TrainingError(f"{name}: expected {kind} or a list of them, got {got}; {_ORDER}")
    if len(items) < at_least:
        raise TrainingError(f"{name}: expected {kind} or a list of them, got {given!r} ({type(given).__name__})")
    return items


def check_owners(schedulers: Iterable[Any], optimizers: Iterable[Any]) -> None:
    """Reject an object that is not a scheduler, or whose optimizer the trainer does not step, so it would never move.

    Raises:
        TrainingError: If it cannot be used; the message names its class.
    """
    owned = [owner for optimizer in optimizers for owner in (optimizer, unwrap_optimizer(optimizer))]
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.Optimizer):
            raise TrainingError(f"scheduler: {type(scheduler).__name__} is an optimizer; list all as optimizers")
        optimizer = getattr(scheduler, "optimizer", None)
        if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode == "max":
            what = "scheduler: ReduceLROnPlateau monitors val/loss, where lower is better"
            raise TrainingError(f"{what}; create it with mode='min'")
        if optimizer is not None and not any(optimizer is owner for owner in owned):
            problem = f"scheduler: {type(scheduler).__name__} schedules an optimizer that is not the trainer's"
            raise TrainingError(f"{problem}; create it with the optimizer that you pass")


def check_function(function: Any, name: str) -> None:
    """Reject objects that cannot be called, and the class of a module, which would be called with the batch."""
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise TrainingError(f"{name}: got the class {function.__name__}; pass an instance, {function.__name__}()")
    if function is not None and not callable(function):
        raise TrainingError(f"{name}: expected a function, got {function!r} ({type(function).__name__})")


def show_keywords(function: Any, *originals: Callable[..., Any]) -> None:
    """Make `help` and notebooks list the keyword-only parameters of other functions, instead of ``**more``."""
    signature = inspect.signature(function)
    shown = dict(signature.parameters)
    shown.popitem()  # the ``**`` parameter
    for original in originals:
        for name, parameter in inspect.signature(original, eval_str=True).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                shown.setdefault(name, parameter)
    function.__signature__ = signature.replace(parameters=list(shown.values()))


for constructor in (SimpleTrainer.__init__, AccelerateTrainer.__init__, GenericTrainer.__init__, generic_trainer):
    show_keywords(constructor, TrainerOptions, make_parts)
show_keywords(get_trainer, SimpleTrainer, AccelerateTrainer, generic_trainer)
