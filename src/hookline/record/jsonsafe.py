"""Moved to hookline.record.strict_json."""

from hookline.record.strict_json import field_values as field_values
from hookline.record.strict_json import simplify as simplify
