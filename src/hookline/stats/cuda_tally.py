# mypy: implicit-reexport
"""Moved to hookline.stats.cuda_accumulators."""

from hookline.stats.cuda_accumulators import add as add
from hookline.stats.cuda_accumulators import addresses_of as addresses_of
from hookline.stats.cuda_accumulators import make_accumulators as make_tallies  # noqa: F401
from hookline.stats.cuda_accumulators import make_counts as make_counts
from hookline.stats.cuda_accumulators import make_flag as make_flag
from hookline.stats.cuda_accumulators import take as take
