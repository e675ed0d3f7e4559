"""Attention maps: the attention weights of every head of a model, for the duration of a ``with`` block.

Fused attention kernels never materialize their weights. Inside the block, a `TorchFunctionMode` follows each attention
call of torch with a separate computation of its weights; the model's own computation is not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from hookline import _device
from hookline._tensors import iter_tensors
from hookline.activations.attention_weights import ATTENTION_FUNCTIONS
from hookline.activations.capture import Capture
from hookline.activations.capture_session import Cache, CaptureSession
from hookline.activations.compile.detection import run_uncompiled
from hookline.activations.hooked_modules import RunningModules
from hookline.core.patterns import select
from hookline.errors import HooklineError, nearest

if TYPE_CHECKING:  # the manager makes sessions
    from hookline.activations.manager import HookManager

SUPPORTED = "scaled_dot_product_attention, nn.MultiheadAttention and a softmax over [batch, heads, queries, keys]"
# Names under which Hugging Face models call attention that is made of torch's own functions.
_VISIBLE_IMPLEMENTATIONS = (None, "eager", "sdpa")
logger = logging.getLogger("hookline")


class AttentionPoints(torch.nn.Module):
    """One identity module per selected module, under the same name; attention weights pass through it.

    Forward hooks can therefore watch attention like any module: ``manager.watch(maps.points)``, or
    ``maps.points[name]`` for a single one.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._modules.update({name: torch.nn.Identity() for name in names})  # `add_module` rejects dots in names

    def __getitem__(self, name: str) -> torch.nn.Module:
        point = self._modules.get(name)
        if point is None:
            raise HooklineError(f"unknown attention point {name!r}; {nearest(name, self._modules)}")
        return point


class AttentionCost:
    """The cost of computing attention maps, in addition to the model's own work.

    Attributes:
        maps: The number of maps.
        bytes: The size of the maps when they were computed: batch x heads x queries x keys numbers each.
    """

    def __init__(self) -> None:
        self.maps = 0
        self.bytes = 0
        self._seconds = 0.0
        self._pending: list[tuple[Any, Any]] = []  # pairs of timing events that were not read yet

    @contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Add the time of the block; on an accelerator by its own clock, because the host only enqueues the work."""
        if not _device.is_accelerator(device):
            start = perf_counter()
            yield
            self._seconds += perf_counter() - start
            return
        first, last = _device.timing_event(), _device.timing_event()
        first.record()
        yield
        last.record()
        self._pending.append((first, last))

    @property
    def seconds(self) -> float:
        """The time spent on computing and keeping the maps; waits for the device."""
        pending, self._pending = self._pending, []
        for first, last in pending:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1e3
        return self._seconds

    def __str__(self) -> str:
        return f"{self.maps} maps, {self.bytes:,} bytes, {self.seconds:.3f} s"


class AttentionMaps(Cache):
    """The weights of every attention that ran, by module name: [batch, heads, queries, keys].

    Read it like any cache, by name or glob, inside and after the block.

    Attributes:
        points: Modules that the weights pass through, for other forward hooks.
        cost: What computing the maps has cost so far.
        switched: The models that were switched to another attention implementation for the block.
    """

    def __init__(self, hook: Capture, model: torch.nn.Module, mode: AttentionMode, switched: Sequence[str]) -> None:
        super().__init__(hook, model)
        self.points, self.cost, self.switched = mode.points, mode.cost, tuple(switched)


class AttentionMode(TorchFunctionMode):
    """Computes the weights of each attention call of this thread and passes them through the module's point."""

    def __init__(self, names: dict[torch.nn.Module, str], running: RunningModules) -> None:
        super().__init__()
        self.points, self.cost = AttentionPoints(names.values()), AttentionCost()
        self._names, self._running = names, running
        self._warned: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function unchanged; if it is an attention of a selected module, compute its weights."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in ATTENTION_FUNCTIONS and (module := self._running.innermost) is not None:
            name = self._names.get(module)
            if name is not None:
                self._record(name, function, result, args, kwargs)
        return result

    def _record(self, name: str, function: Any, result: Any, args: Any, kwargs: Any) -> None:
        device = next(iter_tensors(result)).device
        with torch.no_grad(), self.cost.timing(device):
            try:
                weights = ATTENTION_FUNCTIONS[function](result, args, kwargs)
            except Exception as error:  # the model must not fail because its weights cannot be computed
                if name not in self._warned:
                    self._warned.add(name)
                    logger.warning("no attention map of %r: %s: %s", name, type(error).__name__, error)
                return
            if weights is not None:
                self.cost.maps += 1
                self.cost.bytes += weights.nbytes
                self.points[name](weights.detach())


@contextmanager
def record_attention(model: torch.nn.Module, modules: Any) -> Iterator[tuple[AttentionMode, list[str]]]:
    """Record the attention of the selected modules (None selects all) in this thread until the block ends.

    Yields:
        The mode that records, and the models that were switched to another attention implementation.
    """
    named = dict(model.named_modules())
    selected = named if modules is None else select(modules, named, "module")
    # The root module has no name; a model that attends in its own forward goes by its class name.
    names = {module: name or type(model).__name__ for name, module in selected.items()}
    running = RunningModules()
    mode = AttentionMode(names, running)
    with attention_with_weights(model) as switched, running.following(model), mode:
        yield mode, switched
    kind = type(model).__name__
    if mode.cost.maps:
        logger.info("attention maps of %s: %s", kind, mode.cost)  # formatting waits for the device, so only if printed
    elif running.entered:
        logger.warning("%s ran without attention in the selected modules; supported are %s", kind, SUPPORTED)


@contextmanager
def attention_session(
    make_manager: Callable[..., HookManager], model: torch.nn.Module, modules: Any, options: Mapping[str, Any]
) -> Iterator[AttentionMaps]:
    """Record and capture the attention of a model until the block ends.

    Args:
        make_manager: The class `HookManager`, which imports this module.
        model: The model.
        modules: The modules whose attention to record; None for all.
        options: The options of `Capture`.

    Yields:
        The maps.
    """
    with record_attention(model, modules) as (mode, switched):
        hook = Capture("*", **options)
        maps = AttentionMaps(hook, model, mode, switched)
        session = CaptureSession(make_manager(max_captured_states=None), mode.points, hook)
        try:
            yield maps
        finally:
            maps.close()
            session.close()


# ---- switching to an attention whose weights can be computed ---------------------------------------------------------


@contextmanager
def attention_with_weights(model: torch.nn.Module) -> Iterator[list[str]]:
    """Make attention visible for a block; restores everything at its end, also after an exception.

    Hugging Face models whose attention is a foreign kernel (flash, flex) use "eager" during the block, and compiled
    code runs as plain Python: the mode cannot look into either.

    Yields:
        A description of each switch, such as ``"LlamaModel: flash_attention_2 → eager"``.
    """
    switched: list[str] = []
    with ExitStack() as stack:
        for module in model.modules():
            implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if hasattr(module, "set_attn_implementation") and implementation not in _VISIBLE_IMPLEMENTATIONS:
                switched.append(f"{type(module).__name__}: {implementation} → eager")
                stack.enter_context(_eager(module))
        stack.enter_context(run_uncompiled())
        yield switched


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = [(config, config._attn_implementation) for config in _configs(model.config)]
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        for config, implementation in before:  # outer configs first, because setting one also sets its inner ones
            config._attn_implementation = implementation


def _configs(config: Any) -> Iterator[Any]:
    """Yield a Hugging Face config, then its sub-configs (of a vision and a text model, for example)."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)
