"""Test sinks: everything that is logged reaches them in batches, and one that fails never ends training."""

import bdb
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer
from records import close_record, start_record

from hookline import read_layers, read_metrics
from hookline.errors import RecordError
from hookline.record import Record, read_jsonl


class ListSink:
    """A sink that keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        self.calls.append(("metrics", list(rows)))

    def write_layers(self, rows: Sequence[Any]) -> None:
        self.calls.append(("layers", list(rows)))

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        self.calls.append(("events", list(rows)))

    def rows(self, kind: str) -> list[Any]:
        """Return all rows of a kind."""
        return [row for name, rows in self.calls for row in rows if name == kind]


class BrokenSink(ListSink):
    """A sink whose server is down."""

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        super().write_metrics(rows)
        raise ConnectionError("no route to https://me:secret@host/x")


class Tracker:
    """A tracker in the style of Weights & Biases as a sink: a history per step, a summary, and texts."""

    def __init__(self, project: str) -> None:
        self.project = project
        self.history: list[dict[str, Any]] = []  # stands for the server
        self.summary: dict[str, float] = {}
        self.texts: list[str] = []

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Upload one entry per step, and remember the last value of every metric."""
        for row in rows:
            step, _, _ = row.pop("step"), row.pop("epoch"), row.pop("time")
            self.upload(step, row)
            self.summary.update(row)

    def write_layers(self, rows: Sequence[Any]) -> None:
        """Upload every statistic of every layer, without histograms."""
        for row in rows:
            if row.header.bins is not None:
                continue
            for name, values in zip(row.header.names, row.values.tolist(), strict=True):
                columns = zip(row.header.columns, values, strict=True)
                self.upload(row.step, {f"{row.series}/{name}/{column}": value for column, value in columns})

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show events as lines of text."""
        self.texts += [f"step {row['step']}: {row['kind']}" for row in rows]

    def upload(self, step: int, values: dict[str, Any]) -> None:
        """Send one entry of the history, as the tracker's client would."""
        self.history.append({"project": self.project, "step": step, **values})


def started_in_memory() -> Record:
    record = Record.in_memory()
    record.start([])
    return record


def validating_trainer(**options: Any) -> Any:
    """Make a trainer of eight steps with a validation at the end of each of two epochs."""
    return make_trainer(max_epochs=2, val_dataloader=make_batches(1), record=True, **options)


def add_at_start(trainer: Any, sink: Any) -> None:
    """Add a sink to the record of the run, which is made when training begins."""

    @trainer.on("train_start", name="add_sink")
    def add() -> None:
        trainer.record.add_sink(sink)


def test_every_number_of_a_run_reaches_a_sink() -> None:
    """Losses, validation metrics, logged values, layers and events are the same in the sink and in the files."""
    trainer, sink = validating_trainer(), ListSink()
    add_at_start(trainer, sink)
    trainer.add_hook("gradient_monitor", every=2)

    @trainer.on("step_end", name="logs")
    def log(step: int) -> None:
        trainer.log("mine/value", torch.tensor(float(step)))
        trainer.log_layers("mine", ["a"], ["x"], torch.full((1, 1), float(step)))
        trainer.note("noted", value=step, password="hunter2hunter2")

    trainer.train()
    metrics, _ = read_jsonl(trainer.run_dir / "metrics.jsonl")
    events, _ = read_jsonl(trainer.run_dir / "events.jsonl")
    assert sink.rows("metrics") == metrics and sink.rows("events") == events
    names = {name for row in metrics for name in row}
    assert {"train/loss", "train/epoch_loss", "val/loss", "mine/value"} <= names
    assert "hunter2" not in str(sink.calls) and "noted" in {row["kind"] for row in events}
    layers = read_layers(trainer.run_dir)
    assert {row.series for row in sink.rows("layers")} == set(layers) and "mine" in layers
    steps = [row.step for row in sink.rows("layers") if row.series == "mine"]
    assert steps == list(layers["mine"].steps) == list(range(1, 9))


def test_rows_come_in_batches(tmp_path: Path) -> None:
    """One call per kind and flush, with numbers on the host; nothing is called while values are logged."""
    record, sink = start_record(tmp_path), ListSink()
    record.add_sink(sink)
    for step in (1, 2, 3):
        record.extend([(step, 0, "train/loss", torch.tensor(float(step)), 5.0)])
        record.log_layers("s", step, ["a"], ["x"], torch.ones(1, 1))
        record.event("happened", step)
    assert sink.calls == []
    record.flush()
    assert [(kind, len(rows)) for kind, rows in sink.calls] == [("metrics", 3), ("layers", 3), ("events", 3)]
    assert sink.rows("metrics")[0] == {"step": 1, "epoch": 0, "time": 5.0, "train/loss": 1.0}
    record.flush()
    assert len(sink.calls) == 3
    record.log(4, 0, "bad", float("nan"))
    close_record(record)
    assert sink.calls[-1][0] == "metrics" and str(sink.rows("metrics")[-1]["bad"]) == "nan"


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_failing_sink_is_removed(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning and one event without secrets; the record and the other sinks are complete, at the end too."""
    record, broken, sink = start_record(tmp_path) if kind == "disk" else started_in_memory(), BrokenSink(), ListSink()
    record.add_sink(broken)
    record.add_sink(sink)
    for step in (1, 2):
        record.log(step, 0, "loss", 1.0)
        record.flush()
    close_record(record)
    assert len(broken.calls) == 1 and len(sink.rows("metrics")) == 2
    assert [message.getMessage().split(":")[0] for message in caplog.records] == [
        "the sink BrokenSink failed and was removed; training continues"
    ]
    events = record.events if record.path is None else read_jsonl(record.path / "events.jsonl")[0]
    assert [(row["kind"], row["step"], row["sink"]) for row in events] == [("sink_failed", 1, "BrokenSink")]
    assert sink.rows("events") == events
    assert "secret" not in caplog.text and "secret" not in str(events)


def test_a_sink_that_fails_at_the_close_is_still_reported(tmp_path: Path) -> None:
    """The event is in the file and reaches the other sinks before the record is closed."""
    record, sink = start_record(tmp_path), ListSink()
    record.add_sink(sink)
    record.add_sink(BrokenSink())
    record.log(1, 0, "loss", 1.0)
    close_record(record)
    assert [row["kind"] for row in read_jsonl(record.path / "events.jsonl")[0]] == ["sink_failed"]
    assert [row["kind"] for row in sink.rows("events")] == ["sink_failed"]
    assert record.lost == 0


def test_a_failing_sink_does_not_end_training() -> None:
    """The run completes, and its losses are those of a run without a sink."""
    runs = [validating_trainer(), validating_trainer()]
    add_at_start(runs[0], BrokenSink())
    for trainer in runs:
        trainer.train()
    rows = [read_metrics(trainer.run_dir) for trainer in runs]
    assert [row["train/loss"] for row in rows[0]] == [row["train/loss"] for row in rows[1]]
    assert json.loads((runs[0].run_dir / "run.json").read_text())["outcome"] == "completed"


def test_quitting_the_debugger_in_a_sink_ends_the_run() -> None:
    """It is the user's interruption, not a failure of the sink; the sink is not called again while the run ends."""

    class Quitting(ListSink):
        def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
            super().write_metrics(rows)
            raise bdb.BdbQuit

    trainer, sink, other = validating_trainer(), Quitting(), ListSink()
    add_at_start(trainer, sink)
    trainer.on("train_start", name="add_other")(lambda trainer: trainer.record.add_sink(other) and None)
    with pytest.raises(KeyboardInterrupt, match="quit in the debugger in a sink"):
        trainer.train()
    assert len(sink.rows("metrics")) > 0 and [kind for kind, _ in sink.calls].count("metrics") == 1
    assert other.rows("metrics")[: len(sink.rows("metrics"))] == sink.rows("metrics")  # the others have their rows
    assert json.loads((trainer.run_dir / "run.json").read_text())["outcome"] == "interrupted"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_in_a_sink_loses_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    """Ctrl-C and sys.exit() pass through; the other sinks have their rows, and closing leaves a whole record."""

    class Interrupted(ListSink):
        def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
            raise interruption

    record, other = Record.on_disk(tmp_path, config={}, seed=0, run_id="run"), ListSink()
    record.start([])
    record.add_sink(Interrupted())
    record.add_sink(other)
    for step, write in enumerate((record.flush, lambda: record.close("completed", None, [], [], {})), 1):
        record.log(step, 0, "loss", 0.5)
        with pytest.raises(interruption):
            write()
    assert [row["step"] for row in other.rows("metrics")] == [1, 2]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"] == "completed"
    Record.on_disk(tmp_path, config={}, seed=0, run_id="run")  # the lock was released


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(KeyboardInterrupt, KeyboardInterrupt), (SystemExit, SystemExit), (bdb.BdbQuit, KeyboardInterrupt)],
)
def test_an_interruption_while_a_sink_is_closed_closes_the_others(
    tmp_path: Path, raised: type[BaseException], expected: type[BaseException]
) -> None:
    """A second Ctrl-C while a tracker sends its last rows does not cost another sink its outcome."""

    class Closed(ListSink):
        def close(self, run: Mapping[str, Any]) -> None:
            self.calls.append(("close", [run["outcome"]]))

    class Interrupted(ListSink):
        def close(self, run: Mapping[str, Any]) -> None:
            raise raised

    record, other = start_record(tmp_path), Closed()
    record.add_sink(Interrupted())
    record.add_sink(other)
    with pytest.raises(expected):
        close_record(record)
    assert other.rows("close") == ["completed"]


def test_the_outcome_is_written_before_a_sink_is_waited_for() -> None:
    """A process that is killed while a tracker hangs at the end leaves a whole record."""
    received: list[Any] = []

    class Slow(ListSink):
        def close(self, run: Mapping[str, Any]) -> None:
            received.append(json.loads((trainer.run_dir / "run.json").read_text())["outcome"])

    trainer = make_trainer(data=make_batches(4), record=True)
    trainer.record.add_sink(Slow())
    trainer.train()
    assert received == ["completed"]


def test_a_handle_removes_its_sink() -> None:
    """By `remove` or at the end of a with block; adding a sink twice does not deliver twice."""
    record, sink = started_in_memory(), ListSink()
    handle = record.add_sink(sink)
    record.add_sink(sink)
    record.log(1, 0, "loss", 1.0)
    record.flush()
    handle.remove()
    handle.remove()
    record.log(2, 0, "loss", 1.0)
    record.flush()
    with record.add_sink(sink):
        record.log(3, 0, "loss", 1.0)
        record.flush()
    record.log(4, 0, "loss", 1.0)
    close_record(record)
    assert [row["step"] for row in sink.rows("metrics")] == [1, 3]


def test_what_is_not_a_sink_raises_when_it_is_added() -> None:
    """The error names the methods, one of which it needs."""
    with pytest.raises(RecordError, match="has none of the methods write_metrics, write_layers, write_events"):
        Record.in_memory().add_sink(type("Logs", (), {"write_logs": print})())


def test_a_sink_may_leave_out_what_it_does_not_need(record: Record) -> None:
    """It gets the rows that it has a method for, and is not removed for the others."""
    steps: list[int] = []
    record.add_sink(SimpleNamespace(write_metrics=lambda rows: steps.extend(row["step"] for row in rows)))
    for step in (1, 2):
        record.event("note", step)
        record.log(step, 0, "loss", 1.0)
        record.flush(wait=True)
    assert steps == [1, 2]


def test_a_sink_may_change_its_rows() -> None:
    """Each sink has its own copies, so that neither the record nor other sinks notice."""
    record, first, second = started_in_memory(), ListSink(), ListSink()
    record.add_sink(first)
    record.add_sink(second)
    record.log(1, 0, "loss", 1.0)
    record.event("happened", 1)
    record.flush()
    for row in first.rows("metrics") + first.rows("events"):
        row.clear()
    assert second.rows("metrics") == record.metrics != [{}]
    assert second.rows("events") == record.events != [{}]


def test_a_sink_may_log() -> None:
    """What it logs while it receives rows is delivered with the next flush, not in an endless loop."""

    class Echo(ListSink):
        def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
            super().write_metrics(rows)
            record.log(rows[-1]["step"] + 1, 0, "echo", 1.0)
            record.event("echo", 0)

    record, sink = started_in_memory(), Echo()
    record.add_sink(sink)
    record.log(1, 0, "loss", 1.0)
    record.flush()
    assert len(sink.rows("metrics")) == 1
    record.flush()
    assert [row["step"] for row in sink.rows("metrics")] == [1, 2]
    close_record(record)


def test_threads_lose_no_row() -> None:
    """Events that other threads record while rows are delivered reach the sink exactly once."""
    record, sink = started_in_memory(), ListSink()
    record.add_sink(sink)

    def work(worker: int) -> None:
        for step in range(300):
            record.event("happened", step, worker=worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        record.flush()
    close_record(record)
    seen = {(row["worker"], row["step"]) for row in sink.rows("events")}
    assert len(sink.rows("events")) == len(seen) == 1200


def test_sinks_are_shared_between_records(tmp_path: Path) -> None:
    """A sink that was added before a run began also receives the run's rows, until its handle removes it."""
    before, run, sink = started_in_memory(), start_record(tmp_path), ListSink()
    handle = before.add_sink(sink)
    run.share_sinks(before)
    run.log(1, 0, "loss", 1.0)
    run.flush()
    handle.remove()
    run.log(2, 0, "loss", 1.0)
    close_record(run)
    assert [row["step"] for row in sink.rows("metrics")] == [1]


def test_a_resume_is_a_row_of_metrics(tmp_path: Path) -> None:
    """A sink learns from it that later steps will be repeated."""
    record, sink = start_record(tmp_path), ListSink()
    record.add_sink(sink)
    record.resume_at(5, 1)
    assert [(row["step"], row["resumed"]) for row in sink.rows("metrics")] == [(5, True)]
    close_record(record)


def test_a_tracker_is_a_sink() -> None:
    """Forty lines are enough for metrics, statistics per layer and events."""
    trainer, tracker = validating_trainer(), Tracker("demo")
    add_at_start(trainer, tracker)
    trainer.add_hook("gradient_monitor", every=4)
    trainer.add_hook("lr_monitor")
    trainer.train()
    assert [row["step"] for row in tracker.history if "train/loss" in row] == list(range(1, 9))
    assert any(name.startswith("gradients/0.weight/") for row in tracker.history for name in row)
    assert tracker.summary["train/loss"] == read_metrics(trainer.run_dir)[-1]["train/loss"]
    assert len(tracker.texts) == len(read_jsonl(trainer.run_dir / "events.jsonl")[0])
