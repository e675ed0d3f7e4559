"""Count the tokens of a batch, and the positions over which its mean loss is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, TypeGuard

import torch

from hookline._predictions import IGNORE_INDEX


def count_tokens(batch: Any) -> int:
    """Return the elements of `input_ids`, or of a batch that is an integer tensor, including padding; otherwise 0.

    This is what `tokens_seen` counts by default: it reads only a shape, so no run waits for a device because of it.
    """
    if type(batch) in (tuple, list):
        return 0
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    return tokens.numel() if _is_integer(tokens) else 0


def count_loss_terms(batch: Any, loss_fn: Any, model: Any, warn: Callable[[str], None]) -> int:
    """Return over how many positions of a batch a mean loss is taken, as far as the batch shows it.

    These are the labels that are not ignored: the 'labels' of a dict, or an integer second item of a tuple. Without
    labels, the ones in `attention_mask` count, otherwise the tokens. This waits for the device if the batch is on one.

    Models that shift the labels themselves, as Hugging Face's causal models do, have no prediction for the first label.
    Their labels are a copy of the inputs. An encoder-decoder shifts its inputs instead.

    Args:
        batch: The batch.
        loss_fn: The loss function; its `ignore_index` counts if it has one, otherwise -100.
        model: The model.
        warn: Called with a sentence if labels are counted that the loss seems to ignore.
    """
    if isinstance(batch, Mapping):
        inputs, labels = batch.get("input_ids"), batch.get("labels")
    else:
        inputs, labels = batch, None
        if isinstance(batch, (tuple, list)):
            inputs, labels = (*batch, None, None)[:2]
    if _is_integer(labels):
        ignore_index = _ignore_index(loss_fn)
        counted = labels != ignore_index
        if (negative := labels[counted & (labels < 0)]).numel():
            warn(
                f"labels that are {int(negative[0])} count as tokens; only {ignore_index} is ignored; if the loss "
                "ignores them, too, pass loss_fn=functools.partial(…, ignore_index=…) or count_tokens="
            )
        if isinstance(batch, Mapping) and _is_integer(inputs) and inputs.shape == labels.shape and labels.dim() > 1:
            encodes_first = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            if not encodes_first and torch.equal(labels[counted], inputs[counted]):
                counted = counted[:, 1:]
        return int(counted.sum())
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor):
        return int(mask.sum())
    return inputs.numel() if _is_integer(inputs) else 0


def _ignore_index(loss_fn: Any) -> int:
    """Return the `ignore_index` of a loss: its attribute, the only one among the modules in it, or its parameter."""
    parts = loss_fn.modules() if isinstance(loss_fn, torch.nn.Module) else [loss_fn]
    indices = [getattr(part, "ignore_index", None) for part in parts]
    with suppress(TypeError, ValueError, KeyError):  # it is not a function, has no signature, or lacks the parameter
        indices.append(signature(loss_fn).parameters["ignore_index"].default)  # This also covers a functools.partial.
    given = {index for index in indices if isinstance(index, int)} - {IGNORE_INDEX}
    return given.pop() if len(given) == 1 else IGNORE_INDEX


def _is_integer(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
