"""The gradients by parameter name, as update hooks see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from hookline.errors import GradientError, nearest


class Gradients(MutableMapping[str, torch.Tensor]):
    """A live view of the parameters' gradients. Nothing is copied, and nothing is written before `commit`.

    Assigning to a name keeps the new gradient aside; parameters without a gradient are not listed.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter]) -> None:
        self.params = params
        self.aside: dict[str, Any] = {}  # assigned and not committed yet

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
        return [self[name] for name in self]

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
