"""Norms of gradients: they are torch's, and a chain reads them again exactly when something may have written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import TrainingHook, UpdateHook
from hookline.gradients.local_storage import norms_of, total_norm

Make = Callable[..., Any]


def gradients(params: Make, **given: Any) -> list[torch.Tensor]:
    return [param.grad for param in params(**given).values() if param.grad is not None]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many tensors each pass over the gradients reads."""
    counted: list[int] = []
    real = torch._foreach_norm

    def counting(tensors: list[torch.Tensor], *given: Any, **more: Any) -> Any:
        counted.append(len(tensors))
        return real(tensors, *given, **more)

    monkeypatch.setattr(torch, "_foreach_norm", counting)
    return counted


def measured(name: str) -> dict[str, Any]:
    return {"name": "measure", "as": name}


def assert_logs_true_norm(chain: Any, name: str) -> None:
    grads = [param.grad for param in chain.params.values() if param.grad is not None]
    expected = torch.stack([grad.double().norm() for grad in grads]).norm().item()
    assert chain.trainer.logged[f"gradients/{name}/norm"].item() == pytest.approx(expected, rel=1e-5)


def test_hooks_that_do_not_write_share_one_read(rig: Any, params: Make, reads: list[int]) -> None:
    """Two measurements and the norm that clipping needs are one pass over the gradients."""
    chain = rig(params(), measured("one"), measured("two"), {"name": "clip_norm", "max_norm": 1e6})
    chain.step()
    assert reads == [4]


def test_after_clipping_the_norm_is_known_without_a_read(rig: Any, params: Make, reads: list[int]) -> None:
    """The norms are multiplied by the clipping factor instead of being read again."""
    chain = rig(params(), {"name": "clip_norm", "max_norm": 1.0}, measured("after"))
    chain.step()
    assert reads == [4]
    assert_logs_true_norm(chain, "after")


def test_a_second_clip_reads_again(rig: Any, params: Make, reads: list[int]) -> None:
    """Clipping is exact to the last bit, so it does not use norms that were computed from others."""
    chain = rig(params(), {"name": "clip_norm", "max_norm": 1.0}, {"name": "clip_norm", "as": "again", "max_norm": 0.5})
    chain.step()
    assert reads == [4, 4]


@pytest.mark.parametrize(
    "writer", ["scale", "sign", "clip_value", "centralize", "noise", "mask", "normalize", "grokfast", "clip_adaptive"]
)
def test_a_transform_that_writes_makes_the_next_hook_read(rig: Any, params: Make, writer: str) -> None:
    """The norm after each built-in transform is the norm of what it left."""
    given = {"scale": {"factor": 3.0}, "clip_value": {"max_value": 0.1}, "mask": {"params": ["matrix"]}}
    chain = rig(params(), measured("before"), {"name": writer, **given.get(writer, {})}, measured("after"))
    for seed in range(2):
        chain.step({name: param.grad for name, param in params(seed=seed).items() if param.grad is not None})
        assert_logs_true_norm(chain, "after")


@pytest.mark.parametrize("write", ["in place", "through data", "replaced", "returned"])
def test_however_a_users_hook_writes_the_next_norm_is_right(rig: Any, params: Make, write: str) -> None:
    """In place, in a way that no version counts, by assigning to the parameter, or by what it returns."""

    class Writes(UpdateHook):
        inplace = write in ("in place", "through data")

        def on_update(self, grads: Any) -> Any:
            if write == "in place":
                grads["matrix"].mul_(3)
            elif write == "through data":
                grads["matrix"].data.mul_(3)
            elif write == "replaced":
                chain.params["matrix"].grad = chain.params["matrix"].grad * 3
            return {**grads, "vector": grads["vector"] * 2} if write == "returned" else grads

    chain = rig(params(), measured("before"))
    chain.registry.register(Writes())
    chain.registry.register("measure", "after")
    chain.step()
    assert_logs_true_norm(chain, "after")


def test_a_hook_of_on_gradient_clip_may_write(rig: Any, params: Make) -> None:
    """The norm that is measured after it is read again."""

    class Writes(TrainingHook):
        def on_gradient_clip(self) -> None:
            chain.params["matrix"].grad = torch.ones(7, 3)

    chain = rig(params(), {"name": "clip_norm", "max_norm": 1.0}, measured("after"))
    chain.registry.register(Writes())
    chain.step()
    assert_logs_true_norm(chain, "after")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_and_kept_in_float32(params: Make, dtype: torch.dtype) -> None:
    """A norm in bf16 would have three digits."""
    grads = gradients(params, dtype=dtype)
    found = norms_of(grads, grads)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), torch.stack([grad.double().norm() for grad in grads]), rtol=1e-6, atol=0)


def test_several_dtypes_at_once(params: Make) -> None:
    """Each kind is read by itself; the order of the norms is that of the gradients."""
    kinds = gradients(params), gradients(params, dtype=torch.bfloat16)
    mixed = [grad for pair in zip(*kinds, strict=True) for grad in pair]
    torch.testing.assert_close(norms_of(mixed, mixed), torch.stack([grad.float().norm() for grad in mixed]))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_the_total_norm_is_torchs(params: Make, norm_type: float) -> None:
    """Bit for bit, and of no gradients it is zero."""
    grads = gradients(params)
    assert torch.equal(total_norm(grads, norm_type), torch.nn.utils.get_total_norm(grads, norm_type))
    assert total_norm([]).item() == 0.0
