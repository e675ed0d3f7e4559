"""Fork the tests' process, where that is possible."""

import os

import pytest
import torch


def fork() -> int:
    """Call os.fork; skip the test if a process that is forked from this one could not train."""
    skip_after_cuda()
    probe = os.fork()
    if probe == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(probe, 0)[1] != 0:
        pytest.skip("torch has started threads for backward passes, after which a forked process has none")
    return os.fork()


def skip_after_cuda() -> None:
    """Skip the test if this process has used CUDA: a process that is forked from it fails."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA cannot be used in a process that was forked after CUDA was initialized")
