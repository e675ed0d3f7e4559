"""Norms of gradients: they are torch's, and a chain reads them again exactly when something may have written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer

from hookline import TrainingHook, UpdateHook

Make = Callable[..., Any]


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


def test_after_clipping_the_norm_is_read_again(rig: Any, params: Make, reads: list[int]) -> None:
    """It is the norm of what the clipping hook left."""
    chain = rig(params(), {"name": "clip_norm", "max_norm": 1.0}, measured("after"))
    chain.step()
    assert reads == [4, 4]
    assert_logs_true_norm(chain, "after")


def test_a_second_clip_reads_again(rig: Any, params: Make, reads: list[int]) -> None:
    """Clipping is exact to the last bit of what the first clip left."""
    chain = rig(params(), {"name": "clip_norm", "max_norm": 1.0}, {"name": "clip_norm", "as": "again", "max_norm": 0.5})
    chain.step()
    assert reads == [4, 4]


def test_after_a_write_to_some_gradients_all_are_read_again(rig: Any, params: Make, reads: list[int]) -> None:
    """Each hook that measures reads what it selects, and the next ones share that until something writes."""
    scale = {"name": "scale", "factor": 3.0, "params": ["matrix", "vector"]}
    part = {**measured("part"), "params": "kernel"}
    chain = rig(params(), measured("before"), scale, part, measured("after"), measured("again"))
    chain.step()
    assert reads == [4, 1, 4]
    assert_logs_true_norm(chain, "after")


def test_clipping_a_part_makes_a_measurement_of_all_read_again(rig: Any, params: Make, reads: list[int]) -> None:
    """Each reads what it selects."""
    clip = {"name": "clip_norm", "max_norm": 0.1, "params": ["matrix", "vector"]}
    chain = rig(params(), measured("before"), clip, measured("after"))
    chain.step()
    assert reads == [4, 2, 4]
    assert_logs_true_norm(chain, "after")


def test_a_guard_that_writes_nothing_shares_its_read(rig: Any, params: Make, reads: list[int]) -> None:
    """The norm that a guard tests is the one that clipping uses."""
    rig(params(), "skip_nonfinite", {"name": "clip_norm", "max_norm": 1.0}).step()
    assert reads == [4]


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
def test_half_precision_is_summed_and_kept_in_float32(rig: Any, params: Make, dtype: torch.dtype) -> None:
    """A norm in bf16 would have three digits."""
    chain = rig(params(dtype), measured("here"))
    chain.step()
    found = chain.trainer.logged["gradients/here/norm"]
    expected = torch.stack([param.grad.double().norm() for param in chain.params.values() if param.grad is not None])
    assert found.dtype is torch.float32 and found.item() == pytest.approx(expected.norm().item(), rel=1e-6)


def test_several_dtypes_at_once(rig: Any, params: Make) -> None:
    """Each kind is read by itself; the order of the norms is that of the gradients."""
    wide, half = params(), params(torch.bfloat16)
    mixed = {f"{name}_{kind}": made[name] for name in wide for kind, made in (("wide", wide), ("half", half))}
    for name, grad in rig(mixed, {"name": "normalize", "by": "parameter"}).step().items():
        assert grad is None or grad.float().norm().item() == pytest.approx(1.0, rel=1e-2), name


def test_the_norm_of_a_step_that_nothing_clips_is_torchs() -> None:
    """Hooks that name grad_norm get what get_total_norm returns, bit for bit."""
    found, expected = [], []

    class Notes(TrainingHook):
        def on_gradients_ready(self, model: torch.nn.Module) -> None:
            expected.append(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item())

        def on_step_end(self, grad_norm: float) -> None:
            found.append(grad_norm)

    make_trainer(Notes(), data=make_batches(3)).train()
    assert found == expected and len(found) == 3
