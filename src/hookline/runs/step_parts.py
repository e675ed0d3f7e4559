"""The parts of a step, whose seconds `throughput` records, and the names under which people see them."""

from __future__ import annotations

from typing import NamedTuple


class StepPart(NamedTuple):
    """The name of a part of a step, and its style in the live view."""

    phrase: str  # in a sentence
    label: str  # in the live view
    short: str  # in the live view at a narrow terminal
    style: str


STEP_PARTS = {  # by name, in the order of a step; the record has them as throughput/NAME_seconds
    "data_wait": StepPart("waiting for data", "data", "data", "yellow"),
    "forward_backward": StepPart("forward and backward", "forward-backward", "fwd-bwd", "green"),
    "optimizer": StepPart("optimizer", "optimizer", "optim", "magenta"),
    "hooks": StepPart("hooks", "hooks", "hooks", "cyan"),
}
