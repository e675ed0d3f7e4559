"""The torch operations that serve devices without kernels are right, and the CPU may use them for anything."""

from collections.abc import Callable

import torch
from torch import Tensor

from hookline.stats import torch_path


def moderate(tensor: Tensor) -> bool:
    """Whether no value is so large or so small that its square leaves float32's range."""
    sizes = tensor.detach().double().abs()
    return not bool(((sizes > 1e15) & sizes.isfinite() | (sizes < 1e-15) & (sizes > 0)).any())


def test_every_awkward_tensor(awkward_tensors: Callable[[], list[Tensor]], assert_rows: Callable[..., None]) -> None:
    """All kinds of tensors whose squares float32 can hold give the reference's rows in one call."""
    tensors = [tensor for tensor in awkward_tensors() if moderate(tensor)]
    with torch.no_grad():
        assert_rows(torch_path.summarize(tensors), tensors)


def test_tensors_alike_share_their_operations() -> None:
    """Equal shape and dtype put tensors together; their places are kept."""
    places = torch_path.alike([torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2).half(), torch.ones(2, 1)])
    assert sorted(places.values()) == [[0, 2], [1], [3], [4]]
