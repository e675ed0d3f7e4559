"""Statistics of many tensors at once, computed on their device.

`summarize` returns one statistics row per tensor. `hookline.stats.collector` collects tensors while a model runs and
brings their rows to the host without waiting, `hookline.stats.histograms` counts values and reads percentiles from the
counts, `hookline.stats.rows` merges the rows of parts, and `hookline.stats.distributed` measures tensors of any kind.
Imports `core` and the shared modules; `activations`, `gradients` and what is above them may import it.
"""

from hookline.stats.rows import STATISTICS, summarize

__all__ = ["STATISTICS", "summarize"]
