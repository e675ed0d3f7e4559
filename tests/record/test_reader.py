"""A record can be read back, also after a crash."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest

from hookline.errors import RecordError
from hookline.record.reader import read_json, read_jsonl, read_metrics
from hookline.record.writers import JsonLines


@pytest.mark.parametrize(
    ("text", "records", "torn"),
    [
        (b"", [], False),
        (b'{"a":1}\n{"a":2}\n', [{"a": 1}, {"a": 2}], False),
        (b'{"a":1}\n{"a":', [{"a": 1}], True),
        (b'{"a":1}\n{"a":2}', [{"a": 1}, {"a": 2}], False),
        (b'{"a":1}\n{"b"\n{"a":2}\n', [{"a": 1}, {"a": 2}], True),
        (b'{"a":1}\n\n', [{"a": 1}], False),
        (b'{"a":1}\n\x00\x00\x00', [{"a": 1}], True),
        (b'{"a":1}\n\xff\xfe\n5\n', [{"a": 1}], True),
    ],
)
def test_whole_lines_are_read(tmp_path: Path, text: bytes, records: list[object], torn: bool) -> None:
    """Every whole record is returned, and a torn line is told of, wherever it stands."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(text)
    assert read_jsonl(path) == (records, torn)


def test_every_cut_leaves_the_lines_before_it(tmp_path: Path) -> None:
    """Wherever a kill cuts the file, all lines before the cut are there."""
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
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1}, {"step": 2, "loss": 3, "val/loss": 5}]


def test_a_torn_line_is_told_where_the_reader_was_called(tmp_path: Path) -> None:
    """The warning names the file, points at the caller's line, and comes once a reading."""
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n{"st\n{"step":2}\n{"ste')
    with pytest.warns(RuntimeWarning) as caught:
        assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert str(tmp_path / "metrics.jsonl") in str(caught[0].message)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing or damaged file is a RecordError with its path."""
    with pytest.raises(RecordError, match=r"metrics\.jsonl: No such file"):
        read_metrics(tmp_path)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(RecordError, match=r"run\.json is not a JSON object"):
        read_json(tmp_path / "run.json")


def test_a_record_cut_at_every_byte(tmp_path: Path) -> None:
    """Whatever a kill leaves of the last line: what stands before is read, and a tear is told."""
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        lines.write({"step": step, "epoch": 0, "train/loss": 1.5 / step, "text": 'a "b" \n ü \\', "bad": math.nan})
    lines.close()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    ends = [index for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:cut])
        records, torn = read_jsonl(tmp_path / "metrics.jsonl")
        complete = sum(end <= cut for end in ends)  # the newline itself may be missing
        assert [record["step"] for record in records] == list(range(1, complete + 1))
        assert torn is (cut not in (0, *ends, *(end + 1 for end in ends)))
        with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl: a line was torn") if torn else nullcontext():
            assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, complete + 1))


def test_what_is_written_after_a_cut_is_whole(tmp_path: Path) -> None:
    """A run that goes on ends the torn line first, wherever it was torn."""
    text = b'{"step":1}\n{"step":2,"loss":0.25}\n'
    for cut in range(len(text) + 1):
        path = tmp_path / "x.jsonl"
        path.write_bytes(text[:cut])
        again = JsonLines(path)
        again.write({"step": 3})
        again.close()
        records, _ = read_jsonl(path)
        assert records[-1] == {"step": 3}
        assert [record["step"] for record in records[:-1]] == [1, 2][: len(records) - 1]
