"""`hookline` under torchrun and accelerate launch: one run, and clear errors for what a launcher cannot have."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rank_processes import DEVICE

import hookline
from hookline.cli import USAGE, main

CONFIG = """
model: {name: char_gpt, context: 16, width: 16, heads: 2, layers: 1}
data: {name: stdlib_text, context: 16, batch_size: 4, max_bytes: 60000}
optimizer: {name: adamw, lr: 1e-3}
trainer: {max_steps: 6, seed: 1, validate_every: null, sanity_batches: 0}
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
ACCELERATE = (  # without --multi_gpu it starts one process where there are no GPUs
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", "--num_cpu_threads_per_process=1",
)  # fmt: skip
TIMEOUT = 300.0
needs_a_device_per_process = pytest.mark.skipif(
    DEVICE == "cuda", reason="launched processes use NCCL for tensors on GPUs, which needs a GPU for each of them"
)


def launch(*words: str, folder: Path, during: Callable[[subprocess.Popen[str]], Any] = id) -> tuple[int | None, str]:
    """Run a launcher, and return its exit code and what was printed. No process of it is left afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hookline.__file__).parents[1])}
    (folder / "small.yaml").write_text(CONFIG)
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            during(process)
            with suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, (folder / "output.txt").read_text()


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def read_run(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "runs").glob("*/run.json")
    run: dict[str, Any] = json.loads(path.read_text())
    return run


@needs_a_device_per_process
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_a_launched_train_is_one_run(launcher: tuple[str, ...], tmp_path: Path) -> None:
    code, output = launch(*launcher, "-m", "hookline", "train", "small.yaml", folder=tmp_path)
    assert code == 0, output
    run = read_run(tmp_path)
    assert run["outcome"] == "completed"
    assert run["attempts"][0]["world_size"] == 2
    assert output.count("completed, healthy: 6 steps") == 1
    lines = output.splitlines()
    assert lines.count(str(next((tmp_path / "runs").iterdir()))) == 1
    lines = next((tmp_path / "runs").glob("*/metrics.jsonl")).read_text().splitlines()
    recorded = [json.loads(line) for line in lines]
    assert [one["step"] for one in recorded if "train/loss" in one] == [1, 2, 3, 4, 5, 6]


WORKER = """
import os, sys
from pathlib import Path
from hookline import register_hook
from hookline.cli import main

@register_hook("announce")
class Announce:
    def on_step_end(self, step):
        if step == 3:
            Path("started-" + os.environ["RANK"]).touch()

code = main(["train", "small.yaml", "trainer.max_steps=1000000", "--hook", "announce"])
Path("exit-" + os.environ["RANK"]).write_text(str(code))
sys.exit(code)
"""


@needs_a_device_per_process
def test_sigterm_to_torchrun_ends_the_run_in_order(tmp_path: Path) -> None:
    """torchrun itself exits with 1; its workers save a checkpoint, close the record and exit with 143."""
    (tmp_path / "worker.py").write_text(WORKER)

    def terminate(process: subprocess.Popen[str]) -> None:
        wait_for(lambda: all((tmp_path / f"started-{rank}").exists() for rank in (0, 1)), process)
        process.send_signal(signal.SIGTERM)

    code, output = launch(*TORCHRUN, "worker.py", folder=tmp_path, during=terminate)
    assert code != 0
    assert [(tmp_path / f"exit-{rank}").read_text() for rank in (0, 1)] == ["143", "143"], output
    run = read_run(tmp_path)
    assert (run["outcome"], run["reason"]) == ("interrupted", "SIGTERM")
    assert len(list((tmp_path / "runs").glob("*/checkpoints/*/manifest.json"))) == 1


SCRIPT = """
import torch
from hookline import get_trainer

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.randn(22, 3), torch.randn(22, 1))
loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
get_trainer("accelerate", model, loader, optimizer, loss_fn=torch.nn.MSELoss(), seed=1).train()
"""


@needs_a_device_per_process
@pytest.mark.soak
def test_a_script_with_an_accelerate_trainer(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    code, output = launch(*ACCELERATE, "script.py", folder=tmp_path)
    assert code == 0, output
    assert output.count("completed: 3 steps") == 1
    assert read_run(tmp_path)["attempts"][0]["world_size"] == 2


# ---- clear errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "trainer.precision: 'fp32', but `accelerate launch` asks for 'bf16'"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "trainer.accumulate: 1, but `accelerate launch` asks for 4"),
        ({"ACCELERATE_USE_FSDP": "true"}, "trainer.parallel: 'auto', but `accelerate launch` asks for FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "trainer.parallel: `accelerate launch` asks for DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "trainer.parallel: `accelerate launch` asks for Megatron-LM"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config of `accelerate launch` has no effect"),
    ],
)
def test_what_accelerate_launch_asks_for_and_the_config_does_not_is_an_error(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a run does not use Accelerate, so that the launcher's setting would be lost."""
    Path("small.yaml").write_text(CONFIG)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "small.yaml"]) == USAGE
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_verify_under_a_launcher_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["verify"]) == USAGE
    assert "compares runs in one process: start it without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["output_dir", "init_from"])
def test_a_path_that_is_not_on_a_file_system_is_an_error(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("small.yaml").write_text(CONFIG)
    assert main(["train", "small.yaml", f"trainer.{key}=s3://bucket/runs"]) == USAGE
    assert f"trainer.{key}: 's3://bucket/runs' is not on a file system" in capsys.readouterr().err
    assert not Path("s3:").exists()
