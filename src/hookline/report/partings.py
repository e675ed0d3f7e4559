"""Say where runs part from the first one of a comparison, and what may have caused it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hookline.errors import RecordError
from hookline.record.comparison import Parting, find_differences, find_parting, likely_causes
from hookline.record.json_lines import NON_FINITE
from hookline.record.summary import RunSummary


def describe_partings(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return for each run after the first one a sentence without its subject, and the likely causes."""
    return [_describe_pair(summaries[0], other) for other in summaries[1:]]


def _describe_pair(first: RunSummary, other: RunSummary) -> dict[str, Any]:
    parting = find_parting(first, other)
    if parting is None:
        return {"text": "have no step in common", "causes": []}
    try:
        causes = likely_causes(first, other, parting, find_differences([first, other]))
    except RecordError:  # a config cannot be read, as the list of differences says
        causes = []
    return {"text": describe_parting(parting), "causes": causes}


def describe_parting(parting: Parting) -> str:
    """Return where two runs part, with all digits of the numbers; packed numbers of layers are not shown.

    >>> describe_parting(Parting(7, "train/loss", (0.5, 0.25), 6))
    'part at step 7, where train/loss differs: 0.5 and 0.25; the 6 steps before it are the same'
    """
    if parting.step is None:
        steps = f"{parting.before:,} step{'s' if parting.before != 1 else ''}"
        return f"are the same, bit for bit, in all {steps} that both have recorded"
    same = f"the {parting.before:,} steps before it are the same" if parting.before else "it is the first step"
    numbers = [str(one) for one in parting.values if isinstance(one, (int, float)) or one in NON_FINITE]
    values = f": {' and '.join(numbers)}" if numbers else ""
    return f"part at step {parting.step:,}, where {parting.name} differs{values}; {same}"
