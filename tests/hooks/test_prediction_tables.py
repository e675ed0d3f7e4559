"""Test `confusion_matrix` and `sample_predictions`: tables of what the model predicts in each validation."""

from typing import Any

import builders
import pytest
import torch
from torch import nn

from hookline import Table, trainer_from_config
from hookline.errors import HooklineError

LOGITS = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 9, 0], [0, 0, 9], [9, 0, 0]])  # 0 1 1 2 0
TARGETS = torch.tensor([0, 1, 2, -100, 1])
BATCHES = [(LOGITS[:3], TARGETS[:3]), (LOGITS[3:], TARGETS[3:])]


class Scaled(nn.Module):
    """Returns its input times a number close to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def make_trainer(batches: Any, hook: str, loss_fn: Any = nn.functional.cross_entropy, **parameters: Any) -> Any:
    """Make a trainer that validates once, with a hook."""
    options = {"val_dataloader": batches, "loss_fn": loss_fn, "hooks": {"lifecycle": [{"name": hook, **parameters}]}}
    return builders.make_trainer(model=Scaled, data=batches, lr=1e-6, **options)


def tables(trainer: Any) -> list[tuple[int, str, Table]]:
    return [(row.step, row.name, row.content) for row in trainer.record.media]


def run(name: str, batches: Any = BATCHES, **parameters: Any) -> Any:
    """Train with a hook and return the table of the first validation."""
    trainer = make_trainer(batches, name, **parameters)
    trainer.train()
    assert [hook.failures for hook in trainer.hooks.list_hooks()] == [0] * len(trainer.hooks)
    ((step, recorded_as, table),) = tables(trainer)
    assert step == len(batches) and recorded_as == name
    return table


def test_pairs_of_target_and_prediction_are_counted() -> None:
    """Over all batches, without ignored targets; classes have numbers or names."""
    table = run("confusion_matrix")
    assert table == Table(
        ("target", "0", "1", "2"), (("0", 1, 0, 0), ("1", 1, 1, 0), ("2", 0, 1, 0)), "confusion_matrix"
    )
    assert run("confusion_matrix", classes=["cat", "dog", "owl"]).columns == ("target", "cat", "dog", "owl")


def test_two_classes_with_one_output() -> None:
    """Positive above the threshold; targets that are not classes are left out with a warning."""
    batches = [(torch.tensor([2.0, -1.0, 3.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 7.0]))]
    table = run("confusion_matrix", batches, loss_fn=nn.functional.mse_loss)
    assert table.rows == (("0", 0, 1), ("1", 1, 1))


@pytest.mark.hooks_fail(raises=HooklineError)
def test_too_many_classes_are_a_failure_of_the_hook(caplog: pytest.LogCaptureFixture) -> None:
    """The run continues, and the message says how many a table can have."""
    batches = [(torch.randn(4, 200), torch.zeros(4, dtype=torch.long))]
    trainer = make_trainer(batches, "confusion_matrix")
    trainer.train()
    assert trainer.step == 1 and "the output has 200 classes; expected at most 99" in caplog.text
    with pytest.raises(HooklineError, match="classes: expected 2 to 99 names"):
        run("confusion_matrix", classes=["only"])


def test_the_first_samples_are_shown() -> None:
    """Target, prediction and its probability, of as many samples as were asked for, over several batches."""
    table = run("sample_predictions", samples=4, classes=["cat", "dog", "owl"])
    assert table.columns == ("sample", "target", "prediction", "probability")
    assert [row[:3] for row in table.rows] == [
        (0, "cat", "cat"), (1, "dog", "dog"), (2, "owl", "dog"), (3, "-100", "owl"),
    ]  # fmt: skip
    assert all(0.99 < row[3] <= 1 for row in table.rows)


def test_numbers_are_shown_as_numbers() -> None:
    """For a regression there is no probability."""
    batches = [(torch.tensor([[2.0], [3.0]]), torch.tensor([[2.5], [3.5]]))]
    table = run("sample_predictions", batches, loss_fn=nn.functional.mse_loss)
    assert [row[1] for row in table.rows] == [2.5, 3.5] and [row[3] for row in table.rows] == [None, None]
    assert [row[2] for row in table.rows] == pytest.approx([2.0, 3.0], rel=1e-4)


def test_a_language_model_shows_text() -> None:
    """With a vocabulary in `trainer.hook_data`, which the data of a config gives."""
    config = {
        "model": {"name": "char_gpt", "context": 8, "width": 8, "heads": 2, "layers": 1},
        "data": {"name": "stdlib_text", "context": 8, "batch_size": 4, "max_bytes": 20000},
        "optimizer": "sgd",
        "hooks": {"lifecycle": [{"name": "sample_predictions", "samples": 3}]},
        "trainer": {"max_steps": 1, "validate_every": 1, "record": False, "console": False},
    }
    trainer = trainer_from_config(config, device="cpu")
    trainer.train()
    ((_, _, table),) = tables(trainer)
    assert len(table.rows) == 3
    for _, target, prediction, probability in table.rows:
        assert len(target) == len(prediction) == 8 and 0 < probability < 1


def test_a_sequence_stays_text_however_many_of_its_positions_count() -> None:
    """One counted position is a text of one character, and not the number of its class."""

    class Letters:
        def decode(self, numbers: list[int]) -> str:
            return "".join("abc"[number] for number in numbers)

    for target in (torch.tensor([[-100, 2, 1], [-100, -100, 2]]), torch.tensor([[2], [1]])):
        batches = [(torch.eye(3)[target.clamp(min=0)] * 9, target)]
        trainer = make_trainer(batches, "sample_predictions", loss_fn=lambda output, target: output.sum() * 0)
        trainer.hook_data["vocab"] = Letters()
        trainer.train()
        ((_, _, table),) = tables(trainer)
        expected = ["cb", "c"] if target.shape[1] == 3 else ["c", "b"]
        assert [row[1] for row in table.rows] == [row[2] for row in table.rows] == expected


@pytest.mark.parametrize(("ignored", "parameters"), [(-100, {}), (0, {"ignore_index": 0})], ids=str)
def test_ignored_positions_of_a_sequence_are_not_shown(ignored: int, parameters: dict[str, int]) -> None:
    """Neither their targets nor their predictions, so that the others stand at the same places."""
    target = torch.tensor([[ignored, 2, 1], [ignored] * 3])
    batches = [(torch.eye(3)[torch.tensor([[1, 2, 2], [1, 1, 1]])] * 9, target)]
    table = run("sample_predictions", batches, loss_fn=lambda output, target: output.sum() * 0, **parameters)
    assert [row[1:3] for row in table.rows] == [("2, 1", "2, 2"), ("", "")]
    assert table.rows[0][3] > 0.99 and table.rows[1][3] is None


def test_a_validation_inside_another_one_has_no_table() -> None:
    """A hook that validates in the middle of a validation does not disturb the table."""
    trainer = make_trainer(BATCHES, "confusion_matrix")
    asked: list[bool] = []

    @trainer.on("validation_batch_end", name="nested")
    def validate(trainer: Any) -> None:
        if not asked:
            asked.append(True)
            trainer.validate(BATCHES[:1])

    trainer.train()
    ((_, _, table),) = tables(trainer)
    assert sum(sum(row[1:]) for row in table.rows) == 4
