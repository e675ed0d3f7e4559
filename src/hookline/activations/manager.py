"""`HookManager`: the registry that can watch a model, with or without a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hookline import _checks
from hookline.activations.attention import AttentionMaps, attention_session
from hookline.activations.capture import Capture
from hookline.activations.capture_session import Cache, capture_session
from hookline.activations.capture_store import CapturedState, CaptureStore
from hookline.activations.debug import Debug
from hookline.activations.fire_report import FireReport, fire_report
from hookline.activations.forward_hooks import ForwardDispatcher
from hookline.activations.monitor import Monitor
from hookline.errors import HooklineError
from hookline.registry.handle import Handle
from hookline.registry.loading import OPTIONS, make_hook
from hookline.registry.registry import HookRegistry


class HookManager(HookRegistry):
    """A hook registry that watches modules: its forward hooks fire whenever they run.

    >>> manager = HookManager(max_captured_states=100, memory_limit_mb=512)
    >>> manager.register_capture_hook(model.encoder.layers[4], "encoder_layer_4", layer_idx=4)
    """

    def __init__(
        self,
        config: Any = None,
        *,
        max_captured_states: int | None = 100,
        memory_limit_mb: float | None = None,
        cleanup_interval: int = 1000,
        max_age_seconds: float | None = None,
        enable_intervention: bool = False,
        **loading: Any,
    ) -> None:
        super().__init__()
        _checks.optional(_checks.number, memory_limit_mb, "memory_limit_mb", at_least=0)
        self.enable_intervention = enable_intervention
        self.cleanup_interval = _checks.integer(cleanup_interval, "cleanup_interval", at_least=1)
        limit = None if memory_limit_mb is None else int(memory_limit_mb * 2**20)
        self.captures = CaptureStore(max_captured_states, limit, max_age_seconds)
        self.dispatcher = ForwardDispatcher(self, enable_intervention, self.captures.sweep, cleanup_interval)
        if config is not None:
            self.load(config, **loading)

    # ---- watching --------------------------------------------------------------------------------------------------

    @property
    def tap(self) -> ForwardDispatcher:
        return self.dispatcher

    def watch(self, model: torch.nn.Module, run: Any = None) -> ForwardDispatcher:
        """Resolve module patterns against this model from now on; `run` is what hooks read step and phase from."""
        self.dispatcher.watch(model)
        if run is not None:
            self.dispatcher.run = run
        return self.dispatcher

    def silenced(self) -> AbstractContextManager[None]:
        """Call no forward hook for what this thread runs inside the block."""
        return self.dispatcher.silenced()

    # ---- capture ---------------------------------------------------------------------------------------------------

    def register_capture_hook(
        self,
        module: Any,
        hook_id: str | None = None,
        layer_idx: int | None = None,
        capture_input: bool = True,
        capture_output: bool = True,
        **options: Any,
    ) -> Handle:
        """Keep what a module (or a pattern in the watched model) gets and gives; returns the hook's id.

        `options` are those of `Capture` and of `register`, such as `every`; so they are for the two below.
        """
        what = [part for part, wanted in (("input", capture_input), ("output", capture_output)) if wanted]
        if not what:
            raise HooklineError(f"capture hook {hook_id!r}: capture_input and capture_output are both off")
        return self._register(Capture, hook_id, options, modules=module, what=what, layer_idx=layer_idx)

    def register_monitoring_hook(
        self, module: Any, hook_id: str | None = None, metrics: Sequence[str] | None = None, **options: Any
    ) -> Handle:
        """Statistics, time and memory of a module's calls, chosen by `metrics`; options as `Monitor`'s."""
        return self._register(Monitor, hook_id, options, modules=module, metrics=metrics)

    def register_debug_hook(
        self, module: Any, hook_id: str | None = None, conditions: Any = None, **options: Any
    ) -> Handle:
        """Look at every call of a module; where a condition holds, break at a terminal or record a finding."""
        return self._register(Debug, hook_id, options, modules=module, conditions=conditions)

    def _register(self, kind: type, hook_id: str | None, options: Mapping[str, Any], **parameters: Any) -> Handle:
        """Make a hook with what is its own of the options, and register it with the rest."""
        own = {key: value for key, value in options.items() if key not in OPTIONS}
        rest = {key: value for key, value in options.items() if key in OPTIONS}
        return self.register(make_hook(kind, dict(**parameters, **own)), hook_id, **rest)

    def fire_report(self) -> FireReport:
        """How often each forward hook fired at each of its modules, and why one never did."""
        return fire_report(self)

    def get_captured_states(self, hook_id: str) -> list[CapturedState]:
        """What a capture hook holds, oldest first."""
        return self.captures.of(self.entry(hook_id).name)

    def clear_captured_states(self, hook_id: str | None = None) -> None:
        """Forget what one capture hook holds, or all of them."""
        self.captures.clear(None if hook_id is None else self.entry(hook_id).name)

    def capturing(
        self, model: torch.nn.Module, modules: Any = "*", *, early_stop: bool = False, **options: Any
    ) -> AbstractContextManager[Cache]:
        """Capture for as long as the block lasts; afterwards no hook is left on the model.

        >>> with manager.capturing(model, "blocks.*.mlp") as cache:
        ...     model(batch)
        >>> cache["blocks.3.mlp"]
        """
        return capture_session(HookManager, model, modules, early_stop, options)

    def attention_maps(
        self, model: torch.nn.Module, modules: Any = None, **options: Any
    ) -> AbstractContextManager[AttentionMaps]:
        """Where every head looks, [batch, heads, queries, keys] per module, for as long as the block lasts.

        `modules` selects those that attend (by default all); `options` are a capture's: `dtype`, `device`, `reduce`, …
        Each map costs batch x heads x queries x keys numbers and a matrix product; `maps.cost` adds it up.

        >>> with manager.attention_maps(model) as maps:
        ...     model(batch)
        >>> maps["blocks.3.attention"]
        """
        return attention_session(HookManager, model, modules, options)
