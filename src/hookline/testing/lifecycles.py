"""`lifecycles`: short runs, each with one thing that happens in real runs, to drive a hook through them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hookline.core.catalog import CATALOG
from hookline.core.failures import Incident
from hookline.errors import error_text
from hookline.run.rng import preserve_rng
from hookline.testing.ranks import run_on_threads
from hookline.testing.runs import Killed, SyntheticTrainer

AT_STEP = 4
"""The step in which something happens: in the first epoch, when hooks already have some history."""
INTERRUPTED = [event for event in CATALOG if event not in ("on_exception", "on_checkpoint_load")]
"""The events at which something happens: all but those that follow it."""
REMEDIES = {
    "on_exception": "a run may fail anywhere, even before its first loss, so read only what exists",
    "on_train_end": "a run may end anywhere, even before its first step, so read only what exists",
    "state_dict": "return numbers, strings, tensors, and lists and dicts of these",
    "load_state_dict": "accept what state_dict returned in another process",
    "close": "it must also work after a run that failed",
}

UNHANDLED = "handle it in the hook, or raise only what is to end the run"
FORGOTTEN = "a hook that resumes has only what it `saves`, so list there what it needs, or handle it in the hook"


class Interruption(Exception):
    """Raised in a lifecycle by something other than the hook under test."""


@dataclass(frozen=True)
class Lifecycle:
    """A run of two epochs of five batches, with validations and checkpoints, in which something happens."""

    name: str
    accumulate: int = 1
    """Micro-batches of a step."""
    skips: bool = False
    """Whether a step is skipped."""
    raises_at: str = ""
    """The event at which something else raises an exception, after the hook was called."""
    resumes_at: str = ""
    """The event at which the process is killed; another hook gets the state saved last, and continues in a new run."""
    ranks: int = 1
    """Ranks of the run: threads, each with its own model and hook."""

    def __str__(self) -> str:
        return self.name

    def run(self, hook: Any, *, output_dir: Path | None = None, **options: Any) -> SyntheticTrainer:
        """Drive a hook through this lifecycle.

        Args:
            hook: The hook, a class, a registered name, or a function that makes a hook. If several are needed, the
                others are copies: the hook itself runs on rank 0, and in the resumed run.
            output_dir: The run's directory; without it, everything stays in memory.
            **options: Options of `add_hook`, such as `every`, or the parameters of a class.

        Returns:
            The run, as hooks see it: `run.hook` is the hook, and `run.record.metrics` has what was logged. After a
            resume it is the second run.

        Raises:
            AssertionError: If the hook fails; the message names the event and the step.
        """
        with preserve_rng():
            if self.ranks > 1:
                hooks = hooks_of(hook, self.ranks)[::-1]
                runs = run_on_threads(lambda ranks: self._run(hooks[ranks.rank], options, ranks=ranks), self.ranks)
                return cast(SyntheticTrainer, runs[0])
            if not self.resumes_at:
                return self._run(hooks_of(hook, 1)[0], options, output_dir=output_dir)
            return self.run_twice(hook, output_dir=output_dir, **options)[1]

    def run_twice(self, hook: Any, *, output_dir: Path | None = None, **options: Any) -> tuple[SyntheticTrainer, ...]:
        """Return the run that is killed, and the one that resumes it."""
        first, second = hooks_of(hook, 2)
        killed = self._run(first, options, output_dir=output_dir)
        again = replace(self, resumes_at="", skips=self.skips or self.resumes_at == "on_step_skipped")
        return killed, again._run(second, options, output_dir=output_dir, checkpoint=killed.checkpoint)

    def _run(self, hook: Any, options: dict[str, Any], **settings: Any) -> SyntheticTrainer:
        after_step = SyntheticTrainer.take_checkpoint if self.resumes_at else lambda trainer: None
        run = SyntheticTrainer(accumulate=self.accumulate, after_step=after_step, **settings)
        run.add_tested(hook, options)
        event = self.raises_at or self.resumes_at
        if self.skips or event == "on_step_skipped":
            run.hooks.on("gradients_ready", name="skip", at=AT_STEP)(lambda trainer: trainer.skip_step("for a test"))
        if event == "on_gradient_clip":
            run.hooks.register("clip_norm", "clip", max_norm=1e9)
        if event:
            interrupt(run, event, Killed if self.resumes_at else Interruption)
        with self._judged(run, FORGOTTEN if settings.get("checkpoint") is not None else UNHANDLED):
            run.train()
        return run

    @contextmanager
    def _judged(self, run: SyntheticTrainer, remedy: str) -> Iterator[None]:
        """Raise AssertionError if a hook fails in the block, under any policy; end an interruption here."""
        incidents: list[Incident] = []
        run.hooks.failures.subscribe(incidents.append)
        raised: BaseException | None = None
        try:
            yield
        except Killed:
            pass
        except Exception as error:
            raised = error
        for incident in incidents:
            if incident.hook == run.tested and incident.kind in ("failed", "overruled"):
                remedy = REMEDIES.get(incident.event, remedy)
                rank = f" on rank {run.ranks.rank}" if self.ranks > 1 else ""
                where = f"{incident.event}, step {incident.step}{rank}, in the lifecycle {self.name!r}"
                raise AssertionError(
                    f"hook {run.tested!r}, {where}: {incident.message}. To fix this: {remedy}"
                ) from incident.error
        if raised is not None and not isinstance(raised, Interruption):
            raise raised


def interrupt(run: SyntheticTrainer, event: str, kind: type[BaseException]) -> None:
    """Raise an exception at an event, once all other hooks were called there."""

    def raises(step: int) -> None:
        if step >= AT_STEP or event == "on_train_start":
            raise kind(f"{event}, step {step}")

    def raises_in_chain(grads: Any, step: int) -> Any:
        raises(step)
        return grads

    function: Any = raises_in_chain if event == "on_update" else raises
    function.runs_last = True
    function.isolate_rng = False  # A hook that draws from training's streams is identified as soon as it is alone.
    run.hooks.register(function, "interruption", event=event, on_error="raise")


def maker_of(hook: Any) -> Callable[[], Any]:
    """Return a function that creates a fresh hook, or an object that can be registered as one."""
    if isinstance(hook, (type, str)):
        return lambda: hook
    if inspect.isfunction(hook) and not inspect.signature(hook).parameters:
        return hook
    try:
        unused = copy.deepcopy(hook)
    except Exception as error:
        kind = type(hook).__name__
        raise TypeError(f"{kind} cannot be copied ({error_text(error)}): pass lambda: {kind}(...)") from error
    return lambda: copy.deepcopy(unused)


def hooks_of(hook: Any, count: int) -> list[Any]:
    """Return as many hooks as are needed; a hook that is passed as an object is the last one."""
    if count == 1 and not inspect.isfunction(hook):
        return [hook]
    make = maker_of(hook)
    hooks = [make() for _ in range(count)]
    return hooks if make is hook else [*hooks[1:], hook]


def lifecycles() -> list[Lifecycle]:
    """Return every lifecycle that a hook has to survive, for a loop or for `pytest.mark.parametrize(..., ids=str)`.

    >>> for lifecycle in lifecycles():
    ...     lifecycle.run(MyHook())
    """
    return [
        Lifecycle("complete"),
        Lifecycle("accumulation", accumulate=2),
        Lifecycle("skipped_step", skips=True),
        Lifecycle("two_ranks", ranks=2),
        *(Lifecycle(f"exception_at_{event}", raises_at=event) for event in INTERRUPTED),
        *(Lifecycle(f"resume_at_{event}", resumes_at=event) for event in INTERRUPTED),
    ]
