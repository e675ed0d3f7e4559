"""Tensors of every kind that torch has, and a check of what Hookline's forward hooks make of each.

Run as a program with names of kinds, it checks those: reading a wrong copy of some kinds ends the process.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hookline import HookManager


class Kind(NamedTuple):
    """How to make a tensor of a kind, the word that names it, and the mean that a monitor finds, if it finds one."""

    make: Callable[[], Any]
    word: str = ""
    mean: float | None = None


class Labelled(torch.Tensor):
    """A subclass that has memory and changes no operation."""


class Secret(torch.Tensor):
    """A subclass that supports nothing."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PermissionError(f"no {func}")


def secret() -> torch.Tensor:
    """Make a tensor that cannot be read or copied."""
    return torch.Tensor._make_wrapper_subclass(Secret, (2, 2), dtype=torch.float32)


def dense() -> torch.Tensor:
    """Make four numbers whose mean is 2.5."""
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def fake() -> torch.Tensor:
    """Make a tensor that has no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(2, 2)


def dtensor() -> torch.Tensor:
    """Make a DTensor on a mesh of this process alone."""
    from torch import distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return distribute_tensor(dense(), init_device_mesh("cpu", (1,)), [Replicate()])


def masked() -> Any:
    """Make a tensor with one element masked out."""
    from torch.masked import masked_tensor

    return masked_tensor(dense(), dense() > 1)


def nested(layout: torch.layout) -> torch.Tensor:
    """Make a tensor of one and two rows."""
    return torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=layout)


def per_channel() -> torch.Tensor:
    """Make a tensor with a scale for each row."""
    return torch.quantize_per_channel(dense(), torch.ones(2), torch.zeros(2, dtype=torch.int64), 0, torch.qint8)


def float_zero_points(dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor that torch cannot copy, with a scale and a zero point of real numbers for each row."""
    return torch.quantize_per_channel(dense(), torch.ones(2), torch.zeros(2), 0, dtype)


KINDS = {
    "dense": Kind(dense, mean=2.5),
    "parameter": Kind(lambda: torch.nn.Parameter(dense()), mean=2.5),
    "zero_dim": Kind(lambda: torch.tensor(2.5), mean=2.5),
    "zero_size": Kind(lambda: torch.empty(0, 3), mean=float("nan")),
    "transposed": Kind(lambda: dense().t(), mean=2.5),
    "strided": Kind(lambda: dense()[:, ::2], mean=2.0),
    "negated": Kind(lambda: torch.complex(dense(), -dense()).conj().imag, mean=2.5),
    "float8": Kind(lambda: dense().to(torch.float8_e4m3fn), mean=2.5),
    "float4": Kind(lambda: torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
    "complex": Kind(lambda: torch.complex(dense(), dense()), mean=2.5),
    "conjugate": Kind(lambda: torch.complex(dense(), -dense()).conj(), mean=2.5),
    "int": Kind(lambda: dense().long(), "int64"),
    "bool": Kind(lambda: dense() > 2, "bool"),
    "meta": Kind(lambda: torch.empty(2, 2, device="meta"), "meta"),
    "fake": Kind(fake, "FakeTensor"),
    "sparse_coo": Kind(lambda: dense().to_sparse(), "sparse_coo"),
    "sparse_csr": Kind(lambda: dense().to_sparse_csr(), "sparse_csr"),
    "sparse_csc": Kind(lambda: dense().to_sparse_csc(), "sparse_csc"),
    "sparse_bsr": Kind(lambda: dense().to_sparse_bsr((1, 1)), "sparse_bsr"),
    "sparse_bsc": Kind(lambda: dense().to_sparse_bsc((1, 1)), "sparse_bsc"),
    "mkldnn": Kind(lambda: dense().to_mkldnn(), "mkldnn"),
    "nested": Kind(lambda: nested(torch.strided), "nested"),
    "jagged": Kind(lambda: nested(torch.jagged), "nested"),
    "subclass": Kind(lambda: dense().as_subclass(Labelled), mean=2.5),
    "masked": Kind(masked, "MaskedTensor"),
    "secret": Kind(secret, "Secret"),
    "dtensor": Kind(dtensor, mean=2.5),
    "quantized": Kind(lambda: torch.quantize_per_tensor(dense(), 0.5, 0, torch.qint8), "quantized"),
    "quantized_per_channel": Kind(per_channel, "quantized"),
    "quantized_float": Kind(lambda: float_zero_points(torch.quint8), "quantized"),
    "quint4x2": Kind(lambda: float_zero_points(torch.quint4x2), "quantized"),
}
RISKY = ("quantized", "quantized_per_channel", "quantized_float", "quint4x2", "dtensor")
"""The kinds that need a process: a wrong copy ends it, or they change its state."""


class Returns(torch.nn.Module):
    """Returns a value, whatever its inputs are."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *inputs: Any) -> Any:
        return self.value


class Reports(logging.Handler):
    """Keeps the messages of the logger "hookline"."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("hookline").addHandler(self)
        return self.messages

    def __exit__(self, *failure: object) -> None:
        logging.getLogger("hookline").removeHandler(self)


def observed(value: Any, method: str, **options: Any) -> tuple[HookManager, list[str]]:
    """Register a hook for a module that returns a value and for one that returns ones, and call each four times.

    Check that the hook has not failed; return the manager and what was reported.
    """
    model = torch.nn.ModuleDict({"odd": Returns(value), "usual": Returns(torch.ones(2))})
    manager = HookManager()
    manager.watch(model)
    with Reports() as reports:
        getattr(manager, method)("*", "it", **options)
        for _ in range(4):
            assert model["odd"]() is value
            model["usual"]()
    entry = manager.entry("it")
    assert entry.enabled and entry.failures.total == 0, reports
    return manager, reports


def plain(tensor: Any) -> Any:
    """Return what two tensors of one kind have in common if they are equal."""
    if tensor is None or tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return None if tensor is None else (tensor.shape, tensor.dtype)
    if tensor.is_quantized:
        return tensor.dequantize().tolist(), str(tensor.qscheme())
    if tensor.is_nested:
        return [item.tolist() for item in tensor.unbind()]
    if hasattr(tensor, "to_local"):
        return tensor.to_local().tolist(), tensor.placements
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).tolist()
    if type(tensor).__name__ == "MaskedTensor":
        return tensor.get_data().tolist(), tensor.get_mask().tolist()
    return tensor.to_dense().tolist(), tensor.layout


def check_capture(name: str, clone: bool) -> None:
    """A captured tensor has the kind and the values of the output; None replaces one that cannot be copied."""
    kind = KINDS[name]
    value = kind.make()
    manager, reports = observed(value, "register_capture_hook", clone=clone)
    states = manager.get_captured_states("it")
    assert [state.name for state in states] == ["odd", "usual"] * 4
    if name in ("secret", "quantized_float", "quint4x2"):
        assert states[0].outputs is None
        assert reports == [f"hook 'it', on_forward, step 0: skips {kind.word} tensors of 'odd'"]
    else:
        assert plain(states[0].outputs) == plain(value) and reports == []
        assert type(states[0].outputs) is (torch.Tensor if name == "parameter" else type(value))


def check_monitor(name: str, **options: Any) -> None:
    """A module is measured, or passed over with one word; the others are measured in any case."""
    kind = KINDS[name]
    manager, reports = observed(kind.make(), "register_monitoring_hook", **{"metrics": ["mean", "std"], **options})
    latest = manager.entry("it").hook.latest()
    assert latest["usual"]["mean"] == 1.0
    if kind.mean is None:
        assert "odd" not in latest
        assert reports == [f"hook 'it', on_forward, step 0: skips {kind.word} tensors of 'odd'"]
    else:
        mean = latest["odd"]["mean"]
        assert mean == kind.mean or (mean != mean and kind.mean != kind.mean)


def check_costs(name: str) -> None:
    """Time and memory are measured whatever the output is."""
    manager, _ = observed(KINDS[name].make(), "register_monitoring_hook", metrics=["time", "memory"])
    assert set(manager.entry("it").hook.latest()) == {"odd", "usual"}


def check_debug(name: str) -> None:
    """An output is inspected, and one that has no statistics is named unless it is an integer."""
    kind = KINDS[name]
    manager, reports = observed(kind.make(), "register_debug_hook", inspect=True)
    inspected = {item.module: item for item in manager.entry("it").hook.inspected}
    assert inspected["usual"].mean == 1.0
    if kind.mean is not None:
        assert inspected["odd"].mean == kind.mean or kind.mean != kind.mean
    silent = kind.mean is not None or name in ("int", "bool", "float4")
    assert reports == ([] if silent else [f"hook 'it', on_forward, step 0: skips {kind.word} tensors of 'odd'"])


def check(name: str) -> None:
    """Check one kind with every hook."""
    check_capture(name, clone=False)
    check_capture(name, clone=True)
    check_monitor(name)
    check_monitor(name, metrics=["mean", "histogram", "dead_units"], percentiles=[50])
    check_costs(name)
    check_debug(name)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for item in sys.argv[1:]:
        check(item)
