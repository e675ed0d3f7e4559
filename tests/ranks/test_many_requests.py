"""Whatever ranks request, and whenever: all of them carry out the same requests at the same step."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from hookline.run.progress import Progress
from hookline.run.status import RunStatus, Stop
from hookline.testing.ranks import Board, ThreadRanks, run_on_threads
from hookline.trainer import agreement
from hookline.trainer.agreement import RankAgreement

RANKS, SCHEDULES, STEPS = 8, 1000, 6


class Hooks:
    """No hooks, and nothing that changes."""

    def on_change(self, subscriber: Any) -> None: ...

    def calling_hook(self) -> None:
        return None

    def entries(self) -> list[Any]:
        return []

    def __contains__(self, name: object) -> bool:
        return False


def make_run(ranks: ThreadRanks) -> Any:
    """Return as much of a trainer as an agreement uses."""
    run = SimpleNamespace(ranks=ranks, hooks=Hooks(), progress=Progress(), run_status=RunStatus(), saved=[], noted=[])
    run.save_at_boundary = run.saved.append
    run.note = lambda kind, **fields: run.noted.append(kind)
    run.end_on_signal = lambda name, rank: run.run_status.stops.append(Stop(name, "signal", rank))
    run.engine = SimpleNamespace(averages=True, first_with_batch=lambda rank: rank)
    run.step_log = SimpleNamespace(write_rows=lambda: None)
    run.record = SimpleNamespace(prepare=lambda: 1, exchange=lambda names_agree: None)
    run.agreement = RankAgreement(run)
    return run


def request(agreement: RankAgreement, kind: str, rank: int) -> None:
    """Request something on one rank."""
    if kind == "stop":
        agreement.request_stop(Stop(f"of {rank}", None, rank))
    elif kind == "save":
        agreement.request_save(f"save-{rank}")
    else:
        agreement.request_end("SIGTERM")


def do_schedules(ranks: ThreadRanks) -> list[Any]:
    """Run many short runs; in each, a few ranks request something at random steps and places."""
    ends = []
    for schedule in range(SCHEDULES):
        choose = random.Random(schedule)
        requests = [
            (choose.randrange(RANKS), choose.randrange(STEPS + 1), choose.choice(["stop", "save", "signal"]))
            for _ in range(choose.randrange(4))
        ]
        run, step, carried_out = make_run(ranks), 0, []
        while step < STEPS and not run.run_status.stops:
            for rank, at, kind in requests:
                if (rank, at) == (ranks.rank, step):
                    request(run.agreement, kind, ranks.rank)
            if choose.random() < 0.2:
                run.agreement.settle()
            step += 1
            run.agreement.after_step(step)
            carried_out.append((step, [tuple(one) for one in run.run_status.stops], list(run.saved)))
        run.agreement.settle()
        names = {"stop": "of {}", "save": "save-{}", "signal": "SIGTERM"}
        requested = {names[kind].format(rank) for rank, at, kind in requests if at < step}
        lost = requested - {stop.reason for stop in run.run_status.stops} - set(run.saved)
        ends.append([step, carried_out, [tuple(one) for one in run.run_status.stops], run.saved, lost])
    return ends


@pytest.mark.parametrize("most_steps", [1, 4])
def test_a_thousand_schedules_of_requests_end_alike_on_eight_ranks(most_steps: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(agreement, "MOST_STEPS", most_steps)
    first, *others = run_on_threads(do_schedules, RANKS)
    assert all(one == first for one in others)
    assert any(stops for _, _, stops, _, _ in first)
    assert any(len(saved) > 1 for _, _, _, saved, _ in first)
    assert any(stops[0][2] == 5 for _, _, stops, _, _ in first if stops)  # a rank other than 0 was the first
    assert not any(lost for *_, lost in first)


def test_a_save_after_a_failure_is_not_requested(caplog: pytest.LogCaptureFixture) -> None:
    """The ranks may be at different steps, and a checkpoint would mix them."""
    run = make_run(ThreadRanks(0, Board(1)))
    run.run_status.status = "error"
    assert run.agreement.request_save("late") is False
    run.agreement.settle()
    assert run.saved == [] and "nothing is saved after a failure" in caplog.text
