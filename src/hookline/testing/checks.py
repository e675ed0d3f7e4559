"""Assertions for hooks: a good hook is harmless, resumes exactly, and stays within its budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from hookline.build import SimpleTrainer
from hookline.core.failures import RESERVED_KEYS
from hookline.errors import shown
from hookline.run.rng import preserve_rng
from hookline.testing.lifecycles import INTERRUPTED, Lifecycle, maker_of
from hookline.testing.runs import SyntheticTrainer
from hookline.trainer.trainer import Trainer
from hookline.verify import digest, judge, observe_run

HARMLESS = "leave it unchanged, or declare the change: intervenes = True"
REMEDIES = {
    "random streams": "remove isolate_rng = False, so that the hook has its own random streams",
    "parameters": "work on a copy, param.detach().clone(), and write nothing into parameters or buffers",
    "batch": "clone what you write into",
    "gradients": "clone what you write into, and return what you got from on_update",
    "activations": "clone what you write into, and remove the hooks that you put on modules",
    "train or eval mode": "run the model in `with trainer.inference() as model:`",
    "number of steps": "raise nothing and request no stop",
}
STEPS = 9  # The measured steps: all steps of a lifecycle except the first.
REPEATS = 15
"""Runs that are timed at most. Each step counts with its fastest time, so that load on the machine does not count."""


def small_trainer() -> Trainer:
    """Make a trainer for a model with dropout and batch norm, on eight batches; it writes nothing to disk.

    It trains 1,000 epochs, which takes seconds. For fewer, call ``fit(max_steps=…)``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        batches = [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(8)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return SimpleTrainer(
        model, batches, optimizer, "cpu",
        loss_fn=torch.nn.MSELoss(), max_epochs=1000, record=False, console=False, seed=0,
    )  # fmt: skip


def assert_harmless(
    hook: Any, make_trainer: Callable[[], Trainer] = small_trainer, steps: int = 16, **options: Any
) -> None:
    """Fail unless training is bit for bit the same with a hook as without it; a hook that raises fails, too.

    Args:
        hook: The hook, in any form that `Trainer.add_hook` accepts.
        make_trainer: Creates a new trainer that trains the same way every time.
        steps: The number of optimizer steps to compare.
        **options: Options of `add_hook`, such as `every`.

    Raises:
        AssertionError: If the hook changes training; the message says from which step, through what, and how to fix it.

    >>> assert_harmless(MyHook())
    """
    plain = observe_run(make_trainer(), None, steps)
    trainer = make_trainer()
    trainer.hooks.failures.debug = True  # an exception of the hook is an exception of the test
    name = str(trainer.add_hook(hook, **options))
    verdict = judge(name, False, plain, observe_run(trainer, name, steps))
    if not verdict.harmless:
        wrote = [row for row in trainer.record.events if row["kind"] == "hook_wrote"][:1]
        where = [f"it modified the {row['what']} in {row['on']}, step {row['step']}" for row in wrote]
        remedy = REMEDIES.get(verdict.through, HARMLESS)
        what = "; ".join([f"hook {name!r} {verdict}", *verdict.notes, *where])
        raise AssertionError(f"{what}. To fix this: {remedy}")


# ---- resuming --------------------------------------------------------------------------------------------------------

Facts = dict[str, tuple[int, Any, str]]
"""The results of a run: by description, the step, the value, and how a message shows it."""


def assert_resumable(hook: Any, *, ignore: Iterable[str] = (), **options: Any) -> None:
    """Fail unless a run that is killed and resumed, at any event, ends like an uninterrupted one.

    Metrics, statistics, tables, events, the final weights and the hook's public attributes are compared. Values that
    differ between any two runs, such as times, are ignored.

    Args:
        hook: The hook, a class, a registered name, or a function that makes a hook; a hook is copied.
        ignore: Names of metrics, events and attributes that may differ.
        **options: Options of `add_hook`, such as `every`, or the parameters of a class.

    Raises:
        AssertionError: If something differs; the message says what, where the run was killed, and what was not saved.

    >>> assert_resumable(MyHook())
    """
    make, ignored = maker_of(hook), {repr(name) for name in ignore}
    for skips in (False, True):  # Only a run that skips a step can be killed at on_step_skipped.
        whole, again = (facts(Lifecycle("complete", skips=skips).run(make(), **options)) for _ in range(2))
        unsteady = {key for key in whole.keys() | again.keys() if whole.get(key) != again.get(key)}
        unsteady |= {key for key in whole if not ignored.isdisjoint(key.split())}
        for event in (event for event in INTERRUPTED if skips == (event == "on_step_skipped")):
            with preserve_rng():
                killed, resumed = Lifecycle(f"resume_at_{event}", resumes_at=event).run_twice(make, **options)
            if difference := _difference(whole, killed, resumed, unsteady):
                raise AssertionError(
                    f"hook {resumed.tested!r} does not resume exactly. Killed at {event} in step {killed.step} and "
                    f"{difference}. {_not_saved(killed, make(), options)}To fix this: list what it depends on in "
                    "`saves`, or return it from state_dict and take it in load_state_dict"
                )


def _difference(whole: Facts, killed: SyntheticTrainer, resumed: SyntheticTrainer, unsteady: set[str]) -> str:
    """Return what differs between a run and one that was killed and resumed; empty if nothing does."""
    saved = killed.checkpoint.step if killed.checkpoint else 0
    joined = {key: fact for key, fact in facts(killed).items() if fact[0] <= saved} | facts(resumed)
    later = [key for key in joined if joined[key][0] > saved]  # resuming may be an event itself
    for key in dict.fromkeys([*whole, *later]):
        # If no step was left after a resume, none has set the attributes again.
        if key in unsteady or (key.startswith("attribute") and saved == resumed.step):
            continue
        if (want := whole.get(key)) != (got := joined.get(key)):
            values = [fact[2] if fact else "missing" for fact in (got, want)]
            return f"resumed after step {saved}, {key} is {values[0]} instead of {values[1]}"
    return ""


def facts(run: SyntheticTrainer) -> Facts:
    """Return what a run has recorded, and its weights and the hook under test at its end."""
    run.record.flush(wait=True)
    rows: list[tuple[str, int, Any]] = []
    for metrics in run.record.metrics:
        rows += [("metric", metrics["step"], item) for item in metrics.items() if item[0] not in RESERVED_KEYS]
    rows += [("statistics", row.step, (row.series, row.values)) for row in run.record.layer_rows]
    rows += [("table or image", row.step, (row.name, row.content)) for row in run.record.media]
    for event in (event for event in run.record.events if not event["kind"].startswith("hook")):
        fields = {key: value for key, value in event.items() if key not in ("time", "step", "kind")}
        rows.append(("event", event["step"], (event["kind"], fields)))
    results = {f"{kind} {name!r} at step {step}": (step, value) for kind, step, (name, value) in rows}
    end = run.total_steps or 0
    results["the model's final state"] = end, list(run.model.state_dict().values())
    public = {name: value for name, value in getattr(run.hook, "__dict__", {}).items() if not name.startswith("_")}
    results |= {f"attribute {name!r} at the end": (end, value) for name, value in public.items()}
    return {key: (step, digest(value), shown(value)) for key, (step, value) in results.items()}


def _not_saved(killed: SyntheticTrainer, unused: Any, options: dict[str, Any]) -> str:
    """Name the attributes of a hook that a run has changed, but that its state does not have under these names."""
    state = killed.hooks.entry(killed.tested).state()
    hooks = SyntheticTrainer().add_tested(unused, options), killed.hook
    before, now = (dict(getattr(hook, "__dict__", {})) for hook in hooks)
    changed = [name for name in now if name not in before or digest(now[name]) != digest(before[name])]
    lost = [name for name in changed if not isinstance(state, Mapping) or name.lstrip("_") not in map(str, state)]
    return f"It changed without saving: {', '.join(lost)}. " if lost else ""


# ---- costs -----------------------------------------------------------------------------------------------------------


def assert_within_budget(
    hook: Any, *, microseconds_per_step: float | None = None, calls_per_step: float | None = None, **options: Any
) -> None:
    """Fail if a hook costs more per step than its budget, including the arguments that it names.

    The first step, validations, and the start and the end of a run do not count.

    Load on the machine does not matter: each step counts with its fastest time over several runs, and the test passes
    as soon as these are within the budget. Calls are counted exactly.

    Args:
        hook: The hook, a class, a registered name, or a function that makes a hook; a hook is copied.
        microseconds_per_step: The budget in host time, on average over nine steps.
        calls_per_step: The budget in calls of functions, Python's and C's, that a step makes with the hook and not
            without it. The count depends on the versions of Python and of packages, but not on the machine.
        **options: Options of `add_hook`, such as `every`, or the parameters of a class.

    Raises:
        AssertionError: If the hook is above a budget; the message lists its costs by event.

    >>> assert_within_budget(MyHook(), microseconds_per_step=100)
    """
    if microseconds_per_step is None and calls_per_step is None:
        raise TypeError("pass a budget: microseconds_per_step=100, calls_per_step=50, or both")
    make = maker_of(hook)
    with preserve_rng():
        if calls_per_step is not None:
            with_hook, without = ([_costs(made, _counting_calls, options) for _ in range(3)] for made in (make, None))
            fewest = [sum(map(min, *(costs for _, costs in runs))) for runs in (with_hook, without)]
            _check(with_hook[0][0], (fewest[0] - fewest[1]) / STEPS, calls_per_step, "calls")
        if microseconds_per_step is not None:
            run, fastest = _costs(make, _timing, options)
            for _ in range(REPEATS):
                if sum(fastest) / STEPS / 1000 <= microseconds_per_step:
                    return
                run, times = _costs(make, _timing, options)
                fastest = list(map(min, fastest, times))
            _check(run, sum(fastest) / STEPS / 1000, microseconds_per_step, "µs")


def _costs(
    make: Callable[[], Any] | None, measuring: Any, options: dict[str, Any]
) -> tuple[SyntheticTrainer, list[int]]:
    """Return a run with a hook, or with none, and what each of its steps after the first one has cost."""
    marks: list[tuple[int, int]] = []
    run = SyntheticTrainer(after_step=lambda trainer: marks.append((trainer.step, read())))
    if make is not None:
        run.add_tested(make(), options)
    with measuring(run) as read:
        run.train()
    return run, [after - before for (last, before), (step, after) in pairwise(marks) if step > last]


@contextmanager
def _timing(run: SyntheticTrainer) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the nanoseconds that the hook and its arguments have taken."""
    arguments, entry = run.hooks.dispatch_table.argument_costs, run.hooks.entry(run.tested)
    yield lambda: sum(cost.ns for cost in (*entry.costs.values(), *arguments.values()))


@contextmanager
def _counting_calls(run: SyntheticTrainer) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many functions were called in the block."""
    calls, before = 0, sys.getprofile()

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(before)


def _check(run: SyntheticTrainer, cost: float, budget: float, unit: str) -> None:
    """Raise AssertionError if a cost is above its budget, with where the time of the run went."""
    if cost <= budget:
        return
    by_event = {event: each.ns for event, each in run.hooks.entry(run.tested).costs.items() if each.calls}
    arguments = run.hooks.dispatch_table.argument_costs
    by_argument = {f"reading {name}": each.ns for name, each in arguments.items() if each.calls}
    costs = sorted((by_event | by_argument).items(), key=lambda item: -item[1])[:3]
    most = ", ".join(f"{what} {ns / STEPS / 1000:,.0f} µs" for what, ns in costs)
    raise AssertionError(
        f"hook {run.tested!r} costs {cost:,.0f} {unit} a step, above its budget of {budget:,.0f} (most of it: "
        f"{most}). To fix this: do it less often (every=10), name fewer arguments, read no tensors, or raise the budget"
    )
