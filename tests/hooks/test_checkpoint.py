"""The checkpoint hook saves when it should and keeps what it should; a save that fails ends the run."""

import logging
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import builders
import pytest
import scripted
import torch
from builders import make_batches, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from run_control import PlainRun
from safetensors.torch import load_file

from hookline import CheckpointHook, EarlyStopping, HooksConfig, ModelCheckpoint, Trainer
from hookline.checkpoints import retention
from hookline.checkpoints.store import read_checkpoint
from hookline.errors import CheckpointError, ConfigError, MetricMissing
from hookline.runs.reader import read_events

make_trainer = partial(builders.make_trainer, record=True)
train = partial(builders.train, record=True)


def saved(trainer: Trainer) -> list[str]:
    """The checkpoints on disk."""
    directory = trainer.checkpoint_dir
    return sorted(path.name for path in directory.iterdir()) if directory is not None and directory.exists() else []


@pytest.mark.req("001-27")
@pytest.mark.parametrize(
    ("parameters", "steps"),
    [
        ({}, [4, 8]),
        ({"save_every_n_epochs": 2}, [8]),
        ({"save_every_n_epochs": None, "save_every_n_steps": 3}, [3, 6]),
        ({"save_every_n_epochs": 1, "save_every_n_steps": 4}, [4, 8]),
        ({"save_every_n_epochs": None}, []),
    ],
    ids=str,
)
def test_when_checkpoints_are_saved(parameters: dict[str, Any], steps: list[int]) -> None:
    """Every few epochs, every few steps, or both; a step that is requested twice is saved once."""
    trainer = make_trainer(CheckpointHook(**parameters), max_epochs=2)
    saved_steps: list[int] = []
    trainer.on("checkpoint_save", name="ear")(lambda step: saved_steps.append(step))
    trainer.train()
    assert saved(trainer) == [f"step-{step:08d}" for step in steps]
    assert saved_steps == steps


@pytest.mark.req("001-27")
def test_each_checkpoint_has_the_weights_of_its_step() -> None:
    """Every saved model equals the model at the end of that step, and no other."""
    trainer = make_trainer(CheckpointHook(), max_epochs=2)
    weights: dict[int, torch.Tensor] = {}
    trainer.on("step_end", name="copy")(lambda step, model: weights.update({step: model[0].weight.detach().clone()}))
    trainer.train()
    assert not torch.equal(weights[4], weights[8])
    for step in (4, 8):
        saved_model = load_file(trainer.checkpoint_dir / f"step-{step:08d}" / "model.safetensors")
        assert torch.equal(saved_model["0.weight"], weights[step])


@pytest.mark.req("001-27", "004-30", "002-67")
def test_the_checkpoint_is_durable_at_its_event() -> None:
    """A hook that uploads finds every file in place, at the path and step of the event."""
    trainer = make_trainer()
    trainer.add_checkpointing()
    uploaded: list[str] = []

    @trainer.on("checkpoint_save", name="upload", on_error="raise")
    def upload(trainer: Trainer, checkpoint_path: str, path: str, step: int) -> None:
        assert Path(checkpoint_path).parent == Path(path)
        uploaded.extend(file.name for file in Path(checkpoint_path).iterdir() if file.stat().st_size)

    trainer.train()
    assert "manifest.json" in uploaded
    assert [event["kind"] for event in read_events(trainer.run_dir)] == ["hooks_without_state", "checkpoint_saved"]


def test_a_save_that_fails_ends_the_run() -> None:
    """A run that cannot save would lose everything at its end, so it says so now."""
    trainer = make_trainer()
    trainer.add_checkpointing(save_every_n_steps=1)
    trainer.on("train_start")(lambda trainer: Path(trainer.checkpoint_dir).write_text("a file in the way"))
    with pytest.raises(Exception, match="checkpoints"):
        trainer.train()
    assert trainer.step == 1
    assert trainer.status == "error"


# ---- by a metric -----------------------------------------------------------------------------------------------------


def make_scripted(losses: Sequence[float], *entries: dict[str, Any], **options: Any) -> Trainer:
    """Make a trainer with these validation losses and checkpoint hooks."""
    hooks = HooksConfig(lifecycle=[{"name": "checkpoint", **entry} for entry in entries])
    return scripted.make_scripted(losses, config=hooks, record=True, **options)


def run(losses: Sequence[float], config: dict[str, Any], resume: Path | None = None, **options: Any) -> Trainer:
    """Train with one validation and two steps an epoch."""
    hooks = HooksConfig(enable_model_checkpoint_hook=True, model_checkpoint_config=config)
    return scripted.train_scripted(losses, hooks, resume, record=True, **options)


def links(trainer: Trainer) -> dict[str, str]:
    """Where the links in the checkpoints' directory lead."""
    return {path.name: path.readlink().name for path in trainer.checkpoint_dir.iterdir() if path.is_symlink()}


SEED = {
    "save_top_k": 3,  # Keep best 3 checkpoints
    "monitor": "val/loss",  # Metric to monitor
    "mode": "min",  # min for loss, max for accuracy
    "save_last": True,  # Always keep last checkpoint
    "save_on_train_epoch_end": False,  # Only save after validation
    "filename": "epoch_{epoch}_loss_{val/loss:.2f}",
    "auto_insert_metric_name": False,
}


@pytest.mark.req("002-19", "002-20", "002-21", "002-25")
def test_the_config_of_document_002_keeps_the_best_three() -> None:
    """The three best are there under the names asked for, and best_path and the link lead to the best."""
    trainer = run([0.5, 0.1234, 0.4, 0.3, 0.2, 0.1, 0.9, 0.8], SEED)
    best = {"epoch_1_loss_0.12", "epoch_4_loss_0.20", "epoch_5_loss_0.10"}
    newest = {"epoch_6_loss_0.90", "epoch_7_loss_0.80"}  # which are never deleted
    assert set(saved(trainer)) == best | newest | {"best", "last"}
    hook = trainer.hooks.get("checkpoint")
    assert hook.best_path == trainer.checkpoint_dir / "epoch_5_loss_0.10"
    assert hook.best_score == pytest.approx(0.1)
    assert links(trainer)["best"] == "epoch_5_loss_0.10"


@pytest.mark.req("002-23")
def test_save_last_keeps_the_last() -> None:
    """With it every validation is saved and the last one stays; without it only the best are saved."""
    losses = [0.1, 0.2, 0.3, 0.4]
    last = run(losses, {"monitor": "val/loss", "save_last": True})
    assert saved(last) == ["best", "last", "step-00000002", "step-00000006", "step-00000008"]
    assert links(last) == {"best": "step-00000002", "last": "step-00000008"}
    assert saved(run(losses, {"monitor": "val/loss"})) == ["best", "step-00000002"]


@pytest.mark.req("002-22")
def test_in_mode_max_the_highest_is_the_best() -> None:
    """With mode max the best is the highest."""
    trainer = run([1, 5, 2, 1, 1], {"monitor": "val/loss", "mode": "max", "save_top_k": 1})
    assert links(trainer) == {"best": "step-00000004"}


@pytest.mark.req("002-24")
def test_after_validation_or_at_the_end_of_the_epoch() -> None:
    """By default every validation is evaluated, also several in an epoch; otherwise the end of epochs."""
    config = {"monitor": "val/loss", "save_top_k": -1}
    after = run([4, 3, 2, 1], config, validate_every=1, max_epochs=2)
    assert saved(after) == ["best", *(f"step-{step:08d}" for step in (1, 2, 3, 4))]
    at_end = run([4, 3, 2, 1], {**config, "save_on_train_epoch_end": True}, validate_every=1, max_epochs=2)
    assert saved(at_end) == ["best", "step-00000002", "step-00000004"]
    losses = {"monitor": "train/epoch_loss", "save_on_train_epoch_end": True}
    assert links(run([9, 9, 9], losses)) == {"best": "step-00000006"}


def test_an_old_value_is_never_reused() -> None:
    """Epochs without a validation have no score, whatever the last validation said, and are not among the best."""
    config = {"monitor": "val/loss", "save_top_k": -1, "save_on_train_epoch_end": True}
    config["filename"] = "{epoch}_{val/loss}"
    trainer = run([1, 2], {**config, "auto_insert_metric_name": False}, validate_every="2 epochs", max_epochs=5)
    assert saved(trainer) == ["1_1.0", "3_2.0", "best"]
    with_last = run([1, 2], {**config, "save_last": True}, validate_every="2 epochs", max_epochs=3)
    names = ["epoch=0_val_loss=none", "epoch=1_val_loss=1.0", "epoch=2_val_loss=none"]
    assert saved(with_last) == ["best", *names, "last"]
    assert [checkpoint.score for checkpoint in with_last.hooks.get("checkpoint").kept] == [None, 1.0, None]


def test_steps_between_validations_keep_the_newest() -> None:
    """Saves by steps have no score: the newest two stay, beside the best; one that is validated too is written once."""
    config = {"monitor": "val/loss", "save_top_k": 1, "save_every_n_steps": 1}
    saved_steps: list[str] = []
    trainer = make_scripted([1, 2, 3], config, validate_every=2)
    trainer.on("checkpoint_save", name="ear")(lambda checkpoint_path: saved_steps.append(Path(checkpoint_path).name))
    trainer.fit([torch.ones(2)] * 7, [torch.ones(1)], max_epochs=1)
    assert saved_steps == [f"step-{step:08d}" for step in range(1, 8)]
    assert saved(trainer) == ["best", "step-00000002", "step-00000006", "step-00000007"]
    assert links(trainer) == {"best": "step-00000002"}


def test_a_metric_of_training_ranks_steps() -> None:
    """The loss of a step is new at its end, so checkpoints by steps can be ranked by it."""
    config = {"monitor": "train/loss", "save_top_k": 2, "save_every_n_steps": 1, "save_every_n_epochs": None}
    trainer = run([9, 9, 9], {**config, "mode": "max"})
    assert saved(trainer) == ["best", *(f"step-{step:08d}" for step in (1, 2, 5, 6))]


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("validates", [True, False])
def test_a_metric_of_training_needs_no_validation(every: int, validates: bool) -> None:
    """Ranked by steps, it may be missing at validations, and no validation is needed; the last step is always saved."""
    trainer = make_scripted([9, 9, 9], {"monitor": "train/loss", "save_every_n_steps": every, "save_top_k": 2})
    trainer.fit([torch.ones(2)] * 2, [torch.ones(1)] if validates else None, max_epochs=3)
    assert [checkpoint.step for checkpoint in trainer.hooks.get("checkpoint").kept] == ([5, 6] if every == 1 else [6])


def test_a_metric_of_training_is_evaluated_after_every_epoch() -> None:
    """Without steps to save, at the end of epochs; a misspelt one is an error there, or at the first step."""
    assert links(run([9, 9, 9], {"monitor": "train/epoch_loss"})) == {"best": "step-00000006"}
    for more in ({}, {"save_every_n_steps": 1}):
        with pytest.raises(MetricMissing, match=r"metric 'train/los' was not measured at .*did you mean 'train/loss'"):
            run([9], {"monitor": "train/los", "mode": "min", **more})


def test_a_monitored_metric_needs_no_number_of_epochs() -> None:
    """With save_every_n_epochs null, every validation is evaluated."""
    config = {"monitor": "val/loss", "save_every_n_epochs": None, "save_top_k": -1}
    assert saved(run([3, 2, 1], config)) == ["best", *(f"step-{step:08d}" for step in (2, 4, 6))]


def test_another_run_has_another_ranking() -> None:
    """A hook that is used by a second trainer, or in a second fit, ranks what that run measures and nothing before."""
    hook = CheckpointHook(monitor="val/loss", save_last=True)
    for losses, best in (([3, 1, 2], 2), ([6, 5, 7], 2)):
        trainer = make_scripted([*losses, 9])
        trainer.add_hook(hook)
        trainer.fit([torch.ones(2)], [torch.ones(1)], max_epochs=3)
        assert links(trainer) == {"best": f"step-{best:08d}", "last": "step-00000003"}
        assert hook.best_path == trainer.checkpoint_dir / f"step-{best:08d}"
    trainer.fit(max_epochs=4)
    assert links(trainer) == {"best": "step-00000004", "last": "step-00000004"} and hook.best_score == 9.0


def test_a_misspelt_metric_in_the_file_name_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A metric that a validation does not have would always be 'none'; saves by steps need not have it."""
    config = {"monitor": "val/loss", "filename": "{epoch}_{val/los:.1f}_{eval/loss:.1f}", "save_every_n_steps": 1}
    trainer = run([2, 1], {**config, "auto_insert_metric_name": False, "save_top_k": -1})
    assert "1_none_1.0" in saved(trainer)
    assert [record.getMessage() for record in caplog.records] == [
        "hook 'checkpoint': 'val/los' in filename is written as 'none' at step 2; "
        "did you mean 'val/loss'? Valid: val/loss"
    ]


def test_non_finite_values_are_never_the_best() -> None:
    """NaN and infinity are the worst scores, in either mode."""
    for mode, best in (("min", "step-00000006"), ("max", "step-00000004")):
        trainer = run([math.nan, 2, 1, -math.inf, math.inf, math.nan], {"monitor": "val/loss", "mode": mode})
        assert links(trainer) == {"best": best}
    trainer = run([math.nan, math.nan], {"monitor": "val/loss", "save_last": True})
    assert links(trainer) == {"last": "step-00000004"}


@pytest.mark.parametrize("options", [{}, {"save_top_k": 2, "keep_previous": False}], ids=str)
def test_a_metric_that_is_always_nan_is_reported_and_saved(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A finished run has a checkpoint of its last epoch, a warning and an event, each once."""
    trainer = run([math.nan] * 3, {"monitor": "val/loss", **options})
    assert saved(trainer) == ["step-00000004", "step-00000006"]
    assert trainer.hooks.get("checkpoint").best_path is None
    assert [line for line in caplog.messages if "nan" in line] == [
        "hook 'checkpoint': val/loss is nan after the validation at step 2"
    ]
    events = [event for event in read_events(trainer.run_dir) if event["kind"] == "metric_not_finite"]
    assert [(event["by"], event["monitor"], event["value"], event["step"]) for event in events] == [
        ("checkpoint", "val/loss", "nan", 2)
    ]


def test_a_finite_score_replaces_nan() -> None:
    """NaN fills the places of the best only until there are enough finite scores."""
    trainer = run([math.nan, 3, math.nan, 2], {"monitor": "val/loss", "save_top_k": 2, "keep_previous": False})
    assert saved(trainer) == ["best", "step-00000004", "step-00000008"]


@pytest.mark.parametrize(("keep_previous", "steps"), [(True, (4, 6)), (False, (6,))], ids=str)
def test_keep_previous_decides_whether_one_or_two_are_left(keep_previous: bool, steps: tuple[int, ...]) -> None:
    """With save_top_k=1 the one before the newest is kept by default, in case the newest is damaged."""
    trainer = run([3, 2, 1], {"monitor": "val/loss", "keep_previous": keep_previous})
    assert saved(trainer) == ["best", *(f"step-{step:08d}" for step in steps)]


@pytest.mark.parametrize(
    "parameters",
    [{"save_every_n_steps": 50, "save_every_n_epochs": None}, {"save_every_n_epochs": 5}, {"monitor": "val/loss"}],
    ids=str,
)
def test_a_finished_run_has_a_checkpoint(parameters: dict[str, Any]) -> None:
    """If nothing was due before its end, its last step is saved, with the weights of that step."""
    stopping = EarlyStopping("train/loss", restore_best_weights=True, patience=9)
    options = {"max_epochs": 2, "val_dataloader": make_batches(1), "validate_every": None}
    trainer = make_trainer(stopping, CheckpointHook(**parameters), **options)
    seen: list[torch.Tensor] = []
    trainer.on("step_end", name="seen")(lambda model: seen.append(model[0].weight.detach().clone()))
    trainer.train()
    assert saved(trainer) == ["step-00000008"]
    assert torch.equal(read_checkpoint(trainer.checkpoint_dir / "step-00000008")[0]["model"]["0.weight"], seen[-1])


@pytest.mark.parametrize(
    ("parameters", "steps", "words"),
    [
        ({}, [3, 6], ", 2 steps after the last checkpoint (step 6; save_last: true also saves the end of training)"),
        ({"save_last": True}, [3, 6, 8], ""),
        ({"save_last": True, "save_top_k": 0, "keep_previous": False}, [8], ""),
        ({"save_every_n_epochs": 1, "save_last": True}, [3, 4, 6, 8], ""),
        ({"save_every_n_steps": None, "save_last": True}, [8], ""),
    ],
    ids=str,
)
def test_the_end_of_a_run(parameters: dict[str, Any], steps: list[int], words: str, capfd: Any) -> None:
    """Steps that are in no checkpoint are counted in the closing line; with `save_last` there are none."""
    trainer = make_trainer(max_epochs=2, console=True)
    trainer.add_hook(CheckpointHook(**{"save_every_n_steps": 3, "save_every_n_epochs": None, **parameters}))
    trainer.train()
    assert [name for name in saved(trainer) if name != "last"] == [f"step-{step:08d}" for step in steps]
    assert capfd.readouterr().out.splitlines()[-2].partition(" s")[2].partition(" s")[2] == words
    again = make_trainer(CheckpointHook(every=3, save_last=True), max_epochs=2)
    again.fit(resume=trainer.run_dir)
    assert saved(again)[-1] == "step-00000008", "a run that trains no further step saves none twice"


def test_every_hook_may_save_the_end() -> None:
    """Each has its own link to it."""
    trainer = make_trainer(max_epochs=2)
    for name, every in (("a", 5), ("b", 3)):
        parameters = {"save_every_n_steps": every, "save_every_n_epochs": None, "save_last": True}
        trainer.add_hook(CheckpointHook(filename=f"{name}_{{step}}", **parameters), name=name)
    trainer.train()
    assert {"a_step=8", "b_step=8"} <= set(saved(trainer))


def test_a_run_that_is_interrupted_is_not_told_of_save_last(capfd: Any) -> None:
    """That would not have saved its end, and is on already."""
    trainer = make_trainer(max_epochs=2, console=True)
    trainer.add_hook(CheckpointHook(save_every_n_steps=3, save_every_n_epochs=None, save_last=True))

    def interrupt() -> None:
        raise KeyboardInterrupt

    trainer.on("train_batch_start", at=5)(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert capfd.readouterr().out.splitlines()[-2].endswith("1 step after the last checkpoint (step 3)")


def test_a_run_that_fails_says_what_is_not_saved(capfd: Any) -> None:
    """Saving the end of a run is about runs that end in order."""
    trainer = make_trainer(CheckpointHook(every=3), max_epochs=2, console=True)
    trainer.on("train_batch_start", at=6, on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    closing = capfd.readouterr().out.splitlines()[-2]
    assert closing.endswith(" s, 1 hook failure, 2 steps after the last checkpoint (step 3)")


def test_save_top_k_0_saves_nothing() -> None:
    """Also not at the end of the run."""
    assert saved(run([2, 1], {"monitor": "val/loss", "save_top_k": 0})) == []


def test_the_first_of_equal_scores_stays() -> None:
    """A tie replaces nothing and is not written."""
    assert saved(run([1, 1, 1], {"monitor": "val/loss"})) == ["best", "step-00000002"]


def test_a_missing_metric_ends_the_run() -> None:
    """A misspelt metric is an error at the first validation, which lists the metrics."""
    message = r"metric 'val/acuracy' was not measured after the validation at step 2.*valid: val/loss"
    with pytest.raises(MetricMissing, match=message):
        run([1, 2], {"monitor": "val/acuracy", "mode": "min"})


def test_a_run_that_would_never_save_fails() -> None:
    """Saving after validations only, without any, is an error before the first step."""
    trainer = make_trainer(max_epochs=3)
    trainer.add_checkpointing(save_on_train_epoch_end=False)
    with pytest.raises(MetricMissing, match="checkpoint needs a validation, but there are no val_loaders"):
        trainer.train()
    assert trainer.step == 0


def test_a_metric_that_is_sometimes_missing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Once it has been there, a validation without it is not ranked and not saved, and the log says so once."""
    trainer = make_scripted([1] * 4, {"monitor": "bleu", "mode": "max", "save_top_k": -1})

    @trainer.on("validation_end")
    def measure(metrics: dict[str, Any], epoch: int) -> None:
        if epoch % 2 == 0:
            metrics["bleu"] = epoch

    trainer.fit([torch.ones(2)], [torch.ones(1)], max_epochs=4)
    assert saved(trainer) == ["best", "step-00000001", "step-00000003"]
    assert caplog.text.count("metric 'bleu' was not measured") == 1


def test_without_a_metric_the_newest_are_kept() -> None:
    """save_top_k alone limits how many there are: the newest stay."""
    assert saved(run([1] * 5, {"save_top_k": 3})) == [f"step-{step:08d}" for step in (6, 8, 10)]


def test_checkpoints_are_saved_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A period in seconds saves at the first step after each such span."""
    trainer = make_trainer(CheckpointHook(save_every_n_epochs=None, save_every="10 s"), max_epochs=1)
    now = [0.0]
    trainer.on("train_batch_start", name="time")(lambda batch_idx: now.__setitem__(0, 6.0 * (batch_idx + 1)))
    monkeypatch.setattr("hookline.run.progress.monotonic", lambda: now[0])
    trainer.train()
    assert saved(trainer) == ["step-00000003"]


def test_every_n_epochs_counts_validations_of_those_epochs() -> None:
    """With save_every_n_epochs=2 the validations of every second epoch are evaluated."""
    config = {"monitor": "val/loss", "save_top_k": -1, "save_every_n_epochs": 2}
    assert saved(run([4, 3, 2, 1], config)) == ["best", "step-00000004", "step-00000008"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"save_every_n_epochs": 0}, "expected an integer of at least 1, got 0"),
        ({"save_top_k": -2}, "save_top_k"),
        ({"save_top_k": True}, "save_top_k"),
        ({"save_last": "no"}, "save_last: expected true or false, got 'no'"),
        ({"save_on_train_epoch_end": "false"}, "save_on_train_epoch_end: expected true or false"),
        ({"monitor": ""}, "monitor: expected a non-empty string"),
        ({"save_every": 7}, "save_every: expected a non-empty string"),
        ({"mode": "maximum"}, "mode: invalid value 'maximum'"),
        ({"filename": "../../{epoch}"}, "'/' cannot be in a name"),
        ({"save_every": "2 epochs"}, "use save_every_n_epochs"),
        ({"save_every": "soon"}, "is not a schedule"),
        ({"save_every": "1 h", "save_every_n_steps": 5}, "not both"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(parameters: dict[str, Any], words: str) -> None:
    """At construction, with the parameter and what would be right."""
    with pytest.raises(ConfigError) as caught:
        CheckpointHook(**parameters)
    assert words in str(caught.value)


def test_model_checkpoint_is_the_same_class() -> None:
    """Document 001's CheckpointHook and document 002's model checkpoint are the same class."""
    assert ModelCheckpoint is CheckpointHook


# ---- against a brute-force search ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.one_of(st.none(), st.just(math.nan), st.integers(0, 6).map(float)), max_size=9),
    top_k=st.integers(-1, 3),
    mode=st.sampled_from(["min", "max"]),
    save_last=st.booleans(),
)
def test_what_is_on_disk_equals_a_brute_force_search(
    scores: list[float | None], top_k: int, mode: str, save_last: bool
) -> None:
    """Over random sequences, missing and NaN values among them: the best k of all, and the newest two ever written."""
    with TemporaryDirectory() as directory:
        hook = CheckpointHook(monitor="val/loss", mode=mode, save_top_k=top_k, save_last=save_last)
        run = PlainRun(Path(directory))
        written: list[int] = []
        run.hooks.register(hook)
        run.hooks.on("checkpoint_save", name="written")(lambda step: written.append(step))
        hook.strict = False  # the metric may be missing, also before it was measured once
        for run.progress.step, score in enumerate(scores, 1):
            run.validate(**({} if score is None else {"val/loss": score}))
        sign = 1 if mode == "min" else -1
        ranked = [(step, score) for step, score in enumerate(scores, 1) if score is not None and not math.isnan(score)]
        finite = sorted((sign * score, step) for step, score in ranked)
        best = [step for _, step in finite[: len(finite) if top_k == -1 else top_k]]
        nans = [step for step in written if math.isnan(scores[step - 1] or 0.0)]
        worst = nans[-max(top_k - len(finite), 0) or len(nans) :]  # they fill the places that are left
        kept = set(written) if top_k == -1 else {*best, *worst, *written[-2:]}
        on_disk = {int(path.name[5:]) for path in Path(directory).glob("*/step-*")}
        assert on_disk == kept
        assert (hook.best_path.name if hook.best_path else None) == (f"step-{best[0]:08d}" if best else None)
        assert save_last is False or written == list(range(1, len(scores) + 1))


# ---- nothing is lost -------------------------------------------------------------------------------------------------


def test_two_hooks_do_not_delete_each_others_checkpoints() -> None:
    """A checkpoint that two hooks share stays as long as one of them wants it; each has separate links."""
    highest = {"as": "highest", "monitor": "val/loss", "mode": "max"}
    trainer = make_scripted([1, 2, 3, 4, 5], {"monitor": "val/loss", "save_last": True}, highest)
    trainer.fit([torch.ones(2)], [torch.ones(1)], max_epochs=5)
    assert links(trainer) == {"best": "step-00000001", "last": "step-00000005", "best-highest": "step-00000005"}
    assert saved(trainer) == ["best", "best-highest", "last", *(f"step-{step:08d}" for step in (1, 4, 5))]


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 5])
def test_the_ranking_continues_after_a_resume(epochs: int, tmp_path: Path) -> None:
    """Interrupted after any epoch and resumed, the run ends with the files of the uninterrupted run."""
    losses = [0.5, 0.3, 0.4, 0.2, 0.6, 0.25]
    config = {**SEED, "save_top_k": 2}
    whole = run(losses, config, output_dir=str(tmp_path / "whole"))
    first = run(losses[:epochs], config, output_dir=str(tmp_path / "parts"))
    second = run(losses[epochs:], config, resume=first.run_dir, output_dir=str(tmp_path / "parts"), max_epochs=6)
    assert (second.run_dir, second.step) == (first.run_dir, whole.step)
    assert saved(second) == saved(whole) and links(second) == links(whole)
    assert second.hooks.get("checkpoint").kept == whole.hooks.get("checkpoint").kept


def test_a_resume_deletes_nothing_of_another_run(tmp_path: Path) -> None:
    """Loading into a trainer that writes elsewhere leaves the old run's checkpoints alone, whatever is saved later."""
    first = run([3, 2, 1], {"monitor": "val/loss", "save_top_k": 2})
    before = saved(first)
    trainer = make_scripted([0.5, 0.4, 0.3], {"monitor": "val/loss"}, output_dir=str(tmp_path / "other"))
    trainer.load_checkpoint(first.checkpoint_dir / "best")
    assert trainer.hooks.get("checkpoint").kept == []
    trainer.fit([torch.ones(2)], [torch.ones(1)], max_epochs=6)
    assert saved(first) == before


def test_a_deletion_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed deletion is warned of, and the next save tries again."""
    real, calls = retention.delete_checkpoint, [0]

    def refuse_once(path: Path) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise PermissionError("not today")
        real(path)

    monkeypatch.setattr(retention, "delete_checkpoint", refuse_once)
    trainer = run([5, 4, 3, 2], {"monitor": "val/loss"})
    assert saved(trainer) == ["best", "step-00000006", "step-00000008"]
    assert "cannot be deleted: not today" in caplog.text


def test_a_failure_between_two_steps_is_saved(tmp_path: Path) -> None:
    """With save_on_exception a run that fails while it validates leaves a checkpoint of its last step."""
    with pytest.raises(IndexError):
        run([1], {"monitor": "val/loss", "save_on_exception": True}, max_epochs=2, output_dir=str(tmp_path))
    (directory,) = tmp_path.glob("*/checkpoints")
    assert sorted(path.name for path in directory.iterdir()) == ["best", "step-00000002", "step-00000004"]
    assert read_checkpoint(directory / "step-00000004")[0]["model"]["weight"].item() == 4.0


def test_a_step_that_is_saved_is_not_saved_again() -> None:
    """A failure right after a save, in a hook of that very step, adds nothing to it."""
    trainer = make_scripted([], {"save_on_exception": True})
    trainer.on("checkpoint_save", name="fail", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit([torch.ones(2)], max_epochs=1)
    assert saved(trainer) == ["step-00000001"]


def test_a_step_that_was_saved_before_the_run_went_back_is_saved_again() -> None:
    """Its weights need not be those that were saved when the run came there first."""
    trainer = make_trainer(max_epochs=2)
    trainer.add_hook(CheckpointHook(save_every_n_epochs=None, save_every_n_steps=2, save_on_exception=True))
    trainer.train()
    assert saved(trainer)[-3:] == ["step-00000004", "step-00000006", "step-00000008"]
    trainer.on("step_end", name="fail", on_error="raise")(lambda step: 1 / 0 if step == 6 else None)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(resume=trainer.checkpoint_dir / "step-00000004")
    assert saved(trainer)[-2:] == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_failure_in_a_step_is_saved_apart(accumulate: int, tmp_path: Path) -> None:
    """The unfinished step is skipped, also for the checkpoint's event; the run resumes after the batch that failed."""
    told: dict[str, int] = {}

    def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if batch.isnan().any():
            raise ValueError("a bad batch")
        return model(batch)

    def train_on(bad: float, resume: Path | None = None) -> Trainer:
        options = {"output_dir": str(tmp_path), "step_fn": step, "accumulate": accumulate}
        trainer = make_scripted([], {"save_on_exception": True}, **options)
        trainer.on("checkpoint_save", name="told")(lambda step, checkpoint_path: told.update({checkpoint_path: step}))
        trainer.fit([torch.full((2,), float(value)) for value in (1, 1, 1, bad, 1, 1)], max_epochs=1, resume=resume)
        return trainer

    with pytest.raises(ValueError, match="a bad batch") as caught:
        train_on(math.nan)
    assert not any("failed in" in note for note in getattr(caught.value, "__notes__", ()))
    done = 3 // accumulate
    (path,) = tmp_path.glob("*/exception/*")
    assert path.name == f"step-{done:08d}" and not (path.parent.parent / "checkpoints").exists()
    assert told == {str(path): done}
    trainer = train_on(1.0, resume=path)
    assert (trainer.step, trainer.model.weight.item()) == (done + 2 // accumulate, done + 2 // accumulate)


def train_with_schedule(output: Path, fail: Any = None, resume: Path | None = None) -> Trainer:
    """Six steps with a scheduler; `fail` registers what raises in the third one."""
    model = make_model(3, 1)
    optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()]
    options = {
        "model": model, "data": make_batches(6), "optimizer": optimizers, "output_dir": str(output),
        "scheduler": [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers],
    }  # fmt: skip
    trainer = make_trainer(CheckpointHook(save_on_exception=True), **options)
    if fail is not None:
        fail(trainer)
    trainer.fit(resume=resume)
    return trainer


def fail_at(event: str, last_optimizer: int = 0) -> Any:
    """Return a function that makes a trainer fail at an event of its third step."""

    def register(trainer: Trainer) -> None:
        @trainer.on(event, name="fail", on_error="raise")
        def fail(step: int, trainer: Trainer) -> None:
            if step == 3 and trainer.event_args.optimizer_idx == last_optimizer:
                raise RuntimeError("as planned")

    return register


@pytest.mark.parametrize(
    ("fail", "place"),
    [
        (fail_at("after_optimizer_step", last_optimizer=1), "exception"),
        (fail_at("train_batch_end"), "exception"),
        (fail_at("step_end"), "checkpoints"),
    ],
    ids=["after_optimizer_step", "train_batch_end", "step_end"],
)
def test_a_failure_after_the_optimizer_step(fail: Any, place: str, tmp_path: Path) -> None:
    """The checkpoint's name, counters, schedulers and weights are all of the same step, so a resumed run is exact."""
    whole = train_with_schedule(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="as planned"):
        train_with_schedule(tmp_path / "failed", fail)
    (path,) = (tmp_path / "failed").glob(f"*/{place}/*")
    sections, meta = read_checkpoint(path)
    assert (path.name, meta["step"], sections["progress"]["step"]) == ("step-00000003", 3, 3)
    assert [scheduler["last_epoch"] for scheduler in sections["schedulers"]] == [3, 3]
    resumed = train_with_schedule(tmp_path / "failed", resume=path)
    assert (resumed.step, resumed.lr) == (6, whole.lr)
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)


def test_a_failure_between_two_optimizers(tmp_path: Path) -> None:
    """The step counts from the first optimizer that stepped, and only the schedulers of those that stepped move."""
    with pytest.raises(RuntimeError, match="as planned"):
        train_with_schedule(tmp_path, fail_at("after_optimizer_step"))
    (path,) = tmp_path.glob("*/exception/*")
    sections, meta = read_checkpoint(path)
    assert (path.name, meta["step"]) == ("step-00000003", 3)
    assert [scheduler["last_epoch"] for scheduler in sections["schedulers"]] == [3, 2]


def test_half_a_step_cannot_be_saved_after_the_optimizer_step(tmp_path: Path) -> None:
    """Schedulers and other hooks have not seen the step yet."""

    def save_at(trainer: Trainer) -> None:
        trainer.on("after_optimizer_step", name="save", at=3, on_error="raise")(lambda: trainer.save_checkpoint())

    with pytest.raises(CheckpointError, match="in the middle of a step"):
        train_with_schedule(tmp_path, save_at)


def test_a_failure_saves_nothing_by_default(tmp_path: Path) -> None:
    """save_on_exception is off by default."""
    with pytest.raises(IndexError):
        run([], {}, max_epochs=1, output_dir=str(tmp_path))
    assert not list(tmp_path.glob("*/checkpoints/*"))


# ---- checkpoints that were deleted from disk -------------------------------------------------------------------------


def run_and_delete(scores: list[float], deleted_after: int, **checkpoint: Any) -> Trainer:
    """An epoch of two steps for each score; what the first one saved is deleted at the end of a later one."""
    hook = CheckpointHook(monitor="val/score", mode="min", **checkpoint)
    trainer = make_trainer(hook, data=make_batches(2), val_loaders=make_batches(1), max_epochs=len(scores))

    @trainer.on("validation_end")
    def score(metrics: dict[str, float], epoch: int) -> None:
        metrics["val/score"] = scores[epoch]

    @trainer.on("epoch_end")
    def tidy(trainer: Trainer, epoch: int) -> None:
        if epoch == deleted_after:
            shutil.rmtree(trainer.checkpoint_dir / "step-00000002")

    trainer.train()
    return trainer


@pytest.mark.parametrize("options", [{"save_top_k": 1}, {"save_top_k": 2, "save_last": True}], ids=str)
def test_a_deleted_best_checkpoint_is_replaced(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The best remaining one is linked and returned; the deletion is warned of once."""
    with caplog.at_level(logging.WARNING, logger="hookline"):
        trainer = run_and_delete([0.1, 3, 2, 5], deleted_after=1, **options)
    hook, directory = trainer.hooks.get("checkpoint"), trainer.checkpoint_dir
    assert hook.best_path == (directory / "best").resolve() == directory / "step-00000006"
    assert hook.best_score == 2
    assert [line for line in caplog.messages if "step-00000002 was deleted" in line] == [
        "hook 'checkpoint': step-00000002 was deleted from disk, so it is no longer ranked"
    ]


def test_deleting_a_surplus_checkpoint_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The newest two stay on disk although only one is wanted; deleting the other is not warned of."""
    with caplog.at_level(logging.WARNING, logger="hookline"):
        trainer = run_and_delete([3, 2, 1], deleted_after=1, save_top_k=1)
    assert trainer.hooks.get("checkpoint").best_score == 1
    assert not caplog.messages


def test_a_disk_that_does_not_answer_does_not_change_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only checkpoints that certainly do not exist are dropped; a stale mount may come back."""
    hook = CheckpointHook(monitor="val/loss")
    plain = PlainRun(Path.cwd())
    plain.hooks.register(hook)
    plain.progress.step = 1
    plain.validate(**{"val/loss": 1.0})
    best, stat = hook.best_path, Path.stat

    def stale(path: Path, **options: Any) -> Any:
        if path == best:
            raise OSError(116, "Stale file handle", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", stale)
    plain.progress.step = 2
    plain.validate(**{"val/loss": 2.0})
    assert hook.best_path == best is not None
