"""layers.jsonl is read back exactly, also after a kill, a resume, or a change of what was watched."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import read_layers
from hookline.errors import RecordError
from hookline.record import RunRecord


def make_record(root: Path, run_id: str | None = None) -> RunRecord:
    """A record on disk that has begun."""
    record = RunRecord.create(root, config={}, seed=None, run_id=run_id)
    record.start([])
    return record


def write(record: RunRecord, steps: list[int], value: float = 1.0, series: str = "s") -> None:
    """One name and one column at each of the steps."""
    for step in steps:
        record.layers(series, step, ["a"], ["x"], torch.full((1, 1), value))
    record.flush()


def end(record: RunRecord) -> None:
    """Close with nothing special to say."""
    record.close("completed", None, [], [], {})


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    """Every number of every step, NaN and infinities too, under its name and column."""
    record = make_record(tmp_path)
    values = torch.randn(3, 2, 2)
    values[1, 0, 0], values[2, 1, 1] = float("nan"), float("-inf")
    for step, table in enumerate(values, start=1):
        record.layers("activations", step, ["blocks.0", "blocks.1"], ["mean", "std"], table)
    end(record)
    series = read_layers(record.path)["activations"]
    assert (series.names, series.columns, series.steps) == (("blocks.0", "blocks.1"), ("mean", "std"), (1, 2, 3))
    assert torch.equal(series.values.nan_to_num(7), values.nan_to_num(7))
    assert torch.equal(series.of("blocks.1", "std"), values[:, 1, 1])


def test_histograms_have_one_dimension_more(tmp_path: Path) -> None:
    """Tables of bins come back as [steps, names, columns, bins]."""
    record = make_record(tmp_path)
    record.layers("h", 1, ["a", "b"], ["counts"], torch.arange(8).reshape(2, 1, 4))
    end(record)
    series = read_layers(record.path)["h"]
    assert series.values.shape == (1, 2, 1, 4)
    assert series.of("b", "counts").tolist() == [[4, 5, 6, 7]]


def test_a_misspelt_name_is_helped(tmp_path: Path) -> None:
    """The error lists the names there are."""
    record = make_record(tmp_path)
    record.layers("s", 1, ["blocks.0"], ["mean"], torch.zeros(1, 1))
    end(record)
    with pytest.raises(RecordError, match="no column 'maen'; did you mean 'mean'"):
        read_layers(record.path)["s"].of("blocks.0", "maen")


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    """A resumed run takes back the steps after its checkpoint, and what it writes again replaces the old."""
    first = make_record(tmp_path, "r")
    write(first, [1, 2, 3, 4, 9])
    first._lock.release()  # the first was killed: nobody closed it, but the system has let go of its lock
    again = make_record(tmp_path, "r")
    again.resumed(2, 0)
    write(again, [3, 4], value=2.0)
    end(again)
    series = read_layers(again.path)["s"]
    assert series.steps == (1, 2, 3, 4)
    assert series.values.flatten().tolist() == [1, 1, 2, 2]


def test_a_series_may_change_what_it_is_about(tmp_path: Path) -> None:
    """Names and columns are put together in the order they came; what was not written is NaN."""
    record = make_record(tmp_path)
    record.layers("s", 1, ["a"], ["x", "y"], torch.tensor([[1.0, 2.0]]))
    record.layers("s", 2, ["b", "a"], ["y"], torch.tensor([[3.0], [4.0]]))
    end(record)
    series = read_layers(record.path)["s"]
    assert (series.names, series.columns) == (("a", "b"), ("x", "y"))
    assert series.values.nan_to_num(-1).tolist() == [[[1, 2], [-1, -1]], [[-1, 4], [-1, 3]]]


def test_two_writers_of_one_series_share_its_steps(tmp_path: Path) -> None:
    """Two monitors of different modules are one series: neither hides the other."""
    record = make_record(tmp_path)
    for step in (1, 2):
        record.layers("s", step, ["a"], ["x"], torch.full((1, 1), float(step)))
        record.layers("s", step, ["b"], ["x"], torch.full((1, 1), float(-step)))
    end(record)
    assert read_layers(record.path)["s"].values.flatten().tolist() == [1, -1, 2, -2]


def test_of_two_numbers_of_bins_the_last_counts(tmp_path: Path) -> None:
    """Histograms that were made finer in mid-run cannot be put together; the newer ones are what is read."""
    record = make_record(tmp_path)
    record.layers("h", 1, ["a"], ["counts"], torch.zeros(1, 1, 4))
    record.layers("h", 2, ["a"], ["counts"], torch.ones(1, 1, 8))
    end(record)
    series = read_layers(record.path)["h"]
    assert (series.steps, series.values.shape) == ((2,), (1, 1, 1, 8))


def test_a_torn_file_loses_its_last_line_only(tmp_path: Path) -> None:
    """Cut at every byte, the file gives every whole line before the cut and never an error."""
    record = make_record(tmp_path)
    write(record, [1, 2, 3])
    end(record)
    whole = (record.path / "layers.jsonl").read_bytes()
    ends = [index for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        (record.path / "layers.jsonl").write_bytes(whole[:cut])
        torn = cut not in (0, *ends, *(end + 1 for end in ends))
        with pytest.warns(RuntimeWarning, match="a line was torn") if torn else nullcontext():
            found = read_layers(record.path)
        steps = sum(end <= cut for end in ends[1:])
        assert (found["s"].steps if "s" in found else ()) == tuple(range(1, steps + 1))


def test_the_run_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    """A new process ends the torn line and tells its names again."""
    first = make_record(tmp_path, "r")
    write(first, [1, 2])
    path = first.path / "layers.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    first._lock.release()
    again = make_record(tmp_path, "r")
    write(again, [2, 3])
    end(again)
    with pytest.warns(RuntimeWarning, match="a line was torn"):
        assert read_layers(again.path)["s"].steps == (1, 2, 3)


@pytest.mark.filterwarnings("ignore:.*a line was torn")
@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=60))
def test_nonsense_between_the_lines_is_left_out(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    """Lines that are not ours, or whose data does not fit, change nothing."""
    record = make_record(tmp_path_factory.mktemp("run"))
    write(record, [1])
    end(record)
    with (record.path / "layers.jsonl").open("ab") as file:
        file.write(noise + b"\n" + b'{"series":0,"step":2,"data":"AAA="}\n{"series":9,"step":2,"data":""}\n')
        file.write(
            b'{"series":[0],"step":2}\n{"series":0,"data":"AACAPw=="}\n{"resumed":"0"}\n{"series":0,"step":"3"}\n'
        )
    assert read_layers(record.path)["s"].steps == (1,)


def test_a_run_that_wrote_none(tmp_path: Path) -> None:
    """A run without layers has no series; a directory that is not there is an error."""
    record = make_record(tmp_path)
    end(record)
    assert read_layers(record.path) == {}
    with pytest.raises(RecordError, match=r"cannot read .*layers\.jsonl"):
        read_layers(tmp_path / "nowhere")
