"""Early stopping stops when it should, records why, and resumes its count."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_control import PlainRun
from scripted import make_scripted, train_scripted

from hookline import EarlyStopping, HooklineError, HooksConfig, Trainer
from hookline.errors import ConfigError, MetricMissing

NAN = math.nan


def run(losses: Sequence[float], config: dict[str, Any], **options: Any) -> Trainer:
    """Train two steps an epoch, with one validation at its end."""
    hooks = HooksConfig(enable_early_stopping_hook=True, early_stopping_config=config)
    return train_scripted(losses, hooks, **options)


def ending(trainer: Any) -> tuple[int, str, str | None]:
    """Return the number of validations, the outcome and the reason."""
    return trainer.step // 2, trainer.record.run["outcome"], trainer.record.run["reason"]


@pytest.mark.req("002-27", "002-28", "002-29", "002-30")
def test_it_stops_when_the_metric_stops_improving() -> None:
    """After `patience` checks without improvement the run ends, and the record has the sentence."""
    config = {
        "monitor": "val/loss",
        "patience": 3,
        "mode": "min",
        "min_delta": 0.0001,
        "check_on_train_epoch_end": False,
        "strict": True,
        "verbose": True,
    }
    trainer = run([3, 1.234, 2, 1.5, 1.3, 1.0], config)
    reason = "stopped by early_stopping: val/loss has not improved on 1.234 for 3 checks"
    assert ending(trainer) == (5, "stopped", reason)
    assert trainer.refresh_state()["status"] == "completed"


@pytest.mark.req("002-30")
def test_in_mode_max_higher_values_are_better() -> None:
    """With mode max a falling metric does not improve."""
    trainer = run([1, 2, 1.9, 1.8, 3], {"mode": "max", "patience": 2})
    assert ending(trainer)[0] == 4


@pytest.mark.req("002-31")
@pytest.mark.parametrize(
    ("options", "stops_after"),
    [
        ({"min_delta": 0.0}, 5),
        ({"min_delta": 0.5}, 3),
        ({"min_delta": 0.05, "min_delta_mode": "rel"}, 3),
        ({"min_delta": 0.0005, "min_delta_mode": "rel"}, 5),
    ],
    ids=str,
)
def test_an_improvement_is_more_than_min_delta(options: dict[str, Any], stops_after: int) -> None:
    """min_delta is a difference, or a share of the best value so far, whose sign makes no difference."""
    for best in (10.0, -10.0):
        for sign, mode in ((-1, "min"), (1, "max")):
            losses = [best + sign * change for change in (0.0, 0.2, 0.3, 0.4, 0.5)]
            assert ending(run(losses, {"patience": 2, "mode": mode, **options}))[0] == stops_after


@pytest.mark.req("002-32")
def test_it_checks_at_the_end_of_epochs_too() -> None:
    """With check_on_train_epoch_end the training loss of the epoch can be monitored; no validation is needed."""
    config = {"monitor": "train/epoch_loss", "patience": 2, "mode": "max", "check_on_train_epoch_end": True}
    trainer = make_scripted([], config=HooksConfig(enable_early_stopping_hook=True, early_stopping_config=config))
    trainer.fit([torch.ones(2), torch.ones(2)], max_epochs=9)
    assert ending(trainer)[2] == "stopped by early_stopping: train/epoch_loss has not improved on 0.5 for 2 checks"


@pytest.mark.req("002-32")
@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 3), ({"check_on_train_epoch_end": False}, 3), ({"check_on_train_epoch_end": True}, 6)],
    ids=str,
)
def test_without_epoch_ends_it_checks_after_every_validation(options: dict[str, bool], steps: int) -> None:
    """Validated at every step of two-step epochs: three checks without improvement are three steps, or three epochs."""
    trainer = run([1.0] * 8, {"patience": 2, **options}, validate_every=1, max_epochs=4)
    assert (trainer.step, trainer.record.run["outcome"]) == (steps, "stopped")


def test_a_validation_s_metric_is_new_at_the_end_of_its_epoch_only() -> None:
    """Validated every second epoch and checked every epoch, three equal values are three checks and not six."""
    config = {"patience": 2, "check_on_train_epoch_end": True}
    trainer = run([1, 1, 1, 1], config, validate_every="2 epochs", max_epochs=8)
    assert ending(trainer)[0] == 6


def test_steps_can_be_checked() -> None:
    """A metric of training is checked every n steps, also one that step_fn returns beside the loss."""

    def step(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": model(batch), "error": torch.tensor(4.0)}

    for monitor in ("train/loss", "loss", "train/error", "error"):
        hook = EarlyStopping(monitor, patience=3, mode="max", check_every_n_steps=2)
        trainer = make_scripted([], hook, step_fn=step)
        trainer.fit([torch.ones(2)] * 20, max_epochs=1)
        assert (trainer.step, hook.best_step) == (8, 2), monitor


@pytest.mark.parametrize(
    ("config", "losses", "stops_after", "words"),
    [
        ({"target": 0.5}, [2, 1, 0.5, 0.4], 3, "val/loss 0.5 has reached its target 0.5"),
        ({"divergence_threshold": 5}, [2, 5, 6, 1], 3, "val/loss 6 is worse than 5, its divergence threshold"),
        ({}, [2, NAN, 1], 2, "val/loss is nan"),
        ({"on_non_finite": "count", "patience": 2}, [2, NAN, math.inf, 1], 3, "has not improved on 2 for 2 checks"),
        ({"on_non_finite": "count", "patience": 1}, [NAN, 1], 1, "has not improved for 1 check"),
        ({"on_non_finite": "ignore", "patience": 2}, [2, NAN, 3, NAN, 3, 1], 5, "has not improved on 2 for 2 checks"),
        ({"warmup": "2 epochs", "patience": 1}, [1, 9, 5, 6], 4, "has not improved on 5 for 1 check"),
        ({"warmup": 4, "patience": 1}, [1, 9, 5, 6], 4, "has not improved on 5 for 1 check"),
        ({"monitor": "eval/loss", "patience": 1}, [1, 2, 0], 2, "eval/loss has not improved on 1 for 1 check"),
    ],
    ids=str,
)
def test_other_reasons_end_a_run(config: dict[str, Any], losses: list[float], stops_after: int, words: str) -> None:
    """A target, a divergence threshold, or NaN, according to the options; nothing before the warm-up is over."""
    made, outcome, reason = ending(run(losses, config))
    assert (made, outcome) == (stops_after, "stopped") and reason is not None and words in reason


@pytest.mark.parametrize(
    ("config", "losses", "stops_after"),
    [
        ({"patience": 1}, [1, 2, 2, 2, 2, 2], 4),
        ({"patience": 1, "check_on_train_epoch_end": True}, [1, 2, 2, 2, 2, 2], 4),
        ({"patience": 1}, [1, 2, 2, 0.5, 2, 2], 5),  # an improvement starts the count again
        ({"target": 1.5, "patience": 9}, [1, 1, 1, 1, 1], 4),
        ({"divergence_threshold": 5}, [1, 9, 1, 1, 1], 2),
        ({}, [1, NAN, 1, 1, 1], 2),
    ],
    ids=str,
)
def test_min_epochs(config: dict[str, Any], losses: list[float], stops_after: int) -> None:
    """The run is not stopped before the fourth epoch is complete, unless the metric diverges or is NaN."""
    assert ending(run(losses, {"monitor": "val/loss", "min_epochs": 4, **config}))[:2] == (stops_after, "stopped")


def test_min_epochs_waits_for_the_end_of_the_epoch() -> None:
    """With validations inside of epochs, too."""
    trainer = run([1, 2, 2, 2, 2, 2], {"monitor": "val/loss", "min_epochs": 2, "patience": 1}, validate_every=1)
    assert trainer.step == 4


@pytest.mark.parametrize("how", ["count", "ignore"])
def test_a_metric_that_is_nan_is_reported_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A run that continues all the same says so."""
    trainer = run([1, NAN, NAN], {"monitor": "val/loss", "on_non_finite": how, "patience": 5})
    assert [line for line in caplog.messages if "nan" in line] == [
        "hook 'early_stopping': val/loss is nan after the validation at step 4"
    ]
    assert [event["value"] for event in trainer.record.events if event["kind"] == "metric_not_finite"] == ["nan"]


def oracle(values: Sequence[float | None], config: dict[str, Any]) -> int | None:
    """Return the check, counted from 0, at which the documented rules stop the run; independent of the hook's code."""
    sign = 1 if config["mode"] == "min" else -1
    seen: list[float] = []  # what has been the best, each time
    bad = 0
    for index, value in enumerate(values):
        if value is None or index < config["warmup"]:
            continue
        finite = math.isfinite(value)
        if not finite and config["on_non_finite"] == "ignore":
            continue
        if not finite and config["on_non_finite"] == "stop":
            return index
        if finite and config["target"] is not None and sign * value <= sign * config["target"]:
            return index
        limit = config["divergence_threshold"]
        if finite and limit is not None and sign * value > sign * limit:
            return index
        needed = config["min_delta"] * (abs(seen[-1]) if seen and config["min_delta_mode"] == "rel" else 1)
        if finite and (not seen or sign * seen[-1] - sign * value > needed):
            seen.append(value)
            bad = 0
        else:
            bad += 1
            if bad >= config["patience"]:
                return index
    return None


@settings(max_examples=400, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 4), st.sampled_from([NAN, math.inf, -math.inf])),
        max_size=25,
    ),
    config=st.fixed_dictionaries(
        {
            "patience": st.integers(1, 4),
            "mode": st.sampled_from(["min", "max"]),
            "min_delta": st.sampled_from([0.0, 0.25, 1.0]),
            "min_delta_mode": st.sampled_from(["abs", "rel"]),
            "warmup": st.integers(0, 4),
            "target": st.sampled_from([None, -1.5, 0.0, 1.5]),
            "divergence_threshold": st.sampled_from([None, -1.5, 0.0, 1.5]),
            "on_non_finite": st.sampled_from(["stop", "count", "ignore"]),
        }
    ),
)
def test_it_equals_an_oracle_over_random_sequences(values: list[float | None], config: dict[str, Any]) -> None:
    """With every option, the hook requests a stop at the check at which the oracle does."""
    hook = EarlyStopping(strict=False, **config)
    stopped = None
    for index, value in enumerate(values):
        run = PlainRun()
        metrics = {} if value is None else {"val/loss": value}
        hook.on_validation_end(run, step=index + 1, epoch=index, metrics=metrics)
        if run.stop_reason is not None:
            stopped = index
            break
    assert stopped == oracle(values, config)


@pytest.mark.req("002-33")
def test_strict_ends_the_run_despite_the_failure_policy() -> None:
    """A missing metric ends the run although other failures of the hook are only warned of; the error lists metrics."""
    sentence = r"metric 'val/los' was not measured.*did you mean 'val/loss'\? Valid: val/loss"
    with pytest.raises(MetricMissing, match=sentence) as caught:
        run([1, 2], {"monitor": "val/los", "mode": "min", "on_error": "warn"})
    assert "raised by hook 'early_stopping' in on_validation_end, step 2" in caught.value.__notes__


@pytest.mark.req("002-33")
def test_without_strict_it_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """With strict off the run continues, and one warning names the missing metric and those that exist."""
    trainer = run([1, 2, 3], {"monitor": "val/los", "mode": "min", "strict": False})
    assert ending(trainer)[:2] == (3, "completed")
    assert [record.message for record in caplog.records] == [
        "hook 'early_stopping': metric 'val/los' was not measured after the validation at step 2; "
        "did you mean 'val/loss'? Valid: val/loss"
    ]


def test_a_run_without_validation_fails_before_its_first_step() -> None:
    """Waiting for a validation that cannot happen is an error."""
    trainer = make_scripted([], config=HooksConfig(enable_early_stopping_hook=True))
    with pytest.raises(MetricMissing, match="there are no val_loaders"):
        trainer.fit([torch.ones(2)], max_epochs=3)
    assert trainer.step == 0


@pytest.mark.req("002-34")
def test_verbose_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each improvement, check and the end; nothing without verbose."""
    run([2, 1, 3, 4], {"patience": 2, "verbose": True})
    assert capsys.readouterr().out.splitlines() == [
        "early_stopping: val/loss improved to 2",
        "early_stopping: val/loss improved to 1 on 2",
        "early_stopping: val/loss has not improved on 1 for 1 check of 2",
        "early_stopping: stopping: val/loss has not improved on 1 for 2 checks",
    ]
    run([2, 3], {"patience": 1})
    assert capsys.readouterr().out == ""


def test_the_best_weights_are_restored_at_the_end() -> None:
    """Stopped or not, the model ends with the weights of its best validation, and the record says so."""
    for losses in ([3, 1, 2, 2], [3, 1, 2]):
        trainer = run(losses, {"patience": 2, "restore_best_weights": True})
        assert trainer.model.weight.item() == 4.0 < trainer.step
        event = next(event for event in trainer.record.events if event["kind"] == "best_weights_restored")
        assert (event["by"], event["saved_at"], event["value"]) == ("early_stopping", 4, 1.0)
        assert trainer.hooks.entry("early_stopping").intervenes


@pytest.mark.parametrize("min_delta", [0.0, 0.5])
def test_the_value_that_reaches_the_target_is_the_best(min_delta: float) -> None:
    """The run ends with the weights that reached it, also where they gained less than min_delta."""
    config = {"target": 1.0, "patience": 5, "min_delta": min_delta, "restore_best_weights": True}
    trainer = run([3, 1.25, 1.0, 9], config)
    assert trainer.stop_reason == "val/loss 1 has reached its target 1"
    assert trainer.model.weight.item() == trainer.step == 6
    assert trainer.hooks.get("early_stopping").best == 1.0


def test_another_run_starts_over() -> None:
    """A hook that is used by a second trainer, or in a second fit, starts over."""
    hook = EarlyStopping(patience=2, restore_best_weights=True)
    for _ in range(2):
        trainer = make_scripted([5, 6, 4, 4, 4], hook)
        trainer.fit([torch.ones(2)], [torch.ones(1)], max_epochs=9)
        assert (trainer.step, hook.best_step, trainer.model.weight.item()) == (5, 3, 3.0)
    trainer.model.losses += [9, 8, 7]
    trainer.fit(max_epochs=8)
    assert (trainer.step, trainer.stop_reason, hook.best) == (8, None, 7.0)


def test_a_metric_is_not_missed_before_the_first_validation() -> None:
    """A metric that a hook adds to validations may be missing at the end of epochs until the first validation."""
    for name, ends in (("bleu", None), ("blue", 2)):
        stopping = EarlyStopping(name, mode="max", check_on_train_epoch_end=True)
        trainer = make_scripted([1] * 4, stopping, validate_every="2 epochs")
        trainer.on("validation_end", name="adds")(lambda metrics: metrics.update(bleu=1.0))
        if ends is None:
            trainer.fit([torch.ones(2)], [torch.ones(1)], max_epochs=4)
        else:
            with pytest.raises(MetricMissing, match="metric 'blue' was not measured at the end of the epoch, step 2"):
                trainer.fit([torch.ones(2)], [torch.ones(1)], max_epochs=4)
            assert trainer.step == ends


def test_a_failed_run_keeps_its_weights() -> None:
    """After an exception the weights are not restored, so that they can be examined."""
    with pytest.raises(IndexError):
        run([3, 1], {"restore_best_weights": True}, max_epochs=3)
    trainer = make_scripted([2, 3], EarlyStopping(restore_best_weights=True))
    with pytest.raises(IndexError):
        trainer.fit([torch.ones(2), torch.ones(2)], [torch.ones(1)], max_epochs=3)
    assert trainer.model.weight.item() == 6.0


def test_the_count_continues_after_a_resume() -> None:
    """Interrupted and resumed, the run stops where the uninterrupted one stops, with the same best weights."""
    losses, config = [3, 1, 2, 2, 2, 2], {"patience": 4, "restore_best_weights": True}

    def trained(epochs: int, resume: Path | None = None) -> Trainer:
        hooks = ["checkpoint", EarlyStopping(**config)]
        trainer = make_scripted(losses[3:] if resume else losses, *hooks, record=True)
        trainer.fit([torch.ones(2), torch.ones(2)], [torch.ones(1)], max_epochs=epochs, resume=resume)
        return trainer

    whole, resumed = trained(9), trained(9, resume=trained(3).run_dir)
    assert (resumed.step, resumed.stop_reason) == (whole.step, whole.stop_reason)
    assert resumed.stop_reason == "val/loss has not improved on 1 for 4 checks"
    assert torch.equal(resumed.model.weight, whole.model.weight)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"mode": "mni"}, "did you mean 'min'"),
        ({"patience": -1}, "patience: expected an integer of at least 0, got -1"),
        ({"patience": True}, "patience"),
        ({"monitor": None}, "monitor: expected a non-empty string, got None"),
        ({"strict": "no"}, "strict: expected true or false, got 'no'"),
        ({"restore_best_weights": 1}, "restore_best_weights: expected true or false"),
        ({"min_delta": -0.1}, "min_delta: expected a finite number, at least 0"),
        ({"min_delta": NAN}, "min_delta"),
        ({"min_delta_mode": "relative"}, "did you mean 'rel'"),
        ({"on_non_finite": "stopp"}, "did you mean 'stop'"),
        ({"warmup": "3 s"}, "count in steps or epochs"),
        ({"check_every_n_steps": 5}, "val/loss comes with a validation"),
        ({"check_every_n_steps": 5, "monitor": "loss", "check_on_train_epoch_end": True}, "is on"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(parameters: dict[str, Any], words: str) -> None:
    """At construction, with the parameter and what would be right."""
    with pytest.raises(ConfigError) as caught:
        EarlyStopping(**parameters)
    assert words in str(caught.value)


def test_unknown_options_are_rejected_with_the_nearest() -> None:
    """A misspelt key of early_stopping_config is named with its path."""
    words = r"^hooks\.early_stopping_config: .* no parameter 'patients'; did you mean 'patience'"
    with pytest.raises(HooklineError, match=words):
        run([1], {"patients": 3})


def test_a_validation_outside_of_the_run_is_not_a_check() -> None:
    """trainer.validate() before or after the run does not count as a check."""
    trainer = run([2, 1, 9], {"patience": 1}, max_epochs=2)
    trainer.validate()
    hook = trainer.hooks.get("early_stopping")
    assert (hook.waited, trainer.stop_reason) == (0, None)
