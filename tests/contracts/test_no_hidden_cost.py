"""A step reads a tensor's value only if a due hook asks for it, and then once for all hooks that share it.

The loss of a step on the CPU, where reading waits for nothing, is the only exception. The tests therefore train with a
loss that says that it is on another device.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer
from torch.utils._python_dispatch import TorchDispatchMode

from hookline import ForwardHook, Trainer, TrainingHook
from hookline.gradients.view import Gradients


class Reads:
    """How often a tensor's value was copied to the host."""

    def __init__(self) -> None:
        self.count = 0


class ScalarWatch(TorchDispatchMode):
    """Notices every read of a scalar, from Python or from inside torch."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Count host reads in the block: scalars below Python, whole tensors by the methods that copy them."""
    reads = Reads()
    with monkeypatch.context() as patch, ScalarWatch(reads):
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name), reads), raising=True)
        yield reads


def counted(method: Callable[..., Any], reads: Reads) -> Callable[..., Any]:
    """Return the method, wrapped to count its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        reads.count += 1
        return method(*args, **kwargs)

    return call


class Elsewhere(torch.Tensor):
    """A tensor that says that it is not on the CPU."""

    @property
    def is_cpu(self) -> bool:
        """No."""
        return False

    def tolist(self) -> Any:
        """Read all values at once, as a plain tensor does; a subclass reads them one by one."""
        return self.as_subclass(torch.Tensor).tolist()


def loss_elsewhere(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss that says that it is not on the CPU."""
    return torch.nn.functional.mse_loss(output, target).as_subclass(Elsewhere)


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No write to the record falls into a slow test."""
    monkeypatch.setattr("hookline.run.step_log.FLUSH_SECONDS", math.inf)


def unread_trainer(steps: int = 21, **options: Any) -> Trainer:
    """Make a run that is too short for a write to the record, with SGD, because AdamW reads scalars on the CPU."""
    return make_trainer(data=make_batches(steps), **{"loss_fn": loss_elsewhere, **options})


def reads_of(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, batches: int = 20) -> int:
    """Return the host reads of `batches` micro-batches, including the first, without the run's start and end."""
    monkeypatch.setattr("hookline.run.step_log.FLUSH_SECONDS", math.inf)  # a write by the clock reads what is logged
    run = trainer.stepper()
    with monkeypatch.context(), counting(monkeypatch) as reads:
        for _ in range(batches):
            next(run)
    for _ in run:
        pass
    return reads.count


def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: every way to read a tensor is counted."""
    tensor = torch.ones(())
    ways: list[Callable[[], Any]] = [
        tensor.item, lambda: float(tensor), lambda: int(tensor), lambda: bool(tensor), lambda: tensor.tolist(),
        lambda: tensor.numpy(), lambda: tensor.cpu(), lambda: f"{tensor:.2f}", lambda: 1 if tensor > 0 else 0,
    ]  # fmt: skip
    for way in ways:
        with counting(monkeypatch) as reads:
            way()
        assert reads.count >= 1


OPTIONS: list[dict[str, Any]] = [
    {}, {"accumulate": 4}, {"max_grad_norm": 1.0}, {"accumulate": 2, "loss_weight": "samples"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_is_read_without_listeners(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop itself reads no tensor in a step, also with accumulation, clipping and loss weights."""
    assert reads_of(unread_trainer(**options), monkeypatch) == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_the_cpu_the_loss_is_read_once_a_step(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: a loss that is not finite is announced at its step."""
    trainer = unread_trainer(loss_fn=torch.nn.functional.mse_loss, **options)
    assert reads_of(trainer, monkeypatch) == 20 // options.get("accumulate", 1)


@pytest.mark.req("004-29")
def test_hooks_that_name_free_values_cost_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat, a hook that logs a device tensor, one with **kwargs and a forward hook read nothing."""
    trainer = unread_trainer(max_grad_norm=1.0)

    class Watch(ForwardHook):
        def on_forward(self, output: torch.Tensor, trainer: Any) -> None:
            trainer.log("mean", output.mean())

    class Free(TrainingHook):
        def on_step_end(self, ctx: Any, lr: float, step: int) -> None:
            self.beat = ctx.step, ctx.tokens_seen, lr

        def on_before_backward(self, trainer: Any, loss: torch.Tensor) -> None:
            trainer.log("live", loss)

        def on_train_batch_end(self, **values: Any) -> None:
            assert "loss" not in values and "state" not in values

        def on_gradients_ready(self, grads: Any) -> None:
            self.names = list(grads)

    trainer.add_hook(Watch())
    trainer.add_hook(Free())
    assert reads_of(trainer, monkeypatch) < 5  # after other tests in one process a few were seen; a read a step is 20


def test_a_loss_is_read_once_for_all_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hooks at two events that name loss or metrics share one read per micro-batch."""
    trainer = unread_trainer()
    trainer.on("train_batch_end", name="first")(lambda loss: None)
    trainer.on("train_batch_end", name="second")(lambda loss, metrics: None)
    trainer.on("after_backward", name="third")(lambda loss: None)
    assert reads_of(trainer, monkeypatch) == 20


@pytest.mark.parametrize(
    ("event", "argument", "per_step"),
    [
        ("train_batch_end", "loss", 1),
        ("train_batch_end", "metrics", 1),
        ("train_batch_end", "state", 2),  # the latest loss and the mean
        ("step_end", "loss", 1),
        ("step_end", "grad_norm", 1),
        ("before_optimizer_step", "grad_norm", 1),
    ],
)
def test_what_each_value_costs(event: str, argument: str, per_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value that needs a host read costs one read per event, if a hook names it."""
    trainer = unread_trainer()
    namespace: dict[str, Any] = {}
    exec(f"def hook({argument}): pass", namespace)
    trainer.on(event)(namespace["hook"])
    assert reads_of(trainer, monkeypatch) == 20 * per_step


def test_a_hook_that_is_not_due_costs_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """every=5 reads four losses in twenty steps, and a disabled hook none."""
    trainer = unread_trainer()
    trainer.on("train_batch_end", every=5, name="now_and_then")(lambda loss: None)
    trainer.on("train_batch_end", name="off", enabled=False)(lambda loss, state: None)
    assert reads_of(trainer, monkeypatch) == 4


def test_ctx_reads_only_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those fields of a StepContext that a hook reads are computed, and once."""
    trainer = unread_trainer()
    trainer.on("step_end")(lambda ctx: ctx.step % 10 or (ctx.loss, ctx.loss, ctx.grad_norm, ctx.grad_norm))
    assert reads_of(trainer, monkeypatch) == 4


def test_a_kept_ctx_is_not_read_until_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers stay on the device."""
    trainer, kept = unread_trainer(), []
    trainer.on("step_end")(lambda ctx: kept.append(ctx))
    assert reads_of(trainer, monkeypatch) == 0
    assert all(ctx.loss > 0 and ctx.grad_norm > 0 for ctx in kept)


def test_the_norm_is_computed_at_the_steps_where_a_due_hook_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that names `ctx` or `grad_norm` at on_step_end, and is not due, costs no norm; nor does **values."""
    norms: list[int] = []
    compute = Gradients.norm
    monkeypatch.setattr(Gradients, "norm", lambda self: norms.append(1) or compute(self))
    trainer, kept = unread_trainer(), []
    trainer.on("step_end", name="beat")(lambda step, **values: None)
    trainer.on("step_end", name="last", at=5)(lambda ctx: kept.append(ctx))
    trainer.train()
    assert norms == [1] and kept[0].grad_norm > 0


def test_ctx_and_arguments_share_their_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that reads ctx and one that names loss and grad_norm cost one read of each."""
    trainer = unread_trainer()
    trainer.on("step_end", name="first")(lambda ctx: (ctx.loss, ctx.grad_norm))
    trainer.on("step_end", name="second")(lambda loss, grad_norm: None)
    assert reads_of(trainer, monkeypatch) == 40
