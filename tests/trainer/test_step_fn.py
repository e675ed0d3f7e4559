"""From a batch to a loss: what goes into the model, where the loss is found, and what is said when it is not."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hookline.errors import TrainingError
from hookline.trainer.step_fn import check_trainable, count_tokens, loss_and_metrics, make_step

ONE = torch.ones(2, 3)


class Echo:
    """A model that returns what it was called with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@dataclass
class Output:
    """An output in the style of models that return their loss."""

    loss: torch.Tensor


def test_a_step_function_gets_model_and_batch() -> None:
    """step_fn is the one extension point and comes before everything else."""
    model = Echo()
    assert make_step(model, lambda *given: given, None)(3) == (model, 3)
    assert make_step(model, lambda *given: given, lambda *_: 1 / 0)(3) == (model, 3)


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
    assert make_step(Echo(), None, None)(batch) == called_with


@pytest.mark.parametrize(
    ("batch", "called_with", "target"),
    [((1, 2), ((1,), {}), 2), ([1, 2], ((1,), {}), 2), ({"x": 1}, ((), {"x": 1}), {"x": 1}), (7, ((7,), {}), 7)],
    ids=str,
)
def test_with_a_loss_function(batch: Any, called_with: Any, target: Any) -> None:
    """Of a tuple the first item goes into the model and the second to loss_fn; else loss_fn gets the batch."""
    assert make_step(Echo(), None, lambda output, wanted: (output, wanted))(batch) == (called_with, target)


def test_where_the_loss_is_found() -> None:
    """A tensor, a dict's 'loss' or an attribute; single numbers beside it are metrics."""
    loss = torch.tensor(2.0)
    assert loss_and_metrics(loss) == (loss, {})
    assert loss_and_metrics(Output(loss)) == (loss, {})
    accuracy = torch.tensor([0.5])
    found, metrics = loss_and_metrics({"loss": loss, "accuracy": accuracy, "n": 3, "logits": ONE, 5: 1.0, "s": "x"})
    assert found is loss
    assert metrics == {"accuracy": accuracy, "n": 3}


def test_a_loss_of_one_element_becomes_a_scalar() -> None:
    """Shape [1] is as good as none."""
    assert loss_and_metrics(torch.ones(1))[0].shape == ()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"logits": ONE, "x": 1}, "no loss was found in a dict with 'logits', 'x'"),
        ((ONE, ONE), "no loss was found in tuple"),
        ({"loss": 3.0}, "no loss was found"),
        (ONE, r"the loss must be one number, got shape \(2, 3\)"),
    ],
    ids=str,
)
def test_a_missing_loss_names_the_four_ways(result: Any, words: str) -> None:
    """The error says what came back and the four places where a loss is looked for."""
    with pytest.raises(TrainingError, match=words) as error:
        loss_and_metrics(result)
    for way in ("step_fn", "loss_fn", "'loss'", "scalar requiring grad"):
        assert way in str(error.value)


def test_a_loss_without_a_graph_is_rejected() -> None:
    """It would train nothing."""
    with pytest.raises(TrainingError, match="does not require grad, so nothing would be trained"):
        check_trainable(torch.tensor(1.0))
    check_trainable(torch.tensor(1.0, requires_grad=True))


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": ONE}, 10),
        (torch.ones(3, 4, dtype=torch.int32), 12),
        (ONE, 0),
        ((torch.ones(2, 5, dtype=torch.long), ONE), 0),
        ({"x": ONE}, 0),
        ("text", 0),
    ],
    ids=["input_ids", "integers", "floats", "tuple", "other keys", "text"],
)
def test_counting_tokens(batch: Any, tokens: int) -> None:
    """Elements of input_ids, or of a batch that is itself an integer tensor."""
    assert count_tokens(batch) == tokens


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
    _, metrics = loss_and_metrics({"loss": torch.tensor(1.0), **given})
    assert metrics == {"f32": 1.5, "n": 3, "yes": True, "long": 2.0, "array": 2.5}
    assert [type(value) for value in metrics.values()] == [float, int, bool, float, float]
