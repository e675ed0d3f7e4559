"""Compiled statistics without a GPU: torch computes in place of the kernels, for a model with many blocks."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from hookline import ForwardHook, HookManager
from hookline.activations.compile import compiled_stats
from hookline.stats import STATISTICS, summarize
from hookline.stats.rows import merge

CPU = torch.device("cpu")
INPUT = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
WIDTH = len(STATISTICS)
COMPILING = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo reads it
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # importing inductor
]
"""Marks of tests that compile."""


def make_accumulators(many: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Make rows: here [calls, calls that were due, statistics]."""
    table = torch.zeros((many, 2 + WIDTH), dtype=torch.float64)
    return table, list(table.split(1))


def add(tensors: list[Tensor], tables: list[Tensor], rows: list[int], due: Tensor) -> None:
    """Add one tensor after the other."""
    each = tables * len(rows) if len(tables) == 1 else tables
    for tensor, table, row in zip(tensors, each, rows, strict=True):
        assert tensor.dtype.itemsize > 1, "the kernels cannot read it"
        own = table[row]
        own[0] += 1
        if due.item():
            own[1] += 1
            own[2:] = merge(torch.stack([own[2:], summarize([tensor])[0]]))


def take(rows: list[Tensor], counts: Tensor) -> Tensor:
    """Return the statistics and reset the rows."""
    whole = torch.cat(rows)
    for row in rows:
        row.zero_()
    counts += whole[:, :2]
    whole[whole[:, 1] == 0, 2] = float("nan")
    return whole[:, 2:]


STAND_IN = SimpleNamespace(
    make_accumulators=make_accumulators,
    make_flag=lambda device: torch.zeros((), dtype=torch.int32),
    make_counts=lambda many, device: torch.zeros((many, 2), dtype=torch.float64),
    addresses_of=lambda rows: rows,
    add=add,
    take=take,
)


def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the compiler, and let the CPU have kernels for one test."""
    monkeypatch.setitem(sys.modules, "hookline.stats.cuda_accumulators", STAND_IN)
    monkeypatch.setattr(compiled_stats, "has_kernels", lambda device: device == CPU)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.up(x)))


class Model(nn.Module):
    """Blocks, and a head that runs twice."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(10))
        self.head = nn.Linear(8, 8)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.head(x))


def watching(model: nn.Module, *hooks: ForwardHook, **options: Any) -> HookManager:
    """A manager that watches a model with these hooks, named hook0, hook1, …"""
    manager = HookManager(**options)
    manager.watch(model)
    for index, hook in enumerate(hooks):
        manager.register(hook, f"hook{index}")
    return manager


def graphs() -> int:
    """How many graphs have been compiled."""
    return int(counters["stats"]["unique_graphs"])


def whole(model: nn.Module, backend: str = "aot_eager") -> Any:
    """The model in ``torch.compile``."""
    return torch.compile(model, backend=backend, fullgraph=True)
