"""The memory of a run stays constant: nothing is kept per step, with any hooks."""

import gc
import io
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_trainer

from hookline import ForwardHook, Trainer, TrainingHook

KILOBYTE, MEGABYTE = 2**10, 2**20


class Batches:
    """Gives the same batch again and again, so that the data itself cannot grow."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(0)
        self.count, self.batch = count, (torch.randn(2, 3), torch.randn(2, 1))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.count))


class Watch(ForwardHook):
    """Reads every activation."""

    def on_forward(self, output: torch.Tensor) -> None:
        self.latest = output.mean()


class Everything(TrainingHook):
    """Names the costly arguments at every step."""

    def on_train_batch_end(self, metrics: Any, state: Any, loss: float) -> None:
        metrics["mine"] = loss

    def on_step_end(self, ctx: Any, trainer: Any) -> None:
        self.norm = ctx.grad_norm
        trainer.log("norm", self.norm)


def busy_trainer(steps: int, report: bool = True) -> Trainer:
    """Make a run on disk with hooks of every kind, also a failing one; a record in memory would grow by design."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    trainer = make_trainer(
        Everything(), Watch(), model=model, data=Batches(steps), optimizer=torch.optim.AdamW(model.parameters()),
        record=True, report=report, max_grad_norm=1.0, warn_above=None,  # pytest keeps what is logged
    )  # fmt: skip
    trainer.add_hook("console_log", log_every_n_batches=100, stream=io.StringIO())
    trainer.on("after_backward", every=7, name="sometimes_broken")(lambda step: 1 / (step % 14))
    return trainer


def live_tensors() -> int:
    """Return how many tensors the garbage collector tracks."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def advance(run: Iterator[None], batches: int) -> None:
    """Train that many micro-batches."""
    for _ in range(batches):
        next(run)


def memory_after(trainer: Trainer, run: Iterator[Any], batches: int) -> int:
    """Return Python's memory after that many more batches, when everything has been written."""
    advance(run, batches)
    trainer.step_log.flush()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_memory_is_flat_over_3000_steps() -> None:
    """From step 500 to step 3,000, neither the number of tensors nor Python's memory grows."""
    trainer = busy_trainer(3_050, report=False)  # its summary is bounded, but not full after so few steps
    run = trainer.stepper()
    advance(run, 501)  # just behind a flush of the record
    tensors = live_tensors()
    advance(run, 1_400)
    tracemalloc.start()
    try:
        taken = [memory_after(trainer, run, 100) for _ in range(10)][2:]  # the first ones fill caches
    finally:
        tracemalloc.stop()
    assert live_tensors() - tensors <= 160  # what gathers between two flushes of the record, every 50 steps
    # What Python keeps for reuse goes up and down by some 30 kB; the least of several looks much less.
    assert min(taken[4:]) - min(taken[:4]) < 32 * KILOBYTE  # an object kept for every step would be seen
    advance_to_the_end(run)


def advance_to_the_end(run: Iterator[None]) -> None:
    """Train the remaining batches."""
    for _ in run:
        pass


def with_graph() -> int:
    """Return how many live tensors have a graph."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) and thing.grad_fn is not None for thing in gc.get_objects())


def test_a_finished_run_frees_its_tensors() -> None:
    """After a run no graph is alive, and the tensors of a trainer are freed with it."""
    before, graphs = live_tensors(), with_graph()
    trainer = busy_trainer(20)
    trainer.remove_hook("sometimes_broken")  # pytest keeps what is logged, and with it the frames of a traceback
    trainer.train()
    assert with_graph() == graphs
    del trainer
    assert live_tensors() <= before


def test_gradients_are_not_kept_for_the_next_step() -> None:
    """With a hook at on_step_end, the gradients live until it has been called, and not until the next step."""
    trainer = busy_trainer(3)
    trainer.remove_hook("clip_norm")
    alive: list[weakref.ref[torch.Tensor]] = []
    counts = []
    trainer.on("before_optimizer_step", name="mark")(lambda grads: alive.extend(map(weakref.ref, grads.values())))
    for _ in trainer.stepper():
        counts.append((len(alive), sum(ref() is not None for ref in alive)))
    assert counts == [(4, 0), (8, 0), (12, 0)]


def resident_bytes() -> int:
    """Return the process's resident memory, where the system reports it."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc/self/status on this system")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * KILOBYTE


@pytest.mark.soak
@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_memory_is_flat_over_100000_steps() -> None:
    """From step 10,000 to step 100,000, the process grows by less than eight megabytes."""
    run = busy_trainer(100_000).stepper()
    advance(run, 10_001)
    tensors, resident = live_tensors(), resident_bytes()
    advance(run, 89_990)
    assert live_tensors() - tensors <= 160
    assert resident_bytes() - resident < 8 * MEGABYTE
    advance_to_the_end(run)
