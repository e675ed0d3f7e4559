"""The character model: shapes, causality, names, initial scale, and that it learns."""

import math

import pytest
import torch
from torch import Tensor

from hookline import HooklineError
from hookline.demo.char_gpt import CharGPT


def small(**changes: object) -> CharGPT:
    """A tiny model with fixed weights."""
    torch.manual_seed(0)
    settings = {"vocab_size": 11, "context": 8, "width": 16, "layers": 2, "heads": 4} | changes
    return CharGPT(**settings)


def some_ids(batch: int = 3, time: int = 8) -> Tensor:
    """Reproducible input."""
    return torch.randint(0, 11, (batch, time), generator=torch.Generator().manual_seed(1))


def test_without_labels_there_are_only_logits() -> None:
    """Called on input alone, the model scores every character at every position and gives no loss."""
    out = small()(some_ids())
    assert set(out) == {"logits"}
    assert out["logits"].shape == (3, 8, 11)


def test_loss_is_the_mean_cross_entropy_of_the_labels() -> None:
    """The loss equals the mean over all positions of minus the log-probability of the label."""
    ids, labels = some_ids(), some_ids().flip(1)
    out = small()(input_ids=ids, labels=labels)
    expected = -out["logits"].log_softmax(-1).gather(-1, labels[..., None]).mean()
    torch.testing.assert_close(out["loss"], expected)


def test_untrained_model_knows_nothing() -> None:
    """At the start the loss is that of guessing: the logarithm of the vocabulary's size."""
    loss = small()(some_ids(), some_ids())["loss"].item()
    assert loss == pytest.approx(math.log(11), abs=0.1)


def test_future_characters_do_not_matter() -> None:
    """Changing the last character leaves the logits of all earlier positions as they were, bit for bit."""
    model, ids = small(), some_ids()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    before, after = model(ids)["logits"], model(changed)["logits"]
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_past_characters_do_matter() -> None:
    """Changing the first character changes the logits of the last position."""
    model, ids = small(), some_ids()
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 11
    assert not torch.equal(model(ids)["logits"][:, -1], model(changed)["logits"][:, -1])


def test_position_matters() -> None:
    """The same character repeated gets different logits at different positions."""
    logits = small()(torch.zeros(1, 8, dtype=torch.long))["logits"][0]
    assert not torch.equal(logits[0], logits[1])


def test_modules_have_the_documented_names() -> None:
    """Patterns such as `blocks.*.mlp` find what they name."""
    names = dict(small().named_modules())
    for name in ("embed", "position", "blocks.0.attention", "blocks.1.mlp", "norm", "head"):
        assert name in names


def test_residual_writers_start_smaller_with_depth() -> None:
    """Matrices that write to the residual stream start with 0.02 / sqrt(2 * layers), the others with 0.02."""
    block = small(width=128, layers=8).blocks[3]
    assert block.mlp.project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.mlp.widen.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not block.mlp.project.bias.any()


def test_norms_start_as_identity() -> None:
    """Initialisation leaves the layer norms' scale at one."""
    assert torch.equal(small().norm.weight, torch.ones(16))


@pytest.mark.parametrize("tie", [False, True])
def test_tying_shares_one_matrix(tie: bool) -> None:
    """Only with tie=True are embedding and head the same parameter, and there is one matrix less."""
    model = small(tie=tie)
    assert (model.head.weight is model.embed.weight) is tie
    assert len(list(model.parameters())) == len(list(small().parameters())) - tie


def test_dropout_is_off_in_eval_mode() -> None:
    """Dropout makes two training passes differ and leaves evaluation deterministic."""
    model, ids = small(dropout=0.5), some_ids()
    assert not torch.equal(model(ids)["logits"], model(ids)["logits"])
    model.eval()
    assert torch.equal(model(ids)["logits"], model(ids)["logits"])


def test_no_dropout_draws_no_random_numbers() -> None:
    """With the default dropout of 0 a training pass leaves the global random state alone."""
    model = small()
    state = torch.get_rng_state()
    model(some_ids(), some_ids())["loss"].backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_every_parameter_gets_a_gradient() -> None:
    """One backward pass reaches all parameters."""
    model = small()
    model(some_ids(), some_ids())["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_it_learns_one_batch_by_heart() -> None:
    """Sixty steps on one batch bring the loss far below guessing."""
    model, ids = small(), some_ids()
    labels = ids.roll(-1, dims=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(ids, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2


def test_too_long_input_is_refused() -> None:
    """Input longer than the context is named with both lengths."""
    with pytest.raises(HooklineError, match=r"9 characters.*context=8"):
        small()(some_ids(time=9))


def test_width_must_divide_into_heads() -> None:
    """A width that the heads cannot share equally is refused when the model is built."""
    with pytest.raises(HooklineError, match=r"width=16.*heads=3"):
        small(heads=3)
