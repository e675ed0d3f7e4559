"""Train one model on several processes: DistributedDataParallel and FSDP2, wrapped by the user or by options."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from hookline import _device
from hookline._names import plain_modules, unwrap_module
from hookline._tensors import is_sharded
from hookline.core.patterns import select
from hookline.errors import ConfigError, TrainingError
from hookline.ranks import Ranks, find_ranks, host, leave_ranks, rank_and_world_size
from hookline.run.engine import Engine
from hookline.trainer.options import TrainerOptions

EXIT_SECONDS = 0.1


class DataParallelEngine(Engine):
    """Train a model that every rank holds whole: `DistributedDataParallel`."""

    averages = True

    def __init__(self, device: torch.device, precision: str = "fp32") -> None:
        super().__init__(device, precision)
        self._without_sync = ExitStack()

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the model to the device, and wrap it unless it is wrapped."""
        if kind_of_parallel(model) == "ddp":
            return model
        model = super().prepare(model)
        index = None if self.device.type == "cpu" else [self.device.index]
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=index)

    def eval_model(self, model: Any) -> Any:
        """Return the module inside: the wrapper would broadcast buffers at each call."""
        return getattr(model, "module", model)

    def sync_gradients(self, model: Any, is_last: bool) -> None:
        """Enter DDP's `no_sync` for micro-batches after which gradients are not reduced."""
        if is_last:
            self._without_sync.close()
        else:
            self._without_sync.enter_context(model.no_sync())


class ShardedEngine(Engine):
    """Train a model that the ranks hold in shards: FSDP2's `fully_shard`, or tensor parallelism.

    Args:
        device: Where the shards and the batches are.
        precision: As for `Engine`.
    """

    forward_is_collective = True
    averages = True
    _first_rank: int | None = None
    _syncs = True  # whether FSDP reduces gradients in the current backward pass

    def find_copies(self, model: torch.nn.Module) -> None:
        """Find out which ranks have the same batches: those of a tensor-parallel group, or all of them without FSDP."""
        rank, world_size = rank_and_world_size()
        of_batch = list(range(world_size)) if kind_of_parallel(model) == "tensor" else ranks_of_batch(model, rank)
        self.copies, self._first_rank = len(of_batch), min(of_batch)
        self.averages = len(of_batch) < world_size or world_size == 1

    def first_with_batch(self, rank: int) -> int:
        """Return the lowest rank that has this rank's batches."""
        return rank if self._first_rank is None else self._first_rank

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model; it was sharded on its device, before its optimizer was created."""
        return model

    def free_whole_weights(self, model: torch.nn.Module) -> None:
        """Reshard every module: FSDP leaves the outermost one whole after a forward pass, for the backward pass."""
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sync_gradients(self, model: Any, is_last: bool) -> None:
        """Let FSDP reduce gradients only after the last micro-batch."""
        from torch.distributed.fsdp import FSDPModule

        if is_last == self._syncs:
            return
        self._syncs = is_last
        for module in model.modules():  # the outermost need not be sharded
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(is_last, recurse=False)


def kind_of_parallel(model: torch.nn.Module) -> str:
    """Return how a model is shared between processes: 'ddp', 'fsdp2', 'tensor' or 'none'.

    Raises:
        TrainingError: If it is wrapped in the first version of FSDP.
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise TrainingError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), which is not supported; use "
                "torch.distributed.fsdp.fully_shard, or parallel='fsdp2' in a config"
            )
    compiled = getattr(model, "_orig_mod", model)  # the module that torch.compile wraps, after Accelerate for instance
    if isinstance(compiled, torch.nn.parallel.DistributedDataParallel):
        return "ddp"
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        return "fsdp2"
    return "tensor" if any(map(is_sharded, model.parameters())) else "none"


def ranks_of_batch(model: torch.nn.Module, rank: int) -> list[int]:
    """Return the ranks that have the same batches as this one, given a model with FSDP2.

    The mesh of a parameter has a dimension over which FSDP2 shards. A dimension of replicas may come before it, and
    those of tensor parallelism after it. The first dimension that is not replicated belongs to FSDP2.
    """
    ranks = [rank]
    for param in filter(is_sharded, model.parameters()):
        mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
        by_data = next(
            (place for place, placement in enumerate(placements, 1) if not placement.is_replicate()), mesh.ndim
        )
        here = mesh.get_coordinate()
        if here is not None:
            ranks = max(ranks, mesh.mesh[tuple(here[:by_data])].flatten().tolist(), key=len)
    return ranks


@cache
def let_threads_end() -> None:
    """Give gloo's threads a moment at exit to drop the tensors of the last collective.

    They need the interpreter's lock for that, and a thread that asks for it later aborts the process.
    """
    atexit.register(time.sleep, EXIT_SECONDS)


def make_engine(model: torch.nn.Module, device: torch.device, options: TrainerOptions) -> Engine:
    """Return the engine for a model, as it is wrapped or as `parallel` asks.

    Raises:
        ConfigError: If `parallel` and the process group or the model do not fit together.
    """
    ranks, kind, requested = find_ranks(options.rank_timeout), kind_of_parallel(model), options.parallel
    if ranks.world_size > 1:
        let_threads_end()
    launched = int(os.environ.get("WORLD_SIZE", "1")) if ranks.world_size == 1 else ranks.world_size
    if launched > 1 and requested == "none":
        raise ConfigError(
            "trainer.parallel",
            f"none, but {launched} processes were started, which would train {launched} whole copies; use 'ddp' or "
            "'fsdp2', or start one process",
        )
    if launched > 1 and ranks.world_size == 1:
        raise ConfigError(
            "trainer.parallel",
            f"{launched} processes were started, but torch.distributed is not initialized in this one: call "
            "torch.distributed.init_process_group() and wrap the model first, or train from a config",
        )
    if requested in ("ddp", "fsdp2") and kind not in ("none", requested):
        raise ConfigError("trainer.parallel", f"{requested!r}, but the model is wrapped for {kind!r} already")
    if ranks.world_size > 1 and kind == "none" and requested != "ddp":
        what = {
            "auto": "the model is neither wrapped nor sharded, so each process would train its own copy: pass "
            "DistributedDataParallel(model) or fully_shard(model), or parallel='ddp'",
            "fsdp2": "a model must be sharded before its optimizer is created: call fully_shard(model) first, or train "
            "from a config",
        }[requested]
        raise ConfigError("trainer.parallel", f"{ranks.world_size} processes, and {what}")
    if kind != "none" or requested == "ddp":
        _check_devices(ranks, device)
    if kind in ("fsdp2", "tensor"):
        engine = ShardedEngine(device, options.precision)
        engine.find_copies(model)
        return engine
    if kind == "ddp" or (requested == "ddp" and ranks.world_size > 1):
        return DataParallelEngine(device, options.precision)
    return Engine(device, options.precision)


def _check_devices(ranks: Ranks, device: torch.device) -> None:
    """Raise if two ranks use one GPU under NCCL, which would hang."""
    if device.type == "cpu" or ranks.world_size == 1 or torch.distributed.get_backend() != "nccl":
        return
    used = ranks.gather([host(), str(device)])
    for rank, (machine, gpu) in enumerate(used):
        if (first := used.index([machine, gpu])) < rank:
            raise TrainingError(
                f"ranks {first} and {rank} both use {gpu} of {machine}, which NCCL cannot do: "
                "start as many processes as there are GPUs, or use the backend gloo"
            )


def start_processes(options: TrainerOptions) -> TrainerOptions:
    """Initialize torch.distributed if a launcher started several processes, and return the options with `auto` decided.

    A config says nothing about the model's wrapping, so `auto` means DDP.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and options.parallel != "none" and not torch.distributed.is_initialized():
        if _device.default_device().type != "cpu":
            _device.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group()  # the backend of each device: gloo for tensors on the host
        atexit.register(leave_ranks)
    if find_ranks(options.rank_timeout).world_size > 1 and options.parallel == "auto":
        options = TrainerOptions.make({**vars(options), "parallel": "ddp"})
    return options


def shard(model: torch.nn.Module, device: torch.device, options: TrainerOptions) -> torch.nn.Module:
    """Shard a model over all ranks with FSDP2: each module that `shard_modules` selects by itself, then the rest.

    If selected modules are nested, the outermost is sharded.

    Raises:
        ConfigError: If a pattern selects nothing, or the ranks cannot be divided into `replicas`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = find_ranks()
    if ranks.world_size % options.replicas:
        raise ConfigError("trainer.replicas", f"{ranks.world_size} processes cannot be {options.replicas} equal groups")
    sizes = {"replicate": options.replicas, "shard": ranks.world_size // options.replicas}
    if options.replicas == 1:
        del sizes["replicate"]
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):  # each rank would keep a shard of different initial weights
        torch.distributed.broadcast(tensor.detach(), 0)
    named = plain_modules(model)
    chosen = select(options.shard_modules, named, "trainer.shard_modules") if options.shard_modules else []
    for name in chosen:
        if not any(name.startswith(f"{outer}.") for outer in chosen):  # `*` also matches modules inside a block
            fully_shard(named[name], mesh=mesh)
    fully_shard(unwrap_module(model), mesh=mesh)
    return model
