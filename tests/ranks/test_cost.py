"""What ranks send each other for the record and the agreement, counted: it does not grow with the number of ranks."""

import json
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import DEVICE, make_batches, make_model, make_trainer
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

import hookline.ranks
import hookline.trainer.agreement
from hookline.ranks import Ranks
from hookline.run import progress

STEPS = 100


class Collectives(TorchDispatchMode):
    """Counts the collectives of ours, by kind, and their bytes; training's own have float32 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith("c10d.allreduce"):
            (tensor,) = args[0]
            if tensor.dtype in (torch.int64, torch.float64):
                kind = f"{str(function).split('.')[1]} {str(tensor.dtype).split('.')[1]}"
                self.counts[kind] = self.counts.get(kind, 0) + 1
                if tensor.dtype == torch.int64:
                    self.largest = max(self.largest, tensor.nbytes)
        return function(*args, **(kwargs or {}))


def count(rank: int, kind: str, world_size: int) -> dict[str, Any]:
    progress.monotonic = lambda: 0.0  # type: ignore[attr-defined] # the clock makes no exchange due
    batches = make_batches(rank, world_size, 4) * (STEPS // 4)
    trainer = make_trainer(kind, rank, world_size, None, batches=batches, max_steps=STEPS, max_epochs=9)
    seen, at = Collectives(), {}

    @trainer.on("step_end")
    def note(step: int) -> None:
        at[step] = dict(seen.counts)

    with seen:
        trainer.train()
    (within, later), exchanged = (at[3], at[43]), at[55]
    return {
        "a step": {key: (value - within.get(key, 0)) / 40 for key, value in later.items() if value != within.get(key)},
        "an exchange": {
            key: value - later[key] if key in later else value for key, value in exchanged.items() if "float64" in key
        },
        "bytes": seen.largest,
    }


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("fsdp2", 2), ("ddp", 4)])
def test_ten_fast_steps_cost_one_small_collective_and_an_exchange_one_sum(kind: str, world_size: int) -> None:
    for result in run_on_ranks(count, world_size, kind, world_size):
        assert result.value["a step"] == {"allreduce_ int64": 0.1}
        assert sum(result.value["an exchange"].values()) <= 2  # one sum, and one maximum if there is something for it
        assert result.value["bytes"] <= 128


class EqualRanks(Ranks):
    """Rank 0 of many that do the same at the same time; notes what they would send each other, in bytes."""

    act_together = True

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size=world_size)
        self.sent: list[tuple[str, int]] = []

    def gather(self, value: Any) -> list[Any]:
        self.sent.append(("gather", len(json.dumps(value))))
        return [value] * self.world_size

    def total(self, numbers: Sequence[Any]) -> list[Any]:
        self.sent.append(("awaited sum", 8 * len(numbers)))
        return [number * self.world_size for number in numbers]

    def send(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        self.sent.append(("sum", 8 * len(numbers)))
        return lambda: [number * self.world_size for number in numbers]

    def exchange(self, maxima: torch.Tensor, sums: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        own = sums(maxima)
        self.sent += [("exchanged maximum", maxima.nbytes), ("exchanged sum", own.nbytes)]
        return maxima, own * self.world_size


def count_among(rank: int, world_size: int) -> dict[str, Any]:
    """Train on shards of a group of any number of ranks, of which only this one exists; the numbers mean nothing."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    progress.monotonic = lambda: 0.0  # type: ignore[attr-defined]
    distributed.destroy_process_group()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    ranks = EqualRanks(world_size)
    hookline.ranks._default_ranks = distributed.group.WORLD, ranks  # type: ignore[assignment]
    # Equal ranks have equal batches.
    hookline.trainer.agreement.check_first_batch = lambda ranks, batches, loaders: batches
    model = make_model()
    for module in (*(one for one in model if isinstance(one, torch.nn.Linear)), model):
        fully_shard(module)  # on the mesh of the default group: the helpers' mesh is one of gloo
    trainer = make_trainer("none", 0, 1, None, model=model, batches=make_batches(0, 1, STEPS), max_steps=STEPS)
    trainer.add_hook("activation_stats", every=10)
    trainer.add_hook("gradient_monitor", every=10)
    at: dict[int, int] = {}
    trainer.on("step_end")(lambda step: at.update({step: len(ranks.sent)}))
    trainer.train()
    return {"start": ranks.sent[: at[1]], "steps": ranks.sent[at[1] : at[STEPS]]}


def test_collectives_and_bytes_are_the_same_for_two_and_for_thousands_of_ranks() -> None:
    (two,), (many,), (thousands,) = (run_on_ranks(count_among, 1, world_size) for world_size in (2, 64, 4096))
    assert two.value == many.value == thousands.value
    steps = two.value["steps"]
    assert Counter(kind for kind, _ in steps) == {"sum": STEPS // 10, "exchanged maximum": 1, "exchanged sum": 1}
    assert max(size for kind, size in steps if kind == "sum") <= 128


def wait_for_nothing(rank: int) -> list[str]:
    """Train on a GPU, and return where the host has waited for it after the first steps."""
    batches = [(inputs.to(DEVICE), targets.to(DEVICE)) for inputs, targets in make_batches(rank, 2, 8)] * 4
    trainer = make_trainer("ddp", rank, 2, None, batches=batches)
    waits: list[str] = []

    def note(*_: Any) -> None:
        waits.append("".join(traceback.format_stack(limit=6)))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        for step, _ in enumerate(trainer.stepper()):
            if step in (9, 29):  # later ones read the means of the epoch
                torch.cuda.set_sync_debug_mode("warn" if step == 9 else "default")
                if step == 9:
                    waits.clear()  # torch has warned that the mode is a prototype
    return waits


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs HOOKLINE_RANKS_ON=cuda")
def test_ranks_agree_without_waiting_for_the_device() -> None:
    assert [result.value for result in run_on_ranks(wait_for_nothing, 2)] == [[], []]
