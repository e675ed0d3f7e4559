"""Moved to hookline.demo.sampling."""

from hookline.demo.sampling import SampleText as SampleText
