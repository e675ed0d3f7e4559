"""Check that an update hook that got finite gradients left finite ones."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns

import torch

from hookline.errors import GradientError
from hookline.events.dispatch import Cost
from hookline.gradients.view import Gradients
from hookline.stats.columns import INFS, NANS
from hookline.stats.pieces import Pieces


class FiniteCheck:
    """Compare norms before and after a hook; look at elements only where a norm is not finite.

    Args:
        grads: The gradients that the hook selects; their norms are cached, so later hooks need not read them again.
        cost: Where the time it takes is counted.
        wait: Whether to check on a device too, where the host has to wait for the answer.
    """

    def __init__(self, grads: Gradients, cost: Cost, wait: bool) -> None:
        self._grads, self._cost, self._wait = grads, cost, wait

    def begin(self) -> torch.Tensor | None:
        """Return whether all norms are finite, on the device; None if this is not checked."""
        if not self._wait and not all(tensor.is_cpu for tensor in self._grads.as_list().tensors):
            return None
        return self._grads.norms().isfinite().all()

    def end(self, were_finite: torch.Tensor, before: Mapping[str, torch.Tensor | None]) -> None:
        """Raise if all gradients were finite before the hook and one is not now.

        If one was not finite before, a hook that relates gradients to each other can leave none of them finite.

        Args:
            were_finite: What `begin` returned.
            before: The gradients as they were, to tell an overflowing norm from a non-finite element.

        Raises:
            GradientError: If the hook made a gradient non-finite.
        """
        began = perf_counter_ns()
        are_finite = self._grads.norms().isfinite().all()
        all_before, all_now = torch.stack([were_finite.to(are_finite.device), are_finite]).tolist()
        # A norm overflows earlier than the elements it is made of, so these decide.
        fine = [] if all_now else _finite(self._grads.tensors())
        bad = [name for name, is_fine in zip(self._grads, fine, strict=False) if not is_fine]
        self._cost.add(perf_counter_ns() - began)
        if bad and (all_before or all(_finite([grad for grad in before.values() if grad is not None]))):
            count = f" ({len(bad)} parameters in all)" if len(bad) > 1 else ""
            raise GradientError(f"made the gradient of {bad[0]!r}{count} non-finite, which was finite before")


def _finite(tensors: list[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether all its elements are finite."""
    if not tensors:
        return []
    rows = Pieces(tensors, [f"a gradient of shape {tuple(tensor.shape)}" for tensor in tensors]).summarize()
    finite: list[bool] = (rows[:, NANS] + rows[:, INFS] == 0).tolist()
    return finite
