"""Turn one rank's request into a decision of all: stops, saves and signals, carried out at the same step everywhere.

Every few steps each rank sends a few integers, and reads their sums after the next step, so nothing waits. Agreements
are 100 ms apart by rank 0's clock, or 10 steps if that is shorter, and at the same steps on all ranks: the sums of one
say when the next is due. A request is carried out one step after the next agreement. Hooks that decide only by agreed
numbers (`same_on_all_ranks`) need no agreement, and their requests take effect at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline import __version__
from hookline._console import logger
from hookline.core.base import hook_attribute
from hookline.core.shared_part import SharedPart, Sizes
from hookline.errors import RankError, TrainingError
from hookline.ranks import Number, compare, fingerprint, on_ranks
from hookline.record.across_ranks import SharedRecord
from hookline.record.provenance import git_state
from hookline.record.record import Record
from hookline.run.agreement import Agreement, SaveName
from hookline.run.status import Stop
from hookline.trainer.data.loader_state import set_epochs
from hookline.trainer.data.rank_checks import check_first_batch, check_lengths
from hookline.trainer.stragglers import RankTimes

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

AGREE_MILLISECONDS, MOST_STEPS = 100, 10
EXCHANGE_EVERY, EXCHANGE_SECONDS = 50, 2.0  # steps, or as soon as rank 0's clock has moved by these seconds
REMEDY = (
    "all ranks need the same; if a value must differ, such as a path, compute it in the hook from trainer.ranks.rank; "
    "to run a hook on some ranks only, pass ranks="
)
LATE_EVENTS = {"on_update", "on_gradient_clip", "on_before_optimizer_step"}
"""Events after the gradients are ready at which a hook may still skip the step."""


class Pace:
    """Decides after which steps the ranks agree.

    They are 100 ms apart by rank 0's clock, or 10 steps if these are shorter. All ranks get the same steps, because the
    clock is in the sums that they share. The first agreement comes after the first step.

    Args:
        step: The step that is done.
    """

    def __init__(self, step: int) -> None:
        self.due = 0
        """The next step after which numbers are sent, or the sums of those that were sent are read."""
        self.sent_after = step
        self._steps, self._passed, self._clock = 1, 0, 0

    def send(self, step: int) -> None:
        """Note that numbers are sent after a step; their sums are read after the next one."""
        self._passed, self.sent_after, self.due = step - self.sent_after, step, step + 1

    def receive(self, clock: int, each_step: bool) -> None:
        """Plan the next agreement.

        Args:
            clock: Rank 0's clock in milliseconds when the numbers were sent.
            each_step: Whether to agree after every step.
        """
        if self._passed:
            wanted = -(-AGREE_MILLISECONDS * self._passed // max(clock - self._clock, 1))
            self._steps = min(max(wanted, 1), MOST_STEPS)
        self._clock, self._passed = clock, 0
        self.due = self.sent_after + (1 if each_step else self._steps)


class RankAgreement(Agreement):
    """The requests of this rank, and what the ranks have agreed on."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._trainer, self._ranks = trainer, trainer.ranks
        self.times = RankTimes(trainer)
        self._requests = _no_requests()  # since numbers were last sent
        self._sent: dict[str, Any] = {}  # what the numbers that were sent last are about
        self._receive: Callable[[], list[int]] | None = None  # waits for their sums
        self._pace = Pace(0)
        self._exchanged_at = 0.0  # when an exchange was last prepared, by rank 0's clock
        self._counts_tokens = False  # whether a schedule counts tokens: it is due at the same steps in every run
        # Whether all ranks must decide together if a step is skipped, because a hook may ask for it on some of them:
        # before the update chain, and after it.
        self._skips_early = self._skips_late = False
        self._skip: tuple[int, str] = -1, ""  # the step that a hook has asked to skip on this rank, and why
        self._assigned: dict[str, str] = {}  # how attributes of the trainer were last assigned, by name
        self._is_changed = True  # whether these or the hooks were changed since `_read_hooks`
        self._has_compared = False  # whether the first batches of the ranks have been compared
        self._tokens = -1, 0  # micro-batches, and the tokens of all ranks by then
        trainer.hooks.on_change(self._note_change)

    def _note_change(self) -> None:
        self._is_changed = True

    def note_assignment(self, name: str, value: Any, by: str | None) -> None:
        """Compare an assignment to an attribute of the trainer with those of the other ranks when they next agree.

        Args:
            name: The attribute.
            value: The assigned value, as an error names it.
            by: The hook that did so; None if it was none.
        """
        hook = "" if by is None else f" by hook {by!r}"
        self._assigned[name] = f"{name} was set to {value} in step {self._trainer.progress.step}{hook}"
        self._note_change()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def request_stop(self, stop: Stop) -> None:
        """Stop the run, once all ranks know about it."""
        if self._is_agreed(stop.by):
            super().request_stop(stop)
        else:
            self._requests["stops"].append(stop)

    def request_save(self, name: SaveName) -> bool:
        """Write a checkpoint at a boundary, once all ranks know about it."""
        if self._trainer.run_status.status == "error":
            logger.warning("nothing is saved after a failure: the ranks may be at different steps", of_rank=True)
        elif self._is_agreed(self._trainer.hooks.calling_hook()):
            super().request_save(name)
        else:
            self._requests["saves"].append(name)
        return False

    def request_end(self, signal: str) -> None:
        """Ask to save and end the run. A signal handler calls this, so it only notes the request."""
        self._requests["signals"].append(signal)

    def _is_agreed(self, hook: str | None) -> bool:
        """Return whether all ranks make a request of this hook at the same time."""
        hooks = self._trainer.hooks
        return hook is not None and hook in hooks and bool(hook_attribute(hooks.get(hook), "same_on_all_ranks"))

    # ---- in the order of a run ---------------------------------------------------------------------------------------

    def before_run(self) -> None:
        """Compare options, hooks, data and parameters of the ranks.

        Raises:
            RankError: On every rank, if they differ.
        """
        compare(self._ranks, _compared(self._trainer), REMEDY)

    def record_of_ranks(self, record: Record) -> Record:
        """Return a record whose numbers are those of all ranks."""
        self._record = SharedRecord(record, self._ranks)
        return self._record

    def begin_run(self) -> None:
        """Forget the requests of the last run; schedules read rank 0's clock."""
        self._requests, self._sent, self._receive, self._has_compared = _no_requests(), {}, None, False
        self._pace = Pace(self._trainer.progress.step)
        self._trainer.progress.set_agreed()

    def restored(self) -> None:
        """Make schedules due at the same steps on all ranks; rank 0 counts the tokens that all ranks had counted."""
        self._trainer.progress.set_agreed()
        self._pace = Pace(self._trainer.progress.step)
        if self._ranks.rank:
            self._trainer.progress.tokens_seen = 0

    def measure(self, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the forward pass of a batch with a clock around it."""
        return self.times.measure(compute)

    def before_epoch(self, loaders: Any, epoch: int) -> None:
        """Check that the ranks have the same number of batches, and make them shuffle in the same way."""
        check_lengths(self._ranks, loaders, self._trainer.options)
        set_epochs(loaders, epoch)

    def batches(self, batches: Iterable[Any], loaders: Any) -> Iterable[Any]:
        """Return the batches of an epoch with a clock around each; the first ones of the ranks are compared."""
        if self._trainer.engine.averages and not self._has_compared:
            self._has_compared, batches = True, check_first_batch(self._ranks, iter(batches), loaders)
        return self.times.batches(batches)

    def before_update(self) -> None:
        """Decide whether the step is skipped because a hook has asked for it on some rank."""
        if self._skips_early:
            self._decide_skip()

    def before_optimizer(self) -> None:
        """Decide again after the update chain, if a hook may ask for it there."""
        self.times.end_backward()
        if self._skips_late:
            self._decide_skip()

    def end_step(self) -> None:
        """Stop the clock of this rank's step, and raise RankError if another rank has failed."""
        self.times.end_step()
        self._ranks.check()

    def next_step(self) -> int:
        """Return the step after which `after_step` must run next."""
        return self._pace.due

    def after_step(self, step: int) -> None:
        """Read the sums of the last numbers sent, and send new numbers if the next agreement is due."""
        if step >= self._pace.due and self._receive is not None:
            self._receive_sent()  # before numbers are sent, so that one exchange is over when the next is prepared
        if step < self._pace.due:
            return
        progress, rows = self._trainer.progress, 0
        if is_due := step // EXCHANGE_EVERY > self._pace.sent_after // EXCHANGE_EVERY:
            self.times.share()
        if is_due or progress.seconds - self._exchanged_at >= EXCHANGE_SECONDS:
            self._exchanged_at = progress.seconds
            self._trainer.step_log.write_rows()
            rows = self._record.prepare()
        self._receive = self._ranks.send(self._numbers(rows))

    def after_validation(self) -> None:
        """Exchange what the ranks have recorded; all of them call this."""
        self._trainer.step_log.flush(wait=True)

    def after_epoch(self, read: int, expected: int | None) -> None:
        """Raise TrainingError on this rank if it has reached the end of its data before the others."""
        if read != expected:
            raise TrainingError(
                f"rank {self._ranks.rank} has read all {read} batches of an epoch, which has "
                f"{'no known end' if expected is None else expected}: all ranks need the same number; set "
                "limit_train_batches to a number that every rank has"
            )

    def after_train_end(self) -> None:
        """Write what hooks have asked to save in on_train_end, once all ranks know about it; not after a failure."""
        if self._trainer.status != "error":
            self.settle()
            self._trainer.save_requested()
            self._trainer.finish_save()

    def settle(self) -> None:
        """Wait until all ranks know of all requests, and carry them out: at the start, between epochs, at the end."""
        self._receive_sent()
        self._carry_out(self._ranks.total(self._numbers()))
        self._exchanged_at = self._trainer.progress.seconds  # the record is written next, or the run has just begun

    def end_epoch(self) -> None:
        """Agree on what was requested, and contribute the times and everything that was recorded."""
        self.settle()
        self.times.share()
        self._trainer.step_log.flush(wait=True)

    def _numbers(self, rows: int = 0) -> list[int]:
        """Return the integers to send, and note what they are about.

        Args:
            rows: A fingerprint of the names to exchange; 0 without an exchange.
        """
        if self._is_changed:
            self._is_changed = False
            self._read_hooks()
        progress, hooks = self._trainer.progress, self._changes_mark
        self._sent, self._requests = self._requests, _no_requests()
        requests = sum(map(len, self._sent.values()))
        self._sent |= {"skips": self._skips, "changes": self._changes}
        self._pace.send(progress.step)
        clock = round(progress.own_seconds * 1000) if self._ranks.rank == 0 else 0
        tokens = self.count_once(progress.tokens_seen)
        return [requests, clock, tokens, hooks, hooks * hooks, rows, rows * rows, int(self._counts_tokens)]

    def _receive_sent(self) -> None:
        """Wait for the sums of the numbers that were sent last, if any, and carry out what follows."""
        receive, self._receive = self._receive, None
        if receive is not None:
            self._carry_out(receive())

    def _carry_out(self, sums: list[int]) -> None:
        """Do, identically on all ranks, what follows from the sums: exchange what was recorded, stop, save."""
        requests, clock, tokens, hooks, hooks_squared, rows, rows_squared, counts_tokens = sums
        trainer, sent = self._trainer, self._sent
        trainer.progress.set_agreed(clock / 1000, tokens)
        self._pace.receive(clock, each_step=counts_tokens > 0)
        if not self._ranks.are_equal(hooks, hooks_squared):
            self._raise_ranks_differ(sent["changes"])
        # From here on all ranks know that they have the same hooks.
        self._skips_early, self._skips_late = sent["skips"]
        if rows:
            self._record.exchange(self._ranks.are_equal(rows, rows_squared))
        if not requests:
            return
        requested_here = {name: sent[name] for name in ("stops", "signals")}
        requested_here["saves"] = [name() if callable(name) else name for name in sent["saves"]]
        for rank, requested in enumerate(self._ranks.gather(requested_here)):
            for reason, by, _ in requested["stops"]:
                if rank:
                    trainer.note("stop_requested", reason=reason, by=by, rank=rank)
                trainer.run_status.stops.append(Stop(reason, by, rank))
            for name in requested["saves"]:
                trainer.save_at_boundary(name)
            for signal in requested["signals"]:
                trainer.end_on_signal(signal, rank)

    # ---- skipped steps -----------------------------------------------------------------------------------------------

    def request_skip(self, reason: str) -> None:
        """Skip the step: at once if all ranks do so, otherwise once they have decided together.

        Raises:
            RankError: If the calling hook would skip the step on this rank alone.
        """
        by = self._trainer.hooks.calling_hook()
        if by is None:
            raise RankError("skip_step() with several ranks is for hooks, which declare may_skip or same_on_all_ranks")
        if self._is_agreed(by):
            super().request_skip(reason)
            return
        rank = self._ranks.rank
        if not hook_attribute(self._trainer.hooks.get(by), "may_skip"):
            raise RankError(
                f"hook {by!r} skips a step on rank {rank}, but the other ranks do not know about it: set may_skip = "
                "True on its class, so that all ranks decide together"
            )
        if not (self._skips_early or self._skips_late):
            words = f"hook {by!r} was just added on rank {rank}, and can skip once the ranks have agreed on that"
            raise RankError(f"{words}: {MOST_STEPS + 1} steps later at the latest; add it before the first step")
        self._skip = self._trainer.progress.step, reason

    def _decide_skip(self) -> None:
        """Skip the step on all ranks if a hook has requested it on one; waits for all ranks."""
        args = self._trainer.event_args
        if args.skip_reason is not None:  # on all ranks
            return
        reason = self._skip[1] if self._skip[0] == self._trainer.progress.step else None
        if self._ranks.decide(reason is not None):
            reasons = self._ranks.gather(reason)
            rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
            args.skip_reason = f"{reason} (rank {rank})"

    # ---- numbers -----------------------------------------------------------------------------------------------------

    # The loss of a step is logged like any number: `Window.weigh` weights it by what was in the window of this rank;
    # the record takes the mean in its next exchange. Most of these methods wait for the other ranks, because hooks base
    # decisions on their results.

    def tokens_seen(self) -> int:
        """Return the tokens of all ranks; waits for them, once per micro-batch."""
        progress = self._trainer.progress
        if self._tokens[0] != progress.batches:
            tokens = self.count_once(progress.tokens_seen)
            self._tokens = progress.batches, self._ranks.total([tokens])[0]
        return self._tokens[1]

    def count_once(self, count: Number) -> Number:
        """Return what this rank adds to a count over all ranks: nothing if a lower rank has the same batches."""
        rank = self._ranks.rank
        return count if self._trainer.engine.first_with_batch(rank) == rank else count * 0

    def record_mean(self, name: str, value: Any, is_optional: bool) -> None:
        """Record a metric of the step as the mean over the ranks; a rank may have no value of an optional one."""
        trainer, window = self._trainer, self._trainer.accumulation
        if not is_optional:
            trainer.log(name, window.weigh(value))
            return
        weight = window.rank_weight

        def sums(_: Tensor) -> Tensor:
            number = float(value)  # waits for its device; NaN if this rank has no value, which then has no weight
            return torch.tensor([0.0, 0.0] if math.isnan(number) else [number * weight, weight], dtype=torch.float64)

        def finish(sizes: Sizes, maxima: Tensor, sums: Tensor) -> dict[str, float]:
            total, weights = sums.tolist()
            return {name: total / weights if weights else math.nan}

        trainer.share(SharedPart(name, trainer.step, trainer.epoch, {name: (0, 2)}, finish, sums=sums))

    def average_stats(self) -> None:
        """Combine means, latest values and the step's loss over all ranks, wherever hooks decide by them."""
        trainer, loss = self._trainer, self._trainer.event_args.window_loss
        trainer.stats.average_over_ranks(self._ranks, trainer.step, loss, trainer.accumulation)
        self.tokens_seen()  # stored, because a rank without a validation batch would not ask for it

    # ---- what must not differ ----------------------------------------------------------------------------------------

    def _read_hooks(self) -> None:
        """Record what runs may change, as long as all ranks do it: the hooks with their switches, and attributes.

        A hook that failures have disabled is disabled on this rank alone, and counts as enabled. Whether hooks may skip
        a step on some ranks only, before the update chain and after it, follows from them.
        """
        self._changes, self._counts_tokens, skips = [], False, list[set[str]]()
        for entry in self._trainer.hooks.entries():
            is_enabled = entry.enabled_for_ranks
            self._changes.append(f"hook {entry.name!r} is {'enabled' if is_enabled else 'disabled'}")
            if is_enabled and hook_attribute(entry.hook, "may_skip"):
                skips.append(set(entry.listeners))
            self._counts_tokens |= is_enabled and any(mark.unit == "tokens" for mark in entry.schedule.marks)
        self._changes += [self._assigned[name] for name in sorted(self._assigned)]
        self._changes_mark = fingerprint(self._changes)
        self._skips = any(events - LATE_EVENTS for events in skips), any(events & LATE_EVENTS for events in skips)

    def _raise_ranks_differ(self, changes: list[str]) -> None:
        """Raise RankError with the differences between ranks, given what this one had when it sent its numbers."""
        lists = self._ranks.gather(changes)
        everywhere = set(lists[0]).intersection(*lists[1:])
        odd = dict.fromkeys(change for listed in lists for change in listed if change not in everywhere)
        where = {change: on_ranks([rank for rank, listed in enumerate(lists) if change in listed]) for change in odd}
        said = [f"{change} on {ranks} only" for change, ranks in where.items()]
        raise RankError(
            f"the ranks differ: {'; '.join(said) or 'the order of their hooks'}; add, remove, "
            "enable and disable hooks and assign lr, loss_fn and step_fn on all ranks, and use ranks= for a "
            "hook that runs on some"
        )


def _no_requests() -> dict[str, Any]:
    return {"stops": [], "saves": [], "signals": []}


def _compared(trainer: Trainer) -> dict[str, Any]:
    """Return everything that must be the same on all ranks, by the name that errors use."""
    parameters = {hook.name: hook.parameters for hook in trainer.hooks.list_hooks()}
    hooks = {
        entry.name: {
            "enabled": entry.enabled_for_ranks,
            "schedule": str(entry.schedule),
            "policy": entry.policy,
            "parameters": {
                key: value for key, value in parameters[entry.name].items() if isinstance(value, (int, float, str))
            },
            "place": place,
        }
        for place, entry in enumerate(trainer.hooks.entries())
    }
    config = {key: value for key, value in trainer.describe().items() if key not in ("trainer", "hooks")}
    return {
        "the options": vars(trainer.options),
        "the config": config,
        "the hooks": hooks,
        "the metrics": sorted(trainer.validation_metrics),
        "the loaders": {"training": list(trainer.train_loaders), "validation": list(trainer.val_loaders)},
        "the number of optimizers and schedulers": [len(trainer.optimizers), len(trainer.schedulers)],
        "the parameters": {name: list(param.shape) for name, param in trainer.params.items()},
        "the versions": {"hookline": __version__, "torch": torch.__version__, "git": git_state(Path())},
    }
