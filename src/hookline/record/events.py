"""`EVENTS`: every kind of event that Hookline writes to events.jsonl, with its sentence, severity and readers.

Hooks of users may write kinds of their own. These are not trouble, and their fields are shown as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class EventKind:
    """What Hookline knows about events of one kind."""

    kind: str
    sentence: str
    """What it says; `{…}` are fields of the event."""
    severity: Severity | None = None
    """How bad it is in the list of alerts; None if it does not belong there."""
    mark: str | None = None
    """The group of its mark in charts; None for a mark of its own."""
    curve: str | None = None
    """The curve that its alert leads to; None leads to the hook that it comes from."""
    same_on_all_ranks: bool = False
    """Whether all ranks have it alike, so that rank 0 alone writes it."""
    trackers_alert: bool = False
    """Whether trackers that can send messages send one."""
    changes_numbers: bool = False
    """Whether it may be why two runs have different numbers from then on."""


NAN_MARK, _FAILURE, HOOK_FAILURE_MARK, _RESTART = "NaN or infinity", "failure", "hook failure", "restart"
_LOSS = "train/loss"

_KINDS = (
    # ---- the run
    EventKind("exception", "the run failed: {error}", "error", _FAILURE, trackers_alert=True),
    EventKind("stop_requested", "stop requested: {reason}", None, "stop", same_on_all_ranks=True),
    EventKind(
        "begun_again", "the run was resumed from its beginning, because it had no checkpoint", None, _RESTART,
        same_on_all_ranks=True,
    ),
    EventKind("resume_not_exact", "the run was not resumed exactly: {why}", "warning", same_on_all_ranks=True),
    EventKind("loader_failed", "a loader failed: {error}", "error", _FAILURE),
    EventKind("stall", "no progress for {seconds:.3g} s", "warning", _FAILURE, trackers_alert=True),
    EventKind("stall_over", "the stall was over after {seconds:.3g} s"),
    EventKind("slow_rank", "rank {slow_rank} takes {seconds:.3g} s a step, the others {others:.3g} s", "warning"),
    # ---- numbers
    EventKind(
        "non_finite_weights", "{message}", "error", NAN_MARK, same_on_all_ranks=True, trackers_alert=True
    ),
    EventKind("non_finite_loss", "the loss is {value}", "error", NAN_MARK, _LOSS),
    EventKind(
        "non_finite_losses", "losses of epoch {epoch} that were not finite: {count}", None, NAN_MARK,
        same_on_all_ranks=True,
    ),
    EventKind("non_finite", "{reason}", "error", NAN_MARK, _LOSS),
    EventKind("metric_not_finite", "{monitor} is {value}", "warning", NAN_MARK),
    EventKind("crash", "{reason}: {autopsy}; everything about that step is in {path}", "error", NAN_MARK),
    EventKind(
        "loss_spike", "the loss rose to {loss:.4g}, {spreads:.3g} spreads above the median {median:.4g}", "warning",
        "loss spike", _LOSS, trackers_alert=True,
    ),
    EventKind("gradient_flow", "{verdict}", "warning", same_on_all_ranks=True),
    EventKind("debug_finding", "a debug condition holds in {module}", "warning"),
    EventKind("step_skipped", "an optimizer step was skipped: {reason}", "info", same_on_all_ranks=True),
    # ---- checkpoints
    EventKind("checkpoint_saved", "saved {path}", None, "checkpoint", same_on_all_ranks=True),
    EventKind("checkpoint_loaded", "the run was resumed from {path}", None, _RESTART, same_on_all_ranks=True),
    EventKind("checkpoint_abandoned", "a checkpoint was moved aside: {path}", same_on_all_ranks=True),
    EventKind(
        "checkpoint_failed", "a checkpoint could not be saved: {error}", "error", _FAILURE, same_on_all_ranks=True,
        trackers_alert=True,
    ),
    EventKind(
        "checkpoint_damaged", "a checkpoint is damaged: {problem}", "error", _FAILURE, same_on_all_ranks=True
    ),
    EventKind(
        "best_checkpoint", "{path} is the best so far: {monitor} is {value:.4g}", same_on_all_ranks=True
    ),
    EventKind(
        "best_weights_restored", "the weights of step {saved_at} were restored; the best value was {value:.4g}",
        same_on_all_ranks=True,
    ),
    # ---- what was changed during the run
    EventKind(
        "lr_changed", "the learning rate was changed from {old} to {new}", same_on_all_ranks=True,
        changes_numbers=True,
    ),
    EventKind("loss_fn_changed", "the loss function was changed", same_on_all_ranks=True, changes_numbers=True),
    EventKind("step_fn_changed", "the step function was changed", same_on_all_ranks=True, changes_numbers=True),
    EventKind(
        "parameters_changed", "the optimizers own other parameters: new {added}; gone {gone}", "info",
        same_on_all_ranks=True, changes_numbers=True,
    ),
    EventKind(
        "hooks_changed", "resumed with other hooks: added {added}; removed {removed}; reordered: {reordered}", "info",
        same_on_all_ranks=True,
    ),
    EventKind("hook_state", "its saved state was not used: {problem}", "info", same_on_all_ranks=True),
    EventKind(
        "hooks_without_state", "hooks that will start fresh after a resume: {hooks}", same_on_all_ranks=True
    ),
    # ---- hooks
    EventKind("hook_failed", "{message}", "warning", HOOK_FAILURE_MARK),
    EventKind("hook_disabled", "the hook was switched off: {message}", "warning", HOOK_FAILURE_MARK),
    EventKind("hook_overruled", "{message}", "warning"),
    EventKind(
        "hook_wrote", "the hook changed training without declaring it: {what}", "warning", changes_numbers=True
    ),
    EventKind("hook_costly", "{message}", "info"),
    # Its random streams were restored, so that training is as without it.
    EventKind("hook_drew", "{message}", "info"),
    EventKind("hook_passed_over", "{message}"),
    # ---- what is sent elsewhere
    EventKind("sink_failed", "the sink {sink} failed and was removed: {error}", "warning", HOOK_FAILURE_MARK),
    EventKind("tracker_failed", "the tracker failed and gets no more: {error}", "warning", HOOK_FAILURE_MARK),
    EventKind(
        "tracker_abandoned", "the tracker did not end within {seconds:.3g} s; rows that it did not write: {rows}",
        "warning", HOOK_FAILURE_MARK,
    ),
    EventKind("tracker_dropped_rows", "the tracker was too slow; rows that it did not get: {rows}", "warning"),
    EventKind("notification_failed", "a notification was not sent: {why}", "warning"),
    EventKind("notified", "notifications: {sent} sent, {failed} failed"),
    EventKind("trace_written", "wrote the trace {path}"),
)  # fmt: skip

EVENTS = {kind.kind: kind for kind in _KINDS}


def describe_event(event: Mapping[str, Any]) -> str:
    """Return in one sentence what an event says, after the hook that it is about or comes from."""
    known = EVENTS.get(str(event.get("kind")))
    fields = {
        key: (", ".join(map(str, value)) or "none") if isinstance(value, list) else value
        for key, value in event.items()
    }
    try:  # a record from elsewhere may lack fields, or have others
        text = ("{}" if known is None else known.sentence).format(**fields)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError):
        hidden = ("time", "kind", "step", "by", "hook")
        shown = [f"{key} {value}" for key, value in fields.items() if key not in hidden and value not in (None, "")]
        text = ", ".join(shown) or str(event.get("kind"))
    hook = hook_of(event)
    return f"{hook}: {text}" if hook else text


def hook_of(event: Mapping[str, Any]) -> str | None:
    """Return the hook that an event is about or comes from."""
    hook = event.get("hook", event.get("by"))
    return hook if isinstance(hook, str) else None
