"""The gradients by parameter name, as update hooks see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from hookline.errors import GradientError, nearest
from hookline.gradients.look import Look, gradients_of
from hookline.gradients.norms import Norms
from hookline.gradients.numbers import is_sharded


class Gradients(MutableMapping[str, torch.Tensor]):
    """A live view of the parameters' gradients. Nothing is copied, and nothing is written before `commit`.

    Assigning to a name keeps the new gradient aside; parameters without a gradient are not listed. `steady` says that
    meanwhile nobody but `commit` gives these parameters other gradients: then the links of a chain look for them once.
    """

    def __init__(
        self, params: Mapping[str, torch.nn.Parameter], known: Norms | None = None, steady: bool = False
    ) -> None:
        self.params = params
        self.aside: dict[str, Any] = {}  # assigned and not committed yet
        self._shared, self._steady = known, steady

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
        return [self[name] for name in self] if self.aside else gradients_of(self.params)

    def look(self) -> Look:
        """What the gradients have in common; the links of a chain look together."""
        seen = self.known.seen
        return seen.gradients(self.params) if self._steady and not self.aside else seen.look(self.tensors())

    @property
    def known(self) -> Norms:
        """The norms that were read already. The links of a chain share them; outside of one nothing is kept."""
        return Norms() if self._shared is None else self._shared

    def numbers(self) -> list[torch.Tensor]:
        """The gradients' memory, to be written in place: of a DTensor its shard here, of a sparse gradient its values.

        A function of single elements that leaves zeros zero is right for the whole gradient.
        """
        return list(self.known.seen.numbers(self.writable()))

    def groups(self) -> list[list[torch.Tensor]]:
        """The `numbers`, those of each device and dtype by themselves, as foreach operations want them."""
        return self.known.seen.groups(self.writable())

    def writable(self) -> list[torch.Tensor]:
        """The gradients as `tensors` has them, in a form whose `numbers` can be written to: sparse ones coalesced."""
        look = self.look()
        return look.tensors if look.plain else self._coalesced()

    def norms(self) -> torch.Tensor:
        """One L2 norm per gradient, on the device, of the whole gradient where it is sharded; read once per change."""
        tensors = self.look().tensors
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
        self.known.seen.forget_owners()
        return self.look().tensors

    def forget(self) -> None:
        """Drop what was assigned and not committed; the gradients may be others than before."""
        self.aside.clear()
        self.known.seen.forget_owners()

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
            self.params[name].grad = self._own(name, gradient)
        self.forget()

    def _own(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient that is nobody else's: later links write into it, and the hook may have kept what it returned."""
        return gradient if gradient is None or gradient is self.params[name].grad else gradient.clone()

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
        self._check_kind(name, param, gradient)
        if gradient.requires_grad:
            raise GradientError(f"{name!r}: returned a gradient that still carries a graph; detach it")

    def _check_kind(self, name: str, param: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """As dense, or as sparse, as the parameter or its gradient so far, and cut in the same way."""
        if type(gradient) is torch.Tensor and type(param) is torch.nn.Parameter and gradient.layout is param.layout:
            return  # nearly always, and quicker than what follows
        allowed = {param.layout} if param.grad is None else {param.layout, param.grad.layout}
        if gradient.layout not in allowed:
            wanted = " or ".join(sorted(map(str, allowed)))
            raise GradientError(f"{name!r}: returned layout {gradient.layout}, the gradient has {wanted}")
        if is_sharded(gradient) != is_sharded(param):
            got, wanted = ("a DTensor", "plain") if is_sharded(gradient) else ("a plain tensor", "a DTensor")
            raise GradientError(f"{name!r}: returned {got}, the parameter is {wanted}")
        for fact in ("device_mesh", "placements"):
            theirs, ours = getattr(gradient, fact, None), getattr(param, fact, None)
            if theirs != ours:
                raise GradientError(f"{name!r}: returned {fact} {theirs}, the parameter has {ours}")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value
