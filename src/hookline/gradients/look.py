"""What gradients have in common, looked at once a step: a look at hundreds takes longer than launching work on them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache, reduce
from operator import attrgetter, or_

import torch
from torch import Tensor

from hookline.gradients.numbers import are_same, by_kind, memory_of
from hookline.stats.kinds import Kinds, kinds_of
from hookline.stats.layout import VECTOR_BYTES, kept_table

_GRAD = attrgetter("grad")


def gradients_of(params: Mapping[str, torch.nn.Parameter]) -> list[Tensor]:
    """The gradients that are there, in the order of the parameters."""
    return [grad for grad in map(_GRAD, params.values()) if grad is not None]


class Look:
    """Some gradients, and what is true of them, looked at when somebody asks. Nobody may change the list."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._pointers: Tensor | None = None

    @cached_property
    def kinds(self) -> Kinds:
        """What is true of them apart from where they are."""
        return kinds_of(self.tensors)

    @property
    def plain(self) -> bool:
        """Whether none of them is sharded, sparse or complex."""
        return self.kinds.plain

    @property
    def alike(self) -> bool:
        """Whether all are of one dtype and on one device."""
        return self.kinds.alike

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where each begins; only of plain ones."""
        return tuple(map(Tensor.data_ptr, self.tensors))

    @cached_property
    def aligned(self) -> bool:
        """Whether each begins where a vector of 16 bytes does; only of plain ones."""
        return _are_aligned(self.addresses)

    def pointers(self, device: torch.device) -> Tensor:
        """Where each begins, as a table on their device, for kernels; only of plain ones that are all on it."""
        if self._pointers is None:
            self._pointers = kept_table(device, self.addresses)
        return self._pointers


@lru_cache(maxsize=64)
def _are_aligned(addresses: tuple[int, ...]) -> bool:
    """Kept, because at the next step the same addresses come again, mostly."""
    return reduce(or_, addresses, 0) % VECTOR_BYTES == 0


class Seen:
    """The looks of a step: the links of a chain look together, for as long as the gradients are the same tensors.

    The lists that it hands out are its own, so that they are known again at once: nobody may change them.
    """

    def __init__(self) -> None:
        self._looks: list[Look] = []
        self._of_params: dict[int, Look] = {}

    def gradients(self, params: Mapping[str, torch.nn.Parameter]) -> Look:
        """The gradients that these parameters have. It is remembered by whose they are, until `forget`."""
        look = self._of_params.get(id(params))
        if look is None:
            look = self._of_params[id(params)] = self.look(gradients_of(params))
        return look

    def look(self, tensors: list[Tensor]) -> Look:
        """What they have in common."""
        for look in self._looks:
            if are_same(look.tensors, tensors):
                return look
        look = Look(list(tensors))
        self._looks.append(look)
        return look

    def numbers(self, tensors: list[Tensor]) -> list[Tensor]:
        """As `numbers_of`."""
        look = self.look(tensors)
        return look.tensors if look.plain else [memory_of(tensor) for tensor in tensors]

    def groups(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Their memory, that of each device and dtype by itself."""
        memory = self.numbers(tensors)
        return [memory] if memory and self.look(memory).alike else by_kind(memory)

    def forget_owners(self) -> None:
        """Somebody may have given parameters other gradients."""
        self._of_params.clear()

    def forget(self) -> None:
        """Let go of the tensors."""
        self._looks.clear()
        self._of_params.clear()
