"""Norms of gradients: read in one pass, and not read again until somebody has written to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.gradients.look import Look, Seen
from hookline.gradients.norm_table import NormTable
from hookline.gradients.numbers import any_sharded, is_sharded, numbers_of, places_by_kind
from hookline.stats.columns import wide_dtype
from hookline.stats.layout import kept_table
from hookline.stats.shards import find_shards


class Norms:
    """L2 norms of gradients, on their device, kept while the gradients stay as they are.

    Whether a gradient was written to is told by its version counter, so nobody needs to say so; the counters are asked
    only where a link may write that does not say what became of the norms. Two rules make a run the same whether or not
    somebody measures: what is kept by reading (`of`) is what reading again would give, and what a link knows otherwise
    (`keep`, `multiplied`) is kept by links that change gradients, always.
    """

    def __init__(self) -> None:
        self.seen = Seen()
        """What is known of the gradients beside their norms."""
        self._sure: list[Tensor] | None = None  # whose norms are right, for nobody can have written since
        self._trusting = self._telling = self._kept = False  # what is true of the link that runs
        self._tables: dict[Any, NormTable] = {}
        self._derived = False  # some of them were not found in the gradients but computed from others

    def of(self, tensors: list[Tensor]) -> Tensor:
        """One norm per gradient, of the whole gradient where it is sharded; float32 for half precision."""
        memory = self.seen.numbers(tensors)
        if self.seen.look(memory).alike:
            return self._of_one_kind(tensors, memory)
        groups = places_by_kind(memory)
        found = [self._of_one_kind([tensors[i] for i in some], [memory[i] for i in some]) for some in groups]
        home = memory[0].device
        order = sorted(range(len(memory)), key=[i for some in groups for i in some].__getitem__)
        return torch.cat([part.to(home) for part in found])[kept_table(home, tuple(order))]

    def read(self, tensors: list[Tensor]) -> Tensor:
        """As `of`, for a link that is exact to the last bit: what was only derived is read."""
        if self._derived:
            self._tables.clear()
            self._derived, self._sure = False, None
        return self.of(tensors)

    def keep(self, tensors: list[Tensor], norms: Tensor) -> None:
        """Norms that a link has found while it wrote."""
        memory = self._now_sure(tensors)
        if self.seen.look(memory).alike:
            self._table(memory[0]).put(memory, norms, found=True, settled=not self._telling)
            return
        for some in places_by_kind(memory):
            part = norms[kept_table(norms.device, tuple(some))]
            self._table(memory[some[0]]).put([memory[i] for i in some], part, True, not self._telling)

    def multiplied(self, tensors: list[Tensor], norms: Tensor, factor: Tensor) -> None:
        """A link has multiplied gradients of one kind, whose norms were these: what they are now is derived."""
        self._derived = True
        memory = self._now_sure(tensors)
        self._table(memory[0]).put_product(memory, norms, factor, settled=not self._telling)

    def _now_sure(self, tensors: list[Tensor]) -> list[Tensor]:
        """The memory of gradients whose norms are being said."""
        self._kept = True
        memory = self.seen.numbers(tensors)
        if self._sure is None or len(self._sure) < len(memory):
            self._sure = memory
        return memory

    def were_found(self, look: Look) -> bool:
        """Whether a link has found the norms of all of these while it wrote, and nobody has written since.

        That does not depend on who has measured. So a link that can find the norms, too, may do it then: clipping
        behind it has lost its last bit already.
        """
        if not (look.tensors and look.plain and look.alike):
            return False
        return self._table(look.tensors[0]).were_found(look.tensors)

    def begin_link(self, built_in: bool, tells: bool = False) -> None:
        """A link runs next. While it does, only one of ours is trusted not to write between two questions.

        One that `tells` does not write at all, or says what became of the norms, or settles them before it writes.
        """
        self._trusting, self._telling, self._kept = built_in, built_in and tells, False
        if not self._telling:
            self._settle_tables()

    def end_link(self, may_write: bool) -> None:
        """It has run. If it may have written, and did not say what became of the norms, the versions must tell."""
        if may_write and not self._kept:
            self.distrust()

    def settle(self) -> None:
        """Somebody is about to write without saying what becomes of the norms: afterwards the versions must tell."""
        self._settle_tables()
        self._sure = None

    def distrust(self) -> None:
        """Somebody may have written: before norms are used again, the versions must tell; who cannot is forgotten."""
        self._tables = {kind: table for kind, table in self._tables.items() if table.settled}
        self._sure = None

    def _settle_tables(self) -> None:
        for table in self._tables.values():
            table.settle()

    def clear(self) -> None:
        """Let go of everything; the step is over."""
        self._tables.clear()
        self._derived, self._sure = False, None
        self.seen.forget()

    def _of_one_kind(self, tensors: list[Tensor], memory: list[Tensor]) -> Tensor:
        table = self._table(memory[0])
        if not (self._trusting and memory is self._sure):
            self._read_stale(table, tensors, memory)
        return table.row(memory)

    def _read_stale(self, table: NormTable, tensors: list[Tensor], memory: list[Tensor]) -> None:
        stale = table.stale(memory)
        if len(stale) == len(memory):
            table.put(memory, _read(tensors, memory), settled=not self._telling)
        elif stale:
            table.put_some(memory, stale, _read([tensors[i] for i in stale], [memory[i] for i in stale]))
        self._sure = memory

    def _table(self, like: Tensor) -> NormTable:
        kind = like.device, like.dtype
        if kind not in self._tables:
            self._tables[kind] = NormTable()
        return self._tables[kind]


def _read(tensors: list[Tensor], memory: list[Tensor]) -> Tensor:
    """The norm of each gradient, over all its shards."""
    norms = torch.stack(read_norms(memory))
    return norms if memory is tensors or not any_sharded(tensors) else _over_shards(tensors, norms)


def _over_shards(tensors: list[Tensor], norms: Tensor) -> Tensor:
    """From the norms of what is here to those of the whole gradients; one reduction for all of a mesh."""
    for shards in find_shards(tensors, [f"a gradient of shape {tuple(tensor.shape)}" for tensor in tensors]):
        norms = shards.sums(norms.square()).sqrt()
    return norms


def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, as torch's `get_total_norm` has it; sparse and sharded ones too."""
    if norm_type == 2.0 and any_sharded(tensors):
        norm: Tensor = torch.linalg.vector_norm(Norms().of(tensors))
        return norm
    groups: dict[Any, list[Tensor]] = {}
    for tensor, memory in zip(tensors, numbers_of(tensors), strict=True):
        mesh = getattr(tensor, "device_mesh", None)
        groups.setdefault(mesh, []).append(memory if mesh is None and not tensor.is_complex() else tensor)
    norms = [_whole(torch.nn.utils.get_total_norm(group, norm_type)) for group in groups.values()]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)


def _whole(norm: Any) -> Tensor:
    """A norm as a plain number: torch leaves that of DTensors to be put together over their mesh."""
    full: Tensor = norm.full_tensor() if is_sharded(norm) else norm
    return full


def read_norms(memory: list[Tensor]) -> tuple[Tensor, ...] | list[Tensor]:
    """The L2 norm of each of these plain tensors of one kind, in one launch: the operation that torch clips by.

    (`hookline.stats.norms` is more exact, and would clip differently in the last bit.)
    """
    dtype = memory[0].dtype
    return torch._foreach_norm(memory, 2.0, dtype=None if wide_dtype(dtype) is dtype else wide_dtype(dtype))
