"""Copies for observers: same structure, same values, and no way back to the originals."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tensor_kinds import KINDS, RISKY, Returns, plain

from hookline import ForwardHook, HookManager
from hookline.activations.capture_store import storage_size
from hookline.activations.forward_hooks import observer_view


class Pair(NamedTuple):
    """A named tuple of tensors."""

    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Output:
    """A dataclass that its constructor cannot make again."""

    hidden: torch.Tensor
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.hidden.numel())


class Stubborn(tuple[Any, ...]):
    """A tuple that cannot be made from its items."""

    def __new__(cls, *, items: Any) -> "Stubborn":
        return super().__new__(cls, items)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t.add_(1), "zero": lambda t: t.zero_(), "item": lambda t: t.__setitem__(0, 9.0),
    "view": lambda t: t.view(-1).mul_(2), "slice": lambda t: t[1:].fill_(7.0), "data": lambda t: t.data.add_(1),
    "copy": lambda t: t.copy_(torch.ones_like(t)), "out": lambda t: torch.add(t, 1, out=t),
    "foreach": lambda t: torch._foreach_add_([t], 1.0), "transposed": lambda t: t.t().clamp_(max=-5.0),
}  # fmt: skip


class Calls(ForwardHook):
    """Calls a function with the outputs of a module."""

    def __init__(self, module: torch.nn.Module, function: Callable[[Any], Any]) -> None:
        self.modules, self.function = module, function

    def on_forward(self, output: Any) -> None:
        self.function(output)


def observe(value: Any, function: Callable[[Any], Any]) -> int:
    """Call a function with what an observer gets of a module's output; return how many writes were reported."""
    module, manager = Returns(value), HookManager()
    manager.register(Calls(module, function), "it", on_error="raise")
    assert module() is value
    return manager.entry("it").overruled.get("on_forward", 0)


@pytest.mark.req("000-13", "000-14")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_no_write_reaches_the_original(write: Callable[[torch.Tensor], Any]) -> None:
    """Ten ways to write in place change the copy and leave the activation as it was."""
    original = torch.arange(6.0).reshape(2, 3)
    before = original.clone()

    def check_and_write(made: torch.Tensor) -> None:
        assert torch.equal(made, original)
        write(made)
        assert not torch.equal(made, before)

    observe(original, check_and_write)
    assert torch.equal(original, before)


@pytest.mark.parametrize("kind", [kind for kind in WRITES if kind != "data"])  # .data has another version
def test_writes_are_reported(kind: str) -> None:
    """Under the name of the hook that wrote; reading is not reported."""
    assert observe(torch.arange(6.0).reshape(2, 3), WRITES[kind]) == 1
    assert observe(torch.arange(6.0).reshape(2, 3), torch.sum) == 0


def test_a_later_write_by_the_model_does_not_corrupt_a_copy() -> None:
    """What a hook kept stays as it was when the module ran."""
    original = torch.zeros(3)
    kept = observer_view(original)
    original.add_(1)
    assert kept.sum() == 0 and original.sum() == 3


def test_copies_carry_no_graph() -> None:
    """Keeping one does not keep the graph alive."""
    made = observer_view(torch.ones(2, requires_grad=True) * 2)
    assert not made.requires_grad and made.grad_fn is None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in KINDS if name not in (*RISKY, "secret")])
def test_unusual_tensors_are_copied_too(name: str) -> None:
    """Every kind that can be copied: a clone where torch cannot do better."""
    tensor = KINDS[name].make()
    made = observer_view(tensor)
    assert made is not tensor and plain(made) == plain(tensor)


def test_structures_keep_their_types() -> None:
    """Tuples, named tuples, lists, dicts, dataclasses and what is nested in them arrive as what they are."""
    tensor = torch.ones(2)
    value = {"pair": Pair(tensor, tensor), "list": [tensor, None, "text"], "out": Output(tensor), "shape": tensor.shape}
    seen: list[Any] = []
    observe(value, seen.append)
    (made,) = seen
    assert type(made) is dict and type(made["pair"]) is Pair and type(made["out"]) is Output
    assert made["list"][1:] == [None, "text"] and made["out"].size == 2 and made["shape"] == (2,)
    for copied in (made["pair"].left, made["list"][0], made["out"].hidden):
        assert copied is not tensor and torch.equal(copied, tensor)


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=torch.ones(2)),
        collections.defaultdict(list, a=torch.ones(2)),
        collections.UserDict(a=torch.ones(2)),
        Stubborn(items=(torch.ones(2),)),
        torch.max(torch.ones(2, 2), dim=0),
        torch.nn.utils.rnn.pack_sequence([torch.ones(2)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_that_resist_are_still_copied(value: Any) -> None:
    """However a container is built, its items are readable, and the originals out of reach."""
    key = "a" if hasattr(value, "keys") else 0
    assert observe(value, lambda made: made[key].add_(5)) == 1
    assert value[key].max() == 1


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_memory_is_shared_until_a_write(write: Callable[[torch.Tensor], Any]) -> None:
    """Whichever way, and on whichever side."""
    for side in (0, 1):
        original = torch.arange(6.0).reshape(2, 3)
        both = original, observer_view(original)
        assert storage_size(both[0]) == storage_size(both[1])
        write(both[side])
        assert storage_size(both[0]) != storage_size(both[1])
