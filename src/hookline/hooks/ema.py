"""`ema`: keep an exponential moving average of the weights, and validate with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from weakref import ref

import torch
from annotated_types import Ge, Le

from hookline._names import plain_buffers, plain_parameters
from hookline._words import nearest
from hookline.checkpoints.find import find_checkpoint
from hookline.checkpoints.shards import like
from hookline.errors import CheckpointError
from hookline.hooks.base import NamedHook
from hookline.run.control import RunControl
from hookline.runs.named import find_run

if TYPE_CHECKING:
    from hookline.core.registry import Registry

HALF_PRECISION = (torch.float16, torch.bfloat16)


class EMAHook(NamedHook):
    """Keeps an exponential moving average of the weights; validations measure the average.

    After every optimizer step ``average = decay * average + (1 - decay) * weights``. Half-precision weights are
    averaged in float32. During a validation the model has the averaged weights. Afterwards its trained weights are
    restored bit for bit, even if the hook is disabled or removed in between. The hook does not change training.

    The average is saved with checkpoints: `EMAHook.weights_in(path)` reads it. If several are registered, the first one
    is validated and the others only average. A new model starts a new average.

    Args:
        decay: The share of the old average, 0 to 1.
        warmup: Start with the lower decay ``(1 + n) / (10 + n)`` after n updates, so that the first weights fade soon.
        buffers: Average floating-point buffers, too; otherwise validation uses the model's.
        trainable_only: Average only parameters that require a gradient, each from the first update at which it
            does; validation uses the model's values of the others.
    """

    built_in = True
    name = "ema"
    same_on_all_ranks = True  # a validation of all ranks measures the average
    on_error = "raise"  # a failure half-way would leave a mixture of weights in the model
    runs_last = True  # hooks that read the model at the end of a validation must see the weights that were validated

    def __init__(
        self,
        decay: Annotated[float, Ge(0), Le(1)] = 0.999,
        warmup: bool = True,
        buffers: bool = False,
        trainable_only: bool = False,
    ) -> None:
        self.decay, self.warmup, self.buffers, self.trainable_only = decay, warmup, buffers, trainable_only
        self.updates = 0
        self.average: dict[str, torch.Tensor] = {}
        # The model that currently has the averaged weights, and its own weights.
        self._applied_to: tuple[torch.nn.Module, dict[str, torch.Tensor]] | None = None
        self._applied_in: int | None = None  # the depth of the validation that applied it
        self._stepped = False  # whether an optimizer has stepped in this step
        self._tensors: tuple[torch.nn.Module, dict[str, torch.Tensor]] | None = None  # walking over a model is slow
        self._averaged_model: Callable[[], torch.nn.Module | None] | None = None  # a weak reference
        self._registry: Registry | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    # ---- averaging ---------------------------------------------------------------------------------------------------

    def on_train_start(self, model: torch.nn.Module, resumed: bool = False) -> None:
        """Drop the average of a different model."""
        if not resumed and self._averaged_model is not None and self._averaged_model() is not model:
            self.updates, self.average = 0, {}

    def on_after_optimizer_step(self, trainer: RunControl, optimizer_idx: int) -> None:
        """Update the average after the step's last optimizer."""
        self._stepped = True
        self._update_after_last(trainer, optimizer_idx)

    def _update_after_last(self, trainer: RunControl, optimizer_idx: int) -> None:
        """Update the average after the step's last optimizer, if any of them has stepped."""
        if self._stepped and optimizer_idx == len(trainer.optimizers) - 1:
            self._stepped = False
            self.update(trainer.model)

    # No event method calls another one: a subclass may override either with other arguments.
    on_step_skipped = _update_after_last

    def update(self, model: torch.nn.Module) -> None:
        """Add the model's weights to the average."""
        weights = self._weights(model)
        for name, weight in weights.items():
            average = self.average.get(name)
            if average is None:  # the average starts as the weights themselves
                dtype = torch.float32 if weight.dtype in HALF_PRECISION else weight.dtype
                self.average[name] = weight.to(dtype, copy=True)
            elif average.device != weight.device:  # restored from a checkpoint
                self.average[name] = average.to(weight.device)
        averages = [self.average[name] for name in weights]
        new = [weight.to(average.dtype) for weight, average in zip(weights.values(), averages, strict=True)]
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        if averages:  # all may be frozen for a while
            torch._foreach_lerp_(averages, new, 1.0 - decay)
        self.updates += 1
        if self._averaged_model is None or self._averaged_model() is not model:
            self._averaged_model = ref(model)

    def _weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors to average, without autograd's tracking, so that writing to it is not part of a graph."""
        if self._tensors is None or self._tensors[0] is not model:
            named = plain_parameters(model) | (plain_buffers(model) if self.buffers else {})
            self._tensors = model, {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}
            # A hook that was added after a checkpoint was loaded gets an unsharded average.
            self.average = {
                name: like(average, self._tensors[1].get(name, average)) for name, average in self.average.items()
            }
        # A parameter that was averaged before stays in the average, because it may be frozen only for a while.
        return {
            name: tensor.data
            for name, tensor in self._tensors[1].items()
            if not self.trainable_only
            or tensor.requires_grad
            or name in self.average
            or not isinstance(tensor, torch.nn.Parameter)
        }

    def on_epoch_start(self) -> None:
        """List the model's tensors again: a parameter may have been replaced."""
        self._tensors = None

    # ---- registration ------------------------------------------------------------------------------------------------

    def setup(self, name: str, registry: Registry | None = None) -> None:
        """Subscribe to changes of the registry: being disabled is not an event, and may happen during a validation."""
        super().setup(name)
        self._registry = registry
        if registry is not None:
            self._unsubscribe = registry.on_change(self._restore_if_disabled)

    def _restore_if_disabled(self) -> None:
        if not self._is_enabled:
            self._restore()

    @property
    def _is_enabled(self) -> bool:
        registry, name = self._registry, self.registered_name
        return registry is None or (name in registry and registry.is_enabled(name))

    def close(self) -> None:
        """Restore the model's weights and release the model."""
        self._unsubscribe()
        self._restore()
        self._tensors, self._unsubscribe = None, lambda: None

    # ---- validating --------------------------------------------------------------------------------------------------

    @contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Give a model the averaged weights inside the block; its own are restored bit for bit."""
        is_outermost = self._apply(model)
        try:
            yield model
        finally:
            if is_outermost:
                self._restore()

    def copy_to(self, model: torch.nn.Module) -> None:
        """Overwrite a model's weights with the averaged ones."""
        self._write(model, self.average)

    def _write(self, model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self._weights(model).items():
            if name in values:
                weight.copy_(values[name])

    def on_validation_start(self, trainer: RunControl, model: torch.nn.Module) -> None:
        """Apply the average, unless an earlier hook of this event disabled this one: nothing would then restore it."""
        hooks = [] if self._registry is None else [entry.hook for entry in self._registry.entries()]
        others = [hook._applied_to for hook in hooks if isinstance(hook, EMAHook) and hook is not self]
        # If another hook's average is in the model, restoring that one later would corrupt training.
        is_taken = any(applied_to is not None and applied_to[0] is model for applied_to in others)
        if self._is_enabled and not is_taken and self._apply(model):
            self._applied_in = trainer.validations_in_progress

    def on_validation_end(self, trainer: RunControl) -> None:
        """Restore the weights at the end of the validation that applied the average, not of nested validations."""
        if self._applied_in is not None and trainer.validations_in_progress <= self._applied_in:
            self._restore()

    def _apply(self, model: torch.nn.Module) -> bool:
        """Give a model the averaged weights; return False if it had them or there is no average yet."""
        if self._applied_to is not None or not self.average:  # there is none before the first step
            return False
        weights = {name: weight.clone() for name, weight in self._weights(model).items() if name in self.average}
        self._applied_to = model, weights
        self.copy_to(model)
        return True

    def _restore(self) -> None:
        """Give the model its own weights back, if it has the averaged ones."""
        if self._applied_to is not None:
            self._write(*self._applied_to)
            self._applied_to = self._applied_in = None

    # A validation that fails has no end event. Its failure ends the run, or counts as a failure of the hook that
    # validated.
    on_exception = on_train_batch_start = _restore

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of its updates."""
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.updates, self.average = state["updates"], dict(state["average"])

    @staticmethod
    def weights_in(checkpoint: str | Path, name: str = "ema") -> dict[str, torch.Tensor]:
        """Read the averaged weights of a checkpoint: ``model.load_state_dict(EMAHook.weights_in(path), strict=False)``.

        Args:
            checkpoint: A checkpoint or a run, by its path or name.
            name: The name the hook was registered under.

        Returns:
            The weights by parameter name.

        Raises:
            CheckpointError: If the checkpoint has no such hook.
        """
        states = find_checkpoint(find_run(checkpoint))[0].verified().section("hooks") or {}
        if name not in states or "average" not in states[name]:
            raise CheckpointError(f"{checkpoint} has no averaged weights from a hook {name!r}; {nearest(name, states)}")
        average: dict[str, torch.Tensor] = states[name]["average"]
        return average
