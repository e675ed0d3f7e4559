"""Moved to hookline.record.record: `Record.in_memory`."""

from hookline.record.record import Record

MemoryRecord = Record.in_memory
