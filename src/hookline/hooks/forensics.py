"""Moved to hookline.hooks.nan_forensics.hook."""

from hookline.hooks.nan_forensics.hook import NanForensics as NanForensics
