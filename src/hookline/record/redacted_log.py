"""Moved to hookline.record.redaction."""

from hookline.record.redaction import redacted_log as secrets_kept_out

__all__ = ["secrets_kept_out"]
