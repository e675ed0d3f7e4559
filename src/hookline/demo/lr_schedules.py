"""Learning-rate schedules that torch does not have: constant, and linear warm-up with cosine decay."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hookline.errors import HooklineError


def constant(optimizer: Optimizer) -> LambdaLR:
    """Keep the learning rate as it is. (torch's own ConstantLR starts at a third of it.)"""
    return LambdaLR(optimizer, lambda _: 1.0)


def warmup_cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int, final: float = 0.1) -> LambdaLR:
    """Raise the learning rate linearly to its full value, then lower it along half a cosine to `final` of that.

    Counted in optimizer steps from 1: step `n` of the warm-up uses `n / warmup_steps` of the full rate (so that no step
    is wasted on zero), step `warmup_steps` exactly the full rate, step `total_steps` and all later ones exactly `final`
    of it. Call `step()` once after every optimizer step.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> warmup_cosine(optimizer, warmup_steps=4, total_steps=10).get_last_lr()
    [0.25]

    Args:
        optimizer: The optimizer whose learning rate is scheduled.
        warmup_steps: Steps of the warm-up; 0 for none.
        total_steps: The step at which the rate reaches its final value.
        final: The final value as a fraction of the full rate.

    Raises:
        HooklineError: If the warm-up is not shorter than the run, or `final` is not between 0 and 1.
    """
    if not 0 <= warmup_steps < total_steps:
        raise HooklineError(
            f"warmup_cosine: warmup_steps={warmup_steps} must be 0 or more, and less than {total_steps=}"
        )
    if not 0 <= final <= 1:
        raise HooklineError(f"warmup_cosine: final={final} must be between 0 and 1: it is a fraction")
    peak = max(warmup_steps, 1)

    def factor(steps_done: int) -> float:
        step = steps_done + 1
        if step <= peak:
            return step / peak
        if step >= total_steps:
            return final
        progress = (step - peak) / (total_steps - peak)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)
