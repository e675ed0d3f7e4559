"""Checkpoints of an attached run: what they hold, and that a loop continues from them bit for bit."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from own_loops import Net, assert_same, batches, events_of, loss_of, make, rows_of, state_of, train

import hookline
from hookline import ClipNorm, EarlyStopping, HooklineError
from hookline.errors import CheckpointError

HOOKS = {"lifecycle": ["ema"], "update": [{"name": "clip_norm", "max_norm": 0.2}, {"name": "grokfast"}]}


class Killed(BaseException):
    """Ends a loop as a signal would."""


def drawn(count: int) -> Iterator[Any]:
    """Yield batches that are drawn when they are read, as nanoGPT does."""
    for _ in range(count):
        inputs = torch.randn(4, 8) + random.random()
        yield inputs, (inputs.sum(-1) > 0).long()


def run_loop(lines: str, hl: Any, model: Net, optimizer: Any, steps: int, dies_at: int | None = None) -> None:
    for number, batch in enumerate(hl.batches(drawn(steps)) if lines == "batches" else drawn(steps), 1):
        train(model, optimizer, [batch], hl if lines != "none" else None)
        if lines == "save" and number == 3:
            hl.save()
        if number == dies_at:
            raise Killed


@pytest.mark.parametrize("lines", ["none", "backward", "batches", "save"])
def test_a_killed_loop_resumes_exactly(lines: str) -> None:
    """Weights, running means, moments, hooks' state and random streams, also of data that is drawn in the loop.

    The checkpoint is that of its step, although the step ends only after the next batch was drawn and run.
    """
    config = HOOKS if lines == "save" else HOOKS | {"lifecycle": ["ema", {"name": "checkpoint", "every": 3}]}
    model, optimizer = make()
    random.seed(0)
    with hookline.attach(model, optimizer, config) as hl:
        run_loop(lines, hl, model, optimizer, 7)
    expected, moments = state_of(model), optimizer.state_dict()
    model, optimizer = make()
    random.seed(0)
    with pytest.raises(Killed), hookline.attach(model, optimizer, config) as hl:
        run_loop(lines, hl, model, optimizer, 7, dies_at=5)
    first = hl.run.run_dir
    model, optimizer = make(seed=1)
    random.seed(1)
    with hookline.attach(model, optimizer, config) as hl:
        hl.load(first)
        assert hl.run.step == 3
        run_loop(lines if lines != "save" else "backward", hl, model, optimizer, 4)
    assert_same(state_of(model), expected)
    torch.testing.assert_close(optimizer.state_dict(), moments, rtol=0, atol=0)
    assert hl.run.step == 7 and [row["step"] for row in rows_of(hl)] == [4, 5, 6, 7]


def test_a_damaged_checkpoint_is_refused() -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        train(model, optimizer, batches(), hl)
        hl.save()
    (path,) = (hl.run.run_dir / "checkpoints").iterdir()
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    model, optimizer = make(seed=1)
    before = state_of(model)
    with hookline.attach(model, optimizer) as hl, pytest.raises(CheckpointError, match=r"is damaged .*sha256 differs"):
        hl.load(path)
    assert_same(state_of(model), before)


def test_the_loss_scale_is_in_a_checkpoint() -> None:
    """A resumed loop with a GradScaler of its own continues at the scale that the last one had reached."""

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    model, optimizer = make()
    with hookline.attach(model, optimizer, scaler=(first := scaler())) as hl:
        for batch in batches(5):
            hl.backward(loss_of(model, batch))
            hl.optimizer_step()
            first.update()
            optimizer.zero_grad()
        hl.save()
    with hookline.attach(model, optimizer, scaler=(second := scaler())) as other:
        other.load(str(hl.run.run_dir))
    assert second.state_dict() == first.state_dict() and second.get_scale() == 2.0**12


def test_hooklines_state_in_a_checkpoint_of_the_users_own(tmp_path: Any) -> None:
    """It consists of plain values, which `torch.load` reads with `weights_only=True`."""

    def hooks() -> list[Any]:
        return ["ema", ClipNorm(0.2), EarlyStopping("val/loss", patience=3)]

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=hooks()) as hl:
        for number, batch in enumerate(hl.batches(batches()), 1):
            train(model, optimizer, [batch], hl)
            if number == 3:
                with hl.validation():
                    hl.log("val/loss", 0.25)
                parts = {"model": model, "optimizer": optimizer, "hookline": hl}
                saved: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
                torch.save(saved | {"random": torch.get_rng_state()}, tmp_path / "mine.pt")
    expected, ema = state_of(model), hl.state_dict()["hooks"]["ema"]
    saved = torch.load(tmp_path / "mine.pt", weights_only=True)
    model, optimizer = make(seed=1)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with hookline.attach(model, optimizer, hooks=hooks()) as hl:
        hl.load_state_dict(saved["hookline"])
        torch.set_rng_state(saved["random"])
        assert hl.run.step == 3
        train(model, optimizer, batches()[3:], hl)
    assert_same(state_of(model), expected)
    torch.testing.assert_close(hl.state_dict()["hooks"]["ema"], ema, rtol=0, atol=0)
    assert hl.state_dict()["hooks"]["early_stopping"] == saved["hookline"]["hooks"]["early_stopping"]


def test_state_dict_counts_the_step_before_it() -> None:
    """It ends the step, as `save` does, so that the checkpoint does not count it twice."""
    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        train(model, optimizer, batches(2))
        assert hl.state_dict()["progress"]["steps_done"] == 2
        train(model, optimizer, batches(1))
    assert [row["step"] for row in rows_of(hl)] == [1, 2, 3]


@pytest.mark.parametrize("saver", ["save", "state_dict", "hook"])
def test_what_was_saved_after_an_epoch_resumes_with_the_next(saver: str) -> None:
    """A loop saves after the last batch and its validation, where the epoch is not over yet for its hooks."""

    class Epochs(hookline.TrainingHook):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def on_epoch_end(self, epoch: int, step: int) -> None:
            self.seen.append((epoch, step))

    def run_epochs(count: int) -> dict[str, Any]:
        for _ in range(count):
            train(model, optimizer, hl.batches(batches(3)), hl)
            with hl.validation():
                hl.log("val/loss", 0.5)
            if saver == "save":
                hl.save()
        return hl.state_dict()

    config = {"lifecycle": [{"name": "checkpoint", "monitor": "val/loss"}]} if saver == "hook" else None
    model, optimizer = make()
    with hookline.attach(model, optimizer, config) as hl:
        state = run_epochs(2)
    first = hl.run.run_dir
    with hookline.attach(model, optimizer, hooks=[epochs := Epochs()]) as hl:
        if saver == "state_dict":
            hl.load_state_dict(state)
        else:
            hl.load(first)
        run_epochs(2)
    before = 0 if saver == "hook" else 1  # The hook keeps the best checkpoint, which is the first of equals.
    assert epochs.seen == [(before + 1, 3 * before + 6), (before + 2, 3 * before + 9)]


def test_save_between_backward_and_step_waits_for_the_step() -> None:
    """A checkpoint is that of a whole step."""
    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        train(model, optimizer, batches(1), hl)
        hl.backward(loss_of(model, batches(1)[0]))
        hl.save("mine")
        assert not [event for event in events_of(hl) if event["kind"] == "checkpoint_saved"]
        optimizer.step()
    assert [(event["step"], event["path"][-4:]) for event in events_of(hl)] == [(2, "mine")]


def test_a_run_without_a_directory() -> None:
    """It cannot save: hooks that do are refused at once, and so is `save`; its record is in memory."""
    model, optimizer = make()
    with pytest.raises(HooklineError, match=r"'checkpoint' needs a run that can save checkpoints.*Pass `output_dir=`"):
        hookline.attach(model, optimizer, hooks=["checkpoint"], output_dir=None)
    with hookline.attach(model, optimizer, output_dir=None) as hl:
        train(model, optimizer, batches(2), hl)
        with pytest.raises(HooklineError, match=r"hl\.save: this run cannot save checkpoints; pass `output_dir=`"):
            hl.save()
    assert len(hl.run.record.metrics) == 2 and hl.run.run_dir is None


def test_checkpoints_of_other_optimizers() -> None:
    """Their number and their kinds must match; torch would load another kind's state, and fail in the next step."""
    model, optimizer = make()
    with hookline.attach(model, optimizer) as hl:
        train(model, optimizer, batches(1))
        hl.save("mine")
    more = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = pytest.raises(HooklineError, match="has 1 optimizer, but this loop has 2")
    with refused, hookline.attach(model, {"one": optimizer, "two": more}) as other:
        other.load(f"{hl.run.run_dir}/checkpoints/mine")
    refused = pytest.raises(HooklineError, match="the state of another kind of optimizer")
    with refused, hookline.attach(model, more) as other:
        other.load(f"{hl.run.run_dir}/checkpoints/mine")


@pytest.mark.hooks_fail(raises=CheckpointError)
def test_a_hook_that_fails_at_a_save_ends_the_loop_as_its_policy_says(tmp_path: Any) -> None:
    """A CheckpointError of a hook is the hook's failure, as in the trainer; the checkpoint itself is whole."""

    class Upload(hookline.TrainingHook):
        on_error = "raise"

        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.save("mine")

        def on_checkpoint_save(self) -> None:
            raise CheckpointError("the upload failed")

    model, optimizer = make()
    with (
        pytest.raises(CheckpointError, match="the upload failed"),
        hookline.attach(model, optimizer, hooks=[Upload()], output_dir=tmp_path) as hl,
    ):
        train(model, optimizer, hl.batches(batches()), hl)
    assert "checkpoint_failed" not in [event["kind"] for event in events_of(hl)]
    assert (hl.run.run_dir / "checkpoints" / "mine").is_dir()
