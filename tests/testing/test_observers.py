"""The event recorder and the memory sink, in our trainer."""

import torch
from builders import make_batches, make_trainer

from hookline.testing import EventRecorder, MemorySink


def test_the_recorder_has_every_event() -> None:
    """In order, with the step, and after the hooks that were registered later."""
    recorder = EventRecorder()
    trainer = make_trainer(recorder, data=make_batches(2))
    trainer.on("step_end", name="later")(lambda: recorder.names.append("never"))
    trainer.train()
    assert recorder.events[0] == ("on_train_start", 0) and recorder.events[-1] == ("on_train_end", 2)
    assert [event.step for event in recorder.events if event.name == "on_step_end"] == [1, 2]


def test_the_sink_has_every_row() -> None:
    """Metrics, statistics, events, tables, and how the run ended."""
    trainer, sink = make_trainer("lr_monitor", data=make_batches(3)), MemorySink()
    trainer.on("train_start", name="adds")(lambda trainer: trainer.record.add_sink(sink))

    @trainer.on("step_end", at=2, name="records")
    def record(trainer: object) -> None:
        trainer.note("noted")
        trainer.log_table("rows", ("a",), [(1,)])
        trainer.record.log_layers("mine", 2, ["w"], ["mean"], torch.ones(1, 1))

    trainer.train()
    assert list(sink.values("lr")) == [1, 2, 3] and "noted" in [row["kind"] for row in sink.events]
    assert [row.name for row in sink.media] == ["rows"] and [row.series for row in sink.layers] == ["mine"]
    assert sink.run is not None and sink.run["outcome"] == "completed"
