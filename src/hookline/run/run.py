"""`Run`: what hooks live in. A training loop opens it, calls its step methods (step.py), and ends it.

    run.open(); run.begin()         # the record, the hooks, on_train_start
    …                               # the step methods, for every micro-batch; the loop clears the gradients
    run.finish(); run.end()         # on_train_end, the outcome, the record is closed

An exception that leaves the loop goes to `run.end(error)`. Our trainer is the first host: a subclass that overrides
what it does itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hookline import _device
from hookline._console import logger, print_line
from hookline._text import counted
from hookline.core.base import hook_attribute
from hookline.core.catalog import Event
from hookline.core.change_audit import ChangeAudit
from hookline.core.failures import Incident, first_failure, hook_notes
from hookline.errors import RankError, TrainingError, add_note, error_text, traceback_text
from hookline.gradients.chain import UpdateChain
from hookline.ranks import Ranks
from hookline.record.outcome import Outcome
from hookline.record.record import Record
from hookline.record.redaction import redacted_log
from hookline.record.strict_json import field_values
from hookline.run.agreement import Agreement
from hookline.run.ending import closing_line, judge_run, report_run
from hookline.run.engine import Engine
from hookline.run.event_args import EventArgs, GivenArgs
from hookline.run.manager import HookManager
from hookline.run.parameters import is_finite, was_trained
from hookline.run.progress import Progress
from hookline.run.rng import preserve_rng
from hookline.run.status import SIGNAL, RunStatus, Stop
from hookline.run.step import Steps
from hookline.run.step_log import GRAD_NORM, LR


class Run(Steps):
    """A run of a training loop, with its hooks, events and record. Hooks get it as `trainer`, and may set attributes.

    Its state is in three objects: `progress` (saved counters), `run_status` (how the run ends, and trouble) and
    `event_args` (the values that hooks name).

    Args:
        model: The model.
        optimizers: The optimizers that train it.
        hooks: The hooks: a manager, a list of hooks, or None.
        engine: Places batches, runs backward passes and steps optimizers; by default as a plain loop does.
        ranks: The processes of the run; by default one.
        config: The config that hooks see as `trainer.config`.
        output_dir: The directory that gets the run's directory; None keeps the record in memory.
        seed: The seed of the hooks' random streams.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        hooks: HookManager | Iterable[Any] | None = None,
        *,
        engine: Engine | None = None,
        ranks: Ranks | None = None,
        config: Any = None,
        output_dir: str | Path | None = None,
        seed: int | None = None,
    ) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.params = self.trained_parameters()
        self.hooks = hooks if isinstance(hooks, HookManager) else HookManager()
        self.connection = ExitStack()  # functions that are called when another run gets the hooks
        self.connection.callback(self.hooks.add_registration_check(self.check_needs))
        self.ranks = ranks or Ranks()
        self.engine = engine or Engine(next(model.parameters()).device)
        self.config, self._output_dir, self.seed = config, output_dir, seed
        self.hook_data: dict[str, Any] = {}
        self.optimizer_step = None
        self.progress, self.run_status = Progress(), RunStatus()
        self.agreement = self.make_agreement()
        self.event_args = EventArgs(self)
        self.hooks.failures.current_step = lambda: self.progress.step
        self.connect_hooks()
        self.reset_steps()
        self.until_end = ExitStack()  # functions that are called when the run in progress ends
        if not isinstance(hooks, HookManager | None):
            for hook in hooks:  # last: their `setup` sees the run, which rejects those that need more than it can do
                self.hooks.register(hook)

    def connect_hooks(self) -> None:
        """Let the hooks live in this run: they see its model, its processes and its gradients."""
        self.chain = UpdateChain(self.hooks, self.params, self.model)
        self.change_audit = ChangeAudit(self)
        self.hooks.dispatch_table.change_audit = self.change_audit
        self.hooks.set_ranks(self.ranks)
        self.hooks.watch_for_trainer(self.model, self.event_args)

    def lose_hooks(self) -> None:
        """Release the hooks, because another run has taken them over."""
        self.connection.close()
        if self.running:
            words = "a run in progress has lost its hooks, because another run was created with them; %s"
            logger.warning(words, "give each run its own HookManager")

    def make_agreement(self) -> Agreement:
        """Return the object that decides for all ranks of the run."""
        return Agreement(self)

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def open(self, record: Record | None = None) -> None:
        """Open the record; from here on everything is recorded, and `end` must be called.

        Args:
            record: A record that was started; by default a new one.
        """
        before = vars(self).get("record")
        if record is None:
            self.check_run()
            config, directory = self.describe(), self._output_dir
            if directory is None:
                record = Record.in_memory(config=config, seed=self.seed)
            else:
                record = Record.on_disk(directory, config=config, seed=self.seed)
            record.start(hooks=self.describe_hooks(), training=self.describe_training())
        if before is not None:
            record.share_sinks(before)  # Sinks may have been added before the run.
        # The last run may have stopped inside an epoch; this one continues there.
        self.progress.begin_run(self.position())
        self.record = record
        record.reduce_as({LR: None, GRAD_NORM: None})  # the same on all ranks
        self.run_status.begin()
        self.event_args.begin_run()
        self.agreement.begin_run()
        self.hooks.reset_costs()
        self.reset_steps()
        self.until_end = ExitStack()
        self.until_end.callback(self.run_status.end)
        self.until_end.callback(self.hooks.rng_guard.end)
        self.until_end.callback(self.hooks.failures.subscribe(self._record_incident))
        self.until_end.callback(record.add_own_sink(self.step_log).remove)
        self.until_end.enter_context(redacted_log())

    def check_run(self) -> None:
        """Let the hooks check the run on their ranks, before it has a directory; what one raises ends all ranks."""
        self._check_can_begin()
        failure = first_failure(partial(self._call_hooks, "check_run"))
        problems = self.ranks.gather(failure and error_text(failure))
        if failure is not None:
            raise failure
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise RankError(f"rank {rank}: {problem}")

    def _check_can_begin(self) -> None:
        """Raise TrainingError if the run is in progress, or another one has got its hooks.

        Update and forward hooks are called in only one run.
        """
        if self.running:
            raise TrainingError("this trainer is running already; a hook cannot start another run of it")
        if self.hooks.run is not self:
            problem = "the hooks of this run now belong to another run, which was created with them later"
            raise TrainingError(f"{problem}; give each run its own HookManager, or make this one again")

    def _call_hooks(self, method: str, *values: Any, ends_run: bool = True) -> None:
        """Call a method that is not an event on this rank's hooks, in the order of registration.

        Args:
            method: The method.
            *values: Its arguments besides the run.
            ends_run: Whether an exception ends the run under any policy.
        """
        failures = self.hooks.failures
        with preserve_rng():
            for entry in [entry for entry in self.hooks.entries() if entry.is_called_here(self.ranks)]:
                call = partial(hook_attribute(entry.hook, method), self, *values)
                if ends_run:
                    with failures.call(entry.name, method):
                        call()
                else:
                    failures.call_method(entry, method, call)

    def begin(self) -> None:
        """Set up the hooks, let the host prepare, and fire on_train_start."""
        self.hooks.reopen()
        for entry in self.hooks.entries():
            if isinstance(entry.ranks, frozenset) and min(entry.ranks) >= self.ranks.world_size:
                listed, count = ", ".join(map(str, sorted(entry.ranks))), counted(self.ranks.world_size, "process")
                logger.warning("%r is not called: its ranks are %s, and the run has %s", entry.name, listed, count)
        if any(hook_attribute(entry.hook, "collective") for entry in self.hooks.entries()):
            self.ranks.group  # noqa: B018 - created here, where all ranks are present
        devices = _device.device_indices([*self.model.parameters(), *self.model.buffers()])
        self.hooks.rng_guard.begin(self.seed or 0, devices)
        self._call_hooks("before_first_step", self.prepare())
        self.announce()
        if handler := self.hooks.slots.on_train_start:
            handler(self.event_args)
        self.agreement.settle()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None = None, signal: str | None = None) -> None:
        """Fire on_exception if the run failed, then on_train_end; close hooks and record, print a line.

        Args:
            error: The error that ended the run, if it failed.
            signal: The name of the signal that ended it, if one did.

        Raises:
            BaseException: A hook's exception at the end of a run that had not failed, if its policy says so.
        """
        self.run_status.end_forked_process(error)
        with self.until_end:
            try:
                if error is not None:
                    self._fire_exception(error)
                else:
                    self.run_status.close(failed=False)
            finally:  # Ctrl-C in on_exception comes here, too.
                try:
                    self._close(error, signal)
                finally:
                    self.record.release()

    def _close(self, error: BaseException | None, signal: str | None) -> None:
        """Fire on_train_end, close the hooks, decide the outcome and close the record."""
        if error is None and signal is not None:
            rank = next((stop.rank for stop in self.run_status.stops if stop.by == SIGNAL), 0)
            self.note("stop_requested", reason=signal, by=SIGNAL, **({"rank": rank} if rank else {}))
        outcome, reason = self.decide_outcome(error, signal)
        # A run that was killed after its last step has no step left. A run that had ended, which only rank 0 knows,
        # stays unchanged.
        if outcome.is_clean and self.record.is_tentative and not self.ranks.first(lambda: self.record.had_ended):
            self.record.commit()
        with suppress(Exception):  # another rank has failed, which is detected again where the ranks meet
            self._find_non_finite(outcome)
        self.event_args.end_run(self.run_status.bad_weights or reason or outcome.value)
        failure = self._call_last_hooks(outcome)
        if failure is not None and outcome.is_clean:
            error = failure = self.ranks.explain(failure)
            self.run_status.close(failed=True)
            self.record.event("exception", self.progress.step, error=self.decide_outcome(error)[1])
        elif isinstance(failure, Exception):  # it does not replace the exception or the signal that ends the run
            logger.warning("while the run was ending: %s", describe_error(failure))
            if self.event_args.exception is not None:
                add_note(self.event_args.exception, f"then, while the run was ending: {describe_error(failure)}")
            failure = None
        if failure is None and self.run_status.bad_weights:
            self.note("non_finite_weights", message=self.run_status.bad_weights)
        self.step_log.write_rows()
        self.change_audit.finish()
        self._close_record(*self.decide_outcome(error, signal))
        if failure is not None:
            raise failure

    def _find_non_finite(self, outcome: Outcome) -> None:
        """Count the last losses that are not finite, and find such weights; waits for the device and for all ranks."""
        bad_losses = 0
        with suppress(Exception):  # the device may be gone on this rank, which must still take part in the next steps
            bad_losses = self.stats.take_non_finite()
        self._find_bad_weights(outcome)
        self.record_non_finite_losses(bad_losses)

    def _call_last_hooks(self, outcome: Outcome) -> BaseException | None:
        """Fire on_train_end, close the hooks and meet the other ranks; return what was raised first."""
        failure = first_failure(self._fire_train_end, self.hooks.close)
        if failure is not None:
            self.ranks.failed(self.progress.step, describe_error(failure))

        def look_again() -> None:  # a hook may have restored good weights at the end
            if self.run_status.bad_weights:
                self._find_bad_weights(outcome)

        return failure or first_failure(look_again, self._collect_failures, self.ranks.meet)

    def _fire_train_end(self) -> None:
        """Fire on_train_end, and carry out the requests that hooks made in it unless one failed."""
        if handler := self.hooks.slots.on_train_end:
            handler(self.event_args)
        self.agreement.after_train_end()

    def decide_outcome(
        self, error: BaseException | None = None, signal: str | None = None
    ) -> tuple[Outcome, str | None]:
        """Return how the run ends and why. Nothing else decides this; bad weights are detected at the end."""
        outcome, reason = Outcome.COMPLETED, None
        if signal is not None:
            outcome, reason = Outcome.INTERRUPTED, signal
        elif error is not None:
            alone, described = self.ranks.world_size == 1, describe_error(error)
            reason = described if alone or isinstance(error, RankError) else f"rank {self.ranks.rank}: {described}"
            outcome = Outcome.FAILED if isinstance(error, Exception) else Outcome.INTERRUPTED
        elif self.run_status.stops:
            why, by, rank = self.run_status.stops[0]
            where = f" on rank {rank}" if rank else ""
            is_hook = by is not None and by in self.hooks
            finds_nan = is_hook and hook_attribute(self.hooks.get(str(by)), "explains_non_finite")
            outcome = Outcome.NON_FINITE if finds_nan else Outcome.STOPPED
            reason = f"stopped by {by or 'request_stop'}{where}: {why}"
        if error is None and self.run_status.bad_weights:
            outcome, reason = Outcome.NON_FINITE, "; ".join(filter(None, [self.run_status.bad_weights, reason]))
        return outcome, reason

    def _fire_exception(self, error: BaseException) -> None:
        """Fire on_exception, after finishing whatever belongs to the weights of a half step."""
        _, described = self.decide_outcome(error)
        self.ranks.failed(self.progress.step, described or "")
        self.run_status.close(failed=True)
        self.event_args.exception = error
        self.record.event("exception", self.progress.step, error=described, traceback=traceback_text(error))
        try:
            self.end_failed_step()
        except Exception as another:  # the device is gone, for instance
            logger.warning("while the run was ending: %s", error_text(another))
        try:
            if handler := self.hooks.slots.on_exception:
                handler(self.event_args)
        finally:
            self.after_exception(error)

    def _close_record(self, outcome: Outcome, reason: str | None) -> None:
        """Write the record with the verdict on the run, the report and the closing line."""
        summary = verdict = None
        try:
            self._finish_record(outcome, reason)
        finally:  # Ctrl-C in a sink, or while the run is read, leaves a whole record, too
            try:
                summary, verdict = judge_run(self)
            finally:
                self.record.close_files(verdict)
        if self.prints:
            print_line(closing_line(self, outcome, reason))
        if summary is not None:
            report_run(self, summary)

    def _finish_record(self, outcome: Outcome, reason: str | None, wait: bool = True) -> None:
        costs = self.hooks.costs(wait=wait)
        self.record.finish(outcome, reason, self.describe_hooks(), costs, self.counters(), wait=wait)

    def end_blocked(self, error: RankError) -> None:
        """Close the record of a run that another rank has ended, without what is not on the host yet or a verdict."""
        outcome, reason = self.decide_outcome(error)
        if "record" in vars(self) and self.running:
            self.step_log.write_rows()
            self._finish_record(outcome, reason, wait=False)
            self.record.close_files()
        if self.prints:
            print_line(closing_line(self, outcome, reason))

    def _find_bad_weights(self, outcome: Outcome) -> None:
        """Note which trained parameters are not finite, in the shard of any rank; none of them if the run failed.

        Waits for the device and for all ranks, even after a signal, because one rank alone may have received it.
        """
        counts = self.ranks.total([outcome.is_clean and not is_finite(param) for param in self.params.values()])
        names = [name for name, count in zip(self.params, counts, strict=True) if count]
        words = f"{len(names)} of {len(self.params)} parameters are not finite, first {names[0]!r}" if names else ""
        self.run_status.bad_weights = words

    def _collect_failures(self) -> None:
        """Count the failures of hooks on other ranks, where they do not end the run: rank 0 writes the summary."""
        status, names = self.run_status, [hook.name for hook in self.hooks.list_hooks() if hook.failures]
        mine = [self.ranks.rank, status.hook_failures, names]
        status.failures_elsewhere = 0  # Failures that were noted before are counted again.
        for rank, count, failed in self.ranks.gather(mine):  # after a failure, of this rank alone
            if rank != self.ranks.rank:
                status.failures_elsewhere += count
                for name in failed:
                    status.failed_on_ranks.setdefault(name, []).append(rank)

    def end_on_signal(self, name: str, rank: int = 0) -> None:
        """End the run now, because of a signal that a rank received."""
        self.run_status.stops.append(Stop(name, SIGNAL, rank))
        self.request_boundary()

    # ---- events that are fired by hand -------------------------------------------------------------------------------

    def fire(self, event: Event, values: Mapping[str, Any]) -> None:
        """Fire an event with values that a call by hand passes; what it leaves out is the run's."""
        # A `ctx` or a `state` may contain arguments that the event lacks.
        given = {event.attributes[name]: values[name] for name in event.attributes if name in values}
        for sources in event.respelled.values():
            given.update({sources[name]: values[name] for name in sources if name in values})
        table = self.hooks.dispatch_table
        dispatch = getattr(table.slots, event.name)
        if event.name == "on_forward":  # its callable is for modules, which pass different values
            due = table.scheduler.decision.due_for(event)
            dispatch = table.make_dispatch(event, self.hooks.listeners(event, due))
        if dispatch:
            dispatch(GivenArgs(self.event_args, SimpleNamespace(**given)))

    def follow(self, other: Any) -> None:
        """Let forward hooks read the user's object: its step and its other attributes."""
        self.hooks.dispatcher.run = GivenArgs(self.event_args, other)

    def knows(self, name: str) -> bool:
        """Return whether the run knows an event argument that a call by hand does not pass."""
        return hasattr(type(self.event_args), name) or name in vars(self.event_args)

    # ---- what a host does in its own way -----------------------------------------------------------------------------

    stops_itself = True
    """Whether the loop asks the run whether to stop; if not, a hook's StopTraining reaches the caller of the event."""
    writes_report = True
    """Whether a run with a directory gets a report.html."""

    def parts(self) -> dict[str, Any]:
        """Return the objects of the run that hooks find in `state`."""
        return {"model": self.model, "optimizer": self.optimizers[0], "device": self.device}

    def prepare(self) -> Mapping[str, float] | None:
        """Load weights, resume, try a validation; return its metrics, or None without one."""
        return None

    def announce(self) -> None:
        """Announce that the run begins."""

    def finish(self) -> None:
        """Do what comes between the last step and the closing events: hooks may save something."""
        self._call_hooks("after_last_step", ends_run=False)

    def after_exception(self, error: BaseException) -> None:
        """Finish what was in progress when the run failed."""

    @property
    def prints(self) -> bool:
        """Whether this process prints what the run does."""
        return False

    def position(self) -> dict[str, Any] | None:
        """Return where the loaders are inside an epoch, None between two epochs."""
        return self.progress.position

    # ---- what is recorded about it ---------------------------------------------------------------------------------

    def describe_hooks(self) -> list[dict[str, Any]]:
        """Return every hook with its status; parameters are not copied, because one may be a model or hold a lock."""
        elsewhere = self.run_status.failed_on_ranks
        hooks = [field_values(hook) for hook in self.hooks.list_hooks()]
        for hook in hooks:
            if hook["name"] in elsewhere:
                hook["failed_on_ranks"] = elsewhere[hook["name"]]
        return hooks

    def describe_training(self) -> dict[str, Any]:
        """Return facts that decide whether the losses of the run need to fall.

        A GAN has several optimizers, whose classes are listed, and weights that were trained before are already good.
        """
        trained = {"begins_trained": True} if was_trained(self.model) else {}
        return {"optimizers": [type(optimizer).__name__ for optimizer in self.optimizers], **trained}

    def counters(self) -> dict[str, Any]:
        """Return the counters that run.json ends with."""
        progress, status = self.progress, self.run_status
        return {
            "step": progress.steps_done,
            "epoch": progress.epoch,
            "batches": progress.batches,
            "tokens_seen": progress.tokens,
            **({"loader_batches": self.loader_batches} if self.loader_names else {}),
            "seconds": round(progress.seconds, 3),
            "skipped_steps": status.skipped_steps,
            "failed_saves": status.failed_saves,
            "non_finite_losses": status.non_finite_losses,
            "hook_failures": self.hook_failures,
        }

    def _record_incident(self, incident: Incident) -> None:
        """Write an incident to events.jsonl; failures are counted, including those of hooks that are removed later."""
        if incident.kind == "failed":
            self.run_status.hook_failures += 1
        error = None if incident.error is None else error_text(incident.error)
        what = {"hook": incident.hook, "on": incident.event, "message": incident.message, "error": error}
        self.record.event(f"hook_{incident.kind}", incident.step, **what)


def describe_error(error: BaseException) -> str:
    """Describe the error and, if it came from a hook, name the hook."""
    return "; ".join([error_text(error), *hook_notes(error)])
