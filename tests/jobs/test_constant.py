"""The schedule that changes nothing."""

import torch

from hookline.jobs.constant import constant


def test_the_learning_rate_stays() -> None:
    """However many steps are made, the learning rate is what the optimizer was made with."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = constant(optimizer)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.3]
