"""Run functions of test modules in processes in which no test has run before."""

import inspect
import multiprocessing
import runpy
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

# Each process is forked from one that has imported these and done nothing else: importing torch takes seconds, and a
# process that is forked after CUDA was used or torch has started threads for backward passes cannot train.
# The first optimizer of a process imports torch._dynamo.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["hookline.build", "torch._dynamo", "pytest"])


def start(function: Callable[..., object], *args: Any, **options: Any) -> ForkServerProcess:
    """Start a function of a test module in the current directory of a fresh process.

    Its exit status is that of a script which calls the function; arguments must be picklable.
    """
    place = inspect.getfile(function), function.__module__, function.__qualname__
    process = SERVER.Process(target=_call, args=(*place, args, options, multiprocessing.get_start_method()))
    process.start()
    return process


def status_of(process: ForkServerProcess) -> int:
    """Wait for the end of a process, and return its exit status; it is negative if a signal ended the process."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _call(path: str, module: str, name: str, args: tuple[Any, ...], options: dict[str, Any], workers: str) -> None:
    """Call a function of a module that is read from its path: pytest's importlib mode keeps it off sys.path."""
    multiprocessing.set_start_method(workers, force=True)  # for loaders, as in the process of the tests
    torch.set_num_threads(1)
    runpy.run_path(path, run_name=module)[name](*args, **options)
