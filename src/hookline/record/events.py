"""`EVENTS`: every kind of event that Hookline writes to events.jsonl, with its sentence, severity and readers.

Your hooks may write their own kinds. These never count as trouble, and their fields are shown unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class EventKind:
    """Hookline's description of one kind of event."""

    kind: str
    sentence: str
    """Its message; `{…}` are fields of the event."""
    remedy: str
    """The reader's remedy in one sentence, as shown on the reference page of record events."""
    severity: Severity | None = None
    """Its severity in the list of alerts; None if it does not belong there."""
    mark: str | None = None
    """The group of its mark in charts; None for its own mark."""
    curve: str | None = None
    """The curve that its alert links to; None links to the hook that it comes from."""
    same_on_all_ranks: bool = False
    """Whether it is the same on all ranks, in which case only rank 0 writes it."""
    trackers_alert: bool = False
    """Whether trackers that can send messages send one."""
    changes_numbers: bool = False
    """Whether it may explain why two runs differ from then on."""


NAN_MARK, _FAILURE, HOOK_FAILURE_MARK, _RESTART = "NaN or infinity", "failure", "hook failure", "restart"
_LOSS = "train/loss"

_KINDS = (
    # ---- the run
    EventKind(
        "exception", "the run failed: {error}",
        "Fix the error; `hookline resume RUN` then continues from the newest checkpoint.",
        "error", _FAILURE, trackers_alert=True,
    ),
    EventKind(
        "stop_requested", "stop requested: {reason}",
        "Nothing, if you wanted the stop; otherwise look at the hook or signal in `by`.",
        None, "stop", same_on_all_ranks=True,
    ),
    EventKind(
        "begun_again", "the run was resumed from its beginning, because it had no checkpoint",
        "Add the hook `checkpoint`, so that the next resume continues.", None, _RESTART, same_on_all_ranks=True,
    ),
    EventKind(
        "resume_not_exact", "the run was not resumed exactly: {why}",
        "Nothing, if results may differ; otherwise remove the cause that the event names.",
        "warning", same_on_all_ranks=True,
    ),
    EventKind(
        "loader_failed", "a loader failed: {error}",
        "Nothing, if the signal was meant to end the run; otherwise fix the loader.", "error", _FAILURE,
    ),
    EventKind(
        "stall", "no progress for {seconds:.3g} s",
        "Read the stacks in the event to see where each thread waits.", "warning", _FAILURE, trackers_alert=True,
    ),
    EventKind(
        "stall_over", "the stall was over after {seconds:.3g} s",
        "Compare its duration with your longest expected pause, such as a validation or a save.",
    ),
    EventKind(
        "slow_rank", "rank {slow_rank} takes {seconds:.3g} s a step, the others {others:.3g} s",
        "Compare data loading, load and temperature of that rank's machine with the others'.", "warning",
    ),
    # ---- numbers
    EventKind(
        "non_finite_weights", "{message}",
        "Resume from a checkpoint before the first NaN, with the hook `nan_forensics`.",
        "error", NAN_MARK, same_on_all_ranks=True, trackers_alert=True,
    ),
    EventKind(
        "non_finite_loss", "the loss is {value}",
        "Train again with `--hook nan_forensics` to find the module it comes from.", "error", NAN_MARK, _LOSS,
    ),
    EventKind(
        "non_finite_losses", "non-finite losses in epoch {epoch}: {count}",
        "Train again with `--hook nan_forensics` to find the module they come from.",
        None, NAN_MARK, same_on_all_ranks=True,
    ),
    EventKind(
        "non_finite", "{reason}",
        "Read which module or batch the event names, and fix it.", "error", NAN_MARK, _LOSS,
    ),
    EventKind(
        "metric_not_finite", "{monitor} is {value}",
        "Check how the metric is computed; a hook cannot rank such a value.", "warning", NAN_MARK,
    ),
    EventKind(
        "crash", "{reason}: {autopsy}; the crash folder is {path}",
        "Run `hookline replay` with the crash folder to reproduce the step.", "error", NAN_MARK,
    ),
    EventKind(
        "loss_spike", "the loss rose to {loss:.4g}, {spreads:.3g} spreads above the median {median:.4g}",
        "Look at the batch in `batch_idx`; if it is fine, clip gradients or lower the learning rate.",
        "warning", "loss spike", _LOSS, trackers_alert=True,
    ),
    EventKind(
        "gradient_flow", "{verdict}",
        "Check initialization, normalization and learning rate of the layers it names.",
        "warning", same_on_all_ranks=True,
    ),
    EventKind(
        "debug_finding", "a debug condition holds in {module}",
        "Look at that module's output at that step.", "warning",
    ),
    EventKind(
        "step_skipped", "an optimizer step was skipped: {reason}",
        "Nothing for a single step; if many are skipped, look at the hook or the loss scale.",
        "info", same_on_all_ranks=True,
    ),
    # ---- checkpoints
    EventKind(
        "checkpoint_saved", "saved {path}",
        "Nothing; you can resume or evaluate from it.", None, "checkpoint", same_on_all_ranks=True,
    ),
    EventKind(
        "checkpoint_loaded", "the run was resumed from {path}",
        "Nothing; steps after it are repeated.", None, _RESTART, same_on_all_ranks=True,
    ),
    EventKind(
        "checkpoint_abandoned", "a checkpoint was moved aside: {path}",
        "Delete it if you do not need the later state.", same_on_all_ranks=True,
    ),
    EventKind(
        "checkpoint_failed", "a checkpoint could not be saved: {error}",
        "Free space on the disk or fix its permissions, then resume the run.",
        "error", _FAILURE, same_on_all_ranks=True, trackers_alert=True,
    ),
    EventKind(
        "checkpoint_damaged", "a checkpoint is damaged: {problem}",
        "Delete it; an earlier whole checkpoint is used.", "error", _FAILURE, same_on_all_ranks=True,
    ),
    EventKind(
        "best_checkpoint", "{path} is the best so far: {monitor} is {value:.4g}",
        "Nothing; `RUN/best` names it.", same_on_all_ranks=True,
    ),
    EventKind(
        "best_weights_restored", "the weights of step {saved_at} were restored; the best value was {value:.4g}",
        "Nothing; the model has the weights of that step.", same_on_all_ranks=True,
    ),
    # ---- what was changed during the run
    EventKind(
        "lr_changed", "the learning rate was changed from {old} to {new}",
        "Nothing, if the hook in `by` was meant to change it.", same_on_all_ranks=True, changes_numbers=True,
    ),
    EventKind(
        "loss_fn_changed", "the loss function was changed",
        "Nothing, if the hook in `by` was meant to change it.", same_on_all_ranks=True, changes_numbers=True,
    ),
    EventKind(
        "step_fn_changed", "the step function was changed",
        "Nothing, if the hook in `by` was meant to change it.", same_on_all_ranks=True, changes_numbers=True,
    ),
    EventKind(
        "parameters_changed", "the parameters of the optimizers changed: added {added}; removed {gone}",
        "Nothing, if you added or removed a parameter group.", "info", same_on_all_ranks=True, changes_numbers=True,
    ),
    EventKind(
        "hooks_changed", "resumed with other hooks: added {added}; removed {removed}; reordered: {reordered}",
        "Nothing, if you meant to; otherwise resume with the hooks of the first attempt.",
        "info", same_on_all_ranks=True,
    ),
    EventKind(
        "hook_state", "its state was not restored: {problem}",
        "Register the hook under its old name, or let it start fresh.", "info", same_on_all_ranks=True,
    ),
    EventKind(
        "hooks_without_state", "hooks that will start fresh after a resume: {hooks}",
        "Give the hook `saves` or `state_dict`, if it must continue after a resume.", same_on_all_ranks=True,
    ),
    # ---- hooks
    EventKind(
        "hook_failed", "{message}",
        "Fix the error in the hook; training has continued without its result.", "warning", HOOK_FAILURE_MARK,
    ),
    EventKind(
        "hook_disabled", "the hook was {message}",
        "Fix the error in the hook and resume, or enable it again with `trainer.hooks.enable`.",
        "warning", HOOK_FAILURE_MARK,
    ),
    EventKind(
        "hook_overruled", "{message}",
        "Return nothing from the hook, or declare the change as the message says.", "warning",
    ),
    EventKind(
        "hook_wrote", "the hook changed training without declaring it: {what}",
        "Nothing, if you meant the change; otherwise remove it from the hook.", "warning", changes_numbers=True,
    ),
    EventKind(
        "hook_costly", "{message}",
        "Call the hook less often with `every`, or raise `warn_above`.", "info",
    ),
    # Its random streams were restored, so training is the same as without it.
    EventKind(
        "hook_drew", "{message}",
        "Draw from a generator of the hook's own.", "info",
    ),
    EventKind(
        "hook_passed_over", "{message}",
        "Choose other modules for the hook, or ignore the message.",
    ),
    # ---- what is sent elsewhere
    EventKind(
        "sink_failed", "the sink {sink} failed and was removed: {error}",
        "Fix the sink; the files of the run are complete.", "warning", HOOK_FAILURE_MARK,
    ),
    EventKind(
        "tracker_failed", "the tracker failed and receives no more rows: {error}",
        "Fix the cause; the files of the run are complete.", "warning", HOOK_FAILURE_MARK,
    ),
    EventKind(
        "tracker_abandoned", "the tracker did not finish within {seconds:.3g} s; unwritten rows: {rows}",
        "Raise the tracker's `timeout`, or check its server.", "warning", HOOK_FAILURE_MARK,
    ),
    EventKind(
        "tracker_dropped_rows", "the tracker was too slow; dropped rows: {rows}",
        "Send less with `every` or `layers`, or raise `queue_mb`.", "warning",
    ),
    EventKind(
        "notification_failed", "a notification was not sent: {why}",
        "Check the URL and the service.", "warning",
    ),
    EventKind(
        "notified", "notifications: {sent} sent, {failed} failed",
        "Nothing; look at `notification_failed` if the count of failures is not 0.",
    ),
    EventKind(
        "trace_written", "wrote the trace {path}",
        "Open it in Perfetto or `chrome://tracing`.",
    ),
)  # fmt: skip

EVENTS = {kind.kind: kind for kind in _KINDS}


def describe_event(event: Mapping[str, Any]) -> str:
    """Describe an event in one sentence, after the hook that it concerns or comes from."""
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
