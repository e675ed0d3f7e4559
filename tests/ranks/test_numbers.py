"""Several ranks train as one process does on the global batch: losses, weights, and how often gradients are reduced."""

import math
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import FEATURES, make_trainer, whole_weights
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ["ddp", "fsdp2"]
IGNORED = -100
STEPS = 20


def split(batches: list[Any], rank: int, world_size: int, sizes: list[int]) -> list[Any]:
    """Return the share of a rank of each global batch; the shares of several ranks are `sizes`, in turn."""
    if world_size == 1:
        return batches
    found = []
    for index, batch in enumerate(batches):
        first = sizes[index % len(sizes)]
        share = slice(0, first) if rank == 0 else slice(first, None)
        found.append(tuple(one[share] for one in batch))
    return found


def uneven_batches(rank: int, world_size: int, count: int) -> list[Any]:
    """Return batches of 12 samples, of which rank 0 of two gets 5, 1 or 11."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 12, FEATURES, generator=generator)
    batches = [(one, one.sum(-1, keepdim=True)) for one in inputs]
    return split(batches, rank, world_size, [5, 1, 11])


def labelled_batches(rank: int, world_size: int, count: int) -> list[Any]:
    """Return batches with labels, many of them ignored: all of rank 0 in batch 1, all of both ranks in batch 2."""
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(count, 12, FEATURES, generator=generator)
    labels = torch.randint(0, 4, (count, 12), generator=generator)
    labels[:, 8:] = IGNORED
    labels[1::6, :6] = IGNORED
    labels[2::6] = IGNORED
    return split(list(zip(inputs, labels, strict=True)), rank, world_size, [6])


def masked_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a mean that is NaN, with NaN gradients, if every label is ignored."""
    counted = (labels != IGNORED).float()
    losses = -output.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]  # torch's own loss would give zeros
    return (losses * counted).sum() / counted.sum()


class Classifier(nn.Module):
    """Four classes; the layers are sharded like those of the model that the helpers make."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4))

    def __iter__(self) -> Any:
        return iter(self.layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "accumulated": {"accumulate": 4},
    "short windows": {"accumulate": 3, "max_epochs": 2},
    "each batch": {"accumulate": 4, "sync_each_batch": True},
    "samples": {"loss_weight": "samples", "uneven": True},
    "samples, accumulated": {"loss_weight": "samples", "accumulate": 3, "uneven": True},
    "tokens": {"loss_weight": "tokens", "labelled": True},
    "tokens, accumulated": {"loss_weight": "tokens", "accumulate": 3, "labelled": True},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "accumulate": 2},
    "guards": {"guards": True},
}


def train(rank: int, world_size: int, kind: str, named: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train one run with each of some options, and return weights, losses and skipped steps by option."""
    found = {}
    for name, options in named.items():
        more = dict(options)
        if more.pop("uneven", False):
            more["batches"] = uneven_batches(rank, world_size, STEPS)
        if more.pop("labelled", False):
            more["batches"] = labelled_batches(rank, world_size, STEPS)
            more |= {"loss_fn": masked_loss, "model": Classifier()}
        guards = more.pop("guards", False)
        trainer = make_trainer(kind, rank, world_size, None, **{"max_epochs": 3, "validate_every": None, **more})
        if guards:
            trainer.add_hook("skip_nonfinite")
            trainer.add_hook("spike_guard", factor=1.2, warmup=2)
        trainer.train()
        found[name] = {
            "weights": whole_weights(trainer),
            "losses": [row["train/loss"] for row in trainer.record.metrics if "train/loss" in row],
            "skipped": trainer.skipped_steps,
        }
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Return what one process finds with each of the options."""
    found: dict[str, Any] = run_on_ranks(train, 1, 1, "none", OPTIONS)[0].value
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_process_with_every_option(kind: str, alone: dict[str, Any]) -> None:
    ranks = [result.value for result in run_on_ranks(train, 2, 2, kind, OPTIONS)]
    for name, expected in alone.items():
        found = [one[name] for one in ranks]
        assert found[0]["weights"] == found[1]["weights"], f"{name}: the replicas have drifted apart"
        recorded = [one["losses"] for one in found if one["losses"]]  # of rank 0 alone once they are exchanged
        means = [sum(losses) / len(losses) for losses in zip(*recorded, strict=True)]
        if "precision" in OPTIONS[name]:  # half precision rounds, or overflows in, the sums of each rank
            assert means[0] == pytest.approx(expected["losses"][0], rel=0.01), name
            assert found[0]["skipped"] == found[1]["skipped"], name
            continue
        assert means == pytest.approx(expected["losses"], rel=1e-5), name
        assert found[0]["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-5), name
        assert [one["skipped"] for one in found] == [expected["skipped"]] * 2, name
    assert alone["tokens"]["skipped"] > 0
    assert alone["guards"]["skipped"] > 0


class Reductions(TorchDispatchMode):
    """Counts the collectives that reduce the gradients of shards; the agreement of the ranks is an all_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


def count_reductions(rank: int, kind: str, options: dict[str, Any]) -> list[int]:
    """Return how often gradients were reduced in each step: by DDP's hook for buckets, by FSDP's own collectives."""
    trainer, counts = make_trainer(kind, rank, 2, None, accumulate=4, validate_every=None, **options), [0]
    if kind == "ddp":

        def reduce(state, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations of other types
            counts[-1] += 1
            return allreduce_hook(state, bucket)

        trainer.model.register_comm_hook(None, reduce)
    before = 0
    seen = Reductions()

    @trainer.on("on_gradients_ready")
    def end_step() -> None:
        nonlocal before
        if kind == "fsdp2":
            counts[-1], before = seen.count - before, seen.count
        counts.append(0)

    with seen:
        trainer.train()
    return counts[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_reduces_gradients_once(kind: str) -> None:
    once, each = (run_on_ranks(count_reductions, 2, kind, {"sync_each_batch": each})[0].value for each in (False, True))
    assert len(once) == 2
    assert all(once)
    assert [4 * count for count in once] == each


def overflow(rank: int, kind: str) -> list[Any]:
    """Train with fp16; the gradient of the last row, which only rank 1 has a shard of, overflows in step 2."""
    torch.manual_seed(0)
    batches = [(torch.randn(4, FEATURES), torch.randn(4, 8)) for _ in range(4)]
    batches = [(inputs + rank, targets) for inputs, targets in batches]
    batches[1][1][:, -1] = 1e30
    model = nn.Sequential(nn.Linear(FEATURES, 8))

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output.float() * targets).mean()

    trainer = make_trainer(kind, rank, 2, None, model=model, loss_fn=loss_fn, batches=batches, precision="fp16")
    trainer.train()
    return [trainer.skipped_steps, trainer.engine.scaler.get_scale(), whole_weights(trainer)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_in_the_shard_of_one_rank_skips_the_step_of_all(kind: str) -> None:
    first, second = (result.value for result in run_on_ranks(overflow, 2, kind))
    assert first == second
    assert first[:2] == [1, 2.0**15]
    assert all(map(math.isfinite, first[2]))
