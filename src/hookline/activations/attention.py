"""Attention maps: the attention weights of every head of a model, for the duration of a ``with`` block.

Fused attention kernels never materialize their weights. Inside the block, a `TorchFunctionMode` follows each attention
call of torch with a separate computation of its weights; the model's own computation stays unchanged.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hookline import _device
from hookline._console import logger
from hookline._names import plain_modules, unwrap_module
from hookline._tensors import iter_tensors
from hookline._words import nearest
from hookline.activations.capture import Cache, Capture, capture_session
from hookline.core.patterns import select
from hookline.errors import HooklineError

if TYPE_CHECKING:  # the manager makes sessions
    from hookline.activations.registry import ModelRegistry

SUPPORTED = "scaled_dot_product_attention, nn.MultiheadAttention and a softmax over [batch, heads, queries, keys]"
# Names under which Hugging Face models call attention that consists of torch's own functions.
_VISIBLE_IMPLEMENTATIONS = (None, "eager", "sdpa")
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


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
        self._pending: list[tuple[Any, Any]] = []  # pairs of timing events that have not been read yet

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
        cost: The cost of computing the maps so far.
        switched: The models that were switched to another attention implementation for the block.
    """

    def __init__(self, hook: Capture, model: torch.nn.Module, mode: AttentionMode, switched: Sequence[str]) -> None:
        super().__init__(hook, model)
        self.points, self.cost, self.switched = mode.points, mode.cost, tuple(switched)


class AttentionMode(TorchFunctionMode):
    """Computes the weights of each attention call of this thread and passes them through the module's point."""

    def __init__(self, names: dict[torch.nn.Module, str]) -> None:
        super().__init__()
        self.points, self.cost = AttentionPoints(names.values()), AttentionCost()
        self.model_ran = False
        self._names = names
        self._thread = threading.get_ident()  # the only thread in which torch calls the mode
        self._running: list[torch.nn.Module] = []  # the modules that this thread is in, outermost first
        self._warned: set[str] = set()

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Follow which module of the model runs inside the block, with two torch hooks on each of them."""
        with ExitStack() as attached:
            for module in model.modules():
                attached.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
                attached.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        self.model_ran = True
        if threading.get_ident() == self._thread:
            self._running.append(module)

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        # Modules inside that were left by a BaseException (an early stop, Ctrl-C) did not call this: pop them, too.
        if threading.get_ident() == self._thread:
            while self._running and self._running.pop() is not module:
                pass

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function unchanged; if it is an attention of a selected module, compute its weights."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        # A pass that checkpointing repeats is not seen: the mode is off inside the call of `backward`.
        if function in ATTENTION_FUNCTIONS and self._running:
            name = self._names.get(self._running[-1])
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
def attention_session(
    manager: ModelRegistry, model: torch.nn.Module, modules: Any, options: Mapping[str, Any]
) -> Iterator[AttentionMaps]:
    """Compute and capture the attention weights of the model calls in this thread until the block ends.

    Args:
        manager: A manager that has no hooks yet.
        model: The model.
        modules: The modules whose attention to capture; None for all.
        options: The options of `Capture`.

    Yields:
        The maps.
    """
    named, kind = plain_modules(model), type(unwrap_module(model)).__name__
    selected = named if modules is None else select(modules, named, "module")
    # The root module has no name; a model that computes attention in its own forward gets its class name.
    names = {module: name or kind for name, module in selected.items()}
    mode, hook = AttentionMode(names), Capture("*", **options)
    with attention_with_weights(model) as switched, mode.following(model), mode:
        maps = AttentionMaps(hook, model, mode, switched)
        with capture_session(manager, mode.points, maps):
            yield maps
    if mode.cost.maps:
        logger.info("attention maps of %s: %s", kind, mode.cost)  # formatting waits for the device, so only if printed
    elif mode.model_ran:
        logger.warning("%s computed no attention in the selected modules; Hookline supports %s", kind, SUPPORTED)


# ---- switching to an attention whose weights can be computed ---------------------------------------------------------


@contextmanager
def attention_with_weights(model: torch.nn.Module) -> Iterator[list[str]]:
    """Make attention visible for a block; restores everything at its end, even after an exception.

    Hugging Face models whose attention is a foreign kernel (flash, flex) use "eager" during the block, because the mode
    cannot see into it; nor into compiled code, which a capture session runs as plain Python.

    Yields:
        A description of each switch, such as ``"LlamaModel: flash_attention_2 → eager"``.
    """
    switched: list[str] = []
    before: list[tuple[Any, Any]] = []
    modules: Iterator[Any] = model.modules()
    try:
        for module in modules:
            implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if hasattr(module, "set_attn_implementation") and implementation not in _VISIBLE_IMPLEMENTATIONS:
                switched.append(f"{type(module).__name__}: {implementation} → eager")
                before += [(config, config._attn_implementation) for config in _configs(module.config)]
                module.set_attn_implementation("eager")
        yield switched
    finally:
        for config, implementation in before:  # outer configs first, because setting one also sets its inner ones
            config._attn_implementation = implementation


def _configs(config: Any) -> Iterator[Any]:
    """Yield a Hugging Face config, then its sub-configs (of the models for images and text, for example)."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)


# ---- the weights of an attention call --------------------------------------------------------------------------------

# They are computed after the call, from its arguments, without drawing random numbers, so they are the weights before
# dropout.


def scaled_dot_product_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(QKᵀ · scale + mask), for the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    Computed at least in float32, as in the fused kernels. A query that attends to nothing gets zeros, as it does there.

    Returns:
        The weights in the query's dtype, [..., queries, keys].
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(query.to(wide) * scale, key.to(wide).transpose(-2, -1))
        fully_masked = _apply_mask(scores, attn_mask, is_causal)
        weights = torch.softmax(scores, dim=-1)
        return (weights if fully_masked is None else weights.masked_fill_(fully_masked, 0)).to(query.dtype)


def _apply_mask(scores: Tensor, mask: Any, is_causal: bool) -> Tensor | None:
    """Mask scores in place, because they are large; return which queries are masked entirely."""
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -math.inf)
    if mask is None:
        return None
    if hasattr(mask, "_materialize"):  # torch.nn.attention.bias.CausalBias becomes a tensor only on request
        mask = mask._materialize(scores.device)
    if mask.dtype is torch.bool:
        scores.masked_fill_(~mask, -math.inf)
    else:
        scores.add_(mask)
    return torch.isneginf(scores).all(-1, keepdim=True)


def multi_head_weights(*args: Any, **kwargs: Any) -> Tensor:
    """Return the weights of each head, for the arguments of `F.multi_head_attention_forward`.

    The function runs a second time for them, in eval mode: if the model's own call requested the weights, it would
    compute its output in a different way.
    """
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.arguments.update(need_weights=True, average_attn_weights=False, training=False)
    weights: Tensor = F.multi_head_attention_forward(*call.args, **call.kwargs)[1]  # type: ignore[assignment]
    return weights


def softmax_weights(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a softmax's own result if it is over the keys of [batch, heads, queries, keys]; otherwise None."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return result if result.dim() == 4 and dim in (-1, 3) else None


WeightFunction = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Tensor | None]

ATTENTION_FUNCTIONS: dict[Any, WeightFunction] = {
    F.scaled_dot_product_attention: lambda result, args, kwargs: scaled_dot_product_weights(*args, **kwargs),
    F.multi_head_attention_forward: lambda result, args, kwargs: multi_head_weights(*args, **kwargs),
    **dict.fromkeys((F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax), softmax_weights),
}
"""Maps each torch attention function to one that computes the weights from its result and arguments."""
