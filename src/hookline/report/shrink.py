"""Make the numbers of a report smaller, so that the page stays within its size: pairs of buckets become one.

A spike survives: curves keep the lowest and the highest value of a bucket, layers the value farthest from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]  # curves, layers, histograms of a run
FEWEST = 8  # buckets that are not merged any more


def fit(runs: Sequence[Numbers], budget: int) -> list[Numbers]:
    """Return the numbers in at most this many bytes: as long as they take more, the kind that takes most is halved."""
    kinds = [[dict(run[kind]) for run in runs] for kind in range(3)]
    sizes = [_bytes(kind) for kind in kinds]
    while sum(sizes) > budget:
        largest = sizes.index(max(sizes))
        for run in kinds[largest]:
            for name, one in run.items():
                run[name] = _HALVE[largest](one)
        before, sizes[largest] = sizes[largest], _bytes(kinds[largest])
        if sizes[largest] == before:  # there are too many names to fit, so that the last of them are left out
            for run in kinds[largest]:
                for name in list(run)[len(run) // 2 :]:
                    del run[name]
            sizes[largest] = _bytes(kinds[largest])
    return [(curves, layers, histograms) for curves, layers, histograms in zip(*kinds, strict=True)]


def _bytes(runs: Sequence[Mapping[str, Any]]) -> int:
    """Return how many bytes the arrays take in the page; equal ones are written once."""
    arrays: dict[bytes, int] = {}
    total = 0
    for run in runs:
        for one in run.values():
            if hasattr(one, "counts"):
                total += np.asarray(one.counts).size  # one byte each
            elif hasattr(one, "values"):
                total += 4 * np.asarray(one.values).size
            else:
                distinct = 1 if one.lowest is one.mean or np.array_equal(one.lowest, one.mean, equal_nan=True) else 3
                total += 4 * len(one.mean) * distinct
                steps = np.asarray(one.steps)
                arrays[steps.tobytes()] = 4 * len(steps)
    return total + sum(arrays.values())


def _halve_curve(curve: Any) -> Any:
    if len(curve.steps) <= FEWEST:
        return curve
    return replace(
        curve,
        steps=curve.steps[::2],
        mean=_pairs(curve.mean, lambda pairs: _over_finite(np.mean, pairs)),
        lowest=_pairs(curve.lowest, lambda pairs: _over_finite(np.min, pairs)),
        highest=_pairs(curve.highest, lambda pairs: _over_finite(np.max, pairs)),
        width=curve.width * 2,
    )


def _halve_layers(layers: Any) -> Any:
    if len(layers.steps) <= FEWEST:
        return layers
    return replace(layers, steps=layers.steps[::2], values=_pairs(layers.values, _farthest))


def _halve_histograms(histograms: Any) -> Any:
    if len(histograms.steps) <= FEWEST:
        return histograms
    counts = _pairs(np.asarray(histograms.counts), lambda pairs: pairs.sum(axis=1))
    return replace(histograms, steps=histograms.steps[::2], counts=counts)


_HALVE = (_halve_curve, _halve_layers, _halve_histograms)


def _pairs(values: NDArray[Any], merge: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
    """Merge each two entries along the first axis; the last one of an odd number stays alone."""
    even = len(values) - len(values) % 2
    merged = merge(values[:even].reshape(even // 2, 2, *values.shape[1:]))
    return np.concatenate([merged, values[even:]]).astype(values.dtype)


def _over_finite(reduce: Callable[..., Any], pairs: NDArray[Any]) -> NDArray[Any]:
    """Reduce pairs; a value that is not finite counts only where both are."""
    first, second = pairs[:, 0], pairs[:, 1]
    both = np.stack([np.where(np.isfinite(first), first, second), np.where(np.isfinite(second), second, first)])
    return np.asarray(reduce(both, axis=0))


def _farthest(pairs: NDArray[Any]) -> NDArray[Any]:
    """Choose of each pair the value farthest from 0; NaN and infinities are farther than any number."""
    first, second = pairs[:, 0], pairs[:, 1]
    distance = [np.where(np.isfinite(one), np.abs(one), np.inf) for one in (first, second)]
    return np.where(distance[0] >= distance[1], first, second)
