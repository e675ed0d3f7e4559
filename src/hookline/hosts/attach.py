"""`attach`: hooks, record and report for a training loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from hookline.checkpoints.find import find_checkpoint
from hookline.errors import HooklineError
from hookline.hosts.foreign import ForeignRun
from hookline.hosts.truth import ATTACH, Host
from hookline.ranks import own_rank
from hookline.run.manager import HookManager
from hookline.run.rng import preserve_rng

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


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
    """Attach hooks to a training loop of your own, for the length of a `with` block.

    Forward hooks, update hooks, the record and the report work from there on. The methods of what is returned are
    optional; each lets more hooks work.

    >>> with hookline.attach(model, optimizer, config="hooks.yaml") as hl:
    ...     for batch in hl.batches(loader):  # batch and epoch events, tokens, progress
    ...         loss = model(**batch).loss
    ...         hl.backward(loss)  # the loss
    ...         optimizer.step()
    ...         optimizer.zero_grad()

    Args:
        model: The model that is trained, wrapped (DDP, FSDP2, compiled) or not.
        optimizer: One optimizer; a list of optimizers, which step together; or a dict of optimizers that step
            separately, as those of a GAN: each step then has its own gradients.
        config: A config of hooks: the path of a YAML file, or a dict.
        hooks: More hooks, or a `HookManager`.
        scaler: The GradScaler of your loop, if it has one.
        accelerator: The `Accelerator` of your loop, if it has one.
        step_fn: ``(model, batch) -> loss``, with which hooks such as `nan_forensics` run a batch again.
        output_dir: The directory that gets the run's directory; None keeps the record in memory.
        allow: Prefixes under which a config from a file may name dotted paths.

    Raises:
        HooklineError: If a hook needs what your loop cannot give, or the model is wrapped in FSDP1 or DeepSpeed.
    """
    return Attached(
        model, optimizer, config, hooks=hooks, scaler=scaler, accelerator=accelerator, step_fn=step_fn,
        output_dir=output_dir, allow=allow,
    )  # fmt: skip


class Attached:
    """Hooks in a loop of your own; `attach` makes it, and documents the arguments.

    Args:
        model: The model.
        optimizer: The optimizers.
        config: A config of hooks.
        hooks: More hooks.
        scaler: The loop's GradScaler.
        accelerator: The loop's Accelerator.
        step_fn: Runs a batch again.
        output_dir: Where the run's directory goes.
        allow: Prefixes of dotted paths that a config may name.
        host: What kind of loop it is.
        may_change: Whether hooks may change training.
        prints: Whether the closing line is printed.
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
        host: Host = ATTACH,
        may_change: bool = True,
        prints: bool = True,
    ) -> None:
        check_model(model)
        self._accelerator = accelerator
        scaler = getattr(accelerator, "scaler", None) if scaler is None else scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        optimizers = inner_optimizers(optimizer)
        self.run = ForeignRun(
            model, optimizers, HookManager(), host=host, scaler=self._scaler, ranks=own_rank(),
            step_fn=step_fn, output_dir=output_dir, may_change=may_change, prints=prints,
        )  # fmt: skip
        if config is not None:
            self.run.hooks.load(config, allow=allow)
        for hook in hooks.hooks if isinstance(hooks, HookManager) else hooks:
            self.run.hooks.register(hook)
        self._torch_hooks = ExitStack()
        self._epoch_is_open = False

    # ---- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(error)

    def begin(self) -> None:
        """Open the record, and put torch's step hooks on the optimizers."""
        run = self.run
        run.open()
        try:
            with preserve_rng():  # What hooks prepare must not move the random streams of your loop.
                run.begin()
            for optimizer in run.optimizers:
                for handle in (
                    optimizer.register_step_pre_hook(self._before_step),
                    optimizer.register_step_post_hook(self._after_step),
                ):
                    self._torch_hooks.callback(handle.remove)
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None = None, signal: str | None = None) -> None:
        """End the run, with the exception or the signal that ends your loop; nothing stays on model and optimizers.

        Args:
            error: The exception.
            signal: The name of the signal.
        """
        run = self.run
        if not run.running:
            return
        self._torch_hooks.close()
        if error is None and signal is None:
            try:
                self._end_epoch()
                run.finish()
            except BaseException as failure:
                run.end(failure)
                raise
        run.end(error, signal)

    # ---- what the loop may call --------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader: one epoch, with its events. It ends early when a hook asks to stop.

        Inside `validation` it only yields them.
        """
        run = self.run
        if run.validations_in_progress:
            yield from loader
            return
        self._end_epoch()
        if run.should_stop:
            return
        run.begin_epoch()
        self._epoch_is_open = True
        for batch in loader:
            run.next_batch(batch)
            yield batch
            if self.should_stop:
                break
        run.settle()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of a loss, scaled if you passed a scaler; hooks and record get the loss itself.

        Args:
            loss: The loss, a tensor with one element.
            **options: What `Tensor.backward` takes.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise HooklineError(f"hl.backward: expected a loss with one element, got {what}; reduce it, as by mean()")
        run, accelerator = self.run, self._accelerator
        steps = 1 if accelerator is None else accelerator.gradient_accumulation_steps
        run.backward_begins(loss if steps == 1 else loss / steps)
        if accelerator is not None:
            accelerator.backward(loss, **options)
        else:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward(**options)
        run.backward_ends()

    def optimizer_step(self, optimizer: Any = None) -> None:
        """Step an optimizer through your scaler, so that a step that the scaler skips is recorded.

        Call `scaler.update()` yourself, as always.

        Args:
            optimizer: The optimizer; may be left out if there is only one.
        """
        run = self.run
        if optimizer is None and len(run.optimizers) > 1:
            raise HooklineError(f"hl.optimizer_step: pass one of the {len(run.optimizers)} optimizers")
        inner = run.optimizers[0] if optimizer is None else inner_optimizer(optimizer)
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
        if self._measured is not None:
            self._measured[name] = value
        else:
            self.run.log(name, value)

    _measured: dict[str, Any] | None = None

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Fire the events around a validation, whose results you pass to `log` inside the block.

        >>> with hl.validation():
        ...     hl.log("val/loss", evaluate(model))
        """
        run = self.run
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
        self.run.settle_step()
        return self.run.should_stop

    def save(self, name: str | None = None) -> None:
        """Write a checkpoint after the current step: weights, optimizers, random streams and Hookline's own state."""
        self.run.save(name)

    def load(self, checkpoint: str | Path) -> None:
        """Continue from a checkpoint that `save` or the checkpoint hook wrote, or from the newest one of a run.

        It restores everything but your data and your schedulers.
        """
        self.run.load_checkpoint(find_checkpoint(Path(checkpoint))[0])

    def state_dict(self) -> dict[str, Any]:
        """Return Hookline's own state, for a checkpoint of yours: counters and what hooks remember."""
        return self.run.state_sections()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.run.load_sections(state)

    # ---- torch's optimizer hooks -------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin the step, or let its closure do so: only then there are gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.run.before_step(optimizer)
            return None
        evaluate = self.run.around_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.run.after_step(optimizer)

    def _end_epoch(self) -> None:
        """End the epoch whose batches were read."""
        if self._epoch_is_open:
            self._epoch_is_open = False
            self.run.settle()
            self.run.end_epoch()


def check_model(model: Any) -> None:
    """Refuse what hooks cannot see into.

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


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside a wrapper, such as Accelerate's: its step is the one that is made."""
    while not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__module__.startswith("accelerate."):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise HooklineError(
                "attach: expected an optimizer, a list of optimizers that step together, or a dict of optimizers that "
                f"step separately, got {type(optimizer).__name__}"
            )
        optimizer = inner
    return optimizer


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer] | dict[str, torch.optim.Optimizer]:
    """Return the optimizers inside of wrappers, as a list or a dict."""
    if isinstance(optimizer, Mapping):
        return {name: inner_optimizer(each) for name, each in optimizer.items()}
    return [inner_optimizer(each) for each in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])]
