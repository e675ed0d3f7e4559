"""Parameters by name are those of the model as it is now, found without asking it each time."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookline.activations.named_parameters import NamedParameters


def model() -> nn.Sequential:
    """Two layers, one inside another module."""
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3)))


def test_a_model_that_stays_as_it_is_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the very same answer."""
    known, net = NamedParameters(), model()
    first = known.of(net)
    assert first == dict(net.named_parameters()) and list(first) == [name for name, _ in net.named_parameters()]
    monkeypatch.setattr(net, "named_parameters", None)
    assert known.of(net) is first


def swap(net: nn.Sequential) -> None:
    """Another parameter under the same name."""
    net[0].weight = nn.Parameter(torch.ones(3, 2))


def rename(net: nn.Sequential) -> None:
    """The same parameter under another name, in the same place."""
    bias = net[1][0].bias
    del net[1][0].bias
    net[1][0].late = bias


@pytest.mark.parametrize(
    "change",
    [
        swap,
        rename,
        lambda net: net.register_parameter("more", nn.Parameter(torch.ones(2))),
        lambda net: net[1].append(nn.Linear(3, 3)),
        lambda net: net[1].__setitem__(0, nn.Linear(3, 3)),
        lambda net: net.__delitem__(1),
        lambda net: setattr(net[0], "bias", None),
        lambda net: net.register_module("shared", net[0]),
    ],
)
def test_every_change_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    """Parameters and modules that are added, swapped, renamed or taken away, at any depth."""
    known, net = NamedParameters(), model()
    known.of(net)
    change(net)
    found, now = known.of(net), dict(net.named_parameters())
    assert list(found) == list(now) and all(found[name] is now[name] for name in now)


def test_another_model_is_another() -> None:
    """Even one that looks the same."""
    known, one, other = NamedParameters(), model(), model()
    known.of(one)
    assert known.of(other)["0.weight"] is other[0].weight
