"""Names, tags and notes of runs: given by options, edited at any time, and used to name a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_trainer
from commands import Captured, error_of, json_of, output_of, python
from records import close_record, start_record

from hookline import HooklineError, TrainerConfig, load_run
from hookline.cli import main
from hookline.record.labels import Labels

HOSTILE = ["\x1b[31mred", "a\nb", "a\rb", "\u202eabc", "x" * 10_000, "\ud800", "a\x00", "latest"]


def write_run(run_id: str, root: str = "runs", labels: Labels | None = None) -> Path:
    """Write a run that ended."""
    return close_record(start_record(root, run_id, labels=labels))


def labels_of(run: Path) -> dict[str, Any]:
    """Return the contents of labels.json."""
    return json.loads((run / "labels.json").read_text())


def test_options_label_a_new_run() -> None:
    """Name, tags and notes of the options are in labels.json; a secret in them is not."""
    trainer = make_trainer(
        record=True, name="base", tags=["a", "b", "a"], notes="try 1\nkey: hf_abcdefghij0123456789klmnopqrst"
    )
    trainer.train()
    assert labels_of(trainer.run_dir) == {
        "version": 1, "name": "base", "tags": ["a", "b"], "notes": "try 1\nkey: <redacted>",
    }  # fmt: skip
    assert trainer.record.labels.name == "base"


def test_a_record_in_memory_has_labels() -> None:
    """Without files the record keeps them."""
    trainer = make_trainer(name="base", tags="one")
    trainer.train()
    assert trainer.record.labels == Labels("base", ("one",))


def test_a_config_labels_a_run() -> None:
    """The options are keys under `trainer:`; an empty name is none."""
    options = TrainerConfig(name="", tags=["x"], notes="n\r\nm")
    assert (options.name, options.tags, options.notes) == (None, ["x"], "n\nm")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(name: str, capsys: Captured) -> None:
    """In options and on the command line, with one line that names the option."""
    with pytest.raises(Exception, match=r"^trainer\.name: "):
        make_trainer(name=name)
    with pytest.raises(Exception, match=r"^trainer\.tags: "):
        make_trainer(tags=[name if name != "latest" else ""])
    run = write_run("one")
    error = error_of(capsys, ["label", str(run), "--name", name])
    assert error.startswith("hookline: error: --name: ") and error.count("\n") == 1 and error.isascii()
    assert len(error) < 200
    assert labels_of(run)["name"] is None


def test_label_prints_and_edits(capsys: Captured) -> None:
    """Options change what they name and leave the rest; without options the command prints."""
    run = write_run("one", labels=Labels("old", ("a", "b"), "before"))
    assert main(["label", "one", "--name", "new", "--tag", "c", "--untag", "a"]) == 0
    assert main(["label", "one", "--notes", "first\nsecond"]) == 0
    assert labels_of(run) == {"version": 1, "name": "new", "tags": ["b", "c"], "notes": "first\nsecond"}
    capsys.readouterr()
    assert main(["label", "new"]) == 0
    assert capsys.readouterr().out.split() == ["one", "name", "new", "tags", "b,", "c", "notes", "first", "second"]
    assert json_of(capsys, "label", "new", "--name", "", "--notes", "") == {
        "run_id": "one", "version": 1, "name": None, "tags": ["b", "c"], "notes": None,
    }  # fmt: skip


def test_label_errors_are_one_line(capsys: Captured) -> None:
    """A tag that is not there, a directory that is not a run, and a labels.json that is damaged or newer."""
    run = write_run("one", labels=Labels(tags=("demo",)))
    Path("other").mkdir()
    (damaged := write_run("two") / "labels.json").write_text('{"version": 1, "name": [')
    (newer := write_run("three") / "labels.json").write_text('{"version": 2}')
    for arguments, expected in (
        (["one", "--untag", "dmo"], "did you mean 'demo'"),
        (["other", "--tag", "x"], "other is not a run: has no run.json"),
        (["nothing", "--tag", "x"], "nothing: no run in runs/ has this path, id or name; `hookline runs` lists them"),
        (["two", "--tag", "x"], f"{damaged} is damaged".removeprefix(f"{Path.cwd()}/")),
        (["three", "--tag", "x"], "which a newer Hookline wrote"),
    ):
        error = error_of(capsys, ["label", *arguments])
        assert expected in error and error.count("\n") == 1
    assert labels_of(run)["tags"] == ["demo"] and newer.read_text() == '{"version": 2}'


def test_label_does_not_follow_a_link(capsys: Captured) -> None:
    """A labels.json that leads elsewhere is an error."""
    run = write_run("one")
    (run / "labels.json").unlink()
    Path("target").write_text("{}")
    (run / "labels.json").symlink_to(Path("target").absolute())
    assert "symbolic link" in error_of(capsys, ["label", "one", "--name", "x"]) and Path("target").read_text() == "{}"


def test_a_run_is_labelled_while_it_trains() -> None:
    """Another process changes the labels, and the run neither stops nor overwrites them."""
    trainer = make_trainer(record=True, name="before")

    @trainer.on("train_start")
    def label() -> None:
        python("-m", "hookline", "label", trainer.run_dir, "--name", "after", "--tag", "t", check=True)

    trainer.train()
    assert labels_of(trainer.run_dir)["name"] == "after"
    assert trainer.record.labels == Labels("after", ("t",))
    make_trainer(record=True, name="other", max_steps=3).fit(resume=trainer.run_dir)
    assert labels_of(trainer.run_dir)["name"] == "after"


def test_a_fork_inherits_tags_and_notes(capsys: Captured) -> None:
    """They are those that the first run has by then; its name stays with it."""
    arguments = ["trainer.max_steps=1", "data.batch_size=1", "trainer.sanity_batches=0", "--device", "cpu"]
    train = ["trainer.name=first", "trainer.tags=[a]", "trainer.notes=n", "trainer.validate_every=null"]
    first = Path(output_of(capsys, ["train", *arguments, *train]).splitlines()[-1])
    assert main(["label", "first", "--tag", "b"]) == 0
    assert main(["resume", "first", "--fork", "trainer.max_steps=2", "--device", "cpu"]) == 0
    fork = Path(capsys.readouterr().out.splitlines()[-1])
    assert fork != first and labels_of(fork) == {"version": 1, "name": None, "tags": ["a", "b"], "notes": "n"}
    given = ["trainer.name=second", "trainer.tags=[]"]
    assert main(["resume", "first", "--fork", "trainer.max_steps=2", "--device", "cpu", *given]) == 0
    fork = Path(capsys.readouterr().out.splitlines()[-1])
    assert labels_of(fork) == {"version": 1, "name": "second", "tags": [], "notes": "n"}
    assert "hookline label" in error_of(capsys, ["resume", "first", "trainer.name=other"])


def test_names_name_runs(capsys: Captured) -> None:
    """A path comes first, then a whole id, a name and the beginning of an id; several runs are an error."""
    write_run("2026-aa", labels=Labels("base"))
    write_run("2026-ab", labels=Labels("lr/0.1"))
    write_run("2026", labels=Labels("2026-a"))
    write_run("elsewhere", root="deep/dir", labels=Labels("base"))
    Path("2026-aa").mkdir()

    def found(name: str) -> str:
        capsys.readouterr()
        main(["label", name, "--json"])
        out, err = capsys.readouterr()
        return str(json.loads(out)["run_id"]) if out else err

    assert found("base") == "2026-aa"
    assert found("deep/dir/base") == found("deep/dir/latest") == found("deep/dir/else") == "elsewhere"
    assert found("lr/0.1") == "2026-ab"
    assert found("2026") == "2026"
    assert found("2026-a") == "2026"  # a name, and not the beginning of two ids
    assert found("latest") == "2026"
    assert "is not a run" in found("2026-aa")  # the directory of that name comes first
    assert "2 runs in runs/ begin with it: 2026-aa (completed, " in found("2026-")
    assert "no run in runs/ has this path, id or name; did you mean 'base'? `hookline runs` lists" in found("bsae")
    assert "did you mean 'elsewhere'? `hookline runs deep/dir` lists them" in found("deep/dir/elswhere")


def test_a_name_that_several_runs_have_is_the_newest(capsys: Captured) -> None:
    """Training from one config again is normal; which run is used is printed."""
    for run_id, started in (("b", "2026-01-02"), ("a", "2026-01-03"), ("c", "2026-01-01")):
        run = write_run(run_id, labels=Labels("base"))
        described = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**described, "started": f"{started}T00:00:00+00:00"}))
    assert main(["label", "base", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["run_id"] == "a"
    assert err == "hookline: 3 runs are named base; the newest, a, is used\n"


def test_a_newer_format_is_refused() -> None:
    """A run whose directory a newer Hookline wrote is neither read nor continued, and its lock is free afterwards."""
    trainer = make_trainer(record=True)
    trainer.train()
    run = trainer.run_dir
    described = json.loads((run / "run.json").read_text())
    assert next(iter(described)) == "format" and described["format"] == 1
    (run / "run.json").write_text(json.dumps({**described, "format": 2}))
    before = (run / "run.json").read_bytes()
    for refused in (lambda: load_run(run), lambda: make_trainer(record=True, max_steps=3).fit(resume=run)):
        with pytest.raises(HooklineError, match="has the format 2, but this Hookline reads 1; upgrade Hookline"):
            refused()
    assert main(["label", str(run)]) == 2
    assert (run / "run.json").read_bytes() == before
    (run / "run.json").write_text(json.dumps(described))
    make_trainer(record=True, max_steps=3).fit(resume=run)
