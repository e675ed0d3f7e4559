"""An observer in the backward pass sees the gradient and changes nothing."""

import torch
from torch import Tensor, nn

from hookline.activations.backward import watch_gradient


def test_it_sees_the_whole_gradient_once() -> None:
    """Of an activation that is used several times, the sum over its uses, detached."""
    seen: list[Tensor] = []
    leaf = torch.randn(3, requires_grad=True)
    activation = leaf * 2
    watch_gradient(activation, seen.append)
    (activation.sum() + (activation * activation).sum()).backward()
    assert len(seen) == 1 and not seen[0].requires_grad
    torch.testing.assert_close(seen[0], 1 + 2 * activation.detach())


def test_gradients_are_bit_for_bit_the_same() -> None:
    """With and without the observer, also when it keeps the gradients and the model writes in place."""
    gradients = []
    for watched in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
        kept: list[Tensor] = []
        x = torch.randn(16, 8)
        for layer in model:
            x = layer(x)
            if watched:
                watch_gradient(x, kept.append)
        x.square().sum().backward()
        assert len(kept) == 5 * watched
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_nothing_to_watch() -> None:
    """An activation that needs no gradient is left alone."""
    needs_none = torch.ones(2)
    with torch.no_grad():
        without_graph = torch.ones(2, requires_grad=True) * 2
    for activation in (needs_none, without_graph):
        watch_gradient(activation, lambda gradient: None)
        assert not activation._backward_hooks


def test_gradients_of_gradients() -> None:
    """With create_graph the observer still gets a detached gradient, and the second derivative is right."""
    seen: list[Tensor] = []
    leaf = torch.tensor(3.0, requires_grad=True)
    activation = leaf * 1
    watch_gradient(activation, seen.append)
    (first,) = torch.autograd.grad(activation**3, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first, leaf)
    assert second == 18 and not seen[0].requires_grad
