"""`ForeignRun`: the run of a loop that Hookline does not own. Its host reports what happens; it fires the events.

A micro-batch and a step end late: with the next batch, forward pass, backward pass or step, or when the host says so.
Only then has the loop stepped its scheduler, updated its loss scale and logged what belongs to the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hookline._console import logger
from hookline._names import plain_buffers, unwrap_module
from hookline._tensors import is_sharded, tensor_version
from hookline.activations.hooked_modules import TorchHook
from hookline.core.catalog import CATALOG
from hookline.core.entry import Entry
from hookline.errors import RegistrationError
from hookline.hosts.checkpoints import ForeignCheckpoints
from hookline.hosts.truth import ATTACH, Host
from hookline.ranks import Ranks
from hookline.run.control import ModelCall
from hookline.run.engine import Engine
from hookline.run.epoch_stats import EpochStats
from hookline.run.manager import HookManager
from hookline.run.rng import rng_state
from hookline.run.step_log import LOSS, LR
from hookline.run.window import MicroBatch, Window
from hookline.trainer.counting import count_tokens

StepFn = Callable[[torch.nn.Module, Any], Tensor]
OF_GRADIENTS = {"grads", "grad_norm", "ctx"}
"""Arguments that are computed from the gradients."""
OVERFLOW = "the GradScaler skipped the step: non-finite gradients"
LOST = "the loop cleared the gradients without a step"


class ForeignWindow(Window):
    """The backward passes between two steps. A loop that accumulates divides its losses: a step's loss is their sum."""

    def __init__(self, run: ForeignRun) -> None:
        super().__init__(run.engine)
        self._run = run

    def begin(self, batch: Any) -> bool:
        """Count a micro-batch; return whether it begins a step."""
        self.count += 1
        return self.count == 1

    def add_to_means(self, stats: EpochStats, name: str, value: Tensor | float) -> None:
        """Do nothing: the mean of an epoch is one over steps."""

    def combine(self, parts: Sequence[MicroBatch]) -> Tensor:
        """Return the sum of the losses, or their mean."""
        if len(parts) == 1:
            return parts[0].loss
        losses = torch.stack([part.loss for part in parts])
        return losses.sum() if self._run.losses_add_up else losses.mean()


class CallRecorder(TorchHook):
    """The torch hook on a model whose calls a run records; a loop may copy and pickle the model in the meantime.

    Args:
        record: Called with the arguments of a call.
    """

    def __init__(self, record: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._record = record

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that begins."""
        self._record(args, kwargs)


class ForeignEngine(Engine):
    """Stands for work that a foreign loop does itself; only calls by hooks come here."""

    def place(self, batch: Any) -> Any:
        """Return the batch, which the loop has placed."""
        return batch

    def eval_model(self, model: Any) -> Any:
        """Return the model inside of its wrappers, which may wait for other ranks."""
        return unwrap_module(model)


class ForeignRun(ForeignCheckpoints):
    """A run of a foreign loop. Its optimizers report their steps through torch's optimizer hooks.

    Args:
        model: The model.
        optimizers: The optimizers: a list steps together, a dict separately, each with its own gradients.
        hooks: The hooks.
        host: The kind of loop: the meaning of its events, and its capabilities.
        scaler: The loop's GradScaler.
        ranks: The process of the run, which acts alone: losses are those of this process.
        step_fn: ``(model, batch) -> loss``, to run a batch again.
        output_dir: The directory that gets the run's directory; None keeps the record in memory.
        may_change: Whether hooks may change training; otherwise such hooks are rejected.
        prints: Whether this process prints the closing line.
    """

    can_validate = True
    find_nan_by = "add the hook 'nan_forensics'"
    losses_add_up = True
    """Whether the losses that the host reports add up to the loss of a step; otherwise their mean is the loss."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
        hooks: HookManager | Iterable[Any] | None = None,
        *,
        host: Host = ATTACH,
        scaler: Any = None,
        ranks: Ranks | None = None,
        step_fn: StepFn | None = None,
        output_dir: str | Path | None = None,
        may_change: bool = True,
        prints: bool = True,
    ) -> None:
        self.host, self._may_change, self._prints = host, may_change, prints
        self._is_sharded = any(map(is_sharded, model.parameters()))  # this process has only a part of the weights
        self.can_save, self.can_rerun = not self._is_sharded and output_dir is not None, not self._is_sharded
        self._step_fn, self._has_peers = step_fn, ranks is not None and ranks.world_size > 1
        self.calls: list[tuple[ModelCall, dict[str, Any]]] = []
        self._recording: RemovableHandle | None = None  # the hook on the model that records its calls
        self._savers: list[Entry] = []  # the hooks that may save at the end of a step
        for capability in host.cannot:
            setattr(self, capability, False)
        self.can_skip_steps = self.can_skip_steps and may_change
        self.resume_from: Mapping[str, Any] | None = None  # what `begin` restores, of `state_sections`
        self._steps_together = not isinstance(optimizers, Mapping)
        self._reads_batches = False  # whether the host says where batches begin
        self._hidden: list[tuple[torch.nn.Parameter, Tensor]] = []  # gradients that the optimizer must not see
        self._repeats = False  # whether an optimizer calls its closure once more
        self.optimizer_steps = 0  # calls of `step()` that were reported
        self._steps_after_stop = 0
        self._has_checked = self._had_loss = False
        listed = list(optimizers.values() if isinstance(optimizers, Mapping) else optimizers)
        is_fused = any(group.get("fused") for optimizer in listed for group in optimizer.param_groups)
        self.has_unscaled_gradients = scaler is None or not is_fused
        engine = ForeignEngine(next((param.device for param in model.parameters()), torch.device("cpu")))
        engine.scaler = scaler
        super().__init__(model, listed, hooks, engine=engine, ranks=ranks, output_dir=output_dir)

    def reset_steps(self) -> None:
        """Begin with no step in progress."""
        super().reset_steps()
        self._batch_is_open = False
        self._is_over = False  # whether the next call begins another micro-batch or step
        self._stepping: list[torch.optim.Optimizer] = []  # optimizers of the step in progress
        self._made: list[torch.optim.Optimizer] = []  # The optimizers that have stepped or were skipped.
        # A parameter that the first backward pass of the step has reached, and its version then.
        self._reached: tuple[torch.nn.Parameter | None, int] = None, 0
        self.calls.clear()

    def connect_hooks(self) -> None:
        """Let forward hooks begin a micro-batch with the first forward pass of it."""
        super().connect_hooks()
        self.hooks.dispatcher.begin_batch = self.forward_begins

    def check_needs(self, entry: Entry) -> None:
        """Refuse a hook that needs more than this loop can do, is never due, or would see scaled gradients."""
        super().check_needs(entry)
        if entry.intervenes and not self._may_change:
            problem = f"hook {entry.name!r} changes training, which is not allowed here"
            raise RegistrationError(f"{problem}; leave it out, or pass --allow-changes")
        counts = {mark.unit for mark in entry.schedule.marks} & {"epochs", "tokens"}
        if entry.schedule.loaders or (counts and not self.knows_batches):
            remedy = "count steps" if entry.schedule.loaders else f"count steps, or {self.remedy(['knows_batches'])}"
            raise RegistrationError(
                f"{entry.name!r} runs {entry.schedule}, which {self.title} does not count; {remedy}"
            )
        reads = any(not OF_GRADIENTS.isdisjoint(listener.wanted) for listener in entry.listeners.values())
        if not self.has_unscaled_gradients and (reads or "on_update" in entry.listeners):
            problem = "reads gradients, which are scaled when a fused optimizer under a GradScaler steps"
            raise RegistrationError(f"{entry.name!r} {problem}; {self.host.lacks['has_unscaled_gradients']}")
        reads = reads or any(CATALOG[event].needs == "has_unscaled_gradients" for event in entry.listeners)
        own_count = self._has_peers and not all(mark.whole for mark in entry.schedule.marks)
        if own_count and (entry.intervenes or (reads and self._is_sharded)):
            problem = f"{entry.name!r} runs {entry.schedule}, which each process counts for itself"
            raise RegistrationError(f"{problem}, but it has to run on all of them at once; count steps")

    def begin(self) -> None:
        """Set up the hooks, and fire on_train_start."""
        super().begin()
        self.until_end.callback(self._record_calls, False)
        self.until_end.callback(self.hooks.on_change(self._prepare_for_hooks))
        self._prepare_for_hooks()

    def _prepare_for_hooks(self) -> None:
        """Find out which values the hooks want recorded."""
        entries = self.hooks.entries()
        self._savers = [entry for entry in entries if "can_save" in entry.needs and "on_step_end" in entry.listeners]
        self._record_calls(any("can_rerun" in entry.needs for entry in entries))

    def _record_calls(self, wanted: bool) -> None:
        """Have a hook on the model only while another hook may want to run its calls again."""
        if wanted and self._recording is None:
            self._recording = self.model.register_forward_pre_hook(CallRecorder(self._note_call), with_kwargs=True)
        elif not wanted and self._recording is not None:
            self._recording.remove()
            self._recording = None

    def _note_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of the model in training."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # Inside a graph this would break it.
            return
        if not (self.reruns_batches or self.event_args.is_other_batch):
            self.forward_begins()
            self.calls.append((ModelCall.of(args, kwargs, self.device), self.random_state()))

    @property
    def reruns_batches(self) -> bool:  # type: ignore[override]
        """Whether a batch can be run again, by the user's `step_fn`."""
        return self._step_fn is not None and self._reads_batches

    def remedy(self, lacking: Sequence[str]) -> str:
        """Say what would let a hook work that needs more than this loop can do."""
        remedies = dict.fromkeys(self.host.lacks[name] for name in lacking if name in self.host.lacks)
        return "; ".join(remedies) or super().remedy(lacking)

    @property
    def title(self) -> str:
        """The name of this run in messages."""
        return self.host.title

    # ---- what the host reports ---------------------------------------------------------------------------------------

    def next_batch(self, batch: Any) -> None:
        """Begin the micro-batch of a batch that the loop has read."""
        self._reads_batches = True
        self.settle()
        self._open_batch(batch)

    def forward_begins(self) -> bool:
        """Begin a micro-batch if this is its first forward pass; return whether it is."""
        args, has_grad = self.event_args, torch.is_grad_enabled()
        if args.is_other_batch or self._repeats:
            return False
        # Without grad in eval mode the loop validates, whether it says so or not.
        args.phase = "train" if has_grad or self.model.training else "validation"
        if not has_grad or (self._batch_is_open and not self._is_over):
            return False
        with self.hooks.lock:  # several threads may run the model
            return self._enter()

    def backward_begins(self, loss: Tensor) -> None:
        """Take the loss of a backward pass that begins, and fire on_before_backward."""
        if self._repeats:
            return
        self.forget_lost_step()
        self._had_loss = True
        args = self.event_args
        args.set_loss(loss)
        if handler := self.hooks.slots.on_before_backward:
            handler(args)

    def forget_lost_step(self) -> None:
        """As a backward pass begins, restart the step if the loop has skipped one and has cleared its gradients.

        A loop that has written weights in between makes one step of two backward passes, as sharpness-aware
        minimization (SAM) does.
        """
        if self._repeats:
            return
        self._enter()
        param, version = self._reached
        if self.forget_losses() and (param is None or tensor_version(param) == version):
            self.run_status.skipped_steps += 1
            self.record.event("step_skipped", self.progress.step, reason=LOST, optimizer_idx=0)

    def forget_losses(self) -> bool:
        """Forget the losses since the last step if they left no gradient; return whether there were any.

        A different model's losses leave none.
        """
        if not self.event_args.micro_batches or any(param.grad is not None for param in self.params.values()):
            return False
        self.event_args.micro_batches, self.accumulation.count = [], 1
        return True

    def backward_ends(self) -> None:
        """Add the loss to that of the step, and fire on_after_backward."""
        if self._repeats:
            return
        if handler := self.hooks.slots.on_after_backward:
            handler(self.event_args)
        self._count_loss()
        self._is_over = not self._reads_batches

    def _count_loss(self) -> None:
        """Add the loss of the micro-batch to that of the step."""
        args, progress = self.event_args, self.progress
        assert args.detached_loss is not None
        loss = args.detached_loss.reshape(())
        if not args.micro_batches:
            param = next((param for param in self.params.values() if param.grad is not None), None)
            self._reached = param, 0 if param is None else tensor_version(param)
        args.micro_batches.append(MicroBatch(loss, 1.0, progress.batch_idx, progress.dataloader_name, {}))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the update chain before the first optimizer of a step, and fire on_before_optimizer_step.

        If the step is skipped, the optimizer finds no gradients, which leaves weights and state as they are.
        """
        if self.has_unscaled_gradients and getattr(optimizer, "grad_scale", None) is not None:
            self.has_unscaled_gradients = False  # A GradScaler that was not passed leaves unscaling to the optimizer.
            for entry in self.hooks.entries():
                self.check_needs(entry)
        if not self._batch_is_open or (self._stepping and (optimizer in self._made or not self._steps_together)):
            self._is_over = True
            self._enter()
        args, window = self.event_args, self.accumulation
        if not self._stepping:
            self._stepping = self.optimizers if self._steps_together else [optimizer]
            window.is_complete = True
            if len(self._stepping) == len(self.optimizers):
                self._begin_step(optimizer)
            else:
                with self._only(self._stepping):
                    self._begin_step(optimizer)
        elif args.skip_reason is None:
            self.before_optimizer_step(optimizer)
        if args.skip_reason is not None:
            self._hide(param for group in optimizer.param_groups for param in group["params"])

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.gradients_ready():  # A skipped step has fired the events of its optimizers.
            self.before_optimizer_step(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step of an optimizer, and fire on_after_optimizer_step."""
        self.optimizer_steps += 1
        self._show()
        if optimizer in self._stepping:
            self._made.append(optimizer)
            if optimizer not in self._skipped:
                self.after_optimizer_step(optimizer)
            if len(self._made) == len(self._stepping):
                self._note_lr()
                self.step_log.add(LR, self.event_args.used_lr)
                self._is_over = True
                if self._savers and not self._reads_batches and self._saves_at_step():
                    # The step ends late, when the loop has drawn data and perhaps run the model again.
                    buffers = {name: buffer.clone() for name, buffer in plain_buffers(self.model).items()}
                    self.after_step_state = {"rng": rng_state(), "buffers": buffers}

    def _saves_at_step(self) -> bool:
        """Return whether a hook that saves is due at the end of this step."""
        due = self.hooks.scheduler.decision.due_at_step
        return any(entry.enabled and (entry.schedule.always or entry.name in due) for entry in self._savers)

    def around_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after which the gradients are those of the step: it computes them, once or many times.

        The step begins after the first call. The loss of the step also comes from the first call.
        """
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            calls += 1
            self._repeats = calls > 1
            try:
                loss = closure()
            except BaseException as error:  # the traceback comes from the loop's own closure
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                raise
            finally:
                self._repeats = False
            if calls == 1:
                self.before_step(optimizer)
                return loss
            with self._only(self._stepping):
                if self.event_args.skip_reason is None and (handler := self.hooks.slots.on_update):
                    handler(self.event_args)
            if self.event_args.skip_reason is not None:
                self._hide(param for group in optimizer.param_groups for param in group["params"])
            return loss

        return evaluate

    def step_overflowed(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that the loop's GradScaler has skipped."""
        if not self._batch_is_open or optimizer in self._made:
            self._is_over = True
            self._enter()
        self.event_args.overflowed, self.event_args.skip_reason = True, OVERFLOW
        self.before_step(optimizer)
        self.after_step(optimizer)

    def add_optimizer(self, optimizer: torch.optim.Optimizer, joint: bool) -> bool:
        """Add an optimizer that steps for the first time, or put it in the place of one with the same parameters.

        Return False if it is the inner optimizer of that one, which wraps it.

        Args:
            optimizer: The optimizer.
            joint: Whether it steps together with the others, in the step that they started.
        """
        owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for index, other in enumerate(self.optimizers):
            if any(id(param) in owned for group in other.param_groups for param in group["params"]):
                if other in self._stepping and other not in self._made:
                    return False
                self.optimizers[index] = optimizer
                break
        else:
            self._steps_together = joint
            self.optimizers.append(optimizer)
            if joint and self._stepping:
                self._stepping, self._is_over = self.optimizers, False
        self.find_new_parameters()
        self.record.run.update(self.describe_training())
        return True

    def settle_step(self) -> bool:
        """End the step if all of its optimizers have stepped; return whether the loop is between two steps."""
        if self._stepping and len(self._made) == len(self._stepping):
            self.settle()
        return not (self._batch_is_open or self.in_window)

    def settle(self) -> None:
        """End the step and the micro-batch in progress: later calls belong to the next ones."""
        if not self._batch_is_open:
            return
        self._batch_is_open = self._is_over = False
        made_step = bool(self._stepping)
        if made_step:
            self._end_optimizers()
        self.accumulation.is_complete = made_step
        self.end_batch()
        self._stepping, self._made = [], []
        if made_step:
            if not self._has_checked:
                self._check_first_step()
            if self.run_status.stops:
                self._check_stop()
            self.calls.clear()
        self.at_boundary()
        self.after_step_state = None

    def take_loss(self, loss: Tensor) -> None:
        """Take the loss of the micro-batch from a host that reports only its value, not a backward pass."""
        self.event_args.set_loss(loss)
        self._count_loss()

    # ---- micro-batches and steps -------------------------------------------------------------------------------------

    def _enter(self) -> bool:
        """Begin the micro-batch, or the further step of a batch, that this call belongs to, unless it has begun."""
        if self._batch_is_open and not self._is_over:
            return False
        if self._batch_is_open and self._reads_batches:
            self._begin_further_step()
        else:
            self.settle()
            self._open_batch(None)
        return True

    def _open_batch(self, batch: Any) -> None:
        self.knows_batches = self.knows_windows = self._reads_batches
        self.event_args.forget_loss()
        self._batch_is_open, self._is_over = True, False
        self.begin_batch(batch)

    def _begin_further_step(self) -> None:
        """End a step and begin another one in the same batch, as two optimizers that step separately do."""
        self._end_optimizers()
        self.end_step()
        self.at_boundary()
        self._stepping, self._made, self._is_over = [], [], False
        self.calls.clear()
        self.event_args.forget_step()
        self.event_args.forget_loss()
        self.event_args.used_lr = None
        self.progress.step += 1
        self.accumulation.count = 1
        self.hooks.begin_batch(self.progress)

    def _end_optimizers(self) -> None:
        """Count a skipped step, and make the sum of the losses passed to backward the loss of the step."""
        self.end_optimizers()
        args = self.event_args
        if args.micro_batches:
            loss = args.window_tensor()
            args.last_loss = [loss]
            self.stats.add(LOSS, loss)

    def _check_first_step(self) -> None:
        """Refuse hooks that would never see anything, once the first step has shown what the loop reports.

        Raises:
            RegistrationError: It names the hook, and what to change in the loop.
        """
        self._has_checked, self.knows_loss = True, self._had_loss
        self.can_rerun = self.can_rerun and (self.reruns_batches or self._recording is None or bool(self.calls))
        for entry in self.hooks.entries():
            self.check_needs(entry)

    def _check_stop(self) -> None:
        """Warn once if the loop continues to train although a hook has asked it to stop."""
        self._steps_after_stop += 1
        if self._steps_after_stop == 2:
            stop = self.run_status.stops[0]
            logger.warning(
                "%s asked to stop (%s), but the loop continues training: %s", stop.by, stop.reason, self.host.stop
            )

    def stepping_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers of this step."""
        return self._stepping

    def make_window(self) -> Window:
        """Return a window that ends where the optimizer steps."""
        return ForeignWindow(self)

    @contextmanager
    def _only(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Hide the gradients of other optimizers in the block: they belong to other losses, or are stale."""
        if len(optimizers) == len(self.optimizers):
            yield
            return
        owned = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
        self._hide(param for param in self.params.values() if id(param) not in owned)
        try:
            yield
        finally:
            self._show()

    def _hide(self, params: Iterable[torch.nn.Parameter]) -> None:
        for param in params:
            if param.grad is not None:
                self._hidden.append((param, param.grad))
                param.grad = None

    def _show(self) -> None:
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden.clear()

    def epoch_metrics(self) -> dict[str, float]:
        """Return the means of the current epoch so far, without a loss if the loop has reported none."""
        means = super().epoch_metrics()
        if not self.stats.has_losses:
            del means["train/epoch_loss"]
        return means

    # ---- what a foreign loop does itself -----------------------------------------------------------------------------

    def prepare(self) -> Mapping[str, float] | None:
        """Restore the state of this run from the host's checkpoint."""
        if self.resume_from is not None:
            self.load_sections(self.resume_from)
        return super().prepare()

    def count_tokens(self, batch: Any) -> int:
        """Return the number of tokens in a batch."""
        return 0 if batch is None else count_tokens(batch)

    @contextmanager
    def other_batches(self, phase: str) -> Iterator[None]:
        """Run other batches: in a validation the loop itself chooses the model's mode and draws its random numbers."""
        if phase != "validation":
            with super().other_batches(phase):
                yield
            return
        with self.event_args.preserve_train_batch(phase):
            yield

    def begin_epoch(self, number: int | None = None) -> None:
        """Begin an epoch: the next one, or the one of that number if the host counts them itself.

        An epoch that a resumed run enters half-way continues, without on_epoch_start.
        """
        progress = self.progress
        if number == progress.epoch and progress.batch_idx >= 0 and not progress.epoch_over:
            return
        if number is not None and number != progress.epoch + progress.epoch_over:
            progress.epoch, progress.epoch_over = number, False
        super().begin_epoch()

    def compute_again(self, model: torch.nn.Module) -> Callable[[Any], Tensor]:
        """Return the function that computes the loss of a batch."""
        return super().compute_again(model) if self._step_fn is None else partial(self._step_fn, model)

    @property
    def prints(self) -> bool:
        """Whether this process prints the closing line."""
        return self._prints and self.ranks.rank == 0

    def finish(self) -> None:
        """End the last step, and make the saves that hooks ask for."""
        self.settle()
        super().finish()
        self.save_requested()

    def work_at_boundary(self) -> None:
        """Write the record and the checkpoints that are due."""
        super().work_at_boundary()
        self.save_requested()
