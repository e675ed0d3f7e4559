"""Moved to data/sampler.py."""

from hookline.trainer.data.sampler import ResumableSampler as ResumableSampler
