"""Norms are read once, and again when somebody has written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline.gradients import norm_table, norms
from hookline.gradients.norms import Norms, total_norm

Make = Callable[..., Any]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each reading read."""
    counted: list[int] = []
    real = norms.read_norms

    def counting(memory: list[torch.Tensor]) -> list[torch.Tensor]:
        if memory:
            counted.append(len(memory))
        return real(memory)

    monkeypatch.setattr(norms, "read_norms", counting)
    return counted


def gradients(params: Make, **given: Any) -> list[torch.Tensor]:
    return [param.grad for param in params(**given).values() if param.grad is not None]


def test_they_are_right_and_read_once(params: Make, reads: list[int]) -> None:
    """Asking again, for all or for some, reads nothing."""
    grads, known = gradients(params), Norms()
    found = known.of(grads)
    torch.testing.assert_close(found, torch.stack([grad.norm() for grad in grads]))
    assert torch.equal(known.of(grads), found) and torch.equal(known.of(grads[1:3]), found[1:3])
    assert torch.equal(known.of(grads[::-1]), found.flip(0)) and reads == [4]


@pytest.mark.parametrize("write", ["in place", "fused", "in a view"])
def test_what_was_written_to_is_read_again(params: Make, reads: list[int], write: str) -> None:
    """Only that, however it was written to."""
    grads, known = gradients(params), Norms()
    before = known.of(grads)
    if write == "fused":
        torch._foreach_mul_(grads[1:2], 3.0)
    elif write == "in place":
        grads[1].mul_(3.0)
    else:
        grads[1].view(-1)[:] *= 3.0
    after = known.of(grads)
    torch.testing.assert_close(after[1], before[1] * 3)
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]]) and reads == [4, 1]


def test_a_new_tensor_is_read_though_it_may_lie_where_the_old_one_lay(reads: list[int]) -> None:
    """The old one is held on to, so no address is taken for it."""
    known, one = Norms(), torch.ones(4)
    known.of([one])
    del one
    for value in range(2, 6):
        assert known.of([torch.full((4,), float(value))]).item() == 2.0 * value
    assert len(reads) == 5


def test_what_a_link_knows_is_kept_until_the_next_writing(params: Make, reads: list[int]) -> None:
    """Kept norms mix with read ones; a writing ends both."""
    grads, known = gradients(params), Norms()
    known.keep(grads[:2], torch.tensor([7.0, 8.0]))
    assert known.of(grads)[:2].tolist() == [7.0, 8.0] and reads == [2]
    grads[0].zero_()
    assert known.of(grads)[0].item() == 0.0


def test_letting_go_forgets_everything(params: Make, reads: list[int]) -> None:
    """A chain does so after each step, or it would keep the gradients alive."""
    grads, known = gradients(params), Norms()
    known.of(grads)
    known.of(grads[:2])
    known.clear()
    known.of(grads)
    assert reads == [4, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_and_kept_in_float32(params: Make, dtype: torch.dtype) -> None:
    """A norm in bf16 would have three digits."""
    grads = gradients(params, dtype=dtype)
    found = Norms().of(grads)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), torch.stack([grad.double().norm() for grad in grads]), rtol=1e-6, atol=0)


def test_several_precisions_at_once(params: Make) -> None:
    """Each kind has its own launch; the order stays."""
    kinds = gradients(params), gradients(params, dtype=torch.bfloat16)
    mixed = [grad for pair in zip(*kinds, strict=True) for grad in pair]
    torch.testing.assert_close(Norms().of(mixed), torch.stack([grad.float().norm() for grad in mixed]))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_the_total_is_torchs(params: Make, norm_type: float) -> None:
    """Bit for bit, and of nothing it is zero."""
    grads = gradients(params)
    assert torch.equal(total_norm(grads, norm_type), torch.nn.utils.get_total_norm(grads, norm_type))
    assert total_norm([]).item() == 0.0


def test_while_a_link_of_ours_runs_versions_are_not_asked_twice(params: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can have written; when the link has ended, and may have, they are asked again."""
    asked: list[int] = []
    real = norms.NormTable.stale
    monkeypatch.setattr(norms.NormTable, "stale", lambda *given: asked.append(1) or real(*given))
    known, grads = Norms(), gradients(params)
    grads = known.seen.look(grads).tensors
    known.begin_link(built_in=True)
    assert known.of(grads) is known.of(grads) and len(asked) == 1
    known.end_link(may_write=False)
    known.begin_link(built_in=True)
    known.of(grads)
    assert len(asked) == 1
    known.end_link(may_write=True)
    grads[0].mul_(2)
    known.begin_link(built_in=False)
    torch.testing.assert_close(known.of(grads)[0], grads[0].norm())
    known.of(grads)
    assert len(asked) == 3


def test_what_a_link_keeps_needs_no_question(params: Make, reads: list[int]) -> None:
    """It says itself what became of what it has written, also of a part."""
    known = Norms()
    grads = known.seen.look(gradients(params)).tensors
    known.begin_link(built_in=True)
    known.of(grads)
    grads[1].mul_(2)
    known.keep(grads[1:2], torch.tensor([7.0]))
    known.end_link(may_write=True)
    known.begin_link(built_in=True)
    assert known.of(grads)[1] == 7.0 and reads == [4]
    assert known.were_found(known.seen.look(grads[1:2])) and not known.were_found(known.seen.look(grads))


def test_no_version_is_asked_where_every_link_tells(params: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading hundreds of counters takes longer than launching work; the first link that is silent has it done."""
    asked: list[int] = []
    real = norm_table._versions
    monkeypatch.setattr(norm_table, "_versions", lambda memory: asked.append(len(memory)) or real(memory))
    known = Norms()
    grads = known.seen.look(gradients(params)).tensors
    known.begin_link(built_in=True, tells=True)
    torch._foreach_mul_(grads, 0.5)
    known.multiplied(grads, known.of(grads), torch.tensor(0.5))
    known.end_link(may_write=True)
    known.begin_link(built_in=True, tells=True)
    known.of(grads)
    known.end_link(may_write=False)
    assert asked == []
    known.begin_link(built_in=True, tells=False)
    grads[1].mul_(2)
    known.end_link(may_write=True)
    before = known.of(grads)
    assert asked and before[1] == grads[1].norm()


@pytest.mark.parametrize("settled", [True, False])
def test_who_writes_unannounced_costs_a_reading_and_no_wrong_norm(
    params: Make, reads: list[int], settled: bool
) -> None:
    """A link that should have told and did not: what had been settled is known, the rest is read again."""
    known = Norms()
    grads = known.seen.look(gradients(params)).tensors
    known.begin_link(built_in=True, tells=True)
    known.of(grads)
    if settled:
        known.settle()
    grads[1].mul_(2)
    known.end_link(may_write=True)
    known.begin_link(built_in=True, tells=True)
    torch.testing.assert_close(known.of(grads), torch.stack([grad.norm() for grad in grads]))
    assert reads == ([4, 1] if settled else [4, 4])
