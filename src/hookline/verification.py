"""Moved to verify.py."""

from hookline.verify import NotRepeatable as NotRepeatable
from hookline.verify import Verdict as Verdict
from hookline.verify import digest as digest
from hookline.verify import first_difference as first_difference
from hookline.verify import verify as verify
