"""An average of the weights over the steps, which validates better than the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from hookline.checkpoints import read_checkpoint
from hookline.errors import CheckpointError, nearest
from hookline.hooks.named_hook import NamedHook, validations_under_way
from hookline.hooks.parameters import number, switch

HALF = (torch.float16, torch.bfloat16)


class EMAHook(NamedHook):
    """Keeps an exponential moving average of the weights; validation measures the average.

    After every optimizer step ``average = decay * average + (1 - decay) * weights``. With `warmup` the decay begins
    lower, at ``(1 + n) / (10 + n)`` after n updates, so that the first weights are soon forgotten. Half-precision
    weights are averaged in float32. `buffers` averages floating-point buffers too; else validation uses the model's.

    During a validation the model has the averaged weights; afterwards it has its own again, bit for bit, so that
    training is what it would be without, also when the hook is switched off or removed meanwhile. The average is saved
    with checkpoints: `EMAHook.weights_in(path)` reads it. Of several the first is validated, the others only average.
    Another model begins another average.
    """

    built_in = True
    name = "ema"
    on_error = "raise"  # a failure half-way would leave a mixture of weights in the model
    runs_last = True  # whoever looks at the model when a validation ends shall see what was validated

    def __init__(self, decay: float = 0.999, warmup: bool = True, buffers: bool = False) -> None:
        self.decay = number(decay, "decay", 0, 1)
        self.warmup, self.buffers = switch(warmup, "warmup"), switch(buffers, "buffers")
        self.updates = 0
        self.average: dict[str, torch.Tensor] = {}
        self._live: dict[str, torch.Tensor] | None = None  # the model's own, while it has the average
        self._holder: torch.nn.Module | None = None  # the model that has it
        self._registry: Any = None
        self._unwatch: Callable[[], None] | None = None
        self._nested = 0  # validations inside the one that took the average in
        self._validated_in: list[int] = []  # how deep those are whose start was heard, and whose end was not
        self._moved = False  # whether an optimizer of this step has stepped
        self._known: tuple[torch.nn.Module, dict[str, torch.Tensor]] | None = None  # walking over a model is slow
        self._averaged: Callable[[], torch.nn.Module | None] | None = None  # whose weights they are, while it lives

    # ---- averaging -------------------------------------------------------------------------------------------------

    def on_train_start(self, model: torch.nn.Module | None = None, resumed: bool = False) -> None:
        """The average of another model says nothing of this one."""
        if not resumed and model is not None and self._averaged is not None and self._averaged() is not model:
            self.updates, self.average = 0, {}

    def on_after_optimizer_step(self, trainer: Any, optimizer_idx: int) -> None:
        self._moved = True
        self._update_after_the_last(trainer, optimizer_idx)

    def on_step_skipped(self, trainer: Any, optimizer_idx: int) -> None:
        """A step that no optimizer made is none; of several optimizers, one may have."""
        self._update_after_the_last(trainer, optimizer_idx)

    def _update_after_the_last(self, trainer: Any, optimizer_idx: int) -> None:
        if self._moved and optimizer_idx == len(trainer.optimizers) - 1:
            self._moved = False
            self.update(trainer.model)

    def update(self, model: torch.nn.Module) -> None:
        """Take the model's weights into the average."""
        weights = self._weights(model)
        self._make_room(weights)
        averages = [self.average[name] for name in weights]
        news = [weight.to(average.dtype) for weight, average in zip(weights.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, news, 1.0 - self._decay_now())
        self.updates += 1
        if self._averaged is None or self._averaged() is not model:
            self._averaged = ref(model)

    def _decay_now(self) -> float:
        return min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay

    def _make_room(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Begin with the weights themselves; restored averages move to where the weights are."""
        for name, weight in weights.items():
            average = self.average.get(name)
            if average is None:
                self.average[name] = weight.to(torch.float32, copy=True) if weight.dtype in HALF else weight.clone()
            elif average.device != weight.device:
                self.average[name] = average.to(weight.device)

    def _weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """What is averaged, as tensors that autograd does not watch: writing to them is no operation of the graph."""
        if self._known is None or self._known[0] is not model:
            named = dict([*model.named_parameters(), *(model.named_buffers() if self.buffers else ())])
            self._known = model, {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}
        return {name: tensor.data for name, tensor in self._known[1].items()}

    def on_epoch_start(self) -> None:
        """Look again: somebody may have replaced a parameter."""
        self._known = None

    # ---- in a registry ---------------------------------------------------------------------------------------------

    def setup(self, name: str, registry: Any = None) -> None:
        """Hear of being switched off, which is no event, and may happen in the middle of a validation."""
        super().setup(name)
        self._registry = registry
        self._unwatch = None if registry is None else registry.watch_changes(self._look_whether_it_is_on)

    def _look_whether_it_is_on(self) -> None:
        if self._live is not None and not self._is_on:
            self._put_right()

    @property
    def _is_on(self) -> bool:
        registry = self._registry
        return registry is None or (self.called in registry and registry.is_enabled(self.called))

    def close(self) -> None:
        """Leave the model with its own weights, and hold on to nothing of it."""
        if self._unwatch is not None:
            self._unwatch()
        self._put_right()
        self._known = self._unwatch = None

    # ---- validating ------------------------------------------------------------------------------------------------

    @contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The model with the averaged weights inside the block, and with its own again after it, bit for bit."""
        self._take_in(model)
        try:
            yield model
        finally:
            self._put_back()

    def copy_to(self, model: torch.nn.Module) -> None:
        """Give a model the averaged weights for good."""
        for name, weight in self._weights(model).items():
            if name in self.average:
                weight.copy_(self.average[name])

    def on_validation_start(self, model: torch.nn.Module, trainer: Any = None) -> None:
        """Unless an earlier hook of this very event has switched it off: nobody would put the weights back."""
        if self._is_on and not self._is_taken(model):
            self._take_in(model)
            self._validated_in.append(validations_under_way(trainer) or len(self._validated_in) + 1)

    def _is_taken(self, model: torch.nn.Module) -> bool:
        """Whether the model has another one's average: to put that back later would mix it into training."""
        entries = [] if self._registry is None else self._registry.entries()
        others = [entry.hook for entry in entries if isinstance(entry.hook, EMAHook) and entry.hook is not self]
        return any(other._holder is model for other in others)

    def on_validation_end(self, trainer: Any = None) -> None:
        """Of those inside it, one may have failed, and its end was not heard."""
        depth = validations_under_way(trainer) or len(self._validated_in)
        while self._validated_in and self._validated_in[-1] >= depth:
            self._validated_in.pop()
            self._put_back()

    def on_train_batch_start(self) -> None:
        """A validation that failed, and whose failure a hook forgave, has not put the weights back."""
        if self._live is not None:
            self._put_right()

    def on_exception(self) -> None:
        self._put_right()

    def _take_in(self, model: torch.nn.Module) -> None:
        if self._live is not None:
            self._nested += 1
        elif self.average:  # there is none before the first step
            self._live = {name: weight.clone() for name, weight in self._weights(model).items() if name in self.average}
            self._holder = model
            self.copy_to(model)

    def _put_back(self) -> None:
        if self._nested:
            self._nested -= 1
        elif self._live is not None and self._holder is not None:
            weights = self._weights(self._holder)
            for name, own in self._live.items():
                weights[name].copy_(own)
            self._live = self._holder = None

    def _put_right(self) -> None:
        """No validation is under way, whatever became of the last one."""
        self._nested = 0
        self._validated_in.clear()
        self._put_back()

    # ---- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The average and how often it was updated."""
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on averaging."""
        self.updates, self.average = state["updates"], dict(state["average"])

    @staticmethod
    def weights_in(checkpoint: str | Path, name: str = "ema") -> dict[str, torch.Tensor]:
        """The averaged weights in a checkpoint: ``model.load_state_dict(EMAHook.weights_in(path), strict=False)``."""
        states = read_checkpoint(Path(checkpoint))[0]["hooks"]
        if name not in states or "average" not in states[name]:
            raise CheckpointError(f"{checkpoint} has no averaged weights of a hook {name!r}; {nearest(name, states)}")
        average: dict[str, torch.Tensor] = states[name]["average"]
        return average
