"""Watch a script that knows nothing about Hookline: its optimizers report steps, its backward passes show the loss.

`hookline run` starts the script's own Python with `site/sitecustomize.py` on its path, which calls `begin` here once
torch is imported. A run begins with the first optimizer step, and ends with the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hookline._console import is_terminal, print_line
from hookline.activations.compile.detection import has_compiled
from hookline.hosts.calls import BackwardWatch, wrapped
from hookline.hosts.options import Options

if TYPE_CHECKING:
    from hookline.hosts.watched import Watched

CLOSING_SECONDS = 10.0  # SIGTERM waits this long for the record.
MOST_LOSSES = 10_000  # Losses of micro-batches kept for a run that begins with the next step.
LONG_TRAINING = 25  # Steps after which another training is looked for at once.
MOST_LONG_TRAININGS = 50
NO_STEP = "no optimizer of torch.optim has made a step"


def begin() -> None:
    """Watch this process, with the options that `hookline run` has left in its environment."""
    if not is_terminal(sys.stderr):  # what the script writes to files and pipes stays the script's
        logging.getLogger("hookline").setLevel(logging.CRITICAL + 1)
    watch = Watch(Options.read(os.environ), prints=is_terminal(sys.stdout))
    watch.start()
    atexit.register(watch.end_process)


class Watch:
    """Watches the optimizers and backward passes of this process, and records a run of what they train.

    Args:
        options: The hooks, and what they may do.
        prints: Whether the closing line of a run is printed.
        owns_process: Whether the run ends with the process, whose end decides the outcome.
    """

    def __init__(self, options: Options, prints: bool, owns_process: bool = True) -> None:
        self.options, self._prints, self._owns_process = options, prints, owns_process
        self.attached: Watched | None = None
        self._problem = NO_STEP  # why nothing is recorded; empty if something is, or another rank records
        self._unknown = 0  # steps of optimizers that belong to no run
        self._former: WeakSet[torch.optim.Optimizer] = WeakSet()  # Optimizers of runs that another training ended.
        self._long_trainings = 0
        self._thread: threading.Thread | None = None  # the thread that steps; of several, the first with a loss
        self._computes = False  # whether it computes its losses itself; otherwise other threads do
        self._others: WeakSet[threading.Thread] = WeakSet()  # Threads that step optimizers that are in no run.
        self._in_backward: WeakSet[threading.Thread] = WeakSet()  # Threads in a backward pass that the run has seen.
        self._thread_lock = threading.Lock()
        # Losses of the backward passes since the last step, with their threads and whether the run has seen them.
        self._losses: deque[tuple[torch.Tensor, threading.Thread, bool]] = deque(maxlen=MOST_LOSSES)
        self._has_loss = self._had_loss = False  # whether a backward pass was made since the last step, or ever
        self._has_closure = False  # whether the last step had one: its backward passes do not belong to the next step
        self._exit_code: Any = None  # what `sys.exit` was called with
        self._torch_hooks = ExitStack()
        self._kept_hooks = ExitStack()  # on optimizers of a run that has failed
        self._has_stopped = False

    def start(self) -> None:
        """Begin to watch; nothing is recorded until an optimizer steps."""
        self._torch_hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._torch_hooks.callback(BackwardWatch(self._backward_begins, self._backward_ends).start())
        os.register_at_fork(after_in_child=self._leave)

    def stop(self) -> None:
        """Watch no more."""
        self._has_stopped = True
        self._torch_hooks.close()

    def ignore(self) -> None:
        """Stop watching, from inside a hook: torch may be iterating over its hooks, so none may be removed now."""
        self._has_stopped = True

    # ---- what the script does ----------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take an optimizer into the run if it is not; its own hooks come next, and do the rest."""
        if self._has_stopped or torch.compiler.is_dynamo_compiling():
            return
        attached, losses = self.attached, list(self._losses)
        is_known = attached is not None and any(optimizer is other for other in attached.run.optimizers)
        with self._thread_lock:
            if not self._take_thread(is_known, {thread for _, thread, _ in losses}):
                return
        is_missing = any(not has_run and not self._is_elsewhere(thread) for _, thread, has_run in losses)
        has_loss, self._has_loss, self._exit_code = self._has_loss or is_missing, False, None
        if not is_known or is_missing:
            try:
                with keep_shown_warnings():
                    if not is_known:
                        self._meet(optimizer, has_loss)
                    self._report(losses, is_new_run=self.attached is not attached)
            except Exception as error:
                self.fail(error)
        self._losses.clear()
        self._has_closure = len(args) > 1 or bool(kwargs)

    def _take_thread(self, is_known: bool, computing: set[threading.Thread]) -> bool:
        """Return whether the step that this thread makes belongs to the run.

        Args:
            is_known: Whether the run has the optimizer. The thread that steps it is the one that trains, from now on.
            computing: The threads that have computed losses since the last step.
        """
        thread, former = threading.current_thread(), self._thread
        if not is_known and former is not None and former is not thread and former.is_alive():
            self._others.add(thread)
            return False
        if thread is not former or any(each is thread or each not in self._others for each in computing):
            self._computes = thread in computing
        if is_known or self._has_loss:
            self._thread = thread
            self._others.discard(thread)
        return True

    def _backward_begins(self, loss: torch.Tensor) -> None:
        if self._has_stopped:
            return
        thread, loss, is_elsewhere = threading.current_thread(), loss.detach(), self._is_elsewhere()
        self._in_backward.discard(thread)  # An exception may have ended its last one.
        if not self._has_closure and not (is_elsewhere and thread in self._others):
            self._losses.append((loss, thread, not is_elsewhere and self.attached is not None))
        if is_elsewhere:  # If this thread steps an optimizer of the run, the loss belongs to that step.
            return
        self._has_loss = self._had_loss = True
        self._computes = self._computes or thread is self._thread
        if self.attached is not None:
            self._in_backward.add(thread)
            try:
                self.attached.backward_begins(loss)
            except Exception as error:
                self.fail(error)

    def _backward_ends(self) -> None:
        thread = threading.current_thread()
        if self.attached is not None and thread in self._in_backward:  # otherwise it began before the run, or elsewhere
            self._in_backward.discard(thread)
            try:
                self.attached.backward_ends()
            except Exception as error:
                self.fail(error)

    def _report(self, losses: Iterable[tuple[torch.Tensor, threading.Thread, bool]], is_new_run: bool) -> None:
        """Report the backward passes that the run has not seen."""
        for loss, thread, has_run in losses:
            if self.attached is not None and (is_new_run or not has_run) and not self._is_elsewhere(thread):
                self.attached.backward_begins(loss)
                self.attached.backward_ends()

    def _is_elsewhere(self, thread: threading.Thread | None = None) -> bool:
        """Return whether the work of a thread, by default this one, does not belong to the run.

        This is true while another thread trains and computes its own losses, or once the thread has trained something
        else.
        """
        stepping, thread = self._thread, thread or threading.current_thread()
        if stepping is None or stepping is thread or not stepping.is_alive():
            return False
        return self._computes or thread in self._others

    def fail(self, error: Exception) -> None:
        """End the run instead of the script, unless hooks may change what the script does."""
        if self.options.allow_changes and self.attached is not None:
            raise error
        tell(f"{'nothing is recorded' if self.attached is None else 'the record ends here'}: {error}")
        self._problem = ""
        self.ignore()
        if self.attached is not None:
            self._kept_hooks.callback(self.attached.keep_torch_hooks())
        self.end(error)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def _meet(self, optimizer: torch.optim.Optimizer, has_loss: bool) -> None:
        """Take an optimizer into the run, or begin another run with what it trains.

        A script may create any number of optimizers, so Hookline looks for what they train at the 1st, 2nd, 4th, 8th, …
        step. After a training of some length the count restarts, as often as a search for hyperparameters may need.
        """
        from hookline.hosts.search import find_training, owned_by

        attached, owned = self.attached, owned_by(optimizer)
        if attached is not None and any(id(param) in owned for param in attached.run.model.parameters()):
            attached.add_optimizer(optimizer, joint=not has_loss)
            return
        if attached is not None:
            attached.run.forget_losses()
        self._unknown += 1
        if self._unknown & (self._unknown - 1):
            return
        if attached is not None:
            self._former.update(attached.run.optimizers)
        training = find_training(optimizer, self._former)
        if training is not None:
            self.end()
            if attached is not None and attached.run.optimizer_steps >= LONG_TRAINING:
                self._long_trainings += 1
                self._unknown *= self._long_trainings > MOST_LONG_TRAININGS
            self._begin(training, optimizer)
        elif attached is None:
            self._problem = f"no torch.nn.Module has the parameters of the optimizer ({type(optimizer).__name__})"

    def _begin(self, training: Any, optimizer: torch.optim.Optimizer) -> None:
        """Begin a run, unless this is a rank other than 0."""
        from hookline.hosts.watched import Watched
        from hookline.ranks import own_rank

        ranks = own_rank()
        self._problem = ""
        if ranks.rank:
            self.ignore()
            return
        attached = Watched(training, optimizer, self.options, self._prints, self.fail, self._is_elsewhere)
        attached.begin()
        self.attached = attached
        if self._owns_process and not hasattr(sys.exit, "__wrapped__"):
            self._watch_end(ranks.world_size)

    def end(self, error: BaseException | None = None, signal_name: str | None = None) -> None:
        """End the run that is in progress."""
        attached, self.attached = self.attached, None
        if attached is not None:
            try:
                with keep_shown_warnings():
                    attached.end(error, signal_name)
            except Exception as failure:
                tell(f"while the run was ending: {failure}")

    def end_cell(self, error: BaseException | None) -> None:
        """End the run of a notebook's cell; at the next cell's first step, Hookline looks for what it trains."""
        self.end(error)
        self._kept_hooks.close()
        self._unknown, self._has_stopped = 0, False

    # ---- the process -------------------------------------------------------------------------------------------------

    def _watch_end(self, world_size: int) -> None:
        """Learn how the process ends: only `sys.exit` knows its code, and nothing runs after SIGTERM."""
        sys.exit = wrapped(sys.exit, self._note_exit)
        alone = world_size == 1 and threading.current_thread() is threading.main_thread()
        # With other ranks, the signal must end a process even while it waits for them in a collective.
        if alone and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._end_on_signal)

    def _note_exit(self, code: Any = None) -> None:
        if threading.current_thread() is threading.main_thread():
            self._exit_code = code

    def _end_on_signal(self, number: int, frame: Any) -> None:
        """Close the record, and end as the process would have ended; a lock that it holds must not prevent that."""
        closing = threading.Thread(target=self.end, kwargs={"signal_name": "SIGTERM"}, daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def end_process(self) -> None:
        """End the run as the process ends; say why there is none if a script trained without an optimizer."""
        error = getattr(sys, "last_value", None)  # what main ended with
        if error is None and self._exit_code not in (None, 0):
            error = SystemExit(self._exit_code)
        self.end(error)
        if self._problem and self._had_loss:
            hidden = " outside of compiled code" if self._problem == NO_STEP and has_compiled() else ""
            tell(f"nothing was recorded: {self._problem}{hidden}")
        if isinstance(error, KeyboardInterrupt):
            # Python ends with SIGINT if the last string or script that it has run ended with Ctrl-C. Closing the record
            # may have run another string, for example to define a named tuple.
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def _leave(self) -> None:
        """Do nothing in a process that was forked from this one, such as the worker of a loader."""
        attached, self.attached, self._problem = self.attached, None, ""
        self.stop()
        if attached is not None:
            attached.leave()
        with suppress(ValueError):  # not in a thread
            if signal.getsignal(signal.SIGTERM) == self._end_on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def keep_shown_warnings() -> Iterator[None]:
    """Let Python remember which warnings it has shown, even though the block changes warning filters.

    Python shows a warning once per place, but forgets this whenever a filter changes, which `subprocess` and pydantic
    do.
    """
    forget = getattr(warnings, "_filters_mutated", None)
    if forget is None:  # another Python
        yield
        return
    vars(warnings)["_filters_mutated"] = lambda: None
    try:
        yield
    finally:
        vars(warnings)["_filters_mutated"] = forget


def tell(text: str) -> None:
    """Print a line for the user, who may have sent the script's output to a file."""
    print_line(f"hookline: {text}", sys.stderr)
