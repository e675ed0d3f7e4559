"""What hooks can rely on in each kind of loop: what its events mean there, what it cannot do and why.

Refusals, `hookline events --host` and docs/reference/hosts.md are made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Host:
    """One kind of loop."""

    name: str
    title: str
    """In messages: "hook 'x' needs …, and <title> cannot"."""
    lacks: dict[str, str] = field(default_factory=dict)
    """What a run in it cannot do, of the `CAPABILITIES`, with what would be right."""
    events: dict[str, str] = field(default_factory=dict)
    """What is different about an event there."""
    stop: str = ""
    """How the loop takes a request to stop."""
    cannot: frozenset[str] = frozenset()
    """Those of the `CAPABILITIES` that a run in it never has, beside those that `attach` finds out."""


BATCHES = "read the batches with `for batch in hl.batches(loader)`"
LOSS = "call `hl.backward(loss)` instead of `loss.backward()`"
VALIDATION_BATCHES = "the batches of a validation stay in your loop: leave the hook out, and compute its table there"
RERUN = (
    "call the model itself, outside of compiled functions and not sharded; or pass `step_fn=`, a function "
    "`(model, batch) -> loss`, and read the batches with `hl.batches(loader)`"
)

ATTACH = Host(
    "attach",
    "your own loop",
    lacks={
        "can_rerun": RERUN,
        "knows_validation_batches": VALIDATION_BATCHES,
        "knows_batches": BATCHES,
        "knows_windows": BATCHES,
        "knows_loss": LOSS,
        "can_save": "pass `output_dir=`; save weights that FSDP2 has sharded yourself, with `hl.state_dict()`",
        "has_unscaled_gradients": "make the optimizer with fused=False; under a GradScaler a fused one unscales itself",
    },
    events={
        "on_train_start": "at the beginning of the `with` block",
        "on_epoch_start": f"{BATCHES}, once per pass over the loader",
        "on_train_batch_start": BATCHES,
        "on_before_backward": f"{LOSS}; the loss is not scaled",
        "on_after_backward": LOSS,
        "on_gradients_ready": "as `optimizer.step()` begins: what you clipped before is clipped",
        "on_step_skipped": "for steps that a GradScaler skips, call `hl.optimizer_step(optimizer)`",
        "on_train_batch_end": f"{BATCHES}; late, with the next batch, a validation or the end of the block",
        "on_step_end": "late, with the next batch, forward or backward pass, validation, `hl.should_stop` or the end "
        "of the block: what you log and schedule after `optimizer.step()` belongs to its step",
        "on_validation_start": "at the beginning of a `with hl.validation():` block",
        "on_validation_end": "at its end, with what you passed to `hl.log` inside",
        "on_epoch_end": f"{BATCHES}; late, with the next epoch or the end of the block, after validations",
        "on_train_end": "at the end of the `with` block",
    },
    stop="read the batches with `hl.batches(loader)`, or leave the loop when `hl.should_stop` is true",
)

HOSTS = {host.name: host for host in (ATTACH,)}
