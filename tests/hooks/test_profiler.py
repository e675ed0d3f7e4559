"""The profiler traces windows of steps into the run's directory, and nothing else."""

import gzip
import json
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import make_batches, make_trainer

from hookline import Profiler, SimpleTrainer
from hookline.errors import ConfigError


def train(profiler: Profiler, steps: int = 8, every: int | str | None = None, **options: Any) -> SimpleTrainer:
    """Train a short run on disk with the profiler."""
    trainer = make_trainer(data=make_batches(steps), **{"record": True, **options})
    trainer.add_hook(profiler, every=every)
    trainer.train()
    return trainer


def names_in(path: Path) -> list[str]:
    """The names of what a trace has."""
    with gzip.open(path, "rt") as file:
        return [str(event.get("name")) for event in json.load(file)["traceEvents"]]


def test_it_traces_the_steps_of_the_window() -> None:
    """Three steps, after one of warm-up: two forward linears each; the record says where the trace is."""
    trainer = train(profiler := Profiler(first_step=4, steps=3))
    assert profiler.traces == [trainer.run_dir / "traces" / "step-00000004.json.gz"]
    assert names_in(profiler.traces[0]).count("aten::linear") == 6
    events = (trainer.run_dir / "events.jsonl").read_text()
    assert '"kind":"trace_written","step":6,"by":"profiler"' in events


def test_each_window_has_a_trace() -> None:
    """Each has its own file; one that begins with the run has no warm-up."""
    train(profiler := Profiler(first_step=[1, 6], steps=2))
    assert [path.name for path in profiler.traces] == ["step-00000001.json.gz", "step-00000006.json.gz"]
    assert [names_in(path).count("aten::linear") for path in profiler.traces] == [4, 4]


def test_outside_of_its_windows_it_is_not_called() -> None:
    """Its schedule has exactly the steps of its windows and their warm-up."""
    assert str(Profiler(first_step=10, steps=2, warmup=1).schedule) == "at 9 steps, 10 steps, 11 steps"


def test_a_run_that_ends_in_the_window_still_writes() -> None:
    """What was traced up to the end, or up to a failure, is written."""
    train(profiler := Profiler(first_step=7, steps=5, warmup=0))
    assert names_in(profiler.traces[0]).count("aten::linear") == 4

    def fail(step: int) -> None:
        if step == 3:
            raise ValueError("bad")

    trainer = make_trainer(record=True)
    trainer.on("after_backward", name="fail", on_error="raise")(fail)
    trainer.add_hook(profiler := Profiler(first_step=2, warmup=0))
    with pytest.raises(ValueError, match="bad"):
        trainer.train()
    assert len(profiler.traces) == 1


def test_a_run_that_ends_in_the_warm_up_writes_nothing() -> None:
    """Only the steps after it are traced."""
    trainer = train(profiler := Profiler(first_step=9, warmup=2), steps=8)
    assert profiler.traces == [] and not (trainer.run_dir / "traces").exists()


BLOCKS = "torch 2.11 cannot start a profile after one that was prepared and failed to start"
STARTS = pytest.param("start_trace", marks=pytest.mark.skipif(torch.__version__ < "2.13", reason=BLOCKS))


@pytest.mark.parametrize("moment", ["prepare_trace", STARTS])
@pytest.mark.hooks_fail(raises=RuntimeError)
def test_a_profile_that_cannot_start_is_dropped(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Using one that is half started would end the process; the next trace works."""
    works = getattr(torch.profiler.profile, moment)

    def fails_once(profile: Any) -> None:
        monkeypatch.setattr(torch.profiler.profile, moment, works)
        raise RuntimeError("no counters to be had")

    monkeypatch.setattr(torch.profiler.profile, moment, fails_once)
    trainer = train(profiler := Profiler(first_step=[2, 6], steps=2))
    assert trainer.step == 8
    assert [path.name for path in profiler.traces][-1] == "step-00000006.json.gz"
    assert names_in(profiler.traces[-1]).count("aten::linear") == 4
    assert "no counters to be had" in (trainer.run_dir / "events.jsonl").read_text()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_another_schedule_traces_single_steps(accumulate: int) -> None:
    """Registered with every=4, each due step is a trace, whatever `first_step` says."""
    train(profiler := Profiler(first_step=4), steps=9 * accumulate, every=4, accumulate=accumulate)
    assert [path.name for path in profiler.traces] == ["step-00000004.json.gz", "step-00000008.json.gz"]
    assert [names_in(path).count("aten::linear") for path in profiler.traces] == [2 * accumulate] * 2


def test_a_schedule_of_batches_traces_micro_batches() -> None:
    """The end of the step may not be due, so the trace ends with the micro-batch."""
    train(profiler := Profiler(), every="3 batches", accumulate=2)
    assert [names_in(path).count("aten::linear") for path in profiler.traces] == [2, 2]


def test_adjacent_windows_are_two_traces() -> None:
    """The second has no step left to warm up on; windows that overlap are refused."""
    train(profiler := Profiler(first_step=[5, 2], steps=3), steps=10)
    assert [path.name for path in profiler.traces] == ["step-00000002.json.gz", "step-00000005.json.gz"]
    assert [names_in(path).count("aten::linear") for path in profiler.traces] == [6, 6]
    with pytest.raises(ConfigError, match="the trace of step 2 lasts until step 4, so none can start at 4"):
        Profiler(first_step=[2, 4], steps=3)


def test_without_a_record_it_needs_a_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that keeps nothing on disk says so once, unless a directory is given."""
    train(silent := Profiler(first_step=[2, 5], steps=1), record=False)
    assert silent.traces == [] and caplog.text.count("'profiler': writes nothing") == 1
    train(profiler := Profiler(first_step=2, steps=1, directory=str(tmp_path / "there")), record=False)
    assert profiler.traces == [tmp_path / "there" / "step-00000002.json.gz"] and profiler.traces[0].exists()


def test_invalid_options_are_rejected() -> None:
    """Steps count from 1."""
    with pytest.raises(ConfigError, match="first_step: expected an integer of at least 1, or a list of these, got 0"):
        Profiler(first_step=0)
    with pytest.raises(ConfigError, match=r"first_step: expected .*, or a list of these, got 10\.0"):
        Profiler(first_step=10.0)
    with pytest.raises(ConfigError, match="with_stack: expected true or false"):
        Profiler(with_stack="no")


def test_one_profiler_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    """Two would end the process; the later one leaves out what the earlier one traces, and says so."""
    first, second = Profiler(first_step=3, steps=3), Profiler(first_step=4, steps=2)
    trainer = make_trainer(data=make_batches(8), record=True)
    trainer.add_hook(first, "first")
    trainer.add_hook(second, "second")
    trainer.train()
    assert (len(first.traces), len(second.traces)) == (1, 0)
    assert "hook 'second': step 4 is not traced, because another profiler is active" in caplog.text


def test_a_users_profile_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The user's own profile would be empty otherwise."""
    with torch.profiler.profile() as own:
        train(hook := Profiler(first_step=2, steps=2))
    assert own.key_averages() and not hook.traces and "another profiler is active" in caplog.text


def test_an_empty_list_of_steps_is_rejected() -> None:
    """At least one step is needed."""
    with pytest.raises(ConfigError, match="first_step: expected a step or a list of steps, got an empty list"):
        Profiler(first_step=[])


def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    """Neither a trace nor a log, even to explicit paths."""
    profiler = Profiler(first_step=1, steps=1, directory=str(tmp_path / "traces"))
    train(profiler, fast_dev_run=2, hooks={"lifecycle": [{"name": "json_log", "path": str(tmp_path / "log.jsonl")}]})
    assert not list(tmp_path.iterdir())


def test_only_steps_that_are_lost_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A trace without warm-up is still made; one that is never reached is warned of."""
    first, second = Profiler(first_step=2, steps=2), Profiler(first_step=4, steps=2)
    first.name, second.name = "first", "second"
    builders.train(first, second, Profiler(first_step=50), data=make_batches(6), record=True)
    assert (len(first.traces), len(second.traces)) == (1, 1)
    assert caplog.messages == ["hook 'profiler': nothing was traced: the run ended at step 6, before first_step=50"]
    caplog.clear()
    train(Profiler(), every=1000)
    train(Profiler(first_step=99), fast_dev_run=2)
    assert caplog.messages == []
