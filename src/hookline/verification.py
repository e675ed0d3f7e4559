"""Does a hook change training? Train a few steps with it and without it, and compare everything, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hookline.events.policy import Incident
from hookline.registry.base import TrainingHook
from hookline.trainer.rng import rng_state
from hookline.trainer.trainer import Trainer

PROBE = "hookline_probe"

Seen = tuple[int, str, str, str]  # step, event, what, its digest


@dataclass(frozen=True)
class Verdict:
    """What one hook did to training."""

    hook: str
    declared: bool
    """It is listed as an intervener: changing training is its purpose."""
    step: int | None = None
    """The step at which training first came out different; None if it never did."""
    event: str = ""
    through: str = ""
    """What differed first: random streams, batch, parameters, learning rate, activations, gradients."""
    notes: tuple[str, ...] = ()
    """What it did that was undone, or where it failed."""

    @property
    def harmless(self) -> bool:
        """Whether training was the same."""
        return self.step is None

    @property
    def fine(self) -> bool:
        """Whether training was the same, or is meant not to be."""
        return self.harmless or self.declared

    def __str__(self) -> str:
        if self.harmless:
            return "changes nothing"
        how = "as declared, " if self.declared else ""
        return f"{how}changes training from step {self.step} on, through the {self.through} (seen at {self.event})"


@dataclass
class Watched:
    """One run, as the probe saw it."""

    seen: list[Seen]
    incidents: list[Incident] = field(default_factory=list)


class Probe(TrainingHook):
    """Looks at everything that training consists of: before each forward pass, and after all other hooks of an event.

    Random streams are looked at outside events only: what a hook draws is put back when its event is over.
    """

    built_in = True
    runs_last = True
    on_error = "raise"
    name = PROBE

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def look_before_forward(self, trainer: Trainer) -> None:
        """Look between the events, right before the model runs."""
        compute = trainer.compute

        def observed(batch: Any) -> Any:
            self._see(trainer.step, "the forward pass", batch=batch, **{"random streams": rng_state()})
            self._see(trainer.step, "the forward pass", **_standing(trainer))
            return compute(batch)

        trainer.compute = observed

    def on_before_backward(self, step: int, trainer: Any, loss: Any, batch: Any) -> None:
        self._see(step, "on_before_backward", batch=batch, activations=loss)

    def on_gradients_ready(self, step: int, trainer: Any) -> None:
        self._see(step, "on_gradients_ready", gradients=_gradients(trainer))

    def on_before_optimizer_step(self, step: int, trainer: Any) -> None:
        self._see(step, "on_before_optimizer_step", gradients=_gradients(trainer), **_standing(trainer))

    def on_train_batch_end(self, step: int, trainer: Any) -> None:
        self._see(step, "on_train_batch_end", **_standing(trainer))
        self._see(step, "on_train_batch_end", **{"optimizer's state": [one.state_dict() for one in trainer.optimizers]})

    def _see(self, step: int, event: str, **what: Any) -> None:
        self.seen += [(step, event, name, digest(value)) for name, value in what.items()]


def verify(make_trainer: Callable[[], Trainer], steps: int = 20, only: Iterable[str] = ()) -> list[Verdict]:
    """A verdict on every hook of the trainers that `make_trainer` makes; each is tried alone.

    The trainers must come out alike, seeds included; `NotRepeatable` says so if training differs from itself.
    """
    first = make_trainer()
    names = [name for name in first.hooks if not only or name in set(only)]
    declared = {record.name: record.intervenes for record in first.hooks.list_hooks()}
    plain, again = watch(first, (), steps), watch(make_trainer(), (), steps)
    if (difference := first_difference(plain.seen, again.seen)) is not None:
        raise NotRepeatable(*difference)
    return [judge(name, declared[name], plain, watch(make_trainer(), (name,), steps)) for name in names]


class NotRepeatable(Exception):
    """Training differs from itself without any hook, so nothing can be said about hooks."""

    def __init__(self, step: int, event: str, through: str) -> None:
        super().__init__(
            f"two runs without any hook already differ, from step {step} on, in the {through}: give trainer.seed and "
            "trainer.deterministic, and check that the data comes in the same order"
        )


def watch(trainer: Trainer, keep: Iterable[str], steps: int) -> Watched:
    """Train with these hooks alone, and with the probe behind them."""
    for name in [name for name in trainer.hooks if name not in tuple(keep)]:
        trainer.hooks.remove(name)
    probe, incidents = Probe(), list[Incident]()
    trainer.add_hook(probe)
    probe.look_before_forward(trainer)
    trainer.options.max_steps, trainer.options.console = steps, False
    stop = trainer.hooks.desk.watch(incidents.append)
    try:
        trainer.fit()
    finally:
        stop()
    return Watched(probe.seen, incidents)


def judge(name: str, declared: bool, plain: Watched, with_hook: Watched) -> Verdict:
    """Compare a hook's run with the run that had none."""
    notes = tuple(dict.fromkeys(item.message for item in with_hook.incidents if item.hook == name))
    step, event, through = first_difference(plain.seen, with_hook.seen) or (None, "", "")
    return Verdict(name, declared, step, event, through, notes)


def first_difference(one: list[Seen], other: list[Seen]) -> tuple[int, str, str] | None:
    """Step, event and what, where two runs first differ."""
    for seen, also in zip(one, other, strict=False):
        if seen != also:
            return seen[:3]
    if len(one) != len(other):
        shorter = min(one, other, key=len)
        step = shorter[-1][0] if shorter else 0
        return step, "on_train_end", "number of steps"
    return None


def digest(value: Any) -> str:
    """A short name for a value that changes with any bit of it."""
    found = hashlib.sha256()
    for piece in _pieces(value):
        found.update(piece)
    return found.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        yield tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    elif isinstance(value, dict):
        for key in value:
            yield repr(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pieces(item)
    else:
        yield value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()


def _standing(trainer: Trainer) -> dict[str, Any]:
    model = trainer.model
    return {
        "parameters": [*model.parameters(), *model.buffers()],
        "learning rate": [[group["lr"] for group in one.param_groups] for one in trainer.optimizers],
    }


def _gradients(trainer: Trainer) -> list[torch.Tensor | None]:
    return [param.grad for param in trainer.model.parameters()]
