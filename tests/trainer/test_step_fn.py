"""From a batch to a loss: what goes into the model, where the loss is found, and what is said when it is not."""

from dataclasses import dataclass
from typing import Any

import builders
import pytest
import torch

from hookline import SimpleTrainer
from hookline.errors import TrainingError

ONE = torch.ones(2, 3)


class Model(torch.nn.Module):
    """Notes what it is called with; its output is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((args, kwargs))
        return self.weight * 2.0


@dataclass
class Output:
    """An output in the style of models that return their loss."""

    loss: torch.Tensor


def make_trainer(batch: Any = 7, **options: Any) -> SimpleTrainer:
    """Make a trainer for one batch of any kind."""
    return builders.make_trainer(model=Model, data={"a": [batch]}, lr=0.0, **{"loss_fn": None, **options})


def train(result: Any) -> tuple[float, dict[str, Any]]:
    """Train one step that returns something, and return its loss and metrics."""
    trainer, measured = make_trainer(step_fn=lambda model, batch: result(model.weight)), list[Any]()
    trainer.on("step_end")(lambda trainer, loss: measured.append((loss, trainer.step_metrics())))
    trainer.train()
    return measured[0]


def test_a_step_function_gets_model_and_batch() -> None:
    """step_fn is the one extension point and comes before everything else."""
    given: list[Any] = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        given.append((model, batch))
        return model.weight * 1.0

    trainer = make_trainer(step_fn=step, loss_fn=lambda *_: 1 / 0)
    trainer.train()
    assert given == [(trainer.model, 7)] and trainer.model.calls == []


@pytest.mark.parametrize(
    ("batch", "called_with"),
    [
        ({"x": 1, "y": 2}, ((), {"x": 1, "y": 2})),
        ((1, 2), ((1, 2), {})),
        ([1, 2], ((1, 2), {})),
        (7, ((7,), {})),
    ],
    ids=str,
)
def test_without_a_loss_function(batch: Any, called_with: Any) -> None:
    """A dict goes in as keywords, a tuple or list as arguments, anything else as it is."""
    trainer = make_trainer(batch)
    trainer.train()
    assert trainer.model.calls == [called_with]


@pytest.mark.parametrize(
    ("batch", "called_with", "target"),
    [((1, 2), ((1,), {}), 2), ([1, 2], ((1,), {}), 2), ({"x": 1}, ((), {"x": 1}), {"x": 1}), (7, ((7,), {}), 7)],
    ids=str,
)
def test_with_a_loss_function(batch: Any, called_with: Any, target: Any) -> None:
    """Of a tuple the first item goes into the model and the second to loss_fn; else loss_fn gets the batch."""
    given: list[Any] = []

    def loss(output: torch.Tensor, wanted: Any) -> torch.Tensor:
        given.append((output.item(), wanted))
        return output

    trainer = make_trainer(batch, loss_fn=loss)
    trainer.train()
    assert trainer.model.calls == [called_with] and given == [(2.0, target)]


def test_where_the_loss_is_found() -> None:
    """A tensor (shape [1] is fine), a dict's 'loss' or an attribute; single numbers beside it are metrics."""
    assert train(lambda weight: weight * 2) == (2.0, {})
    assert train(lambda weight: weight.reshape(1) * 2) == (2.0, {})
    assert train(lambda weight: Output(weight * 2)) == (2.0, {})
    more = {"accuracy": torch.tensor([0.5]), "n": 3, "logits": ONE, 5: 1.0, "s": "x"}
    assert train(lambda weight: {"loss": weight * 2, **more}) == (2.0, {"accuracy": 0.5, "n": 3})


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"logits": ONE, "x": 1}, "no loss was found in a dict with 'logits', 'x'"),
        ((ONE, ONE), "no loss was found in tuple"),
        ({"loss": 3.0}, "no loss was found"),
        (ONE, r"the loss must be one number, got shape \(2, 3\)"),
        (torch.tensor(1.0), "does not require grad, so nothing would be trained"),
    ],
    ids=["dict", "tuple", "not a tensor", "several numbers", "no graph"],
)
def test_a_missing_loss_names_the_four_ways(result: Any, words: str) -> None:
    """The error says what came back and the four places where a loss is looked for."""
    with pytest.raises(TrainingError, match=words) as error:
        train(lambda weight: result)
    for way in ("step_fn", "loss_fn", "'loss'", "scalar requiring grad"):
        assert way in str(error.value)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": ONE}, 10),
        (torch.ones(3, 4, dtype=torch.int32), 12),
        (ONE, 0),
        ((torch.ones(2, 5, dtype=torch.long), ONE), 0),
        ([torch.ones(2, 5, dtype=torch.long), ONE], 0),
        ({"x": ONE}, 0),
        ("text", 0),
    ],
    ids=["input_ids", "integers", "floats", "tuple", "list", "other keys", "text"],
)
def test_counting_tokens(batch: Any, tokens: int) -> None:
    """Elements of input_ids, or of a batch that is itself an integer tensor."""
    trainer, seen = make_trainer(batch, step_fn=lambda model, batch: model.weight * 1.0), list[int]()
    trainer.on("step_end")(lambda tokens_seen: seen.append(tokens_seen))
    trainer.train()
    assert seen == [tokens]


def test_numpy_numbers_are_metrics() -> None:
    """Single ones of every real type, as Python's numbers; strings and several numbers are none."""
    numpy = pytest.importorskip("numpy")
    given = {
        "f32": numpy.float32(1.5),
        "n": numpy.int64(3),
        "yes": numpy.bool_(True),
        "long": numpy.longdouble(2),
        "array": numpy.array([[2.5]]),
        "two": numpy.ones(2),
        "word": numpy.str_("good"),
        "imaginary": numpy.complex64(1j),
    }
    _, metrics = train(lambda weight: {"loss": weight * 1.0, **given})
    assert metrics == {"f32": 1.5, "n": 3, "yes": True, "long": 2.0, "array": 2.5}
    assert [type(value) for value in metrics.values()] == [float, int, bool, float, float]
