"""Turn logged scalars into rows of metrics.jsonl, without waiting for the devices that they are on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hookline._device import HostCopy
from hookline.errors import RecordError, with_article
from hookline.record import strict_json
from hookline.record.pending import Pending
from hookline.record.redaction import redact_name

REDUCTIONS = ("mean", "sum", "max", "min")
"""How the numbers that the ranks log under one name are combined."""

Entry = tuple[int, int, str, Any, float]  # step, epoch, name, value, time
Row = dict[str, Any]


def snapshot(name: str, value: Any) -> Any:
    """Return a plain number as it is and a tensor as a copy on its own device, which the caller cannot change.

    Raises:
        RecordError: If the value of the metric `name` is not one real number.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise RecordError(f"metric {name!r} has shape {list(value.shape)}; log one number, e.g. its .mean()")
        if value.is_complex() or value.is_meta:
            kind = "complex" if value.is_complex() else "on the meta device"
            raise RecordError(f"metric {name!r} is {kind}; log a real number that has a value")
        copy = value.detach().clone()
        return copy if copy.dim() == 0 else copy.reshape(())
    if isinstance(value, (int, float)):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return value.item()
    raise RecordError(
        f"metric {name!r} is {with_article(type(value).__name__)}; log a number or a tensor with one element"
    )


class MetricBatch(Pending):
    """The metrics of one flush, with one copy to the host per device and dtype among their tensors.

    Args:
        entries: The logged values; tensors are 0-dim. Reading replaces them with numbers, unless a device lost them.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self._groups: list[tuple[list[int], HostCopy]] = []  # indices of entries, and the copy that holds them
        lost: list[Exception] = []
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, (_, _, _, value, _) in enumerate(entries):
            if isinstance(value, torch.Tensor):
                by_kind.setdefault((value.device, value.dtype), []).append(index)
        for indices in by_kind.values():
            try:
                self._groups.append((indices, HostCopy(torch.stack([entries[index][3] for index in indices]))))
            except Exception as error:  # the device failed; the numbers on the host are still good
                lost += [error] * len(indices)
        super().__init__("metrics", [copy for _, copy in self._groups], self._read_groups)
        self.lost += lost

    def _read_groups(self) -> list[Row]:
        """Return one row per step and epoch, without the numbers that a device lost."""
        for indices, copy in self._groups:
            try:
                values = copy.wait()
            except Exception as error:
                self.lost += [error] * len(indices)
                continue
            if values.is_floating_point() and values.element_size() < 4:  # 8-bit floats have no `tolist`
                values = values.float()
            for index, number in zip(indices, values.tolist(), strict=True):
                step, epoch, name, _, logged_at = self.entries[index]
                self.entries[index] = (step, epoch, name, number, logged_at)
        return metric_rows(entry for entry in self.entries if not isinstance(entry[3], torch.Tensor))


def metric_rows(entries: Iterable[Entry]) -> list[Row]:
    """Return one row per step and epoch: integers as ints, booleans as bools, names without the secrets in them."""
    rows: dict[tuple[int, int], Row] = {}
    for step, epoch, name, value, logged_at in entries:
        row = rows.get((step, epoch))
        if row is None:
            row = rows[step, epoch] = {"step": step, "epoch": epoch, "time": round(logged_at, 6)}
        clean = redact_name(name)
        row[clean if clean == name else strict_json.free_name(clean, row)] = value
    # Sorted, because some values are logged at once and losses only with the next flush.
    return [row for _, row in sorted(rows.items())]
