"""Train with Hugging Face Accelerate: what an `Accelerator` has prepared, in the same loop as any other model.

The Accelerator decides about device, precision and how processes share the model and the data. Accumulation, clipping,
schedulers, checkpoints and the record are the trainer's.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from hookline import _device
from hookline.errors import ConfigError, TrainingError
from hookline.ranks import leave_ranks, own_rank
from hookline.run.engine import Engine
from hookline.run.rng import preserve_rng, seed_everything
from hookline.trainer.data.loader_state import has_state
from hookline.trainer.data.loaders import Loaders
from hookline.trainer.options import TrainerOptions
from hookline.trainer.parallel import DataParallelEngine, ShardedEngine, kind_of_parallel, let_threads_end

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}  # Accelerate's words, and ours
UNSUPPORTED = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "TPUs (XLA)"}


# ---- the Accelerator -------------------------------------------------------------------------------------------------


def find_accelerator(accelerator: Any, device: Any, options: Mapping[str, Any]) -> Any:
    """Check and return the Accelerator of a run; one is created if none is passed.

    Args:
        accelerator: The user's, or None.
        device: The device that the user named, if any.
        options: The options that the user gave; `precision` and `device` are for an Accelerator that is created here.

    Raises:
        TrainingError: If Accelerate is not installed, or is configured for what the loop cannot do.
        ConfigError: If an option contradicts the Accelerator.
    """
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise TrainingError("Accelerate is not installed: pip install 'hookline[accelerate]'") from error
    refuse_unsupported(_asked_of_launcher())
    if accelerator is None:
        wanted = {ours: theirs for theirs, ours in PRECISIONS.items()}.get(options.get("precision", ""))
        try:
            accelerator = Accelerator(mixed_precision=wanted, cpu=_device.find_device(device).type == "cpu")
        except (ImportError, ValueError) as error:  # for instance, another one was created with other settings
            raise TrainingError(f"no Accelerator can be created: {error}") from error
        atexit.register(leave_ranks)
    if not isinstance(accelerator, Accelerator):
        raise TrainingError(f"accelerator: expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    check_accelerator(accelerator)
    check_options(accelerator, device, options)
    return accelerator


def check_accelerator(accelerator: Any) -> None:
    """Raise TrainingError if an Accelerator is set up for what the loop cannot do, or does not do what was asked."""
    refuse_unsupported(accelerator.distributed_type)
    steps, several = accelerator.gradient_accumulation_steps, accelerator.num_processes > 1
    config = getattr(accelerator, "parallelism_config", None)
    started = max(int(os.environ.get("WORLD_SIZE", "1")), own_rank().world_size)
    if started > 1 and not several:
        raise TrainingError(
            f"{started} processes were started, but the Accelerator knows of only one, so each would train its own "
            "copy: without GPUs, create it with cpu=True, or leave `accelerator` out"
        )
    if steps != 1:
        raise TrainingError(
            f"the Accelerator has gradient_accumulation_steps={steps}, but the trainer accumulates itself: create "
            f"the Accelerator without it, and pass accumulate={steps} to the trainer"
        )
    if config is not None and (config.cp_enabled or getattr(config, "sp_enabled", False)):
        raise TrainingError(
            "the Accelerator has cp_size or sp_size > 1, but context and sequence parallelism are not supported; use "
            "data parallelism, FSDP2 or tensor parallelism"
        )
    if _is_on("ACCELERATE_USE_FSDP") and several and accelerator.distributed_type != "FSDP":
        raise TrainingError(
            f"the Accelerator was asked for FSDP, but uses {accelerator.distributed_type.value}: every process would "
            "have the whole model, because Accelerate has no FSDP on the CPU; pass fully_shard(model) to "
            "get_trainer('simple', …), or leave FSDP out"
        )
    if accelerator.distributed_type == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise TrainingError("the Accelerator uses FSDP1, which is not supported: pass fsdp_version=2 to its plugin")
    if accelerator.mixed_precision not in PRECISIONS:
        asked = accelerator.mixed_precision
        raise TrainingError(f"the Accelerator has mixed_precision={asked!r}, which is not supported; use 'bf16'")
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        raise TrainingError(
            f"the Accelerator has mixed_precision='fp16', but on {accelerator.device.type!r} Accelerate trains in fp32 "
            "then; use 'bf16' or 'no'"
        )


def check_options(accelerator: Any, device: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option of the trainer contradicts the Accelerator."""
    precision = PRECISIONS[accelerator.mixed_precision]
    if options.get("precision", precision) != precision:
        raise ConfigError(
            "trainer.precision",
            f"{options['precision']!r}, but the Accelerator has mixed_precision={accelerator.mixed_precision!r}; the "
            "Accelerator decides, so leave `precision` out",
        )
    if device is not None and _device.find_device(device) != device_of(accelerator):
        raise TrainingError(
            f"device: {str(device)!r}, but the Accelerator uses {str(accelerator.device)!r}; it decides, so leave "
            "`device` out, or create it with cpu=True"
        )
    for name in ("parallel", "shard_modules", "replicas"):
        if options.get(name) not in (None, "auto", 1):
            raise ConfigError(f"trainer.{name}", "the Accelerator decides how processes share the model; leave it out")


def device_of(accelerator: Any) -> torch.device:
    """Return the device of an Accelerator, with an index if it has any; Accelerate numbers the CPU, too."""
    device: torch.device = accelerator.device
    return torch.device("cpu") if device.type == "cpu" else _device.with_index(device)


def _asked_of_launcher() -> str:
    """Return the engine that `accelerate launch` asks for if the loop cannot run it, otherwise ""."""
    return next((kind for kind in UNSUPPORTED if _is_on(f"ACCELERATE_USE_{kind}")), "")


def check_launcher(options: TrainerOptions) -> None:
    """Raise ConfigError if `accelerate launch` asks for something that a run from a config would not do.

    Such a run does not use Accelerate, which is where the launcher's settings take effect.
    """
    if kind := _asked_of_launcher():
        why = f"`accelerate launch` asks for {UNSUPPORTED[kind]}, which is not supported; use 'ddp' or 'fsdp2'"
        raise ConfigError("trainer.parallel", why)
    if _is_on("ACCELERATE_USE_FSDP") and options.parallel != "fsdp2":
        why = f"{options.parallel!r}, but `accelerate launch` asks for FSDP: set trainer.parallel=fsdp2"
        raise ConfigError("trainer.parallel", why)
    if _is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise ConfigError("trainer.parallel", "the parallelism_config of `accelerate launch` has no effect on a config")
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked != "no" and PRECISIONS.get(asked) != options.precision:
        why = f"{options.precision!r}, but `accelerate launch` asks for {asked!r}: use one of them in both places"
        raise ConfigError("trainer.precision", why)
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", str(options.accumulate)):
        why = f"{options.accumulate}, but `accelerate launch` asks for {steps}: set trainer.accumulate={steps}"
        raise ConfigError("trainer.accumulate", why)


def refuse_unsupported(kind: str) -> None:
    """Raise TrainingError if a kind of distribution, as Accelerate calls it, is one that the loop cannot run."""
    if kind in UNSUPPORTED:
        raise TrainingError(
            f"the Accelerator is configured for {UNSUPPORTED[kind]}, which is not supported: they replace the training "
            "loop; use DDP or FSDP2"
        )


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


# ---- engines ---------------------------------------------------------------------------------------------------------


class PreparedEngine(Engine):
    """Train a prepared model with the device, the precision and the GradScaler of its Accelerator."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(device_of(accelerator), PRECISIONS[accelerator.mixed_precision])
        self.accelerator = accelerator
        self.scaler = accelerator.scaler

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model as it is."""
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the Accelerator's context, which the forward of a prepared model enters by itself."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def step(self, optimizer: torch.optim.Optimizer, step_function: Callable[..., Any] | None = None) -> None:
        """Step an optimizer, whose gradients are unscaled; a prepared one would unscale them again."""
        super().step(optimizer if self.scaler is None else unwrap_optimizer(optimizer), step_function)


class PreparedDataParallelEngine(PreparedEngine, DataParallelEngine):
    """Runs what an Accelerator prepared as `DistributedDataParallel`."""


class PreparedShardedEngine(PreparedEngine, ShardedEngine):
    """Runs what an Accelerator prepared with FSDP2 or tensor parallelism."""


def prepared_engine(accelerator: Any, model: torch.nn.Module) -> Engine:
    """Return the engine for a prepared model, depending on how it is shared between processes."""
    if accelerator.num_processes > 1:
        let_threads_end()
    kinds = {"ddp": PreparedDataParallelEngine, "fsdp2": PreparedShardedEngine, "tensor": PreparedShardedEngine}
    engine = kinds.get(kind_of_parallel(model), PreparedEngine)(accelerator)
    if isinstance(engine, ShardedEngine):
        engine.find_copies(model)
    return engine


# ---- model, optimizers, schedulers -----------------------------------------------------------------------------------


def prepare_model(
    accelerator: Any, model: torch.nn.Module, optimizers: Sequence[Any]
) -> tuple[torch.nn.Module, list[Any]]:
    """Let an Accelerator prepare a model and its optimizers together; prepared or wrapped objects stay unchanged.

    Returns:
        The prepared model and optimizers.

    Raises:
        TrainingError: If Accelerate refuses one of them.
    """
    from accelerate.optimizer import AcceleratedOptimizer

    todo = [model] if kind_of_parallel(model) == "none" else []  # Accelerate itself knows what it has prepared
    todo += [optimizer for optimizer in optimizers if not isinstance(optimizer, AcceleratedOptimizer)]
    if not todo:
        return model, list(optimizers)
    try:
        done = accelerator.prepare(*todo)
    except ValueError as error:  # for instance FSDP2, with an optimizer that was not prepared with its model
        raise TrainingError(f"the Accelerator cannot prepare them: {error}") from error
    by_id = {id(part): prepared for part, prepared in zip(todo, [done] if len(todo) == 1 else done, strict=True)}
    return by_id.get(id(model), model), [by_id.get(id(optimizer), optimizer) for optimizer in optimizers]


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a prepared one; others are returned unchanged."""
    return getattr(optimizer, "optimizer", optimizer)


def unwrap_scheduler(scheduler: Any) -> Any:
    """Return the scheduler inside a prepared one, which would step once per process; others are returned unchanged."""
    from accelerate.scheduler import AcceleratedScheduler

    return scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler


# ---- loaders ---------------------------------------------------------------------------------------------------------


def prepare_loaders(accelerator: Any, loaders: Loaders, seed: int | None, each_once: bool = False) -> Loaders:
    """Let an Accelerator divide the batches of DataLoaders between the processes.

    Args:
        accelerator: The Accelerator.
        loaders: One loader, a list or a dict of them; one that is not a DataLoader belongs to each process alone.
        seed: Seeds the order of a loader that is shuffled, if given.
        each_once: Whether no sample may be repeated to give all processes the same number, as in a validation.

    Raises:
        TrainingError: If a loader repeats samples and must not.
    """

    def prepared(loader: Any) -> Any:
        return _prepare_loader(accelerator, loader, each_once) if isinstance(loader, DataLoader) else loader

    with nullcontext() if seed is None else preserve_rng():
        if seed is not None:
            seed_everything(seed)  # Accelerate draws the seed of a shuffled loader when it prepares it
        if isinstance(loaders, Mapping):
            return {name: prepared(loader) for name, loader in loaders.items()}
        if isinstance(loaders, (list, tuple)) and any(isinstance(loader, DataLoader) for loader in loaders):
            return [prepared(loader) for loader in loaders]
        return prepared(loaders)


def _prepare_loader(accelerator: Any, loader: Any, each_once: bool) -> Any:
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard

    if not isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        # A sampler that already gives each process its share would be divided again.
        if max(getattr(loader.sampler, "num_replicas", 1), getattr(loader.sampler, "world_size", 1)) > 1:
            return loader
        loader = accelerator.prepare_data_loader(loader)
    dispatches = isinstance(loader, DataLoaderDispatcher) and accelerator.num_processes > 1
    repeats = dispatches or isinstance(loader.base_dataloader.dataset, IterableDatasetShard)
    if each_once and repeats and not loader.drop_last:
        raise TrainingError(
            "a validation loader with an IterableDataset, or with dispatch_batches=True, repeats samples to give all "
            "processes the same number, and these would count twice: use a dataset with a length and no "
            "dispatch_batches, or an IterableDataset with drop_last=True"
        )
    return PreparedLoader(loader, dispatches, each_once)


class PreparedLoader:
    """A prepared loader, read so that a run can resume inside an epoch: without the batch that Accelerate reads ahead.

    It has the sampler, the batch sampler and the dataset that Accelerate's own wrap, as a DataLoader has them.

    Args:
        prepared: Accelerate's loader.
        dispatches: Whether rank 0 reads the batches of all processes; its collectives are then left to Accelerate.
        each_once: Whether no sample is repeated at the end, so that processes may have different numbers of batches.
    """

    def __init__(self, prepared: Any, dispatches: bool, each_once: bool) -> None:
        from accelerate.data_loader import IterableDatasetShard

        base = prepared.base_dataloader
        self.prepared, self.base_dataloader, self.generator = prepared, base, base.generator
        self.sampler = prepared.get_sampler()
        self._sampler_of_rank = base.batch_sampler if hasattr(base.batch_sampler, "even_batches") else base.sampler
        self.batch_sampler = getattr(self._sampler_of_rank, "batch_sampler", base.batch_sampler)
        self.dataset = base.dataset.dataset if isinstance(base.dataset, IterableDatasetShard) else base.dataset
        self.passes = _Passes(prepared)
        self._dispatches, self._each_once = dispatches, each_once
        if has_state(base) and not dispatches:  # torchdata's
            self.state_dict, self.load_state_dict = base.state_dict, base.load_state_dict

    def __len__(self) -> int:
        with self._uneven():
            return len(self.prepared)

    def __iter__(self) -> Iterator[Any]:
        if self._dispatches:
            return iter(self.prepared)
        from accelerate.utils import synchronize_rng_states

        if getattr(self.prepared, "rng_types", None):  # so that all processes shuffle in the same way
            synchronize_rng_states(self.prepared.rng_types, self.prepared.synchronized_generator)
        self.prepared.set_epoch(self.prepared.iteration)
        self.prepared.iteration += 1
        return self._read_uneven() if self._each_once else iter(self.base_dataloader)

    def _read_uneven(self) -> Iterator[Any]:
        with self._uneven():
            yield from self.base_dataloader

    @contextmanager
    def _uneven(self) -> Iterator[None]:
        """Repeat no samples inside the block, if each counts once. The loader may be one that training reads, too."""
        before = getattr(self._sampler_of_rank, "even_batches", None)
        if not self._each_once or before is None:
            yield
            return
        self._sampler_of_rank.even_batches = False
        try:
            yield
        finally:
            self._sampler_of_rank.even_batches = before


class _Passes:
    """How often a prepared loader was read, as state that checkpoints save."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next pass."""
        return {"iteration": self._prepared.iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore it."""
        self._prepared.iteration = state["iteration"]
