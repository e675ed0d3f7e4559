"""Find the better direction of a metric: the mode of a hook that monitors it, otherwise the one its name suggests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Direction = Literal["low", "high"]

_LOW = frozenset({
    "loss", "losses", "error", "errors", "err", "mse", "rmse", "mae", "nll", "perplexity", "ppl", "wer", "cer",
    "bpb", "bpc", "fid", "ece", "brier",
})  # fmt: skip
_HIGH = frozenset({
    "acc", "accuracy", "f1", "precision", "recall", "auc", "auroc", "auprc", "score", "bleu", "rouge", "meteor",
    "iou", "miou", "dice", "map", "r2", "psnr", "ssim", "mfu",
})  # fmt: skip
# train/loss_scale is not a loss, and high values of scikit-learn's neg_log_loss are better.
_NEITHER = frozenset({"scale", "weight", "lr", "neg"})
_LOW_PHRASE = re.compile(r"(bits_per_(byte|char|character|token|dim)|cross_entropy)$")
_HIGH_PHRASE = re.compile(r"(_per_s(ec|econd)?|exact_match)$")


def better(name: str, hooks: Iterable[Mapping[str, Any]] = ()) -> Direction | None:
    """Return whether a low or a high value of a metric is better; None if neither is known to be.

    >>> [better(name) for name in ("val/loss", "val/top5_acc", "val/bits_per_byte", "train/lr", "train/grad_norm")]
    ['low', 'high', 'low', None, None]

    Args:
        name: The metric.
        hooks: The hooks of its run, as run.json describes them. If one monitors the metric, its mode decides.
    """
    for hook in hooks:
        parameters = hook.get("parameters", {})
        if parameters.get("mode") not in ("min", "max"):
            continue
        if monitored_metric(hook) == name:
            return "low" if parameters["mode"] == "min" else "high"
    last = name[-200:].rpartition("/")[2]
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last)  # valLoss is two words, mAP is one
    last = last.lower()
    words = {word for text in (last, split.lower()) for word in re.split(r"[^a-z0-9]+", text)}
    if words & _NEITHER:
        return None
    # A loss that is computed from a score is a loss.
    if words & _LOW or _LOW_PHRASE.search(last):
        return "low"
    return "high" if words & _HIGH or _HIGH_PHRASE.search(last) else None


def monitored_metric(hook: Mapping[str, Any]) -> str | None:
    """Return the metric that a hook monitors, as the record names it; None if it monitors none."""
    monitor = hook.get("parameters", {}).get("monitor")
    return re.sub(r"^eval/", "val/", monitor) if isinstance(monitor, str) and hook.get("enabled", True) else None
