"""One step's look at the gradients: everything is measured on their device and becomes one table, to travel at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.stats.columns import STATISTICS
from hookline.stats.histograms import fold, percentiles
from hookline.stats.layout import upload
from hookline.stats.newest import Known, remember, remember_norms
from hookline.stats.pieces import Pieces

_GRAD = attrgetter("grad")


class Wanted(NamedTuple):
    """What a look shall measure beside the norms."""

    moments: bool = True
    bins_per_octave: int = 0  # 0 for no histogram
    points: tuple[float, ...] = ()
    update_ratio: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of what is measured at first; those of a histogram's bins have no names and come last."""
        return _columns(self)

    @property
    def reads_all(self) -> bool:
        """Whether all statistics are needed; a histogram's window ends at the largest value."""
        return self.moments or bool(self.bins_per_octave) or bool(self.points)


@lru_cache
def _columns(wanted: Wanted) -> tuple[str, ...]:
    points = [percentile_name(point) for point in wanted.points]
    top = ["top_octave"] if wanted.bins_per_octave else []
    return (*(STATISTICS if wanted.reads_all else ("l2",)), *points, *top)


def percentile_name(point: float) -> str:
    """What a percentile's column is called: p10, p99.9."""
    return f"p{point:g}"


class Sent(NamedTuple):
    """What belongs to a table on its way: the parameters of its rows, those of them that have a gradient, its columns.

    The column ``final_l2`` is there only where the gradients were changed before the optimizers got them.
    """

    names: tuple[str, ...]
    there: tuple[int, ...]
    columns: tuple[str, ...]


class Look:
    """The gradients of some parameters in one step. Of those that have none, the table holds NaN.

    `versions_tell` says that whoever writes to them until the optimizer steps does so in a way that versions count.
    """

    def __init__(
        self, step: int, params: Mapping[str, torch.nn.Parameter], wanted: Wanted, versions_tell: bool = True
    ) -> None:
        self.step = step
        self.params, self._wanted = dict(params), wanted
        self._places, grads = self._gradients()
        self._names = names = tuple(self.params)
        pieces = Pieces(grads, names if len(grads) == len(names) else [names[place] for place in self._places])
        # A DTensor's version misses writes to its shard, so that only plain gradients can be known again.
        known = Known(grads) if pieces.plain else None
        self._measured = self._measure(pieces, known)
        self._known = known if versions_tell else None
        self._unchanged = False  # the optimizers got what was measured
        self._final: Tensor | None = None
        self._sizes: Tensor | None = None
        self._under_way: StepSize | None = None

    def see_final(self) -> None:
        """The optimizers step next: measure what they get. Where nobody touched the gradients, that is known."""
        if self._final is None and not self._unchanged:
            places, grads = self._gradients()
            self._unchanged = self._known is not None and self._known.are(grads)
            if not self._unchanged:
                self._final = self._spread(Pieces(grads).norms().unsqueeze(1), places, missing=0.0)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """One optimizer steps next: keep its parameters as they are."""
        owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = list(self.params.values())
        places = [place for place in self._places if id(params[place]) in owned]
        self._under_way = StepSize([params[place] for place in places], places) if places else None

    def after_step(self) -> None:
        """It has stepped: measure how far."""
        if self._under_way is not None:
            found = self._spread(self._under_way.measure(), self._under_way.places)
            self._sizes = found if self._sizes is None else torch.where(found.isnan(), self._sizes, found)
            self._under_way = None

    def table(self) -> tuple[Sent, Tensor]:
        """Everything that was measured, [parameters, columns and bins], and what the rows and columns are."""
        blocks: dict[tuple[str, ...], Tensor | None] = {}
        if not self._unchanged:
            blocks["final_l2",] = self._final
        if self._wanted.update_ratio:
            blocks["update_l2", "weight_l2"] = self._sizes
        columns = (*chain.from_iterable(blocks), *self._wanted.columns)
        sent = Sent(self._names, tuple(self._places), columns)
        if not blocks:
            return sent, self._measured
        found = [self._missing(names) if block is None else block for names, block in blocks.items()]
        return sent, torch.cat([*found, self._measured], dim=1)

    def _missing(self, columns: Sequence[str]) -> Tensor:
        return self._measured.new_full((len(self.params), len(columns)), float("nan"))

    def _gradients(self) -> tuple[list[int], list[Tensor]]:
        """Where there are gradients, and these."""
        grads = list(map(_GRAD, self.params.values()))
        places = [place for place, grad in enumerate(grads) if grad is not None]
        return places, grads if len(places) == len(grads) else [grads[place] for place in places]

    def _measure(self, pieces: Pieces, known: Known | None) -> Tensor:
        """Statistics or norms, then percentiles, the octave at which the bins end, and the bins, as far as wanted."""
        if not self._wanted.reads_all:
            norms = pieces.norms()
            if known is not None:
                remember_norms(known, norms)  # for whoever looks next
            return self._spread(norms.unsqueeze(1), self._places)
        blocks = [rows := pieces.summarize()]
        if known is not None:
            remember(known, rows)  # for whoever looks next
        points, resolution = self._wanted.points, self._wanted.bins_per_octave
        if not (points or resolution):
            return self._spread(rows, self._places)
        counted = pieces.histograms(rows)
        blocks += [percentiles(counted, points)] if points else []
        blocks += [counted.tops.unsqueeze(1), fold(counted.counts, resolution)] if resolution else []
        return self._spread(torch.cat([block.to(rows.dtype) for block in blocks], dim=1), self._places)

    def _spread(self, found: Tensor, places: list[int], missing: float = float("nan")) -> Tensor:
        """What was found of some parameters, in the rows of all of them."""
        if len(places) == len(self.params):
            return found
        rows = found.new_full((len(self.params), found.shape[1]), missing)
        return rows.index_copy_(0, upload(places, torch.int64, found.device), found)


class StepSize:
    """How far one optimizer step moves some parameters, and how large they were. Holds a copy of them meanwhile."""

    @torch.no_grad()
    def __init__(self, params: Sequence[Tensor], places: list[int]) -> None:
        self.places = places
        self._pieces = Pieces(params)
        self._weights = self._pieces.norms()
        self._before = torch._foreach_mul(self._pieces.dense, 1)  # copies, in a few launches

    @torch.no_grad()
    def measure(self) -> Tensor:
        """The norms of what was added to each parameter, and of each parameter before, [parameters, 2]."""
        torch._foreach_sub_(self._before, self._pieces.dense)
        return torch.stack([self._pieces.with_dense(self._before).norms(), self._weights], dim=1)
