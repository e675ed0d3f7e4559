"""`attach`: hooks, record and report for your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hookline._console import logger
from hookline.checkpoints.find import find_checkpoint
from hookline.checkpoints.format import Section, decode
from hookline.core.base import Hook
from hookline.errors import HooklineError, error_text
from hookline.hosts.foreign import ForeignRun
from hookline.hosts.versions import check_version
from hookline.ranks import own_rank
from hookline.run.manager import HookManager
from hookline.run.rng import preserve_rng

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
_ATTACHED: WeakSet[torch.optim.Optimizer] = WeakSet()  # The optimizers of runs in progress.


def attach(
    model: torch.nn.Module,
    optimizer: Any,
    config: Any = None,
    *,
    hooks: Iterable[Any] | HookManager = (),
    scaler: Any = None,
    accelerator: Any = None,
    step_fn: Callable[[torch.nn.Module, Any], Tensor] | None = None,
    output_dir: str | Path | None = "runs",
    allow: Iterable[str] = (),
) -> Attached:
    """Attach hooks to your own training loop, for the duration of a `with` block.

    Forward hooks, update hooks, the record and the report work from there on. The methods of the returned object are
    optional; each of them enables more hooks.

    >>> with hookline.attach(model, optimizer, config="hooks.yaml") as hl:
    ...     for batch in hl.batches(loader):  # batch and epoch events, tokens, progress
    ...         loss = model(**batch).loss
    ...         hl.backward(loss)  # the loss
    ...         optimizer.step()
    ...         optimizer.zero_grad()

    Args:
        model: The model that is trained, wrapped (DDP, FSDP2, compiled) or not.
        optimizer: One optimizer; a list of optimizers, which step together; or a dict of optimizers that step
            separately, as in a GAN: each step then has its own gradients.
        config: A hooks config: the path of a YAML file, or a dict.
        hooks: More hooks, or a `HookManager`.
        scaler: The GradScaler of your loop, if it has one.
        accelerator: The `Accelerator` of your loop, if it has one.
        step_fn: ``(model, batch) -> loss``, which lets hooks such as `nan_forensics` run a batch again.
        output_dir: The directory that gets the run's directory; None keeps the record in memory.
        allow: Prefixes under which a config from a file may name dotted paths.

    Raises:
        HooklineError: If your loop lacks something that a hook needs, or the model is wrapped in FSDP1 or DeepSpeed.
    """
    return Attached(
        model, optimizer, config, hooks=hooks, scaler=scaler, accelerator=accelerator, step_fn=step_fn,
        output_dir=output_dir, allow=allow,
    )  # fmt: skip


class Attached:
    """Hooks in your own loop; `attach` creates it, and documents the arguments.

    Args:
        model: The model.
        optimizer: The optimizers.
        config: A hooks config.
        hooks: More hooks.
        scaler: The loop's GradScaler.
        accelerator: The loop's Accelerator.
        step_fn: Runs a batch again.
        output_dir: Where the run's directory goes.
        allow: Prefixes of dotted paths that a config may name.
        **of_run: The host, and the other arguments of `ForeignRun`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        config: Any = None,
        *,
        hooks: Iterable[Any] | HookManager = (),
        scaler: Any = None,
        accelerator: Any = None,
        step_fn: Callable[[torch.nn.Module, Any], Tensor] | None = None,
        output_dir: str | Path | None = "runs",
        allow: Iterable[str] = (),
        **of_run: Any,
    ) -> None:
        check_model(model)
        check_options(config, hooks, scaler, accelerator, step_fn, output_dir)
        if accelerator is not None:
            check_version("accelerate", (1, 15))
        self._accelerator = accelerator
        scaler = getattr(accelerator, "scaler", None) if scaler is None else scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        optimizers = inner_optimizers(optimizer)
        manager = hooks if isinstance(hooks, HookManager) else HookManager()
        self.run = ForeignRun(
            model, optimizers, manager, scaler=self._scaler, ranks=own_rank(), step_fn=step_fn, output_dir=output_dir,
            **of_run,
        )  # fmt: skip
        if config is not None:
            manager.load(config, allow=allow)
        for hook in () if hooks is manager else hooks:
            manager.register(hook)
        self._torch_hooks = ExitStack()
        self._epoch_is_open = False
        self._steps_of_others = 0  # Steps in a row of optimizers that were not attached.
        self._has_warned = False

    # ---- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(error)

    def begin(self) -> None:
        """Open the record, and put torch's step hooks on the optimizers."""
        run = self.run
        if run.running:
            raise HooklineError("hl.begin: this run is in progress; call hl.end() first")
        if any(optimizer in _ATTACHED for optimizer in run.optimizers):
            problem = "attach: another run is already attached to this optimizer and would count the same steps"
            raise HooklineError(f"{problem}; leave its `with` block first, or pass all hooks to one attach()")
        run.open()
        try:
            with preserve_rng():  # Preparations by hooks must not advance the random streams of your loop.
                run.begin()
            for optimizer in run.optimizers:
                self._listen_to(optimizer)
            self.notice_others()
        except BaseException as error:
            self.end(error)
            raise

    def notice_others(self) -> None:
        """Listen to the steps of optimizers that were not attached."""
        self._torch_hooks.callback(register_optimizer_step_pre_hook(self._watch_for_others).remove)

    def add_optimizer(self, optimizer: torch.optim.Optimizer, joint: bool) -> None:
        """Take an optimizer into the run, which steps together with the others if `joint`."""
        if self.run.add_optimizer(optimizer, joint):
            self._listen_to(optimizer)

    def _listen_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Put torch's step hooks on an optimizer."""
        _ATTACHED.add(optimizer)
        self._torch_hooks.callback(_ATTACHED.discard, optimizer)
        for handle in (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ):
            self._torch_hooks.callback(handle.remove)

    def end(self, error: BaseException | None = None, signal: str | None = None) -> None:
        """End the run, with the exception or the signal that ends your loop; nothing is left on model and optimizers.

        Args:
            error: The exception.
            signal: The name of the signal.
        """
        run = self.run
        if not run.running:
            return
        self._torch_hooks.close()
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None  # A script may end this way inside the block.
        if error is None and signal is None:
            try:
                self.end_epoch()
                run.finish()
            except BaseException as failure:
                run.end(failure)
                raise
        else:
            try:
                run.settle_step()  # The last step is complete; whatever ends the run came after it.
            except Exception as failure:  # It does not replace the exception that ends the run.
                logger.warning("while the run was ending: %s", error_text(failure))
        run.end(error, signal)

    def _in_block(self, call: str) -> ForeignRun:
        """Return the run, for a method that needs it in progress."""
        if not self.run.running:
            when = "has ended" if self.run.run_ended else "has not begun"
            raise HooklineError(f"hl.{call}: the run {when}; call it inside of `with hookline.attach(…) as hl:`")
        return self.run

    # ---- what the loop may call --------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader: one epoch, with its events. It ends early when a hook asks to stop.

        Inside `validation` it only yields them.
        """
        run = self._in_block("batches")
        if not isinstance(loader, Iterable):
            raise HooklineError(f"hl.batches: expected an iterable of batches, got {type(loader).__name__}")
        if run.validations_in_progress:
            yield from loader
            return
        self.end_epoch()
        if run.should_stop:
            return
        self.begin_epoch()
        for batch in loader:
            self._in_block("batches").next_batch(batch)
            yield batch
            if self.should_stop:
                break
        else:
            run.progress.epoch_over = True  # Resuming from here starts with the next epoch.
        run.settle()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of a loss, scaled if you passed a scaler; hooks and record get the loss itself.

        Args:
            loss: The loss, a tensor with one element.
            **options: The options of `Tensor.backward`.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise HooklineError(f"hl.backward: expected a loss with one element, got {what}; reduce it, as by mean()")
        run, accelerator = self._in_block("backward"), self._accelerator
        steps = 1 if accelerator is None else accelerator.gradient_accumulation_steps
        run.backward_begins(loss if steps == 1 else loss / steps)
        if accelerator is not None:
            accelerator.backward(loss, **options)
        else:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward(**options)
        run.backward_ends()

    def optimizer_step(self, optimizer: Any = None) -> None:
        """Step an optimizer through your scaler, so steps that the scaler skips are recorded.

        Call `scaler.update()` yourself, as usual.

        Args:
            optimizer: The optimizer; may be left out if there is only one.
        """
        run = self._in_block("optimizer_step")
        if optimizer is None and len(run.optimizers) > 1:
            raise HooklineError(f"hl.optimizer_step: pass one of the run's {len(run.optimizers)} optimizers")
        inner = run.optimizers[0] if optimizer is None else inner_optimizer(optimizer)
        if all(inner is not known for known in run.optimizers):
            raise HooklineError(f"hl.optimizer_step: this {type(inner).__name__} was not passed to attach()")
        made = run.optimizer_steps
        if self._accelerator is not None and optimizer is not None:
            optimizer.step()
        elif self._scaler is not None:
            self._scaler.step(inner)
        else:
            inner.step()
        if run.optimizer_steps == made and self._scaler is not None:
            run.step_overflowed(inner)

    def log(self, name: str, value: Any) -> None:
        """Record a number under a name; inside `validation` it is a result that early stopping and checkpoints read."""
        run = self._in_block("log")
        if isinstance(value, Tensor) and value.numel() != 1:
            problem = f"expected one number, got a tensor of shape {tuple(value.shape)}"
            raise HooklineError(f"hl.log({name!r}): {problem}; reduce it, as by mean()")
        if self._measured is not None:
            self._measured[name] = value
        else:
            run.log(name, value)

    _measured: dict[str, Any] | None = None

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Fire the events around a validation, whose results you pass to `log` inside the block.

        >>> with hl.validation():
        ...     hl.log("val/loss", evaluate(model))
        """
        run = self._in_block("validation")
        if self._measured is not None:
            raise HooklineError(
                "hl.validation: a validation is already in progress; use one `with` block around all of it"
            )
        run.settle()
        with run.validation() as metrics:
            self._measured = metrics
            try:
                yield
            finally:
                self._measured = None
        run.at_boundary()

    @property
    def should_stop(self) -> bool:
        """Whether a hook has asked to stop; the step in progress ends here."""
        if self.run.running:
            self.run.settle_step()
        return self.run.should_stop

    def save(self, name: str | None = None) -> None:
        """Write a checkpoint of the last step: weights, optimizers, random streams and Hookline's own state.

        Between a backward pass and `step()`, it is written after the step.
        """
        run = self._in_block("save")
        if not run.can_save:
            raise HooklineError(f"hl.save: this run cannot save checkpoints; {run.host.lacks['can_save']}")
        run.save(name)
        if run.settle_step():
            run.save_requested()

    def load(self, checkpoint: str | Path) -> None:
        """Continue from a checkpoint that `save` or the checkpoint hook wrote, or from the newest one of a run.

        It restores everything but your data and your schedulers.
        """
        run = self._in_block("load")
        if not isinstance(checkpoint, (str, Path)):
            raise HooklineError(f"hl.load: expected the path of a run or a checkpoint, got {type(checkpoint).__name__}")
        run.load_checkpoint(find_checkpoint(Path(checkpoint))[0].verified())

    def state_dict(self) -> dict[str, Any]:
        """Return Hookline's own state for your own checkpoint: counters and the hooks' state, as plain values."""
        run = self.run
        if run.running:
            run.settle_step()
        return {name: plain_section(section) for name, section in run.state_sections().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        run = self._in_block("load_state_dict")
        missing = sorted(run.state_sections().keys() - set(state if isinstance(state, Mapping) else ()))
        if missing:
            expected = "expected what hl.state_dict() returned"
            raise HooklineError(f"hl.load_state_dict: {expected}; there is no {', '.join(missing)}")
        run.load_sections(state)

    # ---- torch's optimizer hooks -------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin the step, or let its closure do so: only then are there gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.run.before_step(optimizer)
            return None
        evaluate = self.run.around_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _watch_for_others(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Warn once if an optimizer that was not attached trains the model: hooks do not see its steps."""
        if optimizer in self.run.optimizers:
            self._steps_of_others = 0  # A wrapper around an attached optimizer steps it, too.
            return
        self._steps_of_others += 1
        if self._steps_of_others != 2 or self._has_warned or optimizer in _ATTACHED:
            return
        trained = {id(param) for param in self.run.model.parameters()}
        if any(id(param) in trained for group in optimizer.param_groups for param in group["params"]):
            self._has_warned = True
            problem = f"another optimizer ({type(optimizer).__name__}) trains the model, and hooks do not see its steps"
            logger.warning("attach: %s; leave the `with` block and attach it", problem)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.run.after_step(optimizer)

    # ---- epochs ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, number: int | None = None) -> None:
        """Begin an epoch, after the end of the last one.

        Args:
            number: The number of the epoch, from 0; by default the next.
        """
        self.end_epoch()
        self.run.begin_epoch(number)
        self._epoch_is_open = True

    def end_epoch(self) -> None:
        """End the epoch whose batches were read, and carry out the hooks' requests at its end."""
        self.run.settle()
        if self._epoch_is_open:
            self._epoch_is_open = False
            self.run.end_epoch()
            self.run.at_boundary()


def check_model(model: Any) -> None:
    """Reject objects that hooks cannot see into.

    Raises:
        HooklineError: If it is not a module, or wrapped in FSDP1 or DeepSpeed.
    """
    if not isinstance(model, torch.nn.Module):
        raise HooklineError(f"attach: expected a torch.nn.Module first, got {type(model).__name__}")
    for module in model.modules():
        kind = type(module)
        if kind.__name__ == "FullyShardedDataParallel" or kind.__module__.startswith("deepspeed."):
            name = "FSDP1" if kind.__name__ == "FullyShardedDataParallel" else "DeepSpeed"
            problem = f"{name} is not supported, because its parameters are not the model's"
            raise HooklineError(f"{problem}; use FSDP2 (fully_shard) or DDP")


def check_options(config: Any, hooks: Any, scaler: Any, accelerator: Any, step_fn: Any, output_dir: Any) -> None:
    """Refuse options of the wrong type.

    Raises:
        HooklineError: The message names the option and the expected value.
    """
    is_list = isinstance(hooks, (HookManager, Iterable)) and not isinstance(hooks, (str, Mapping))
    for name, value, fits, expected in (
        ("config", config, not isinstance(config, (list, tuple, Hook)), "a path or a dict (hooks go into `hooks=[…]`)"),
        ("hooks", hooks, is_list, "a list of hooks or a HookManager"),
        ("scaler", scaler, scaler is None or hasattr(scaler, "is_enabled"), "a GradScaler"),
        ("accelerator", accelerator, accelerator is None or hasattr(accelerator, "backward"), "an Accelerator"),
        ("step_fn", step_fn, step_fn is None or callable(step_fn), "a function `(model, batch) -> loss`"),
        ("output_dir", output_dir, isinstance(output_dir, (str, Path, type(None))), "a path or None"),
    ):
        if not fits:
            remedy = "; pass a config as `config=`" if name == "hooks" and isinstance(value, Mapping) else ""
            raise HooklineError(f"{name}: expected {expected}, got {type(value).__name__}{remedy}")


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside a wrapper, such as Accelerate's: its step is the one that counts."""
    while not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__module__.startswith("accelerate."):
        # A learning-rate scheduler has an optimizer, too, and no parameters.
        inner = getattr(optimizer, "optimizer", None) if hasattr(optimizer, "param_groups") else None
        if inner is None:
            raise HooklineError(
                "attach: expected an optimizer, a list of optimizers that step together, or a dict of optimizers that "
                f"step separately, got {type(optimizer).__name__}"
            )
        optimizer = inner
    return optimizer


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer] | dict[str, torch.optim.Optimizer]:
    """Return the optimizers inside of wrappers, as a list or a dict.

    Raises:
        HooklineError: If there is none, or one appears twice.
    """
    listed = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    named = optimizer if isinstance(optimizer, Mapping) else dict(enumerate(listed))
    inner: dict[Any, torch.optim.Optimizer] = {name: inner_optimizer(each) for name, each in named.items()}
    if not inner:
        raise HooklineError(f"attach: expected at least one optimizer, got an empty {type(optimizer).__name__}")
    if len({id(each) for each in inner.values()}) < len(inner):
        raise HooklineError("attach: an optimizer was passed twice; pass each of them once")
    return inner if isinstance(optimizer, Mapping) else list(inner.values())


def plain_section(section: Any) -> Any:
    """Return a section of a checkpoint as the plain values that it was encoded from."""
    return decode(section.value, section.tensors) if isinstance(section, Section) else section
