"""The weights of an attention, found beside it: what the model gets of it stays as it is.

Three functions of torch are known to attend. Each is asked after it has run; nothing here draws a random number, so
weights are those before dropout.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HALVES = (torch.float16, torch.bfloat16)
WEIGHED_DIMENSIONS = 4  # [batch, heads, query, key]
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


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
    """softmax(QKᵀ · scale + mask) for the arguments of `scaled_dot_product_attention`, in the query's dtype.

    In float32 at least, as the fused kernels do. A query that may look at nothing has zeros, as they give it.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(_wide(query) * scale, _wide(key).transpose(-2, -1))
        sees_nothing = _mask(scores, attn_mask, is_causal)
        weights = torch.softmax(scores, dim=-1)
        return (weights if sees_nothing is None else weights.masked_fill_(sees_nothing, 0)).to(query.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _mask(scores: Tensor, mask: Any, is_causal: bool) -> Tensor | None:
    """Put -inf where a query must not look, in place: scores are large. Returns which queries see nothing at all."""
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -math.inf)
    if mask is None:
        return None
    if hasattr(mask, "_materialize"):  # torch.nn.attention.bias.CausalBias is no tensor until somebody needs one
        mask = mask._materialize(scores.device)
    if mask.dtype is torch.bool:
        scores.masked_fill_(~mask, -math.inf)
    else:
        scores.add_(mask)
    return torch.isneginf(scores).all(-1, keepdim=True)


def multi_head_weights(*args: Any, **kwargs: Any) -> Tensor:
    """What `multi_head_attention_forward` gives as weights when it is asked for those of each head.

    It is run once more for them, as in eval mode: asked the first time, it would take another way to its output.
    """
    asked = _MULTI_HEAD.bind(*args, **kwargs)
    asked.arguments.update(need_weights=True, average_attn_weights=False, training=False)
    weights: Tensor = F.multi_head_attention_forward(*asked.args, **asked.kwargs)[1]  # type: ignore[assignment]
    return weights


def softmax_weights(made: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The softmax itself, where it is one over the keys of [batch, heads, query, key]; otherwise None."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return made if made.dim() == WEIGHED_DIMENSIONS and dim in (-1, WEIGHED_DIMENSIONS - 1) else None


Finder = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Tensor | None]  # of the function's output and arguments

ATTENTIONS: dict[Any, Finder] = {
    F.scaled_dot_product_attention: lambda made, args, kwargs: scaled_dot_product_weights(*args, **kwargs),
    F.multi_head_attention_forward: lambda made, args, kwargs: multi_head_weights(*args, **kwargs),
    **dict.fromkeys((F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax), softmax_weights),
}
"""How the weights are found, for every function that attends."""
