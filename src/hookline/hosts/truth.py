"""The guarantees that hooks have in each kind of loop: what its events mean, what it cannot do and why.

Refusals, `hookline events --host` and docs/reference/hosts.md are generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hookline._words import nearest
from hookline.core.catalog import Event
from hookline.errors import HooklineError

AS_EVERYWHERE = "as in Hookline's trainer"


@dataclass(frozen=True)
class Host:
    """One kind of loop."""

    name: str
    title: str
    """In messages: "hook 'x' needs …, and <title> cannot"."""
    lacks: dict[str, str] = field(default_factory=dict)
    """The `CAPABILITIES` that a run in it lacks, each with its remedy."""
    events: dict[str, str] = field(default_factory=dict)
    """How an event differs there."""
    stop: str = ""
    """How the loop handles a request to stop."""
    clipping: str = ""
    """The remedy if it clips gradients before hooks get them."""
    cannot: frozenset[str] = frozenset({"knows_validation_batches"})
    """The `CAPABILITIES` that a run in it never has."""

    def meaning(self, event: Event) -> str:
        """Return what an event means there."""
        if event.needs in self.cannot:
            return f"never: {self.lacks[event.needs]}"
        return self.events.get(event.name, AS_EVERYWHERE)


BATCHES = "read the batches with `for batch in hl.batches(loader)`"
LOSS = "call `hl.backward(loss)` instead of `loss.backward()`"
VALIDATION_BATCHES = "validation batches stay in your loop: omit the hook, and compute its table there"
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
        "has_unscaled_gradients": "create the optimizer with fused=False; under a GradScaler, a fused one unscales "
        "the gradients itself",
    },
    events={
        "on_train_start": "at the beginning of the `with` block",
        "on_epoch_start": f"{BATCHES}, once per pass over the loader",
        "on_train_batch_start": BATCHES,
        "on_before_backward": f"{LOSS}; the loss is not scaled",
        "on_after_backward": LOSS,
        "on_gradients_ready": "as `optimizer.step()` begins, after your own clipping, if any",
        "on_step_skipped": "for steps that a GradScaler skips, call `hl.optimizer_step(optimizer)`",
        "on_train_batch_end": f"{BATCHES}; late, with the next batch, a validation or the end of the block",
        "on_step_end": "late, with the next batch, forward or backward pass, validation, `hl.should_stop` or the end "
        "of the block: what you log and schedule after `optimizer.step()` belongs to its step",
        "on_validation_start": "at the beginning of a `with hl.validation():` block",
        "on_validation_end": "at its end, with the metrics you passed to `hl.log` inside",
        "on_epoch_end": f"{BATCHES}; late, with the next epoch or the end of the block, after validations",
        "on_checkpoint_load": "as `hl.load` or `hl.load_state_dict` is called, after on_train_start",
        "on_train_end": "at the end of the `with` block",
    },
    stop="read the batches with `hl.batches(loader)`, or leave the loop when `hl.should_stop` is true",
)

RERUN_THERE = "pass `step_fn=`, a function `(model, batch) -> loss`"
CALLED_THERE = f"let the loop call the model itself, neither compiled nor sharded; or {RERUN_THERE}"
THERE = {
    "can_rerun": CALLED_THERE,
    "knows_validation_batches": "validation batches stay in the host's loop: leave the hook out",
    "can_save": ATTACH.lacks["can_save"],
    "has_unscaled_gradients": ATTACH.lacks["has_unscaled_gradients"],
}
"""What runs lack in every other trainer."""
AT_STEP = "as the optimizer's step begins, after unscaling and any clipping by the host"
FINAL = "as the optimizer's step begins, after the host's clipping and the update chain: what the optimizer uses"

LIGHTNING = Host(
    "lightning",
    "Lightning",
    lacks=THERE
    | {
        "can_rerun": RERUN_THERE,
        "can_validate": "give the module a `validation_step` and `fit` validation batches",
        "knows_loss": "let `training_step` return the loss",
    },
    events={
        "on_train_start": "at Lightning's on_train_start: weights are restored, the sanity check is over",
        "on_before_backward": "the loss of the micro-batch; Lightning's own is divided for accumulation and scaled",
        "on_gradients_ready": AT_STEP,
        "on_before_optimizer_step": f"{FINAL}; Lightning's own comes before clipping",
        "on_step_skipped": "also for steps that Lightning's GradScaler skips",
        "on_train_batch_end": "at Lightning's on_train_batch_end: schedulers have stepped",
        "on_step_end": "at Lightning's on_train_batch_end: schedulers have stepped",
        "on_validation_end": "with the metrics that the module logged; `val_loss` becomes `val/loss`",
        "on_epoch_end": "at Lightning's on_train_epoch_end, after the validation",
        "on_checkpoint_save": "for checkpoints that hooks asked for; Lightning saves its own next to it, `<name>.ckpt`",
        "on_checkpoint_load": "as `fit(ckpt_path=…)` begins, before on_train_start",
        "on_exception": "for every exception that leaves `fit`, and for Ctrl-C",
    },
    stop="sets `trainer.should_stop`; Lightning continues until `min_epochs` and `min_steps`",
    clipping="to see them before, leave `gradient_clip_val` out and use the hook `clip_norm`",
)

TRANSFORMERS = Host(
    "transformers",
    "the Trainer of transformers",
    lacks=THERE
    | {"can_validate": "set `eval_strategy`"}
    | dict.fromkeys(("knows_loss", "knows_batches", "knows_windows"), "let `training_step` call `compute_loss`"),
    events={
        "on_train_start": "at on_train_begin: weights are restored",
        "on_train_batch_start": "before `compute_loss`",
        "on_before_backward": "the result of `compute_loss`. With `num_items_in_batch` it is a share: "
        "the losses of a window add up to the step's loss",
        "on_after_backward": "after `training_step`",
        "on_gradients_ready": f"{AT_STEP}; `max_grad_norm` is 1.0 by default",
        "on_before_optimizer_step": FINAL,
        "on_step_skipped": "also for steps that the GradScaler skips",
        "on_train_batch_end": "late, with the next batch or on_step_end",
        "on_step_end": "at on_step_end: the scheduler has stepped, gradients are cleared",
        "on_validation_start": "at on_step_end or on_epoch_end, if the Trainer evaluates next",
        "on_validation_end": "at on_evaluate: `eval_loss` is `val/loss`",
        "on_epoch_end": "after the evaluation of the epoch, which the Trainer's own on_epoch_end precedes",
        "on_checkpoint_save": "for checkpoints that hooks asked for; the Trainer then saves its own, too",
        "on_checkpoint_load": "as `train(resume_from_checkpoint=…)` begins, before on_train_start",
        "on_exception": "for every exception that leaves `train`",
    },
    stop="sets `control.should_training_stop`",
    clipping="to see them before, set `max_grad_norm=0` and use the hook `clip_norm`",
)

IGNITE = Host(
    "ignite",
    "Ignite",
    lacks=THERE
    | {
        "can_validate": "pass `evaluator=`, the engine that validates",
        "knows_loss": "call `hl.backward(loss)` in the function of your engine",
    },
    events={
        "on_train_start": "at STARTED",
        "on_epoch_start": "at EPOCH_STARTED",
        "on_train_batch_start": "at ITERATION_STARTED",
        "on_before_backward": "if your function calls `hl.backward(loss)`; the loss is not scaled",
        "on_after_backward": "if your function calls `hl.backward(loss)`",
        "on_gradients_ready": ATTACH.events["on_gradients_ready"],
        "on_before_optimizer_step": FINAL,
        "on_step_skipped": ATTACH.events["on_step_skipped"],
        "on_train_batch_end": "at ITERATION_COMPLETED",
        "on_step_end": "at ITERATION_COMPLETED; the loss is what your function returned, alone or as `loss`",
        "on_validation_start": "at STARTED of the evaluator",
        "on_validation_end": "at its COMPLETED: the metric `loss` is `val/loss`",
        "on_epoch_end": "late, at EPOCH_STARTED of the next epoch or at COMPLETED, after validations",
        "on_checkpoint_load": "at STARTED, if `load_state_dict` was called",
        "on_exception": "for every exception that leaves `engine.run`",
        "on_train_end": "at COMPLETED or TERMINATE",
    },
    stop="calls `engine.terminate()`",
)

UNEDITED = "call `hookline.attach` in your script"
RUN = Host(
    "run",
    "hookline run",
    cannot=frozenset({"can_stop", "can_validate", "knows_batches", "knows_windows", "knows_validation_batches"}),
    lacks=dict.fromkeys(("can_rerun", "can_stop", "can_validate", "knows_batches", "knows_windows"), UNEDITED)
    | {
        "can_skip_steps": "pass --allow-changes",
        "knows_validation_batches": VALIDATION_BATCHES,
        "knows_loss": "compute the gradients with `loss.backward()`",
        "has_unscaled_gradients": ATTACH.lacks["has_unscaled_gradients"],
    },
    events={
        "on_train_start": "as the first optimizer makes its first step",
        "on_before_backward": "the loss is not scaled; those of the first step come as `optimizer.step()` begins",
        "on_after_backward": "those of the first step come as `optimizer.step()` begins",
        "on_gradients_ready": ATTACH.events["on_gradients_ready"],
        "on_step_skipped": "never; a step that a GradScaler or the script leaves out is recorded with the next "
        "backward pass, if the gradients are None by then",
        "on_step_end": "late, with the next forward or backward pass, or the end of the process",
        "on_checkpoint_load": f"never: {UNEDITED}",
        "on_train_end": "as the process ends",
    },
    stop="call `hookline.attach` in the script, and leave its loop when `hl.should_stop` is true",
)

HOSTS = {host.name: host for host in (ATTACH, LIGHTNING, TRANSFORMERS, IGNITE, RUN)}


def find_host(name: str) -> Host:
    """Return the host of a name.

    Raises:
        HooklineError: If there is none; the message suggests the nearest name.
    """
    if name not in HOSTS:
        raise HooklineError(f"there is no host {name!r}; {nearest(name, HOSTS)}")
    return HOSTS[name]
