"""Small runs for tests on several ranks: the same data and model as in one process, a share of each batch per rank."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rank_processes import DEVICE
from torch import distributed, nn

from hookline import SimpleTrainer, Trainer, rank_watch, read_layers, read_metrics
from hookline.trainer import agreement

SAMPLES, FEATURES = 32, 6
PATIENCE = 30


def make_watch_patient() -> None:
    """Let the watch between ranks notice a failure at once, and wait 30 times as long for a process that is slow."""
    rank_watch.BEAT_SECONDS = 0.1
    rank_watch.monotonic = lambda: monotonic() / PATIENCE  # type: ignore[attr-defined]
    rank_watch.CLOSE_SECONDS *= PATIENCE  # by another clock


def agree_each_step() -> None:
    """Let the ranks of a run agree after every step, as they do if its steps take 100 ms."""
    agreement.MOST_STEPS = 1


def make_model() -> nn.Module:
    """Return a small model with the same weights in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
    return model.to(DEVICE)


def make_batches(rank: int = 0, world_size: int = 1, steps: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the share of a rank of each global batch; of one process all of it."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, SAMPLES, FEATURES, generator=generator)
    targets = inputs.sum(-1, keepdim=True)
    return [(given[rank::world_size], other[rank::world_size]) for given, other in zip(inputs, targets, strict=True)]


def wrap(model: nn.Module, kind: str, **options: Any) -> nn.Module:
    """Move the model to the device and share it between processes.

    Args:
        model: The model; for 'fsdp2' and 'hsdp' an iterable of modules, of which the linear ones become shards.
        kind: 'ddp', 'fsdp2', 'hsdp' (two replicas of shards), or anything else to leave the model as it is.
        **options: Options of DistributedDataParallel.

    Returns:
        The model or what wraps it.
    """
    model = model.to(DEVICE)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, **options)
    if kind in ("fsdp2", "hsdp"):
        from torch.distributed.fsdp import fully_shard

        count = distributed.get_world_size()
        mesh = make_mesh(replicate=2, shard=count // 2) if kind == "hsdp" else make_mesh(shard=count)
        for module in model:
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def make_mesh(**sizes: int) -> Any:
    """Return a mesh of all ranks with the sizes of its dimensions, over gloo.

    Some versions of torch use NCCL for a mesh of GPUs although the default process group is one of gloo, and NCCL
    refuses two ranks on one GPU.
    """
    from torch.distributed.device_mesh import init_device_mesh

    backends: dict[int | str, Any] = dict.fromkeys(sizes, "gloo")
    return init_device_mesh(DEVICE, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=backends)


def make_trainer(kind: str, rank: int, world_size: int, folder: str | Path | None, **options: Any) -> Trainer:
    """Make a trainer of one rank; `folder` None keeps the record in memory."""
    options = {"loss_fn": nn.MSELoss(), "seed": 3, "console": False, **options}
    model = wrap(options.pop("model", None) or make_model(), kind if world_size > 1 else "none")
    batches = options.pop("batches", None) or make_batches(rank, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    where = {"record": False} if folder is None else {"output_dir": str(folder)}
    return SimpleTrainer(model, batches, optimizer, DEVICE, **where, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that ranks may have in shards of its first dimension; all of them must call it.

    `full_tensor` would do, but crashes over gloo for shards on a GPU (torch 2.11).
    """
    if not hasattr(tensor, "to_local"):
        return tensor.detach()
    mesh: Any = tensor.device_mesh
    size = -(-len(tensor) // mesh.size(-1))  # of the largest shard; the last ones may be smaller or empty
    local = tensor.to_local().detach().cpu()
    own = torch.cat([local, local.new_zeros(size - len(local), *local.shape[1:])])
    parts = [torch.empty_like(own) for _ in range(mesh.size(-1))]
    distributed.all_gather(parts, own, group=mesh.get_group(mesh.ndim - 1))
    return torch.cat(parts)[: len(tensor)]


def whole_weights(trainer: Trainer) -> list[float]:
    """Return all weights as one list, gathered if they are sharded."""
    return [number for param in trainer.params.values() for number in whole(param).flatten().tolist()]


def layers_of(path: Path) -> dict[tuple[str, str, str], torch.Tensor]:
    """Return the numbers of layers.jsonl by series, layer and column."""
    return {
        (name, layer, column): series.of(layer, column)[torch.tensor(series.steps).argsort()]
        for name, series in read_layers(path).items()
        for layer in series.names
        for column in series.columns
    }


def metrics_of(path: Path) -> dict[tuple[int, str], Any]:
    """Return the numbers of metrics.jsonl by step and name, without what is about the ranks themselves."""
    left_out = ("step", "epoch", "time")
    numbers: dict[tuple[int, str], Any] = {}
    for row in read_metrics(path):
        numbers |= {(row["step"], name): value for name, value in row.items() if name not in left_out}
    return {key: value for key, value in numbers.items() if not key[1].startswith("ranks/")}
