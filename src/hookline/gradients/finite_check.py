"""Whether a link that got finite gradients has left one that is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter_ns

import torch

from hookline.errors import GradientError
from hookline.events.dispatch import Cost
from hookline.gradients.view import Gradients
from hookline.stats.columns import INFS, NANS
from hookline.stats.pieces import Pieces

Before = Mapping[str, torch.Tensor | None]


class FiniteCheck:
    """Compares norms before and behind the link; only where one is not finite, elements are looked at.

    Links behind it need not read those norms again. Its cost is in an account of its own: on a GPU the host waits for
    the answer, so there it is done only `if_asked`.
    """

    def __init__(self, grads: Gradients, cost: Cost, if_asked: bool) -> None:
        self._grads, self._cost, self._waits = grads, cost, if_asked

    def begin(self) -> torch.Tensor | None:
        """Whether all gradients have a finite norm, on the device; None where this is not checked."""
        tensors = self._grads.look().tensors
        if not self._waits and not all(tensor.is_cpu for tensor in tensors):
            return None
        return self._norms_are_finite()

    def end(self, were_finite: torch.Tensor, before: Before) -> None:
        """Raise if all gradients were finite before the link and one is not now.

        With one that was not, a link that puts gradients in relation to each other can leave none finite.
        """
        began = perf_counter_ns()
        are_finite = self._norms_are_finite()
        knew, fine = torch.stack([were_finite.to(are_finite.device), are_finite]).tolist()
        culprits = [] if fine else self._culprits()
        self._cost.add(perf_counter_ns() - began)
        if culprits and (knew or _all_finite(before.values())):
            where = repr(culprits[0]) + (f" ({len(culprits)} parameters in all)" if len(culprits) > 1 else "")
            raise GradientError(f"made the gradient of {where} non-finite, which was finite before")

    def _norms_are_finite(self) -> torch.Tensor:
        return self._grads.norms().isfinite().all()

    def _culprits(self) -> list[str]:
        """Those with an element that is not finite; a norm overflows earlier."""
        fine = _finite(self._grads.tensors()).tolist()
        return [name for name, is_fine in zip(self._grads, fine, strict=True) if not is_fine]


def _all_finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    there = [gradient for gradient in gradients if gradient is not None]
    return not there or bool(_finite(there).all())


def _finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Whether each is finite in every element."""
    rows = Pieces(tensors, [f"a gradient of shape {tuple(tensor.shape)}" for tensor in tensors]).summarize()
    return rows[:, NANS] + rows[:, INFS] == 0
