"""Moved to hookline.record.redaction."""

from hookline.record.redaction import SecretValues as KnownSecrets
from hookline.record.redaction import redact_values as without_known

__all__ = ["KnownSecrets", "without_known"]
