"""Attention weights: multiplied by the values they give the output of the attention."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from hookline import HookManager


class Attends(torch.nn.Module):
    """Calls torch's attention."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


def weights_of(*args: Any, **kwargs: Any) -> Tensor:
    """The attention map of one call."""
    model = Attends()
    with HookManager().attention_maps(model) as maps:
        model(*args, **kwargs)
    return maps["Attends"]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from a new generator, so that no test depends on another's draws."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def mask_of(kind: str, queries: int, keys: int) -> Any:
    """The kinds of mask that scaled_dot_product_attention takes."""
    sometimes = (draw(queries, keys) > -0.5) | torch.eye(queries, keys, dtype=torch.bool)
    return {"none": None, "bool": sometimes, "float": draw(queries, keys)}[kind]


@settings(max_examples=60, deadline=None)
@given(
    queries=st.integers(1, 5),
    keys=st.integers(1, 5),
    groups=st.sampled_from([1, 2, 4]),
    mask=st.sampled_from(["none", "bool", "float", "causal"]),
    scale=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    batch=st.sampled_from([(), (3,), (2, 2)]),
)
def test_weights_times_values_is_the_attention(
    queries: int, keys: int, groups: int, mask: str, scale: float | None, dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    """Whatever mask, scale, grouping of heads, dtype and number of dimensions: the weights explain the output."""
    heads = 4
    if mask == "bool":
        queries = min(queries, keys)  # so that every query sees something
    query, key = draw(*batch, heads, queries, 8, dtype=dtype), draw(*batch, heads // groups, keys, 8, dtype=dtype)
    value = draw(*batch, heads // groups, keys, 6, dtype=dtype)
    more: dict[str, Any] = {"scale": scale, "enable_gqa": groups > 1, "is_causal": mask == "causal"}
    if mask != "causal":
        more["attn_mask"] = mask_of(mask, queries, keys)
        if mask == "float":
            more["attn_mask"] = more["attn_mask"].to(dtype)
    weights = weights_of(query, key, value, **more)
    assert weights.shape == (*batch, heads, queries, keys) and weights.dtype == dtype
    made = weights.double() @ value.double().repeat_interleave(groups, -3)
    loose = 0.03 if dtype is torch.bfloat16 else 1e-5
    expected = F.scaled_dot_product_attention(query, key, value, **more).double()
    torch.testing.assert_close(made, expected, atol=loose, rtol=loose)


def test_a_fully_masked_query_has_zero_weights() -> None:
    """Zeros, as from the fused kernels, not NaN; a NaN in the query stays NaN."""
    query = draw(1, 1, 2, 4)
    mask = torch.tensor([[False, False], [True, False]])
    assert weights_of(query, query, query, mask).flatten().tolist() == [0, 0, 1, 0]
    query[0, 0, 1] = math.nan
    assert weights_of(query, query, query, mask)[0, 0, 1, 0].isnan()


def test_a_causal_bias_is_a_mask() -> None:
    """Torch's lazy causal masks are aligned to the last key."""
    query, key = draw(1, 2, 2, 4), draw(1, 2, 5, 4)
    weights = weights_of(query, key, key, causal_lower_right(2, 5))
    torch.testing.assert_close(
        weights @ key, F.scaled_dot_product_attention(query, key, key, attn_mask=causal_lower_right(2, 5))
    )
    assert (weights[..., 0, 4] == 0).all() and (weights[..., 1, 4] > 0).all()


def test_half_precision_is_widened_under_autocast_too() -> None:
    """Scores are not rounded to eight bits: weights are the true ones rounded to their dtype."""
    query, key = draw(1, 1, 4, 16, dtype=torch.bfloat16) * 6, draw(1, 1, 9, 16, dtype=torch.bfloat16)
    true = weights_of(query.double(), key.double(), key.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = weights_of(query, key, key)
    assert torch.equal(weights, true.bfloat16())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 6}], ids=str
)
def test_multi_head_weights_are_torchs_own(options: dict[str, Any], need_weights: bool) -> None:
    """One map per head, before dropout, with and without need_weights; nothing is drawn."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, **options)
    query, key = draw(3, 4, 8), draw(3, 5, options.get("kdim", 8))
    torch.manual_seed(1)
    module(query, key, key, need_weights=need_weights)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with HookManager().attention_maps(module) as maps:
        module(query, key, key, need_weights=need_weights)
    assert torch.equal(torch.get_rng_state(), state)
    weights = maps["MultiheadAttention"]
    expected = module.eval()(query, key, key, average_attn_weights=False)[1]
    assert torch.equal(weights, expected) and weights.shape[:3] == (3, 2, 4)


class Softmax(torch.nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, scores: Tensor) -> Tensor:
        return self.function(scores)


@pytest.mark.parametrize(
    ("function", "dims", "recorded"),
    [
        (lambda scores: scores.softmax(-1), 4, True),
        (lambda scores: F.softmax(scores, dim=3), 4, True),
        (lambda scores: torch.softmax(input=scores, dim=-1), 4, True),
        (lambda scores: torch.special.softmax(scores, -1), 4, True),
        (lambda scores: scores.softmax(1), 4, False),
        (lambda scores: scores.softmax(-1), 3, False),
    ],
    ids=["method", "functional", "by keyword", "special", "not the last dimension", "three dimensions"],
)
def test_which_softmax_is_attention(function: Callable[[Tensor], Tensor], dims: int, recorded: bool) -> None:
    """One over the last of four dimensions; not the one over a vocabulary, nor one over channels."""
    scores = draw(2, 2, 3, 3)[(0,) * (4 - dims)]
    model = Softmax(function)
    with HookManager().attention_maps(model) as maps:
        made = model(scores)
    assert len(maps) == recorded and (not recorded or torch.equal(maps["Softmax"], made))
