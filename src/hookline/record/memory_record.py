"""Moved to hookline.record.record: `Record.in_memory`."""

from typing import Any

from hookline.record.provenance import new_run_id
from hookline.record.record import Record
from hookline.record.sinks import MemorySink


class MemoryRecord(Record):
    """The old name of `Record.in_memory`."""

    def __init__(self, config: Any = None, seed: Any = None, run_id: Any = None, *, keep: int = 100_000) -> None:
        super().__init__(MemorySink(keep), config, seed, run_id or new_run_id())
