"""Compare update hooks on DTensors of two processes with the same hooks on whole tensors, for test_sharded.py."""

import os
import sys
from typing import Any

import torch
from conftest import Rig, make_params  # beside this file
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hookline.errors import GradientError

HOOKS: list[list[Any]] = [
    [{"name": "clip_norm", "max_norm": 1.0}],
    [{"name": "clip_norm", "max_norm": 1.0, "norm_type": 1.0}],
    [{"name": "clip_norm", "max_norm": 1.0, "norm_type": float("inf")}],
    [{"name": "clip_value", "max_value": 0.5}],
    [{"name": "clip_adaptive", "clipping": 0.1}],
    [{"name": "scale", "factor": 0.5, "params": "matrix"}],
    [{"name": "normalize"}],
    [{"name": "normalize", "by": "parameter"}],
    ["sign"],
    ["centralize"],
    ["grokfast"],
    [{"name": "freeze", "params": "vector"}],
    [{"name": "mask", "params": "kernel"}],
    [{"name": "mask", "masks": {"matrix": torch.tensor([[1, 0, 1]]), "kernel": torch.eye(4, 3).view(4, 3, 1, 1)}}],
    ["skip_nonfinite"],
    [{"name": "spike_guard", "warmup": 1, "action": "clip"}],
    [
        "centralize",
        {"name": "measure", "metrics": ["norm", "absmax", "std", "count"]},
        {"name": "clip_norm", "max_norm": 1.0},
        {"name": "measure", "as": "after"},
        "link_norms",
    ],
]


def sharded(params: dict[str, torch.nn.Parameter], mesh: Any, dim: int = 0) -> dict[str, torch.nn.Parameter]:
    """Shard parameters and gradients over the mesh; what is too small to be sharded is replicated."""
    made = {}
    for name, param in params.items():
        place = [Shard(dim) if param.dim() > dim else Replicate()]
        made[name] = torch.nn.Parameter(distribute_tensor(param.detach(), mesh, place))
        if param.grad is not None:
            made[name].grad = distribute_tensor(param.grad, mesh, place)
    return made


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(entries: list[Any], mesh: Any, dim: int = 0) -> None:
    """Check that gradients, logged values and the norm before clipping equal those of whole tensors on every rank."""
    plain, cut = Rig(make_params(), *entries), Rig(sharded(make_params(), mesh, dim), *entries)
    wanted, found = plain.step(), {name: whole(grad) for name, grad in cut.step().items()}
    for name, grad in wanted.items():
        assert (grad is None) == (found[name] is None), (entries, name)
        if grad is not None:
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)
    assert plain.trainer.logged.keys() == cut.trainer.logged.keys()
    for name, value in plain.trainer.logged.items():
        torch.testing.assert_close(cut.trainer.logged[name], value, rtol=1e-5, atol=1e-6)
    if hasattr(plain, "clipped"):
        torch.testing.assert_close(cut.clipped[0], plain.clipped[0], rtol=1e-5, atol=1e-6)


def refused(hook: Any, mesh: Any, dim: int) -> str:
    try:
        Rig(sharded(make_params(), mesh, dim), hook).step()
    except GradientError as error:
        return str(error)
    return ""


def taken(function: Any, mesh: Any) -> str:
    """Return the error about the gradients that a function returns."""
    rig = Rig(sharded(make_params(), mesh))
    function.collective = True  # what it does with DTensors needs all ranks
    rig.registry.register(function, "returns", event="update", on_error="raise")
    try:
        rig.step()
    except GradientError as error:
        return str(error)
    return ""


def main(store: str, rank: int) -> None:
    """Run all comparisons; both processes do the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for entries in HOOKS:
        compare(entries, mesh)
    assert refused("centralize", mesh, 1).startswith("centralize: 'matrix' is sharded within its rows")
    assert refused("clip_adaptive", mesh, 1).startswith("clip_adaptive: 'matrix' is sharded within its rows")
    mask = {"name": "mask", "masks": {"matrix": torch.tensor([[1, 0, 1]])}}
    compare([mask], mesh, dim=1)
    assert taken(lambda grads: {name: whole(grad) for name, grad in grads.items()}, mesh).endswith(
        "'matrix': returned a plain tensor, but the parameter is a DTensor"
    )
    assert "'matrix': returned placements" in taken(
        lambda grads: {name: grad.redistribute(placements=[Replicate()]) for name, grad in grads.items()}, mesh
    )
    assert refused("noise", mesh, 0).startswith("noise: 'matrix' is sharded over processes")
    dist.destroy_process_group()
    print(f"all the same on rank {rank}", flush=True)


if __name__ == "__main__":
    # One interpreter imports everything and then becomes two: importing takes longer than all that they do.
    child = os.fork()
    main(sys.argv[1], rank=0 if child else 1)
    if child and os.waitpid(child, 0)[1]:
        sys.exit("rank 1 failed")
