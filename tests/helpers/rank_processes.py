"""Run a function on several ranks: processes that are forked from one interpreter, which has imported torch already.

>>> def train(rank, folder): ...
>>> run_on_ranks(train, 2, str(tmp_path))
[RankResult(value=…), RankResult(value=…)]

Run as a script this file is that interpreter; it reads one job a line from stdin and forks its ranks.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 300.0  # after which ranks that wait for each other are killed; a test takes a few seconds
DEVICE = os.environ.get("HOOKLINE_RANKS_ON", "cpu")  # "cuda": all ranks on one GPU, over gloo


@dataclass
class RankResult:
    """What one rank returned, raised and printed, and the exit code of its process (negative: a signal)."""

    value: Any
    error: str
    exit_code: int | None
    output: str


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, check: bool = True
) -> list[RankResult]:
    """Call ``function(rank, *arguments)`` on every rank of a gloo process group.

    Args:
        function: A function on the top level of a test module.
        world_size: The number of ranks.
        *arguments: JSON values.
        check: Whether an error or an exit code other than 0 on any rank fails the test.

    Returns:
        The results by rank; values are JSON values.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "file": function.__code__.co_filename, "function": function.__name__, "arguments": arguments,
            "world_size": world_size, "folder": folder, "path": sys.path,
        }  # fmt: skip
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        ended = json.loads(server.stdout.readline())
        results = []
        for rank, code in enumerate(ended):
            answer = Path(folder) / f"{rank}.json"
            said = json.loads(answer.read_text()) if answer.exists() else {"value": None, "error": ""}
            output = (Path(folder) / f"{rank}.log").read_text(errors="replace")
            results.append(RankResult(said["value"], said["error"], code, output))
    if check:
        for rank, result in enumerate(results):
            assert not result.error, f"rank {rank}:\n{result.error}\n{result.output}"
        codes = [result.exit_code for result in results]
        killed = f"(None: killed after {LIMIT_SECONDS:g} s)"
        assert codes == [0] * world_size, f"exit codes {codes} {killed}\n{results[0].output}"
    return results


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def _serve() -> None:
    """Fork the ranks of each job that is read, and write their exit codes."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        sys.path[:] = job["path"]
        _import_for_ranks()
        until, ended = time.monotonic() + LIMIT_SECONDS, {}
        processes = {_fork(rank, job): rank for rank in range(job["world_size"])}
        while len(ended) < len(processes) and time.monotonic() < until:
            for pid, rank in processes.items():
                if rank not in ended:
                    exited, status = os.waitpid(pid, os.WNOHANG)
                    if exited:
                        ended[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        for pid, rank in processes.items():
            if rank not in ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended[rank] = None
        print(json.dumps([ended[rank] for rank in range(job["world_size"])]), flush=True)


def _import_for_ranks() -> None:
    """Import what every rank needs before it is forked: in each of them it would take 0.6 s, a small run 0.1 s."""
    import pytest
    import rank_runs
    import torch._dynamo

    del pytest, rank_runs, torch


def _fork(rank: int, job: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    folder, code = Path(job["folder"]), 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.enable()
        count = str(job["world_size"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
        answer = {"value": None, "error": ""}
        try:
            answer["value"] = _call(rank, job)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            answer["error"] = traceback.format_exc()
        partial = folder / f".{rank}.json"
        partial.write_text(json.dumps(answer, default=str))
        partial.rename(folder / f"{rank}.json")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _call(rank: int, job: dict[str, Any]) -> Any:
    from torch import distributed

    if DEVICE == "cuda":
        _prepare_gpu()
    spec = importlib.util.spec_from_file_location("rank_job", job["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_job"] = module
    spec.loader.exec_module(module)
    store = f"file://{job['folder']}/store"
    distributed.init_process_group("gloo", store, rank=rank, world_size=job["world_size"])
    distributed.barrier()  # a rank that ends at once would break the others' connections
    value = getattr(module, job["function"])(rank, *job["arguments"])
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return value


def _prepare_gpu() -> None:
    """Make runs on the GPU the same bit for bit when they are repeated; the interpreter that forks must not use it."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when a process uses it first
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)  # a device mesh would take the GPU with the number of the rank


if __name__ == "__main__":
    _serve()
