"""The gradients by parameter name, as update hooks see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from hookline.errors import GradientError, nearest
from hookline.gradients.norms import Norms
from hookline.gradients.numbers import are_plain, numbers_of


class Gradients(MutableMapping[str, torch.Tensor]):
    """A live view of the parameters' gradients. Nothing is copied, and nothing is written before `commit`.

    Assigning to a name keeps the new gradient aside; parameters without a gradient are not listed.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter], known: Norms | None = None) -> None:
        self.params = params
        self.aside: dict[str, Any] = {}  # assigned and not committed yet
        self._shared = known

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self.aside[name] if name in self.aside else self.params[name].grad
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, gradient: torch.Tensor) -> None:
        if name not in self.params:
            raise KeyError(f"{name!r} is no parameter here; {nearest(name, self.params)}")
        self.aside[name] = gradient

    def __delitem__(self, name: str) -> None:
        self[name]  # a KeyError for what is not there
        self.aside[name] = None

    def __iter__(self) -> Iterator[str]:
        for name, param in self.params.items():
            if self.aside.get(name, param.grad) is not None:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Gradients({len(self)} of {len(self.params)} parameters)"

    def tensors(self) -> list[torch.Tensor]:
        """The gradients that are there, in the order of the parameters."""
        if self.aside:
            return [self[name] for name in self]
        return [grad for param in self.params.values() if (grad := param.grad) is not None]

    @property
    def known(self) -> Norms:
        """The norms that were read already. The links of a chain share them; outside of one nothing is kept."""
        return Norms() if self._shared is None else self._shared

    def numbers(self) -> list[torch.Tensor]:
        """The gradients' memory, to be written in place: of a DTensor its shard here, of a sparse gradient its values.

        A function of single elements that leaves zeros zero is right for the whole gradient.
        """
        return numbers_of(self.writable())

    def writable(self) -> list[torch.Tensor]:
        """The gradients as `tensors` has them, in a form whose `numbers` can be written to: sparse ones coalesced."""
        tensors = self.tensors()
        return tensors if are_plain(tensors) else self._coalesced()

    def norms(self) -> torch.Tensor:
        """One L2 norm per gradient, on the device, of the whole gradient where it is sharded; read once per change."""
        tensors = self.tensors()
        return self.known.of(tensors) if tensors else torch.zeros(0)

    def norm(self) -> torch.Tensor:
        """The L2 norm of all gradients together, on the device; zero when there are none."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.norms())
        return norm

    def _coalesced(self) -> list[torch.Tensor]:
        """Add up what a sparse gradient holds twice for one place, or it could not be written to."""
        for name, grad in self.items():
            if grad.is_sparse:
                self.params[name].grad = grad.coalesce()
        return self.tensors()

    def forget(self) -> None:
        """Drop what was assigned and not committed."""
        self.aside.clear()

    def commit(self, returned: Any) -> None:
        """Take over what a hook returned, all or nothing; None for a name removes its gradient."""
        if returned is None:
            raise GradientError("returned None; return the gradients (the mapping you got, or a new one)")
        if returned is not self and not isinstance(returned, Mapping):
            raise GradientError(f"returned {type(returned).__name__}; return a mapping of parameter name to gradient")
        new = dict(self.aside) if returned is self else self._checked_keys(returned)
        for name, gradient in new.items():
            self._check(name, gradient)
        for name, gradient in new.items():
            self.params[name].grad = gradient
        self.aside.clear()

    def _checked_keys(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in self if name not in returned]
        if missing:
            all_of = f"{missing[0]!r} ({len(missing)} in all)"
            raise GradientError(f"dropped {all_of}; return every gradient, None to remove one")
        unknown = [name for name in returned if name not in self.params]
        if unknown:
            choices = nearest(str(unknown[0]), self.params)
            raise GradientError(f"returned {unknown[0]!r}, which is no parameter here; {choices}")
        return dict(returned)

    def _check(self, name: str, gradient: Any) -> None:
        if gradient is None:
            return
        if not isinstance(gradient, torch.Tensor):
            raise GradientError(f"{name!r}: returned {type(gradient).__name__}, not a tensor")
        param = self.params[name]
        for fact in ("shape", "dtype", "device"):
            wanted, got = getattr(param, fact), getattr(gradient, fact)
            if wanted != got:
                raise GradientError(f"{name!r}: returned {fact} {_plain(got)}, the parameter has {_plain(wanted)}")
        if gradient.requires_grad:
            raise GradientError(f"{name!r}: returned a gradient that still carries a graph; detach it")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value
