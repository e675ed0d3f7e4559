"""`activation_stats`: record mean and standard deviation of modules' outputs."""

from __future__ import annotations

from typing import Any

from hookline.activations.monitor import Monitor


class ActivationStats(Monitor):
    """A `Monitor` of mean and standard deviation, in layers.jsonl; `hookline.read_layers` reads them.

    Args:
        modules: The modules to record, as `ForwardHook.modules` selects them.
    """

    built_in = True
    name = "activation_stats"

    def __init__(self, modules: Any = "*") -> None:
        super().__init__(modules, metrics=("mean", "std"))
