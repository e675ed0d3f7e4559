"""Test your own hooks: drive them through short runs, record what happens, and check that they behave well.

`hookline help testing-hooks` shows how. The same things are pytest fixtures wherever Hookline is installed.
"""

from hookline.testing.checks import assert_harmless, assert_resumable, assert_within_budget, small_trainer
from hookline.testing.lifecycles import Lifecycle, lifecycles
from hookline.testing.observers import EventRecorder, MemorySink

__all__ = [
    "EventRecorder",
    "Lifecycle",
    "MemorySink",
    "assert_harmless",
    "assert_resumable",
    "assert_within_budget",
    "lifecycles",
    "small_trainer",
]
