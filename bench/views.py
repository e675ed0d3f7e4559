"""The cost of looking at a run: the live view, the report, the trackers, beside those of Lightning and the HF Trainer.

What is drawn or written by the clock does not happen in every step, so blocks of steps are timed, not single steps.
Each contender has a process of its own: the threads of its trackers would take time from the others, too.
"""

import logging
import multiprocessing
import os
import pty
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from multiprocessing.connection import Connection
from statistics import median
from tempfile import TemporaryDirectory
from time import clock_gettime, perf_counter, process_time, pthread_getcpuclockid, sleep
from typing import Any

import torch
from torch import nn

from bench.interleave import HandOver, Threaded, standard_error_of_median
from bench.peers import STEPS_WITHOUT_END, silence
from bench.table import Table

TITLE = "The cost of looking at a run"
COLUMNS = ("contender", "step ms", "above plain µs", "± s.e.", "of a step", "other threads µs", "goal")
NOTES = [
    "Model: three layers of 640 units, batch 64, SGD, on one thread. Above plain: the median over the rounds of"
    " (contender - the same trainer without views), one directly after the other, per step of a block of 500 steps, "
    "with its standard error.",
    "Other threads: the processor time per step of the threads that do not train. They hold Python's lock for most of "
    "it, so it is roughly how much they can delay training; other programs affect it less than durations. Trackers "
    "write every two seconds, partly between two blocks; this column includes all of it.",
    "Output goes to a pseudo-terminal that a process reads. All trackers write to the disk: TensorBoard, W&B offline,"
    " MLflow to sqlite.",
    "Every trainer logs the loss of every step, which is the default in Hookline but not in the others.",
]
WIDTH, BATCH, BLOCK, FEWEST_ROUNDS = 640, 64, 500, 6
SECONDS_TO_CONNECT = 20  # MLflow makes a database
STEPS_OF_A_ROUND = 80  # a round here counts as so many of other benchmarks, which time single steps

loss_fn = nn.CrossEntropyLoss()


def make_model() -> nn.Module:
    """Make a model whose step takes about 5 ms on one core."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def make_batches() -> list[Any]:
    """Make the batches beforehand."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(16)
    ]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=0.001)


def bare(loader: HandOver) -> None:
    """Run a loop of plain PyTorch."""
    model = make_model()
    optimizer = make_optimizer(model)
    for inputs, targets in loader:
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def hookline(*views: str, every: int = 1) -> Callable[[HandOver], None]:
    """Return Hookline's loop with some of its views; trackers get every so many values of a metric."""

    def loop(loader: HandOver) -> None:
        import hookline

        model = make_model()
        trackers = {
            "tensorboard": lambda: hookline.TensorBoardTracker(every=every),
            "wandb": lambda: hookline.WandbTracker(mode="offline", every=every),
            "mlflow": lambda: hookline.MLflowTracker(tracking_uri="sqlite:///mlflow.db", every=every),
        }
        hooks: list[Any] = [make() for name, make in trackers.items() if name in views]
        if "live" in views:
            hooks.append(hookline.ConsoleLogHook())
        hookline.SimpleTrainer(
            model, loader, make_optimizer(model), "cpu", loss_fn=loss_fn, max_steps=STEPS_WITHOUT_END,
            console="live" in views, report="report" in views, hooks=hooks,
        ).train()  # fmt: skip

    return loop


def lightning(views: bool) -> Callable[[HandOver], None]:
    """Return Lightning's loop, with its TQDM bar and its TensorBoard logger or without both."""

    def loop(loader: HandOver) -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import TQDMProgressBar
        from lightning.pytorch.loggers import TensorBoardLogger

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = make_model()

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                inputs, targets = batch
                loss: torch.Tensor = loss_fn(self.net(inputs), targets)
                if views:
                    self.log("train/loss", loss, prog_bar=True)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return make_optimizer(self)

        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, log_every_n_steps=1,
            enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=views,
            logger=TensorBoardLogger("lightning") if views else False, callbacks=[TQDMProgressBar()] if views else [],
        )  # fmt: skip
        trainer.fit(Module(), loader)

    silence("lightning.pytorch", "lightning.fabric")
    return loop


class NetWithLoss(nn.Module):
    """The same model, returning the loss as the HF Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": loss_fn(self.net(inputs), targets)}


def hf_trainer(views: bool) -> Callable[[HandOver], None]:
    """Return the HF Trainer's loop, with its progress bar and its TensorBoard callback or without both."""

    def loop(loader: HandOver) -> None:
        from transformers import Trainer, TrainingArguments
        from transformers.trainer_callback import PrinterCallback

        class ReadyMade(Trainer):
            def get_train_dataloader(self) -> Any:
                return loader

        model = NetWithLoss()
        arguments = TrainingArguments(
            output_dir="hf", max_steps=STEPS_WITHOUT_END, use_cpu=True, save_strategy="no", eval_strategy="no",
            logging_strategy="steps" if views else "no", logging_steps=1, report_to=["tensorboard"] if views else [],
            disable_tqdm=not views, max_grad_norm=0.0, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = ReadyMade(model, arguments, optimizers=(make_optimizer(model), None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    silence("transformers")
    return loop


ALL_VIEWS = ("live", "report", "tensorboard", "wandb", "mlflow")
# Each row: what it is called, its loop, the row it is compared with, whether batches are dicts, and the goal.
ROWS: list[tuple[str, Callable[[HandOver], None], str | None, bool, str]] = [
    ("plain PyTorch", bare, None, False, ""),
    ("Hookline", hookline(), "plain PyTorch", False, ""),
    ("Hookline, live view and report", hookline("live", "report"), "Hookline", False, ""),
    ("Hookline, TensorBoard", hookline("tensorboard"), "Hookline", False, ""),
    ("Hookline, live view, report, TensorBoard", hookline("live", "report", "tensorboard"), "Hookline", False, "≤ 2 %"),
    ("Hookline, W&B offline", hookline("wandb"), "Hookline", False, ""),
    ("Hookline, MLflow", hookline("mlflow"), "Hookline", False, ""),
    ("Hookline, live view, report, all trackers", hookline(*ALL_VIEWS), "Hookline", False, "≤ 2 %"),
    ("Hookline, all of these, every=10", hookline(*ALL_VIEWS, every=10), "Hookline", False, "≤ 2 %"),
    ("Lightning", lightning(False), "plain PyTorch", False, ""),
    ("Lightning, TQDM bar and TensorBoard", lightning(True), "Lightning", False, ""),
    ("HF Trainer", hf_trainer(False), "plain PyTorch", True, ""),
    ("HF Trainer, its bar and TensorBoard", hf_trainer(True), "HF Trainer", True, ""),
]


@contextmanager
def terminal() -> Iterator[None]:
    """Make standard output and standard error a terminal of 120 columns inside the block."""
    controller, worker = pty.openpty()
    os.environ |= {"COLUMNS": "120", "LINES": "40", "TERM": "xterm-256color"}
    reader = subprocess.Popen(["cat"], stdin=controller, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = sys.stdout, sys.stderr
    with os.fdopen(worker, "w") as stream:
        sys.stdout = sys.stderr = stream
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
    reader.kill()
    os.close(controller)


def serve(name: str, connection: Connection) -> None:
    """Make blocks of steps of one contender on request, and send their seconds; the body of its process."""
    loop, as_dicts = next((loop, as_dicts) for row, loop, _, as_dicts, _ in ROWS if row == name)
    batches = make_batches()
    if as_dicts:
        batches = [{"inputs": inputs, "targets": targets} for inputs, targets in batches]
    os.environ |= {"WANDB_SILENT": "true", "WANDB_MODE": "offline"}
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    with TemporaryDirectory() as directory, chdir(directory), terminal():
        try:
            contender = Threaded(loop, batches)
            contender.turn(BLOCK)  # to warm up
        except Exception as error:  # it is not installed
            connection.send(error)
            return
        connection.send(None)
        own_clock = pthread_getcpuclockid(contender.thread.ident or 0)
        while connection.recv():
            started = perf_counter()
            contender.turn(BLOCK - 1)
            seconds = (perf_counter() - started) / BLOCK
            connection.send((seconds, process_time() - clock_gettime(own_clock)))


class InProcess:
    """A contender in a process of its own."""

    def __init__(self, name: str) -> None:
        """Start the process."""
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._blocks, self._by_others, self._before = 0, 0.0, 0.0
        self._process = context.Process(target=serve, args=(name, other), daemon=True)
        self._process.start()

    def wait(self) -> None:
        """Wait until the contender has made its first steps."""
        if (error := self._connection.recv()) is not None:
            raise error

    def turn(self) -> float:
        """Make a block of steps, and return the seconds of one."""
        self._connection.send(True)
        self._blocks += 1
        seconds, self._by_others = self._connection.recv()
        return float(seconds)

    def start_counting(self) -> None:
        """Begin to count what other threads do: connecting to a tracker, such as making a database, is over."""
        self.turn()
        self._blocks, self._before = 0, self._by_others

    @property
    def by_others(self) -> float:
        """The processor seconds of threads that do not train, by step."""
        return (self._by_others - self._before) / (self._blocks * BLOCK)

    def close(self) -> None:
        """End the process; what its run would write at its end is of no use."""
        self._process.kill()
        self._process.join()


def measure(rounds: int, only: list[str]) -> Table:
    """Time blocks of steps of every contender in turn."""
    table = Table(TITLE, COLUMNS, notes=list(NOTES))
    rows = [row for row in ROWS if not only or any(name.lower() in row[0].lower() for name in (*only, "plain pytorch"))]
    baselines = {row[0]: row[2] for row in rows}
    seconds: dict[str, list[float]] = {}
    above: dict[str, list[float]] = {name: [] for name in baselines}
    contenders = {name: InProcess(name) for name in baselines}
    try:
        for name, contender in contenders.items():
            try:
                contender.wait()
                seconds[name] = []
            except Exception as error:
                table.notes.append(f"{name}: not measured ({error})")
        sleep(SECONDS_TO_CONNECT)
        for name in seconds:
            contenders[name].start_counting()
        draw = random.Random(0)
        for _ in range(max(rounds // STEPS_OF_A_ROUND, FEWEST_ROUNDS)):
            for name in draw.sample(list(seconds), len(seconds)):
                # Directly after each other, because the speed of a machine drifts.
                pair = [name, baselines[name]] if baselines[name] in seconds else [name]
                times = {one: contenders[one].turn() for one in draw.sample(pair, len(pair))}
                seconds[name].append(times[name])
                above[name] += [times[name] - times[one] for one in pair[1:]]
    finally:
        for contender in contenders.values():
            contender.close()
    for name, _, baseline, _, goal in [row for row in rows if row[0] in seconds]:
        step, differences = f"{median(seconds[name]) * 1e3:.2f}", above[name]
        others = f"{contenders[name].by_others * 1e6:.0f}"
        if not differences:
            table.rows.append((name, step, "", "", "", others, goal))
            continue
        share = f"{median(differences) / median(seconds[str(baseline)]):+.1%}"
        error = standard_error_of_median(differences)
        table.rows.append((name, step, f"{median(differences) * 1e6:+.0f}", f"{error * 1e6:.0f}", share, others, goal))
    return table
