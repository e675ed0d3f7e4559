"""Test reading metrics.jsonl and layers.jsonl, also after a kill, a resume or a change of what was recorded."""

import json
import math
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import close_record, start_record

from hookline import load_run, read_layers, read_metrics
from hookline.errors import RecordError
from hookline.record import Record, read_json, read_jsonl
from hookline.runs.reader import Damage
from hookline.runs.summary import RunSummary


@pytest.mark.parametrize(
    ("text", "records", "torn"),
    [
        (b"", [], False),
        (b'{"a":1}\n{"a":2}\n', [{"a": 1}, {"a": 2}], False),
        (b'{"a":1}\n{"a":', [{"a": 1}], True),
        (b'{"a":1}\n{"a":2}', [{"a": 1}, {"a": 2}], False),
        (b'{"a":1}\n{"b"\n{"a":2}\n', [{"a": 1}, {"a": 2}], True),
        (b'{"a":1}\n\n', [{"a": 1}], False),
        (b'{"a":"\\ud800"}\n{"a":2}\n', [{"a": "\ud800"}, {"a": 2}], False),  # half a character, of a foreign record
        (b'{"a":1}\n\x00\x00\x00', [{"a": 1}], True),
        (b'{"a":1}\n\xff\xfe\n5\n', [{"a": 1}], True),
    ],
)
def test_whole_lines_are_read(tmp_path: Path, text: bytes, records: list[object], torn: bool) -> None:
    """Every whole line is returned, and a torn line is reported, wherever it is."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(text)
    assert read_jsonl(path) == (records, torn)


def test_every_cut_leaves_the_lines_before_it(tmp_path: Path) -> None:
    """Wherever a kill cuts the file, all lines before the cut are returned."""
    path = tmp_path / "x.jsonl"
    text = b'{"a":1,"b":"x"}\n{"a":2,"b":"y"}\n'
    for cut in range(len(text)):
        path.write_bytes(text[:cut])
        records, _ = read_jsonl(path)
        assert len(records) >= text[:cut].count(b"\n")
        assert records == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}][: len(records)]


def test_non_finite_numbers_come_back(tmp_path: Path) -> None:
    """The strings for non-finite numbers become numbers, but text stays text."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"time":"NaN","loss":"NaN","a":"Infinity","b":"-Infinity","c":"text","reason":"NaN"}\n')
    record = read_jsonl(path)[0][0]
    assert math.isnan(record.pop("loss"))
    assert record == {"time": "NaN", "a": math.inf, "b": -math.inf, "c": "text", "reason": "NaN"}


def test_the_last_record_of_a_step_wins(tmp_path: Path) -> None:
    """A resumed run's steps replace the first attempt's, and lines of one step are joined."""
    lines = ['{"step":1,"loss":1}', '{"step":2,"loss":2}', '{"step":2,"val/loss":5}', '{"step":2,"loss":3}', '{"x":1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.warns(RuntimeWarning, match="line 5 is damaged"):
        assert read_metrics(tmp_path) == [{"step": 1, "loss": 1}, {"step": 2, "loss": 3, "val/loss": 5}]


def test_a_torn_line_is_warned_of_at_the_callers_line(tmp_path: Path) -> None:
    """The warning names the file, points at the caller's line, and is given once per read."""
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n{"st\n{"step":2}\n{"ste')
    with pytest.warns(RuntimeWarning) as caught:
        assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    assert len(caught) == 1 and caught[0].filename == __file__
    expected = f"{tmp_path / 'metrics.jsonl'}: line 2 and 1 more are damaged; the other lines were read"
    assert str(caught[0].message) == expected


@pytest.mark.parametrize("name", ["metrics", "layers", "events", "media"])
def test_an_edited_line_is_named_by_its_number(tmp_path: Path, name: str) -> None:
    """A line in the middle is damaged, even if it is JSON; nothing of it is used."""
    record = start_record(tmp_path)
    for step in (1, 2, 3):
        record.log(step, 0, "loss", 1.0)
        record.event("x", step)
        record.log_table(step, 0, "t", ["a"], [[step]])
        record.log_layers("s", step, ["a"], ["mean"], torch.ones(1, 1))
    close_record(record)
    assert record.path is not None
    path = record.path / f"{name}.jsonl"
    for number, edited in ((2, "{"), (3, '{"step": "3", "kind": 3}')):
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[: number - 1], edited, *lines[number:], ""]))
    with pytest.warns(RuntimeWarning, match=rf"{name}\.jsonl: line 2 and 1 more are damaged; the other lines"):
        loaded = load_run(record.path)
        assert isinstance(loaded.media, list)
    (damage,) = RunSummary.read(record.path, media=True).files.damage.items()
    assert damage == (f"{name}.jsonl", Damage(2, 2, is_torn=False))


@pytest.mark.parametrize(
    ("before", "resumed_at", "after"),
    [([], 0, [1, 2]), ([1, 2, 3], 1, [2]), ([], 5, [6, 7])],
    ids=["began again", "continued", "forked from another run"],
)
def test_the_mark_of_a_resumed_run_is_not_a_row(
    before: list[int], resumed_at: int, after: list[int], record: Record
) -> None:
    """Every row has the metrics of its step, with the epoch that they were logged in."""
    for step in before:
        record.log(step, 0, "train/loss", 3.0)
    record.resume_at(resumed_at, 7)
    for step in after:
        record.log(step, 8, "train/loss", 1.0)
    close_record(record)
    rows = [(row["step"], row["epoch"], row["train/loss"]) for row in read_metrics(record.path)]
    assert rows == [(step, 0, 3.0) for step in before if step <= resumed_at] + [(step, 8, 1.0) for step in after]
    assert not any("resumed" in row for row in read_metrics(record.path))


def test_metrics_beside_the_mark_of_a_resumed_run_are_read(tmp_path: Path) -> None:
    """With several ranks the mark is written together with what hooks log when they resume."""
    record = start_record(tmp_path)
    close_record(record)
    assert record.path is not None
    rows = [{"step": 5, "loss": 1.0}, {"step": 6, "loss": 2.0}, {"step": 5, "resumed": True, "decay": 0.5}]
    (record.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_metrics(record.path) == [{"step": 5, "loss": 1.0, "decay": 0.5}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("step", "resumed", "series", "name", "names", "columns", "bins", "data", "counts", "time", "epoch", "loss")
HOSTILE = [
    b'{"step":[1]}\n{"step":{"a":1}}\n{"step":"1"}\n{"step":null}\n{"step":1.5}\n{"step":true}\n',
    b'{"step":1}\n{"step":"a","resumed":true}\n{"step":[],"resumed":1}\n',
    b"[" * 100_000 + b"\n" + b'{"a":' * 100_000 + b"\n",
    b'{"step":' + b"9" * 5000 + b"}\n",
    b'{"series":0,"name":["a"],"names":["a"],"columns":["x"]}\n{"series":0,"step":1,"data":"AACAPw=="}\n',
    b'{"series":0,"name":"s","names":5,"columns":["x"]}\n{"series":0,"step":1,"data":"AACAPw=="}\n',
    b'{"series":0,"name":"s","names":[["a"]],"columns":[{}]}\n{"series":0,"step":1,"data":"AACAPw=="}\n',
    b'{"series":0,"name":"s","names":["a"],"columns":["x"],"bins":-1}\n{"series":0,"step":1,"data":"AACAPw=="}\n',
    b'{"series":0,"name":"s","names":["a"],"columns":["x"],"bins":1e30}\n{"series":0,"step":1,"data":""}\n',
    b'{"series":0,"name":"s","names":["a"],"columns":["x"],"bins":99999999999999999999}\n{"series":0,"step":1,"counts":""}\n',
    b'{"series":0,"name":"s","names":["a"],"columns":["x"]}\n{"series":0,"step":1,"data":["A"]}\n{"series":0,"step":1,"counts":3}\n',
    b"\xff\xfe{\x00}\x00\n\x00" * 10,
    b"",
]


@pytest.mark.filterwarnings("ignore:.*line .* (torn|damaged)")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_are_read_or_refused(text: bytes, tmp_path: Path) -> None:
    """Lines that Hookline did not write are passed over, and nothing but a `RecordError` is raised."""
    for name, read in {"metrics.jsonl": read_metrics, "layers.jsonl": read_layers}.items():
        (tmp_path / name).write_bytes(text)
        with suppress(RecordError):
            read(tmp_path)
    with pytest.raises(RecordError, match="is not a JSON object"):
        read_json(tmp_path / "metrics.jsonl")


@pytest.mark.filterwarnings("ignore:.*line .* (torn|damaged)")
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8), max_size=6))
@settings(max_examples=200)
def test_any_lines_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, object]]
) -> None:
    """The same for random values in the fields of our lines."""
    folder = tmp_path_factory.mktemp("lines")
    for name, read in {"metrics.jsonl": read_metrics, "layers.jsonl": read_layers}.items():
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
        with suppress(RecordError):
            read(folder)


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Headers that claim a table of many more places than the file has values are refused."""
    names = [f"n{index}" for index in range(30_000)]
    headers = [
        {"series": 0, "name": "s", "names": names, "columns": []},
        {"series": 1, "name": "s", "names": [], "columns": names},
        {"series": 2, "name": "s", "names": ["a"], "columns": ["b"]},
    ]
    data = [{"series": index, "step": 1, "data": "AACAPw==" if index == 2 else ""} for index in range(3)]
    (tmp_path / "layers.jsonl").write_text("\n".join(map(json.dumps, [*headers, *data])))
    with pytest.raises(RecordError, match=r"layers\.jsonl has 1 values for a table of 900,060,001"):
        read_layers(tmp_path)


@pytest.mark.parametrize("path", ["nowhere", "a\0b", "x" * 5000])
def test_paths_that_cannot_be_read(path: str) -> None:
    """Every reader gives the same error."""
    for read in (read_metrics, read_layers, read_json, read_jsonl):
        with pytest.raises(RecordError, match=r"cannot read|no run is in runs/"):
            read(path)


def test_a_missing_file_raises(tmp_path: Path) -> None:
    """The error is a RecordError with the path."""
    with pytest.raises(RecordError, match=r"metrics\.jsonl: No such file"):
        read_metrics(tmp_path)


def test_a_record_cut_at_every_byte(tmp_path: Path) -> None:
    """Whatever a kill leaves of the last line, the lines before are read and a torn line is reported."""
    rows = [{"step": step, "loss": 1.5 / step, "text": 'a "b" \n ü \\', "bad": "NaN"} for step in range(1, 5)]
    whole = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
    ends = [index for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:cut])
        records, torn = read_jsonl(tmp_path / "metrics.jsonl")
        complete = sum(end <= cut for end in ends)  # the newline itself may be missing
        assert [record["step"] for record in records] == list(range(1, complete + 1))
        assert torn is (cut not in (0, *ends, *(end + 1 for end in ends)))
        with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl: line [0-9]+ was torn") if torn else nullcontext():
            assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, complete + 1))


# ---- layers.jsonl ----------------------------------------------------------------------------------------------------


def write(record: Record, steps: list[int], value: float = 1.0, series: str = "s") -> None:
    """Write one name and one column at each of the steps."""
    for step in steps:
        record.log_layers(series, step, ["a"], ["x"], torch.full((1, 1), value))
    record.flush()


def test_what_was_written_comes_back(record: Record) -> None:
    """Every number of every step is read, NaN and infinities too, under its name and column."""
    values = torch.randn(3, 2, 2)
    values[1, 0, 0], values[2, 1, 1] = float("nan"), float("-inf")
    for step, table in enumerate(values, start=1):
        record.log_layers("activations", step, ["blocks.0", "blocks.1"], ["mean", "std"], table)
    close_record(record)
    series = read_layers(record.path)["activations"]
    assert (series.names, series.columns, series.steps) == (("blocks.0", "blocks.1"), ("mean", "std"), (1, 2, 3))
    assert torch.equal(series.values.nan_to_num(7), values.nan_to_num(7))
    assert torch.equal(series.of("blocks.1", "std"), values[:, 1, 1])


def test_histograms_have_one_dimension_more(record: Record) -> None:
    """Histograms are read as [steps, names, columns, bins]."""
    record.log_layers("h", 1, ["a", "b"], ["counts"], torch.arange(8).reshape(2, 1, 4))
    close_record(record)
    series = read_layers(record.path)["h"]
    assert series.values.shape == (1, 2, 1, 4)
    assert series.of("b", "counts").tolist() == [[4, 5, 6, 7]]


def test_a_misspelt_column_raises(record: Record) -> None:
    """The error lists the names there are."""
    record.log_layers("s", 1, ["blocks.0"], ["mean"], torch.zeros(1, 1))
    close_record(record)
    with pytest.raises(RecordError, match="no column 'maen'; did you mean 'mean'"):
        read_layers(record.path)["s"].of("blocks.0", "maen")


def test_a_resumed_run_replaces_later_steps(tmp_path: Path) -> None:
    """A resumed run discards the steps after its checkpoint, and what it writes again replaces the old values."""
    first = start_record(tmp_path, "r")
    write(first, [1, 2, 3, 4, 9])
    del first  # as if the process was killed: the record was not closed, the lock is free
    again = start_record(tmp_path, "r")
    again.resume_at(2, 0)
    write(again, [3, 4], value=2.0)
    close_record(again)
    series = read_layers(again.path)["s"]
    assert series.steps == (1, 2, 3, 4)
    assert series.values.flatten().tolist() == [1, 1, 2, 2]


def test_a_series_may_change_its_names_and_columns(record: Record) -> None:
    """Names and columns are merged in the order of their appearance; what was not written is NaN."""
    record.log_layers("s", 1, ["a"], ["x", "y"], torch.tensor([[1.0, 2.0]]))
    record.log_layers("s", 2, ["b", "a"], ["y"], torch.tensor([[3.0], [4.0]]))
    close_record(record)
    series = read_layers(record.path)["s"]
    assert (series.names, series.columns) == (("a", "b"), ("x", "y"))
    assert series.values.nan_to_num(-1).tolist() == [[[1, 2], [-1, -1]], [[-1, 4], [-1, 3]]]


def test_two_writers_of_one_series_share_its_steps(record: Record) -> None:
    """Two monitors of different modules may write one series: neither hides the other."""
    for step in (1, 2):
        record.log_layers("s", step, ["a"], ["x"], torch.full((1, 1), float(step)))
        record.log_layers("s", step, ["b"], ["x"], torch.full((1, 1), float(-step)))
    close_record(record)
    assert read_layers(record.path)["s"].values.flatten().tolist() == [1, -1, 2, -2]


def test_the_last_number_of_bins_counts(record: Record) -> None:
    """Histograms that were made finer in mid-run cannot be put together; the newer ones are what is read."""
    record.log_layers("h", 1, ["a"], ["counts"], torch.zeros(1, 1, 4))
    record.log_layers("h", 2, ["a"], ["counts"], torch.ones(1, 1, 8))
    close_record(record)
    series = read_layers(record.path)["h"]
    assert (series.steps, series.values.shape) == ((2,), (1, 1, 1, 8))


def test_a_torn_file_loses_its_last_line_only(record: Record) -> None:
    """Cut at every byte, the file gives every whole line before the cut and never an error."""
    write(record, [1, 2, 3])
    close_record(record)
    whole = (record.path / "layers.jsonl").read_bytes()
    ends = [index for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        (record.path / "layers.jsonl").write_bytes(whole[:cut])
        torn = cut not in (0, *ends, *(end + 1 for end in ends))
        with pytest.warns(RuntimeWarning, match="line [0-9]+ was torn") if torn else nullcontext():
            series = read_layers(record.path)
        steps = sum(end <= cut for end in ends[1:])
        assert (series["s"].steps if "s" in series else ()) == tuple(range(1, steps + 1))


def test_a_run_resumes_after_a_torn_line(tmp_path: Path) -> None:
    """A new process ends the torn line and writes the header again."""
    first = start_record(tmp_path, "r")
    write(first, [1, 2])
    path = first.path / "layers.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    del first
    again = start_record(tmp_path, "r")
    again.resume_at(1, 0)
    write(again, [2, 3])
    close_record(again)
    with pytest.warns(RuntimeWarning, match="line [0-9]+ was torn"):
        assert read_layers(again.path)["s"].steps == (1, 2, 3)


@pytest.mark.filterwarnings("ignore:.*line .* (torn|damaged)")
@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=60))
def test_foreign_lines_are_ignored(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    """Lines that are not ours, or whose data does not fit, change nothing."""
    record = start_record(tmp_path_factory.mktemp("run"))
    write(record, [1])
    close_record(record)
    with (record.path / "layers.jsonl").open("ab") as file:
        file.write(noise + b"\n" + b'{"series":0,"step":2,"data":"AAA="}\n{"series":9,"step":2,"data":""}\n')
        file.write(
            b'{"series":[0],"step":2}\n{"series":0,"data":"AACAPw=="}\n{"resumed":"0"}\n{"series":0,"step":"3"}\n'
        )
    assert read_layers(record.path)["s"].steps == (1,)


def test_a_run_that_wrote_none(tmp_path: Path, record: Record) -> None:
    """A run without layers has no series; a missing directory is an error."""
    close_record(record)
    assert read_layers(record.path) == {}
    with pytest.raises(RecordError, match=r"nowhere: no run in .* has this path, id or name"):
        read_layers(tmp_path / "nowhere")


def test_events_of_all_ranks_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    """Each rank writes a file of its own, and a reader sees one list."""
    record = start_record(tmp_path)
    close_record(record)
    assert record.path is not None
    for folder, times in (("", (1, 4)), ("ranks/1", (2,)), ("ranks/2", (3,))):
        lines = [json.dumps({"time": time, "kind": "x", "step": 1}) + "\n" for time in times]
        (record.path / folder).mkdir(parents=True, exist_ok=True)
        (record.path / folder / "events.jsonl").write_text("".join(lines))
    assert [event["time"] for event in load_run(record.path).events] == [1, 2, 3, 4]
