"""The baseline: the loop one writes by hand when nobody is watching.

It is fixed. It reads no loss back (`.item()` would wait for the device) and frees gradients instead of
zeroing them. Everything else in this package is measured as time above these five lines.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from bench.tiny import Batch, loss_fn


def steps(model: nn.Module, batches: Iterable[Batch], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Train for ever, one step for each `next()`."""
    for inputs, targets in batches:
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield
