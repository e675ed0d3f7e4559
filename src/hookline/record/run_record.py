"""Moved to hookline.record.record: `Record.on_disk`."""

from hookline.record.record import Record as Record
from hookline.record.record import Record as RunRecord

__all__ = ["Record", "RunRecord"]
