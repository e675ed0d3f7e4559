"""Moved to hookline.record.json_lines."""

from hookline.record.json_lines import JsonLines as JsonLines
from hookline.record.json_lines import write_json_atomic as write_json_atomic
