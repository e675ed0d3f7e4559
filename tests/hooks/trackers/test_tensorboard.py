"""What `tensorboard` writes, read by TensorBoard's own reader."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked_runs import PNG, make_trainer, send_media

from hookline import HooklineError, TensorBoardTracker, read_layers, read_metrics


def read(directory: Path) -> Any:
    """Return TensorBoard's view of a directory, with every event."""
    everything = {"scalars": 0, "histograms": 0, "tensors": 0, "images": 0}
    reader = EventAccumulator(str(directory), size_guidance=everything)
    reader.Reload()
    return reader


def scalars_of(reader: Any) -> dict[str, dict[int, float]]:
    return {tag: {scalar.step: scalar.value for scalar in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


@pytest.mark.req("004-37")
def test_every_number_reaches_tensorboard_at_its_step() -> None:
    """Every metric of metrics.jsonl and, if asked for, every statistic of layers.jsonl is a scalar with its step."""
    trainer = make_trainer(TensorBoardTracker(layers="all", timeout=600.0))
    trainer.add_hook("gradient_monitor", every=2)
    trainer.on("step_end", name="logs")(lambda trainer, step: trainer.log("mine/value", 10.0 * step))
    trainer.train()
    scalars = scalars_of(read(trainer.run_dir / "tensorboard"))
    logged: dict[str, dict[int, float]] = {}
    for row in read_metrics(trainer.run_dir):
        for name in row.keys() - {"step", "epoch", "time"}:
            logged.setdefault(name, {})[row["step"]] = row[name]
    for series, layers in read_layers(trainer.run_dir).items():
        for name in layers.names:
            for column in layers.columns:
                values = layers.of(name, column).tolist()
                logged[f"{series}/{name}/{column}"] = dict(zip(layers.steps, values, strict=True))
    assert {"train/loss", "val/loss", "mine/value", "gradients/0.weight/norm"} <= logged.keys() == scalars.keys()
    for name, values in logged.items():
        assert scalars[name] == pytest.approx(values, rel=1e-6, nan_ok=True), name


def test_histograms_texts_and_hyperparameters() -> None:
    """A histogram has the record's bins; events are texts by kind; the config is a text and a row of HPARAMS."""
    trainer = make_trainer(TensorBoardTracker(timeout=600.0))
    trainer.add_hook("gradient_monitor", every=4, log_histogram=True)
    trainer.on("step_end", at=3, name="notes")(lambda trainer: trainer.note("noted", value="why"))
    trainer.train()
    reader = read(trainer.run_dir / "tensorboard")
    histograms = reader.Histograms("gradient_histograms/0.weight")
    assert [histogram.step for histogram in histograms] == [4, 8] and histograms[0].histogram_value.num == 12
    (note,) = reader.Tensors("events/noted/text_summary")
    assert (note.step, note.tensor_proto.string_val[0]) == (3, b"value: why")
    assert b"max_epochs" in reader.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    content = reader.PluginTagToContent("hparams")
    assert b"trainer.max_epochs" in content["_hparams_/session_start_info"]
    assert b"val/loss" in content["_hparams_/experiment"]


def test_a_resumed_run_continues_and_hides_what_is_repeated() -> None:
    """The files are in one directory; a step of the earlier attempt after the checkpoint is gone."""
    trainer = make_trainer(TensorBoardTracker(timeout=600.0), max_steps=6)
    trainer.add_hook("checkpoint", save_every_n_steps=4, save_last=False)
    trainer.on("step_end", at=6, name="only_once")(lambda trainer: trainer.log("first_attempt", 1.0))
    trainer.train()
    resumed = make_trainer(TensorBoardTracker(timeout=600.0), max_steps=8)
    resumed.fit(resume=trainer.run_dir)
    assert resumed.run_dir == trainer.run_dir and len(list((trainer.run_dir / "tensorboard").iterdir())) == 2
    reader = read(trainer.run_dir / "tensorboard")
    assert [scalar.step for scalar in reader.Scalars("train/loss")] == list(range(1, 9))
    assert "first_attempt" not in {tag for tag, values in scalars_of(reader).items() if values}


def test_images_and_tables() -> None:
    """An image is the PNG as it was logged, a table a text."""
    trainer = make_trainer(TensorBoardTracker(directory="elsewhere", timeout=600.0), max_steps=2)

    @trainer.on("train_start", name="sends", after="tensorboard")
    def send() -> None:
        send_media(trainer.hooks.get("tensorboard"))

    trainer.train()
    reader = read(Path("elsewhere"))
    (image,) = reader.Images("sample/pixel")
    assert (image.step, image.encoded_image_string, image.width) == (3, PNG, 1)
    assert b"| a\\|b | 0.5 |" in reader.Tensors("sample/table/text_summary")[0].tensor_proto.string_val[0]


def test_a_run_without_a_directory_needs_one() -> None:
    """The error comes before the first step."""
    trainer = make_trainer(TensorBoardTracker(timeout=600.0), record=False)
    with pytest.raises(HooklineError, match="no record on disk; give it a directory"):
        trainer.train()
    make_trainer(TensorBoardTracker(directory="elsewhere", timeout=600.0), record=False).train()
    assert len(read(Path("elsewhere")).Scalars("train/loss")) == 8
