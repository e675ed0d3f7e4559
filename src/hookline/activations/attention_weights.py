"""Compute the weights of an attention call from its arguments, without changing what the model gets.

Three functions of torch are supported. Their weights are computed after they ran; nothing here draws a random number,
so the weights are those before dropout.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_HALF_DTYPES = (torch.float16, torch.bfloat16)
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
    """Return softmax(QKᵀ · scale + mask), for the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    Computed at least in float32, as the fused kernels do. A query that attends to nothing gets zeros, as from them.

    Returns:
        The weights in the query's dtype, [..., queries, keys].
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    if query.dtype in _HALF_DTYPES:
        wide_query, key = query.float(), key.float()
    else:
        wide_query = query
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(wide_query * scale, key.transpose(-2, -1))
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
    """Return a softmax's own result if it is over the keys of [batch, heads, queries, keys], else None."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return result if result.dim() == 4 and dim in (-1, 3) else None


WeightFunction = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Tensor | None]

ATTENTION_FUNCTIONS: dict[Any, WeightFunction] = {
    F.scaled_dot_product_attention: lambda result, args, kwargs: scaled_dot_product_weights(*args, **kwargs),
    F.multi_head_attention_forward: lambda result, args, kwargs: multi_head_weights(*args, **kwargs),
    **dict.fromkeys((F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax), softmax_weights),
}
"""Maps each torch function that attends to one that computes its weights from its result and arguments."""
