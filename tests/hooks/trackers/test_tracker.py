"""Training neither waits for a tracker nor fails with it, and the record says what a tracker lost."""

import copy
import json
import random
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_config import PARTS
from tracked_runs import make_trainer

from hookline import HooklineError, RunConfig, Tracker, load_config, trainer_from_config
from hookline.cli import main
from hookline.errors import ConfigError
from hookline.hooks.queue import BackgroundQueue
from hookline.record import read_events, read_jsonl


class ListTracker(Tracker):
    """A tracker that keeps what it gets; it may wait for an event, or fail."""

    package = "json"

    def __init__(self, gate: threading.Event | None = None, fails_at: str = "", **options: Any) -> None:
        super().__init__(**{"timeout": 600.0, **options})
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self.entered = threading.Event()
        self._gate, self._fails_at = gate, fails_at

    def note_call(self, kind: str, content: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        if self._gate is not None:
            self._gate.wait()
        self.calls.append((kind, content))
        if kind == self._fails_at:
            raise ConnectionError("no route to https://me:hunter2hunter2@host/x")

    def open(self, run: Any) -> None:
        self.note_call("open", run)

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        self.note_call("metrics", rows)

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.note_call("scalars", (step, values))

    def write_histogram(self, step: int, histogram: Any) -> None:
        self.note_call("histogram", (step, histogram))

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        self.note_call("events", rows)

    def finish(self, run: Mapping[str, Any]) -> None:
        self.note_call("finish", run)

    def of(self, kind: str) -> list[Any]:
        return [content for called, content in self.calls if called == kind]


class TableTracker(ListTracker):
    """One that gets tables, too."""

    def write_media(self, rows: Sequence[Any]) -> None:
        self.note_call("media", rows)


def kinds_of(trainer: Any) -> list[str]:
    return [event["kind"] for event in read_jsonl(trainer.run_dir / "events.jsonl")[0]]


def test_a_tracker_gets_every_row_and_the_outcome_in_its_thread() -> None:
    """The rows are those of the files, those that come while the run ends included; no thread is left."""
    trainer = make_trainer(tracker := ListTracker())
    trainer.train()
    rows = [row for batch in tracker.of("metrics") for row in batch]
    assert rows == read_jsonl(trainer.run_dir / "metrics.jsonl")[0] and rows[-1]["step"] == 8
    assert tracker.of("finish")[0]["outcome"] == "completed" and tracker.calls[-1][0] == "finish"
    (run,) = tracker.of("open")
    assert (run.run_id, run.directory, run.resumed_at) == (trainer.run_id, trainer.run_dir, None)
    assert tracker.threads == {"hookline-tracker"}
    assert "hookline-tracker" not in [thread.name for thread in threading.enumerate()]


def test_a_failed_run_is_finished_with_its_outcome() -> None:
    """The exception is among the events, although it is recorded after the hooks were closed."""
    trainer = make_trainer(tracker := ListTracker())
    trainer.on("step_end", at=3, name="boom", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert tracker.of("finish")[0]["outcome"] == "failed"
    assert "exception" in [row["kind"] for rows in tracker.of("events") for row in rows]


def test_a_hanging_tracker_neither_delays_nor_stops_training(caplog: pytest.LogCaptureFixture) -> None:
    """All steps are done while it hangs; the end waits for the given time, then it is abandoned, with an event."""
    gate = threading.Event()
    trainer = make_trainer(tracker := ListTracker(gate, timeout=0.05))
    trainer.train()
    assert trainer.step == 8 and trainer.record.run["outcome"] == "completed" and tracker.calls == []
    assert kinds_of(trainer) == ["tracker_abandoned"]
    assert len([line for line in caplog.messages if "was abandoned" in line]) == 1
    gate.set()


def test_ctrl_c_during_the_wait_abandons_the_tracker_with_an_event(caplog: pytest.LogCaptureFixture) -> None:
    """The first one ends training; what the second one leaves unsent is in the record, and in one warning."""
    gate = threading.Event()

    class Interrupted(ListTracker):
        def finish(self, run: Mapping[str, Any]) -> None:
            pause = 0.2  # seconds; a signal that comes before the main thread waits may not wake it
            while not gate.wait(pause):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                pause = 10.0

    trainer = make_trainer(Interrupted())
    trainer.on("step_end", at=3, name="first")(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    gate.set()
    assert trainer.record.run["outcome"] == "interrupted" and kinds_of(trainer)[-1] == "tracker_abandoned"
    assert len([line for line in caplog.messages if "was abandoned" in line]) == 1


def test_numbers_are_not_walked_on_the_thread_that_trains() -> None:
    """A row of metrics counts by its length, and a tracker that has failed gets nothing that could be measured."""

    class Row(dict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("walked")

    gate, rows = threading.Event(), list[Any]()

    def work(queue: BackgroundQueue) -> None:
        gate.wait()
        rows.extend(queue.take())

    tracker, queue = ListTracker(), BackgroundQueue(work, 10**6, on_error=pytest.fail, name="test")
    tracker._put(queue, "metrics", [Row(a=1.0, b=2.0)])
    gate.set()
    queue.close(60)
    tracker._put(queue, "events", [Row(a="text")])
    assert [(kind, list(map(len, batch))) for kind, batch in rows] == [("metrics", [2])]


@pytest.mark.filterwarnings("error")
def test_an_abandoned_tracker_that_fails_later_is_not_reported_again(caplog: pytest.LogCaptureFixture) -> None:
    """The record is closed by then; nothing is lost that was not reported."""
    gate, before = threading.Event(), set(threading.enumerate())
    trainer = make_trainer(tracker := ListTracker(gate, fails_at="open", timeout=0.05))
    trainer.train()
    (thread,) = (new for new in set(threading.enumerate()) - before if new.name == "hookline-tracker")
    gate.set()
    thread.join()
    assert tracker.calls[-1][0] == "open" and kinds_of(trainer) == ["tracker_abandoned"]
    assert len(caplog.records) == 1 and "was abandoned" in caplog.text and trainer.record.lost == 0


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """One warning and one event at the end have the number of rows; the others arrive in order."""
    gate = threading.Event()
    trainer = make_trainer(tracker := ListTracker(gate, queue_mb=0.0))

    @trainer.on("step_end", name="flush")
    def flush(step: int) -> None:
        tracker.entered.wait()  # it is in `open`, so that one batch waits and the others are dropped
        trainer.log("mine", step)
        trainer.record.flush()

    trainer.on("train_end", name="go_on")(gate.set)
    trainer.train()
    (event,) = read_events(trainer.run_dir)
    rows = read_jsonl(trainer.run_dir / "metrics.jsonl")[0]
    received = [row for batch in tracker.of("metrics") for row in batch]
    assert event["kind"] == "tracker_dropped_rows" and event["rows"] == len(rows) - len(received) > 0
    assert received[0] == rows[0] and [row["step"] for row in received] == sorted(row["step"] for row in received)
    assert len([line for line in caplog.messages if "dropped" in line]) == 1


@pytest.mark.parametrize("nested", [False, True])
def test_the_limit_of_the_queue_counts_texts(nested: bool) -> None:
    """Of eight events of 0.1 MB each, those that wait have at most 0.3 MB together."""
    gate = threading.Event()
    trainer = make_trainer(tracker := ListTracker(gate, queue_mb=0.3))

    @trainer.on("step_end", name="writes")
    def write(step: int) -> None:
        tracker.entered.wait()  # it is in `open`, so that everything waits
        text = "y" * 99_000 + str(step)
        trainer.record.event("large", step, text=[{"text": text}] if nested else text)
        trainer.record.flush()

    trainer.on("train_end", name="open_gate")(gate.set)
    trainer.train()
    steps = [row["step"] for rows in tracker.of("events") for row in rows if row["kind"] == "large"]
    assert steps[:2] == [1, 2] and len(steps) <= 3


def test_the_limit_of_the_queue_counts_the_texts_of_tables() -> None:
    """A table of long texts is not counted as one of numbers."""
    gate = threading.Event()
    trainer = make_trainer(tracker := TableTracker(gate, queue_mb=0.3))

    @trainer.on("step_end", name="writes")
    def write(step: int) -> None:
        tracker.entered.wait()
        trainer.log_table("texts", ["text"], [["y" * 900] for _ in range(90)])
        trainer.record.flush()

    trainer.on("train_end", name="open_gate")(gate.set)
    trainer.train()
    assert [row.step for rows in tracker.of("media") for row in rows][:2] == [1, 2]
    assert len(tracker.of("media")) <= 3


@pytest.mark.parametrize("place", ["open", "metrics", "finish"])
def test_a_failing_tracker_is_reported_once_and_switched_off(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Training is the same, and neither the log nor the record shows the secret in the exception."""
    trainer = make_trainer(tracker := ListTracker(fails_at=place))
    trainer.on("step_end", name="flush")(lambda trainer: trainer.record.flush())
    trainer.train()
    assert trainer.record.run["outcome"] == "completed" and tracker.calls[-1][0] == place
    assert kinds_of(trainer) == ["tracker_failed"]
    assert len([line for line in caplog.messages if "was disabled" in line]) == 1
    assert "hunter2" not in caplog.text + (trainer.run_dir / "events.jsonl").read_text()


def test_importing_a_package_does_not_change_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some packages draw random numbers when they are imported; training continues from the state before."""
    (tmp_path / "drawing_package.py").write_text("import random\nrandom.random()\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Drawing(ListTracker):
        __module__, built_in = "hookline.own", True  # users' hooks are kept from the streams in any case
        package = "drawing_package"

    states = []
    for tracker in (ListTracker(), Drawing()):
        trainer = make_trainer(tracker, max_steps=1)
        random.seed(3)
        trainer.train()
        states.append(random.getstate())
    assert "drawing_package" in sys.modules and states[0] == states[1]


def test_a_missing_package_is_an_error_before_the_first_step() -> None:
    """One line says what to install; no step is made."""

    class Missing(Tracker):
        package, extra = "no_such_package_anywhere", "tensorboard"

    trainer = make_trainer(Missing())
    with pytest.raises(HooklineError, match=r"no_such_package_anywhere \(pip install 'hookline\[tensorboard\]'\)"):
        trainer.train()
    assert trainer.step == 0


@pytest.mark.hooks_fail(raises=TypeError)
def test_a_package_that_fails_on_import_switches_the_tracker_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a package does whose own dependencies do not fit together."""
    (tmp_path / "broken_package.py").write_text("raise TypeError('descriptors cannot be created directly')")
    monkeypatch.syspath_prepend(tmp_path)
    tracker = ListTracker()
    tracker.package = "broken_package"
    assert make_trainer(tracker).train()["status"] == "completed"
    assert "descriptors cannot be created directly" in caplog.text
    assert tracker.calls == []


def test_a_tracker_needs_no_package() -> None:
    tracker = ListTracker()
    tracker.package = ""
    make_trainer(tracker).train()
    assert tracker.of("finish")


def test_the_command_names_the_missing_package_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hookline train` leaves no run; what does not track does not need the package."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    arguments = ["train", "trainer.max_steps=2", "trackers=[mlflow]", "trainer.console=false"]
    assert main(arguments) == 2 and not Path("runs").exists()
    assert "pip install 'hookline[mlflow]'" in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert main(["explain", "trackers=[mlflow]"]) == 0
    assert main([*arguments, "trackers.mlflow.enabled=false"]) == 0
    assert main([*arguments, "--fast-dev-run", "1"]) == 0


def test_a_trial_run_is_not_tracked() -> None:
    """`fast_dev_run` writes nothing anywhere."""
    tracker = ListTracker()
    make_trainer(tracker, fast_dev_run=2).train()
    assert tracker.calls == []


def test_removing_a_tracker_during_the_run_finishes_it() -> None:
    """It gets no later row, and does not stay behind as a thread."""
    tracker = ListTracker()
    trainer = make_trainer()
    trainer.add_hook(tracker, name="mine")

    @trainer.on("step_end", at=4, name="remove")
    def remove() -> None:
        trainer.log("mine", 1.0)
        trainer.record.flush()
        trainer.remove_hook("mine")

    trainer.train()
    assert tracker.calls[-1][0] == "finish" and tracker.of("finish")[0]["outcome"] is None
    assert max(row["step"] for rows in tracker.of("metrics") for row in rows) <= 4


def test_each_run_of_a_trainer_is_tracked_by_itself() -> None:
    """The second run has its own id, and its rows arrive once."""
    trainer = make_trainer(tracker := ListTracker())
    trainer.train()
    trainer.fit(max_epochs=3)
    first, second = tracker.of("open")
    assert first.run_id != second.run_id and len(tracker.of("finish")) == 2
    losses = [row["step"] for rows in tracker.of("metrics") for row in rows if "train/loss" in row]
    assert losses == list(range(1, 13))


def test_a_tracker_can_be_copied_before_and_after_a_run() -> None:
    """A copy has the parameters and nothing of the run."""
    trainer = make_trainer(tracker := ListTracker(timeout=3.0))
    trainer.train()
    tracker.entered = tracker._gate = None  # of the test; they cannot be copied
    assert copy.deepcopy(tracker).timeout == 3.0


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", {"scalars", "histogram"}), ("histograms", {"histogram"})],
    ids=["all", "histograms"],
)
def test_which_statistics_are_sent_is_a_parameter(layers: str, expected: set[str]) -> None:
    """Numbers have the names series/layer/column and their step."""
    tracker, none = ListTracker(layers=layers), ListTracker(layers="none")
    trainer = make_trainer(tracker, none)
    trainer.add_hook("gradient_monitor", every=4, log_histogram=True, bins_per_octave=2)
    trainer.train()
    assert {kind for kind, _ in tracker.calls} & {"scalars", "histogram"} == expected
    assert not none.of("scalars") + none.of("histogram")
    assert {step for step, _ in tracker.of("histogram")} == {4, 8}
    if layers == "all":
        assert "gradients/0.weight/norm" in tracker.of("scalars")[0][1]


@pytest.mark.parametrize("bins_per_octave", [1, 2, 4, 8])
def test_histograms_have_edges_around_the_values(bins_per_octave: int) -> None:
    """Counting the gradients between the edges gives the same counts, whatever the resolution."""
    tracker, seen = ListTracker(), []
    trainer = make_trainer(tracker, max_steps=1)
    trainer.add_hook("gradient_monitor", every=1, log_histogram=True, bins_per_octave=bins_per_octave)
    trainer.on("gradients_ready", name="see")(lambda grads: seen.append(grads["0.weight"].clone()))
    trainer.train()
    histogram = {sent.tag: sent for _, sent in tracker.of("histogram")}["gradient_histograms/0.weight"]
    counts, _ = torch.histogram(seen[0].flatten().double(), torch.from_numpy(histogram.edges))
    assert counts.tolist() == histogram.counts.tolist() and counts.sum() == seen[0].numel()
    assert histogram.counts[0] > 0 and histogram.counts[-1] > 0  # empty bins at the ends are left out


def test_activation_histograms_have_edges_too() -> None:
    """Those of outputs and those of gradients, which are two columns of one series."""
    trainer = make_trainer(tracker := ListTracker(), max_steps=1)
    trainer.add_hook("monitor", modules="0", metrics=["histogram"], gradients=True)
    trainer.train()
    sizes = {histogram.tag: histogram.counts.sum() for _, histogram in tracker.of("histogram")}
    assert set(sizes) and all(size == 8 for size in sizes.values())


def test_bins_of_unknown_meaning_have_their_numbers_as_edges() -> None:
    """A series that a user logs with bins is a histogram over 0, 1, 2, …."""
    trainer = make_trainer(tracker := ListTracker(), max_steps=1)
    counts = torch.tensor([[[0.0, 2.0, 0.0, 1.0]]])
    trainer.on("step_end", name="logs")(lambda trainer: trainer.log_layers("mine", ["a"], ["n"], counts))
    trainer.train()
    ((step, histogram),) = tracker.of("histogram")
    assert (step, histogram.tag, histogram.edges.tolist(), histogram.counts.tolist()) == (
        1, "mine/a", [1.0, 2.0, 3.0, 4.0], [2.0, 0.0, 1.0],
    )  # fmt: skip


@pytest.mark.hooks_fail(raises=HooklineError)
def test_the_config_is_sent_without_secrets_and_with_the_labels() -> None:
    """A tracker knows what the record's files contain, and nothing else."""
    trainer = make_trainer(tracker := ListTracker())
    trainer.add_hook("json_log", path="https://me:hunter2hunter2@host/x.jsonl", every=1)
    labels = {"version": 1, "name": "mine", "tags": ["a", "b"], "notes": "because"}

    @trainer.on("train_start", name="label", before="list_tracker")
    def label() -> None:
        (trainer.run_dir / "labels.json").write_text(json.dumps(labels))

    trainer.train()
    (run,) = tracker.of("open")
    assert (run.name, run.tags, run.notes) == ("mine", ("a", "b"), "because")
    assert "json_log" in str(run.config) and "hunter2" not in str(run)


# ---- the key `trackers` ----------------------------------------------------------------------------------------------


def config_with(**more: Any) -> dict[str, Any]:
    """Return the config of a very short run."""
    return {**yaml.safe_load(PARTS), "optimizer": {"name": "sgd", "lr": 0.01}, **more}


def test_a_config_lists_trackers_by_name_or_with_parameters() -> None:
    """They are lifecycle hooks, after those of `hooks.lifecycle`; the record's config has what was written."""
    trackers = ["tensorboard", {"name": "wandb", "project": "x", "mode": "offline", "as": "remote"}]
    trainer = trainer_from_config(config_with(trackers=trackers, hooks={"lifecycle": ["lr_monitor"]}))
    assert list(trainer.hooks) == ["lr_monitor", "tensorboard", "remote", "identity"]
    assert trainer.hooks.get("remote").project == "x" and trainer.hooks.entry("tensorboard").kinds == ["lifecycle"]
    assert trainer.describe()["trackers"] == trackers
    assert "trackers" not in trainer_from_config(config_with()).describe()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trackers.wandb.project=y", [{"name": "wandb", "project": "y"}]),
        ("hooks.wandb.project=y", [{"name": "wandb", "project": "y"}]),
        ("trackers.0.project=y", [{"name": "wandb", "project": "y"}]),
        ("trackers=[mlflow]", ["mlflow"]),
    ],
    ids=str,
)
def test_overrides_reach_trackers(override: str, expected: list[Any]) -> None:
    """By name, as for every hook, by place, or the whole list."""
    assert load_config(config_with(trackers=["wandb"]), [override])[0]["trackers"] == expected


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        (["tensorbord"], "trackers.0.name: .*tensorboard"),
        ([{"name": "wandb", "projekt": "x"}], "trackers.0: .*project"),
        ([{"name": "wandb", "mode": "of"}], "trackers.0: .*offline"),
        (["clip_norm"], "trackers.0: "),
        ("tensorboard", "trackers: expected a valid list"),
    ],
    ids=str,
)
def test_a_wrong_tracker_is_an_error_that_names_its_place(trackers: Any, message: str) -> None:
    """The path is the one that was written, and the nearest name is given."""
    with pytest.raises(HooklineError, match=message):
        trainer_from_config(config_with(trackers=trackers))


def test_an_override_of_a_missing_tracker_is_an_error() -> None:
    """The message has the nearest name."""
    with pytest.raises(ConfigError, match=r"trackers\.wandbb: no hook .* 'wandb'"):
        load_config(config_with(trackers=["wandb"]), ["trackers.wandbb.project=y"])


def test_explain_shows_trackers(capsys: pytest.CaptureFixture[str]) -> None:
    """They are hooks like any other, also for `hookline hooks`."""
    assert main(["explain", "trackers=[tensorboard]"]) == 0
    assert "tensorboard" in capsys.readouterr().out
    assert main(["hooks", "wandb"]) == 0
    assert "project" in capsys.readouterr().out


def test_verify_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that compare hooks are not runs to track."""
    Path("run.yaml").write_text(PARTS + "trackers: [tensorboard, {name: mlflow, tracking_uri: 'sqlite:///ml.db'}]\n")
    assert main(["verify", "run.yaml", "--steps", "2"]) == 0
    assert "tensorboard" in capsys.readouterr().out
    assert not list(Path().rglob("events.out*")) and not Path("ml.db").exists()


def test_the_schema_knows_trackers(capsys: pytest.CaptureFixture[str]) -> None:
    """An editor completes them as it completes hooks."""
    assert main(["schema"]) == 0
    assert "#/$defs/Hook" in json.dumps(json.loads(capsys.readouterr().out)["properties"]["trackers"])
    assert RunConfig(**config_with(trackers=["wandb"])).trackers == ["wandb"]


def test_every_sends_the_first_value_of_each_metric_in_so_many_steps() -> None:
    """Metrics that are measured less often, such as those of validations, are all sent."""
    trainer = make_trainer(tracker := ListTracker(every=4), validate_every=3, sanity_batches=0)
    trainer.train()
    rows = [row for batch in tracker.of("metrics") for row in batch]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 4, 8]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    last = ListTracker(every=100)
    make_trainer(last, validate_every=3, sanity_batches=0).train()
    rows = [row for batch in last.of("metrics") for row in batch]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]  # the first, and the result of the run
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 8] and rows[-1]["step"] == 8
    with pytest.raises(ConfigError, match="every"):
        ListTracker(every="2 epochs")


def test_rows_gather_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client takes milliseconds for a call, however few rows it has."""
    monkeypatch.setattr("hookline.hooks.trackers.base.PAUSE", 3600.0)
    written: list[list[int]] = []
    called = threading.Event()

    class Gathering(ListTracker):
        def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
            written.append([row["step"] for row in rows])
            called.set()

    tracker = Gathering()
    queue = BackgroundQueue(partial(tracker._work, None), 10**6, on_error=pytest.fail, name="test")
    tracker._put(queue, "metrics", [{"step": 1}])
    called.wait()
    for step in (2, 3, 4):
        called.clear()
        tracker._put(queue, "metrics", [{"step": step}])
        called.wait(0.05)
    queue.close(60)
    assert written == [[1], [2, 3, 4]]


@pytest.mark.parametrize("error", [ValueError("broken\x1b]0;title\x07"), TimeoutError("no answer"), SystemExit(3)])
def test_a_check_that_fails_for_no_fault_of_the_users_switches_the_tracker_off(
    error: BaseException, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a HooklineError, such as a missing login, ends the run; nothing that a terminal would obey is printed."""

    class Broken(ListTracker):
        def check(self, run: Any) -> None:
            raise error

    trainer = make_trainer(tracker := Broken(), console=True)
    trainer.train()
    assert trainer.record.run["outcome"] == "completed" and tracker.calls == []
    assert kinds_of(trainer) == ["tracker_failed"]
    verdict = capsys.readouterr().out
    assert type(error).__name__ in verdict and "\x1b" not in verdict and "\x07" not in verdict
    (line,) = [line for line in caplog.messages if "training continues" in line]
    assert type(error).__name__ in line and "\x1b" not in line and "\x07" not in line


def test_a_check_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training begins without the tracker."""
    gate = threading.Event()

    class Hanging(ListTracker):
        def check(self, run: Any) -> None:
            gate.wait()

    monkeypatch.setattr("hookline.hooks.trackers.base.MIN_START", 0.05)
    trainer = make_trainer(tracker := Hanging(timeout=0.05))
    trainer.train()
    gate.set()
    assert trainer.step == 8 and tracker.calls == [] and kinds_of(trainer) == ["tracker_abandoned"]


@pytest.mark.hooks_fail(raises=ValueError)
@pytest.mark.parametrize("method", ["close", "on_step_end", "on_train_end"])
def test_a_tracker_that_raises_in_a_method_of_its_hook_does_not_end_the_run(method: str) -> None:
    """The policy of trackers is to switch one off that fails."""

    def fail(self: Any) -> None:
        raise ValueError("broken")

    trainer = make_trainer(type("Broken", (ListTracker,), {method: fail})())
    trainer.train()
    assert trainer.step == 8 and trainer.record.run["outcome"] == "completed"
    assert "hook_failed" in kinds_of(trainer)
