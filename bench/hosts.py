"""Microseconds that hooks add to a step of Lightning, transformers, Ignite and a loop with `attach`."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from statistics import median
from threading import Thread
from time import thread_time
from typing import Any

import torch

from bench.interleave import (
    HandOver,
    Threaded,
    close_all,
    no_garbage_collection,
    on_one_core,
    standard_error_of_median,
)
from bench.overhead import scratch_directory
from bench.peers import STEPS_WITHOUT_END, NetWithLoss, do_nothing, hf_arguments, silence
from bench.table import Table
from bench.tiny import loss_fn, make_batches, make_model, make_optimizer

TITLE = "Hooks in other trainers"
COLUMNS = ("host", "contender", "step µs", "above the host µs", "± s.e.", "bar µs")
BLOCK = 50  # steps that are timed together: a block is longer than what the clock of a thread can tell apart
NOTES = [
    "Model: MLP 32-64-10, batch 16, SGD, ready-made batches. The record is in memory.",
    "Above the host: median over the rounds of (contender - host alone) in the same round, in thread time.",
    "A/A: the host alone, measured a second time; its difference is noise.",
    "Its own callback: a callback of the host with a handler that does nothing, for each event of a step that "
    "Hookline's callback listens to.",
    "The goal in a host is the time of its own callback in this table; for attach it is 10 µs without hooks and 30 "
    "with ten.",
]
HOOKS = 10


def hooks(count: int) -> list[Any]:
    """Make hooks that listen to four events of a step."""
    from hookline import TrainingHook

    class Noop(TrainingHook):
        def on_train_batch_start(self, batch_idx: int) -> None: ...
        def on_after_backward(self, batch_idx: int) -> None: ...
        def on_before_optimizer_step(self, batch_idx: int) -> None: ...
        def on_step_end(self, step: int) -> None: ...

    return [type(f"Noop{index}", (Noop,), {})() for index in range(count)]


class Timed(HandOver):
    """Hands out blocks of batches; the time of a block is that of the loop's own thread, for each of its steps."""

    def __iter__(self) -> Iterator[Any]:
        """Hand out batches, waiting after each block."""
        started = 0.0
        for batch in cycle(self._batches):
            if not self._steps_left:
                self.seconds = (thread_time() - started) / BLOCK
                self._wait_for_a_turn()
                started = thread_time()
            self._steps_left -= 1
            yield batch


class Hosted(Threaded):
    """A loop in a thread of its own, which makes a block of steps at a time."""

    def __init__(self, loop: Callable[[HandOver], object], batches: Sequence[Any]) -> None:
        """Start the loop and wait until it asks for its first batch."""
        self._loader = Timed(batches)
        self.thread = Thread(target=self._loader.drive, args=(loop,), daemon=True)
        self.thread.start()
        self._loader.wait()

    def turn(self, untimed: int) -> float:
        """Make a block of steps; return the seconds of one."""
        return self._loader.advance(BLOCK)


def own_loop(count: int | None, lines: bool = False) -> Hosted:
    """Make a bare loop, with `attach` if a number of hooks is given; `lines` are all that are optional."""
    import hookline

    model = make_model()
    optimizer = make_optimizer(model)

    def loop(loader: HandOver) -> None:
        block = (
            nullcontext() if count is None else hookline.attach(model, optimizer, hooks=hooks(count), output_dir=None)
        )
        with block as hl:
            backward = hl.backward if hl and lines else torch.Tensor.backward
            for inputs, targets in hl.batches(loader) if hl and lines else loader:
                backward(loss_fn(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return Hosted(loop, make_batches())


def lightning(callbacks: Callable[[], list[Any]]) -> Hosted:
    """Make Lightning in its `barebones` mode for measurements."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return loss_fn(self.net(batch[0]), batch[1])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    def loop(loader: HandOver) -> None:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, barebones=True, max_epochs=1, limit_val_batches=0, callbacks=callbacks()
        )
        trainer.fit(Module(), loader)

    silence("lightning.pytorch", "lightning.fabric")
    return Hosted(loop, make_batches())


def lightning_noop() -> list[Any]:
    """Make a callback of Lightning's that does nothing."""
    import lightning.pytorch as pl

    class Noop(pl.Callback):
        on_train_batch_start = on_before_backward = on_after_backward = on_train_batch_end = do_nothing

    return [Noop()]


def lightning_hooks(count: int) -> list[Any]:
    """Make our callback."""
    from hookline.lightning import Hooks

    return [Hooks(hooks=hooks(count), output_dir=None)]


def hf_trainer(callbacks: Callable[[], list[Any]]) -> Hosted:
    """Make the HF Trainer, with batches prepared beforehand."""
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback

    class ReadyMade(Trainer):
        loader: HandOver

        def get_train_dataloader(self) -> Any:
            return self.loader

    def loop(loader: HandOver) -> None:
        model = NetWithLoss()
        trainer = ReadyMade(model, hf_arguments(), optimizers=(make_optimizer(model), None), callbacks=callbacks())
        trainer.remove_callback(PrinterCallback)
        trainer.loader = loader
        trainer.train()

    silence("transformers")
    return Hosted(loop, [{"inputs": inputs, "targets": targets} for inputs, targets in make_batches()])


def hf_noop() -> list[Any]:
    """Make a callback of the Trainer's that does nothing."""
    from transformers import TrainerCallback

    class Noop(TrainerCallback):
        on_step_begin = on_pre_optimizer_step = on_optimizer_step = on_step_end = do_nothing

    return [Noop()]


def hf_hooks(count: int) -> list[Any]:
    """Make our callback."""
    from hookline.transformers import Hooks

    return [Hooks(hooks=hooks(count), output_dir=None)]


def ignite(add: Callable[[Any, Any, Any], Any]) -> Hosted:
    """Make Ignite's engine; `add` gets the engine, the model and the optimizer."""
    from ignite.engine import Engine

    model = make_model()
    optimizer = make_optimizer(model)

    def update(engine: Engine, batch: Any) -> None:
        loss = loss_fn(model(batch[0]), batch[1])
        backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    silence("ignite")
    engine = Engine(update)
    backward = add(engine, model, optimizer) or torch.Tensor.backward
    return Hosted(lambda loader: engine.run(loader, epoch_length=STEPS_WITHOUT_END), make_batches())


def ignite_noop(engine: Any, model: Any, optimizer: Any) -> None:
    """Add four handlers that do nothing."""
    from ignite.engine import Events

    for event in (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED):
        engine.add_event_handler(event, lambda engine: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: None)


def ignite_hooks(count: int, engine: Any, model: Any, optimizer: Any) -> Any:
    """Attach hooks; return what runs the backward pass."""
    from hookline.ignite import attach

    return attach(engine, model, optimizer, hooks=hooks(count), output_dir=None).backward


ALONE, AGAIN, OWN = "the host alone", "A/A", "its own callback"
WITHOUT, WITH = "Hookline, no hooks", f"Hookline, {HOOKS} hooks"
GROUPS: dict[str, dict[str, Callable[[], Hosted]]] = {
    "attach": {
        ALONE: partial(own_loop, None), AGAIN: partial(own_loop, None),
        WITHOUT: partial(own_loop, 0), f"{WITHOUT}, every line": partial(own_loop, 0, True),
        f"{WITH}, every line": partial(own_loop, HOOKS, True),
    },
    "Lightning": {
        ALONE: partial(lightning, list), AGAIN: partial(lightning, list), OWN: partial(lightning, lightning_noop),
        WITHOUT: partial(lightning, partial(lightning_hooks, 0)),
        WITH: partial(lightning, partial(lightning_hooks, HOOKS)),
    },
    "HF Trainer": {
        ALONE: partial(hf_trainer, list), AGAIN: partial(hf_trainer, list), OWN: partial(hf_trainer, hf_noop),
        WITHOUT: partial(hf_trainer, partial(hf_hooks, 0)), WITH: partial(hf_trainer, partial(hf_hooks, HOOKS)),
    },
    "Ignite": {
        ALONE: partial(ignite, do_nothing), AGAIN: partial(ignite, do_nothing), OWN: partial(ignite, ignite_noop),
        WITHOUT: partial(ignite, partial(ignite_hooks, 0)), WITH: partial(ignite, partial(ignite_hooks, HOOKS)),
    },
}  # fmt: skip


def interleave(contenders: dict[str, Hosted], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step in one block per round for each contender, in a new order every round."""
    order, shuffle = list(contenders), random.Random(0).shuffle
    for name in order:
        for _ in range(4):
            contenders[name].turn(0)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    with no_garbage_collection():
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                seconds[name].append(contenders[name].turn(0))
    return seconds


def lines(host: str, seconds: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Return the rows of a host."""
    base, rows = seconds[ALONE], []
    own = [(one - other) * 1e6 for one, other in zip(seconds.get(OWN, base), base, strict=True)]
    bars = {WITHOUT: 10.0, f"{WITH}, every line": 30.0} if host == "attach" else {WITHOUT: median(own)}
    for name, times in seconds.items():
        above = [(one - other) * 1e6 for one, other in zip(times, base, strict=True)]
        figures = ("", "") if name == ALONE else (f"{median(above):.1f}", f"{standard_error_of_median(above):.1f}")
        bar = f"{bars[name]:.1f}" if name in bars else ""
        rows.append((host, name, f"{median(times) * 1e6:.1f}", *figures, bar))
    return rows


def measure(rounds: int, only: list[str]) -> Table:
    """Run the contenders of each host side by side and tabulate them."""
    torch.set_num_threads(1)
    rounds = max(rounds // 8, 20)
    rows: list[tuple[str, ...]] = []
    notes = [f"{rounds} rounds of blocks of {BLOCK} steps, on one core.", *NOTES]
    words = [word.lower() for word in only] or [""]
    with scratch_directory(), on_one_core():
        for host, builders in GROUPS.items():
            if not any(word in host.lower() for word in words):
                continue
            contenders: dict[str, Hosted] = {}
            try:
                contenders |= {name: build() for name, build in builders.items()}
                rows += lines(host, interleave(contenders, rounds))
            except ModuleNotFoundError:
                notes.append(f"{host}: not installed")
            finally:
                close_all(contenders)
    return Table(TITLE, COLUMNS, rows, notes)
