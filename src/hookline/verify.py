"""Check that hooks leave training unchanged: train with and without each hook and compare the runs bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hookline._tensors import iter_tensors
from hookline.core.base import TrainingHook
from hookline.core.failures import Incident, hook_notes
from hookline.errors import ConfigError, error_text
from hookline.hooks.queue import sending_suspended
from hookline.record.redaction import redact_text
from hookline.run.control import RunControl
from hookline.run.rng import rng_state
from hookline.trainer.trainer import Trainer

FORWARD = "the forward pass"

Observation = tuple[int, str, str, str]  # step, event, what was observed, its digest


@dataclass(frozen=True)
class Verdict:
    """The effect of one hook on training."""

    hook: str
    declared: bool
    """Whether the hook is listed as an intervener: changing training is its purpose."""
    step: int | None = None
    """The first step at which training differed; None if it never did."""
    event: str = ""
    through: str = ""
    """What differed first: batch, random streams, parameters, learning rate, optimizer options or state, train or eval
    mode, activations, loss, gradients or number of steps."""
    notes: tuple[str, ...] = ()
    """Changes of the hook that were undone, and its failures."""

    @property
    def harmless(self) -> bool:
        """Whether training was the same."""
        return self.step is None

    @property
    def fine(self) -> bool:
        """Whether training was the same, or the hook declares that it changes training."""
        return self.harmless or self.declared

    def __str__(self) -> str:
        if self.harmless:
            return "changes nothing"
        how = "as declared, " if self.declared else ""
        return f"{how}changes training from step {self.step} on, through the {self.through} (seen at {self.event})"


class NotRepeatable(Exception):
    """Two runs without any hook differ, so nothing can be said about hooks."""


def verify(make_trainer: Callable[[], Trainer], steps: int = 20) -> list[Verdict]:
    """Judge every hook of a trainer, each alone.

    Args:
        make_trainer: Makes a new trainer; all of them must train in the same way, including seeds.
        steps: The number of optimizer steps to compare.

    Returns:
        A verdict for each hook, in the order of registration.

    Raises:
        NotRepeatable: If two runs without any hook differ.
    """
    first = make_trainer()
    declared = {name: first.hooks.entry(name).intervenes for name in first.hooks}
    plain = observe_run(first, None, steps)
    difference = first_difference(plain, observe_run(make_trainer(), None, steps))
    if difference is not None:
        step, _, through = difference
        remedy = "set trainer.seed and trainer.deterministic, and check that the data comes in the same order"
        raise NotRepeatable(
            f"two runs without any hook already differ, from step {step} on, in the {through}: {remedy}"
        )
    return [
        judge(name, may_write, plain, observe_run(make_trainer(), name, steps)) for name, may_write in declared.items()
    ]


def observe_run(trainer: Trainer, hook: str | None, steps: int) -> Probe:
    """Train for some steps with one of the trainer's hooks or none, observed by a probe that runs after it.

    Nothing is posted to webhooks. Messages of incidents are stored without secrets, which only a living run knows.

    Args:
        trainer: The trainer; its other hooks are removed.
        hook: The name of the hook to keep.
        steps: The number of optimizer steps.

    Returns:
        The probe. If the hook made training fail, its incidents include that.

    Raises:
        Exception: If the run failed without any hook, or the hook itself raised.
    """
    for name in list(trainer.hooks):
        if name != hook:
            trainer.hooks.remove(name)
    probe = Probe()
    trainer.add_hook(probe)
    probe.attach(trainer)
    trainer.options.console = False
    trainer.hooks.audits_every_call = True  # at all calls, not only at some
    unsubscribe = trainer.hooks.failures.subscribe(probe.store)
    try:
        with sending_suspended(), torch.enable_grad():  # This also restores a grad mode that a hook changes.
            trainer.fit(max_steps=steps)
    except Exception as error:
        if hook is None or isinstance(error, ConfigError) or hook_notes(error):
            raise
        # Training itself failed, which does not happen without the hook.
        probe.store(Incident("failed", hook, "", trainer.step, f"ended the run: {error_text(error)}"))
    finally:
        unsubscribe()
    return probe


def judge(name: str, declared: bool, plain: Probe, with_hook: Probe) -> Verdict:
    """Compare a hook's run with the run that had no hooks.

    Args:
        name: The hook's name.
        declared: Whether the hook declares that it changes training.
        plain: The run without hooks.
        with_hook: The run with this hook alone.

    Returns:
        The verdict, with the messages of the incidents that the hook caused.
    """
    notes = tuple(dict.fromkeys(item.message for item in with_hook.incidents if item.hook == name))
    step, event, through = first_difference(plain, with_hook) or (None, "", "")
    return Verdict(name, declared, step, event, through, notes)


def first_difference(plain: Probe, with_hook: Probe) -> tuple[int, str, str] | None:
    """Return step, event and name of the first observation that differs; None if there is none."""
    for observation, counterpart in zip(plain.observations, with_hook.observations, strict=False):
        if observation[1] != counterpart[1] and "on_train_end" in (observation[1], counterpart[1]):
            return min(observation[0], counterpart[0]), "on_train_end", "number of steps"
        if observation != counterpart:
            return observation[:3]
    return None


class Probe(TrainingHook):
    """Digest everything that training consists of: around each forward pass, and after all other hooks of an event.

    Random streams are digested outside of events only, because what a hook draws is restored when its event is over.
    """

    built_in = True
    runs_last = True
    on_error = "raise"
    name = "hookline_probe"

    def __init__(self) -> None:
        self.observations: list[Observation] = []  # in order
        self.incidents: list[Incident] = []  # caused by the run's hooks
        self._in_forward = False

    def attach(self, trainer: Trainer) -> None:
        """Observe the training batches of a trainer, and every activation that is computed for them.

        The loss alone does not show every change: a batch norm removes the scale of its input again. So the inputs of
        all modules without children and the output of the model are compared, too. Inputs rather than outputs, since
        a forward hook that is registered later runs after ours. A compiled model is observed only from outside.
        """
        compute = trainer.forward.compute

        def observed(batch: Any) -> Any:
            if trainer.event_args.phase != "train":
                return compute(batch)
            streams = {"random streams": rng_state()}
            self._observe(trainer.step, FORWARD, batch=batch, **streams, **_training_state(trainer))
            self._in_forward = True
            try:
                return compute(batch)
            finally:
                self._in_forward = False

        def observe_activations(module: torch.nn.Module, inputs: Any, values: Any) -> None:
            if self._in_forward:  # a hook may run the model for itself
                self._observe(trainer.step, FORWARD, activations=list(iter_tensors([inputs, values])))

        trainer.forward.compute = observed
        trainer.forward.model.register_forward_hook(observe_activations)
        if not trainer.options.compile:
            for module in trainer.model.modules():
                if next(module.children(), None) is None:
                    module.register_forward_pre_hook(observe_activations, with_kwargs=True)

    def store(self, incident: Incident) -> None:
        """Store the incidents that a hook of the run caused, without secrets."""
        self.incidents.append(replace(incident, message=redact_text(incident.message), error=None))

    def on_before_backward(self, step: int, loss: Any, batch: Any) -> None:
        self._observe(step, "on_before_backward", batch=batch, loss=loss)

    def on_gradients_ready(self, step: int, trainer: RunControl) -> None:
        self._observe(step, "on_gradients_ready", gradients=_gradients(trainer))

    def on_before_optimizer_step(self, step: int, trainer: RunControl) -> None:
        self._observe(step, "on_before_optimizer_step", gradients=_gradients(trainer), **_training_state(trainer))

    def on_train_batch_end(self, step: int, trainer: RunControl) -> None:
        self._observe(step, "on_train_batch_end", **_training_state(trainer))

    def on_train_end(self, step: int, trainer: RunControl) -> None:
        self._observe(step, "on_train_end", **_training_state(trainer))

    def _observe(self, step: int, event: str, **values: Any) -> None:
        self.observations += [(step, event, name, digest(value)) for name, value in values.items()]


def digest(value: Any) -> str:
    """Return a short hash that changes with any bit of a value, with dtypes, shapes and keys."""
    sha256 = hashlib.sha256()
    for piece in _pieces(value):
        sha256.update(piece)
    return sha256.hexdigest()[:16]


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


def _training_state(trainer: RunControl) -> dict[str, Any]:
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    options = [{key: value for key, value in group.items() if key not in ("params", "lr")} for group in groups]
    return {
        "parameters": [*trainer.model.parameters(), *trainer.model.buffers()],
        "learning rate": [group["lr"] for group in groups],
        "optimizer options": options,
        "optimizer state": [list(optimizer.state.values()) for optimizer in trainer.optimizers],
        "train or eval mode": [module.training for module in trainer.model.modules()],
    }


def _gradients(trainer: RunControl) -> list[torch.Tensor | None]:
    return [param.grad for param in trainer.model.parameters()]
