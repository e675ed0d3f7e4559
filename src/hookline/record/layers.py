"""Collect statistics per layer without waiting for a device, and pack them as lines of layers.jsonl.

Names are written once, then packed numbers per step: GPT-2 small has 148 parameters, and ten named statistics of each
would be 90 kB of JSON a step; packed they are 8 kB.
"""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

import torch

from hookline import _device
from hookline._device import HostCopy
from hookline.errors import RecordError
from hookline.record.format import SeriesHeader, pack_counts
from hookline.record.json_lines import JsonLines
from hookline.record.pending import Pending


class LayerRow(NamedTuple):
    """One step of a series; the values are on the host, in float32, [names, columns] or [names, columns, bins]."""

    step: int
    header: SeriesHeader
    values: torch.Tensor

    @property
    def series(self) -> str:
        """The name of the series."""
        return self.header.series


def layer_step(step: int, header: SeriesHeader, values: torch.Tensor) -> Pending:
    """Return one step of a series on its way to the host.

    On CUDA the copy starts here, on the stream that computed the values. They may be changed afterwards.

    Args:
        step: The step of the values.
        header: The meaning of the values.
        values: Real numbers in the header's shape.

    Raises:
        RecordError: If the values are not real numbers.
    """
    if values.is_complex() or values.is_meta:
        kind = "complex" if values.is_complex() else "on the meta device"
        raise RecordError(
            f"layers {header.series!r}: the values are {kind}; pass a tensor of real numbers that holds data"
        )
    values = values.detach() if values.requires_grad else values
    # On an accelerator the copy to the host is the snapshot; elsewhere it would only refer to the values.
    copy = HostCopy(values.to(torch.float32, copy=not _device.is_accelerator(values.device)))
    return Pending("layers", [copy], lambda: [LayerRow(step, header, copy.wait())])


class LayerLines(JsonLines):
    """The file layers.jsonl.

    A line ``{"series", "name", "names", "columns"}`` defines an id, once per process, with ``"bins"`` for histograms.
    Each step is a line ``{"series", "step", "data"}`` with base64 of little-endian float32; histograms of counts have
    ``"counts"`` instead, a fifth as long (see `pack_counts`). A line ``{"resumed"}`` discards later steps above it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._ids: dict[SeriesHeader, int] = {}

    def write_row(self, row: LayerRow) -> None:
        """Append one step, after its header if that is new. Raises `RecordError` if the disk refuses."""
        header = row.header
        number = self._ids.get(header)
        if number is None:
            number = len(self._ids)
            fields = {"series": number, "name": header.series, "names": header.names, "columns": header.columns}
            self.write(fields if header.bins is None else {**fields, "bins": header.bins})
            self._ids[header] = number  # only now: a header that the disk refused is written again
        # Bins of whole numbers are packed as counts. The line is formatted by hand, because an encoder would scan
        # every character of the numbers.
        values = row.values.numpy()
        counts = None if header.bins is None else pack_counts(values.reshape(-1))
        field = b"data" if counts is None else b"counts"
        text = b64encode(values.astype("<f4", copy=False).tobytes() if counts is None else counts)
        self.write_line(b'{"series":%d,"step":%d,"%s":"%s"}' % (number, row.step, field, text))
