"""Test tables and images: what hooks log can be read again, whatever its name, and never ends training."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_trainer
from records import close_record, start_record

from hookline import load_run
from hookline.errors import RecordError
from hookline.record import Image, MediaRow, Record, Table, read_media


class ListSink:
    """A sink that keeps tables and images."""

    def __init__(self) -> None:
        self.media: list[MediaRow] = []

    def write_metrics(self, rows: Sequence[Any]) -> None: ...

    def write_layers(self, rows: Sequence[Any]) -> None: ...

    def write_events(self, rows: Sequence[Any]) -> None: ...

    def write_media(self, rows: Sequence[MediaRow]) -> None:
        self.media += rows


def log_image(root: Path, image: Any) -> Image:
    """Log an image and read it from the run's files."""
    record = start_record(root)
    record.log_image(1, 0, "image", image)
    (row,) = read_media(close_record(record))
    assert isinstance(row.content, Image)
    return row.content


def pixels(image: Image) -> np.ndarray[Any, Any]:
    """Decode a PNG without filters, independently of other libraries: [H, W, C]."""
    start = image.png.index(b"IDAT")
    size = int.from_bytes(image.png[start - 4 : start], "big")
    lines = np.frombuffer(zlib.decompress(image.png[start + 4 : start + 4 + size]), np.uint8).reshape(image.height, -1)
    assert not lines[:, 0].any()  # the number of the filter
    return lines[:, 1:].reshape(image.height, image.width, -1)


# ---- in a run --------------------------------------------------------------------------------------------------------


def test_tables_and_images_of_a_run_can_be_read() -> None:
    """What a hook logs is in the run's files, in `load_run` and in sinks that take it, with step and epoch."""
    trainer, sink = make_trainer(record=True, max_epochs=2), ListSink()

    @trainer.on("train_start", name="add_sink")
    def add() -> None:
        trainer.record.add_sink(sink)

    @trainer.on("step_end", name="logs", every=4)
    def log(step: int) -> None:
        trainer.log_table("val/samples", ["text", "count"], [["a", 1], ["b", None]])
        trainer.log_image("weights", torch.full((2, 3), 0.5), step=step + 1)

    trainer.train()
    rows = read_media(trainer.run_dir)
    assert [(row.step, row.epoch, row.name) for row in rows] == [
        (4, 0, "val/samples"), (5, 0, "weights"), (8, 1, "val/samples"), (9, 1, "weights"),
    ]  # fmt: skip
    assert rows[0].content == Table(("text", "count"), (("a", 1), ("b", None)))
    assert isinstance(rows[1].content, Image) and (rows[1].content.width, rows[1].content.height) == (3, 2)
    assert sink.media == rows == load_run(trainer.run_dir).media


def test_a_run_in_memory_keeps_them_in_lists() -> None:
    """`record.media` is like `record.metrics`."""
    record = Record.in_memory()
    record.start([])
    record.log_table(1, 0, "t", ["a"], [[1.5]])
    record.log_image(2, 0, "i", np.zeros((2, 2), np.uint8))
    record.flush()
    assert [type(row.content) for row in record.media] == [Table, Image]
    record.resume_at(1, 0)
    assert [row.name for row in record.media] == ["t"]


@pytest.mark.hooks_fail(raises=RecordError)
def test_a_mistake_is_a_failure_of_the_hook_that_training_survives() -> None:
    """A table that does not fit is reported with its hook's name, and the run completes."""
    trainer = make_trainer(record=True)
    trainer.on("step_end", name="bad")(lambda: trainer.log_table("t", ["a", "b"], [[1]]))
    trainer.train()
    events = load_run(trainer.run_dir).events
    assert trainer.step == 4 and trainer.hook_failures
    assert any("table 't', row 0 has 1 cells" in str(event) for event in events)


def test_a_resumed_run_discards_what_came_after_its_checkpoint() -> None:
    """Tables of later steps of the earlier attempt are gone; those of the repeated steps count."""
    for steps, text in ((3, "first"), (4, "second")):
        trainer = make_trainer(record=True, max_steps=steps)

        @trainer.on("step_end", name="logs")
        def log(step: int, trainer: Any, text: str = text) -> None:
            trainer.log_table("t", ["text"], [[text]])
            if step == 2:
                trainer.save()

        last = None if steps == 3 else next(Path("runs").iterdir()) / "checkpoints" / "step-00000002"
        trainer.fit(resume=last)
    logged = [(row.step, row.content.rows[0][0]) for row in read_media(trainer.run_dir)]
    assert logged == [(1, "first"), (2, "first"), (3, "second"), (4, "second")]


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_cells_are_read_as_they_were_logged(record: Record) -> None:
    """Numbers that JSON lacks are numbers again and texts stay texts; secrets and long texts are cut out."""
    cells = ["NaN", float("nan"), float("-inf"), True, 2**60, np.float32(0.5), torch.tensor(3), "x" * 5000, "\ud800"]
    record.log_table(1, 0, "t", map(str, range(len(cells))), [cells], kind="mine")
    record.log_table(1, 0, "secrets", ["url"], [["https://me:hunter2hunter2@host/x"]])
    record.log_table(1, 0, "matrix", ["a", "b"], torch.eye(2, dtype=torch.int64))
    rows = {row.name: row.content for row in read_media(close_record(record))}
    table = rows["t"]
    assert isinstance(table, Table) and table.kind == "mine"
    (row,) = table.rows
    assert row[0] == "NaN" and row[1] != row[1] and row[2:7] == (float("-inf"), True, 2**60, 0.5, 3)
    assert len(row[7]) < 1100 and row[7].endswith("(5,000 characters)") and row[8] == "\\ud800"
    assert "hunter2" not in str(rows["secrets"])
    assert rows["matrix"].rows == ((1, 0), (0, 1))


@pytest.mark.parametrize(
    ("columns", "rows", "words"),
    [
        ("ab", [["a", "b"]], "columns must be a list of strings"),
        ([], [], "has no columns"),
        (["a"], 3, "rows must be a list of rows"),
        (["a"], ["x"], "row 0: expected a list of 1 cells"),
        (["a"], [[1], [1, 2]], "row 1 has more than 1 cells"),
        (["a"], [[{}]], "row 0: a cell is a dict"),
        (["a"], [[torch.ones(2)]], r"row 0: a cell has the shape \[2\]"),
        (["a", "b"], [[1, 2]] * 5001, "more than 10,000 cells"),
    ],
)
def test_wrong_tables(columns: Any, rows: Any, words: str) -> None:
    """The message says which row, and what is right."""
    with pytest.raises(RecordError, match=f"table 't'.*{words}"):
        Record.in_memory().log_table(1, 0, "t", columns, rows)


# ---- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.parametrize("first", [True, False])
def test_pixels_of_every_layout_arrive(channels: int, kind: str, first: bool, tmp_path: Path) -> None:
    """Tensors and arrays, with the channels first or last."""
    expected = torch.randint(0, 256, (5, 7, channels), dtype=torch.uint8)
    given = expected.permute(2, 0, 1) if first else expected
    image = log_image(tmp_path, given if kind == "tensor" else given.numpy()[:, ::-1][:, ::-1])
    assert (image.width, image.height) == (7, 5)
    assert np.array_equal(pixels(image), expected.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_floats_are_from_0_to_1(dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Floats become 0 to 255; others are clipped with a warning, also NaN."""
    image = log_image(tmp_path, torch.tensor([[0.0, 0.5, 1.0]], dtype=dtype, requires_grad=True))
    assert pixels(image).flatten().tolist() == [0, 128, 255] and not caplog.records
    image = log_image(tmp_path, torch.tensor([[-1.0, float("nan"), 300.0]], dtype=dtype))
    assert pixels(image).flatten().tolist() == [0, 0, 255]
    assert "image 'image' has values that are not from 0 to 1" in caplog.text


def test_the_tensor_may_change_after_it_was_logged(tmp_path: Path) -> None:
    """The image is what it was when it was logged."""
    record, image = start_record(tmp_path), torch.zeros(2, 2, dtype=torch.uint8)
    record.log_image(1, 0, "i", image)
    image.fill_(9)
    (row,) = read_media(close_record(record))
    assert isinstance(row.content, Image) and not pixels(row.content).any()


def test_images_of_pil_and_figures_of_matplotlib_write_themselves(tmp_path: Path) -> None:
    """Neither library need be installed: an image of PIL has `save`, a figure `savefig`."""
    png = log_image(tmp_path, torch.ones(2, 3)).png

    class PILImage:
        size = (3, 2)

        def getbands(self) -> tuple[str, ...]:
            return ("L",)

        def save(self, file: Any, format: str) -> None:
            file.write(png if format == "PNG" else b"")

    class Figure:
        def savefig(self, file: Any, format: str) -> None:
            file.write(png if format == "png" else b"")

    assert log_image(tmp_path, Figure()) == log_image(tmp_path, PILImage()) == Image(png, 3, 2)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.ones(2), r"has the shape \[2\]"),
        (torch.ones(5, 6, 7), r"has the shape \[5, 6, 7\]"),
        (torch.ones(0, 3), "has the shape"),
        (torch.ones(2, 2, dtype=torch.int64), "is int64; pass uint8, or floats from 0 to 1"),
        (torch.ones(1, 4097), "is 4097 x 1 pixels, but at most 4096 x 4096"),
        (torch.ones(2, 2, device="meta"), "no pixels that can be read"),
        (np.array([["a"]], dtype=object), "cannot be written as PNG"),
        ("cat.png", "is a str; log a tensor"),
    ],
)
def test_wrong_images(image: Any, words: str) -> None:
    """The message says what is right."""
    with pytest.raises(RecordError, match=f"image 'i' .*{words}"):
        Record.in_memory().log_image(1, 0, "i", image)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_names_of_all_kinds_have_files_of_their_own(tmp_path: Path) -> None:
    """Names that differ only in what a file's name cannot have, or in case, do not share a file, and none leads out."""
    names = [
        "a", "A", "a/b", "a_b", "a.b", "../../../etc/passwd", "/etc/passwd", "con", ".", "..", "a-", "x" * 10_000,
        "x" * 10_001, "ä", "a\0b", "a\nb", "\ud800", "-rf", "a b", "a\\b", "a-12345678", "latest.json",
    ]  # fmt: skip
    record = start_record(tmp_path / "runs")
    for index, name in enumerate(names):
        record.log_table(3, 0, name, ["index"], [[index]])
    run = close_record(record)
    rows = read_media(run)
    assert [row.content.rows[0][0] for row in rows] == list(range(len(names)))
    assert [row.name for row in rows if row.name.isascii() and "\\ud" not in row.name] == [
        name for name in names if name.isascii()
    ]
    files = [path.name for path in (run / "media").iterdir()]
    assert len({name.lower() for name in files}) == len(names) and max(map(len, files)) < 120
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    with pytest.raises(RecordError, match="needs a name"):
        Record.in_memory().log_table(1, 0, "", ["a"], [])


def test_of_one_name_and_step_the_last_counts(record: Record) -> None:
    """As with metrics."""
    for value in (1, 2):
        record.log_table(1, 0, "t", ["a"], [[value]])
    (row,) = read_media(close_record(record))
    assert row.content == Table(("a",), ((2,),))


def test_of_a_table_and_an_image_with_one_name_and_step_the_last_counts(tmp_path: Path) -> None:
    """They are in different files, so that the line decides which one is read."""
    record = start_record(tmp_path)
    record.log_table(1, 0, "x", ["a"], [[1]])
    record.log_image(1, 0, "x", torch.zeros(2, 2))
    (row,) = read_media(close_record(record))
    assert isinstance(row.content, Image)


def test_damaged_files_are_left_out(tmp_path: Path, record: Record) -> None:
    """Files that are missing, torn, of another format or elsewhere; the others are read, with one warning."""
    for name in "abcde":
        record.log_table(1, 0, name, ["x"], [[1]])
    record.log_image(1, 0, "f", torch.ones(2, 2))
    run = close_record(record)
    (run / "media" / "a-1.json").unlink()
    (run / "media" / "b-1.json").write_text('{"columns": ["x"], "rows": [[1, 2')
    (run / "media" / "c-1.json").write_text('{"columns": ["x"], "rows": [[{}]]}')
    (run / "media" / "d-1.json").write_text('{"rows": 5}')
    (run / "media" / "f-1.png").write_bytes(b"GIF89a")
    (tmp_path / "secret.json").write_text('{"columns": ["x"], "rows": []}')
    with (run / "media.jsonl").open("a") as file:
        for place in ("../secret.json", "media/../../secret.json", str(tmp_path / "secret.json"), None, 5):
            file.write(
                json.dumps({"step": 9, "epoch": 0, "time": 0, "name": str(place), "type": "table", "file": place})
                + "\n"
            )
        file.write('{"step": 1, "na')
    with pytest.warns(RuntimeWarning) as caught:
        rows = read_media(run)
    assert [row.name for row in rows] == ["e"]
    assert any("media/a-1.json is missing or damaged (9 more like it)" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("read", [read_media, lambda run: load_run(run).media])
def test_a_warning_cannot_control_the_terminal_and_names_the_callers_line(read: Any, record: Record) -> None:
    record.log_table(1, 0, "t", ["x"], [[1]])
    run = close_record(record)
    line = {"step": 1, "epoch": 0, "time": 1, "name": "x", "type": "image", "file": "\x1b]0;pwned\x07"}
    (run / "media.jsonl").write_text(json.dumps(line) + '\n{"torn\n')
    with pytest.warns(RuntimeWarning) as caught:
        assert read(run) == []
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert not any(letter in message for message in messages for letter in "\x1b\x07")
    assert r"\x1b]0;pwned\x07 is missing or damaged" in messages[1]
    assert {warning.filename for warning in caught} == {__file__}


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    """Neither the folder nor the list may lead out of the run; the rows are lost and counted."""
    record = start_record(tmp_path / "runs")
    assert record.path is not None
    (tmp_path / "elsewhere").mkdir()
    (record.path / "media").symlink_to(tmp_path / "elsewhere")
    record.log_table(1, 0, "t", ["a"], [[1]])
    with pytest.warns(RuntimeWarning, match="it is a symbolic link"):
        record.flush()
    assert record.lost == 1 and not list((tmp_path / "elsewhere").iterdir())
    assert read_media(close_record(record)) == []


def test_a_full_disk_loses_the_row_and_not_the_run() -> None:
    """The table that the disk refuses is counted as lost, and no line names it."""
    trainer = make_trainer(record=True)

    @trainer.on("step_end", name="logs", at=2)
    def log() -> None:
        (trainer.run_dir / "media").write_text("not a folder")
        trainer.log_table("t", ["a"], [[1]])

    with pytest.warns(RuntimeWarning, match="is losing data; training continues"):
        trainer.train()
    assert trainer.step == 4 and trainer.record.lost == 1
    assert not read_media(trainer.run_dir)


def test_a_run_without_media_has_no_file_of_it() -> None:
    """A run that logs neither tables nor images has none, and reading them gives none."""
    trainer = make_trainer(record=True)
    trainer.train()
    assert read_media(trainer.run_dir) == [] and not list(trainer.run_dir.glob("media*"))
    with pytest.raises(RecordError, match="this run has no directory"):
        read_media(None)
