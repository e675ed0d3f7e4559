"""Fork the tests' process, where that is possible."""

import os

import pytest
import torch


def fork() -> int:
    """Call os.fork; skip the test if this process has used CUDA, which a forked process cannot use again."""
    skip_after_cuda()
    return os.fork()


def skip_after_cuda() -> None:
    """Skip the test if this process has used CUDA: a process that is forked from it fails."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA cannot be used in a process that was forked after CUDA was initialized")
