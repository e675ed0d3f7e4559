"""The one thing that attaching returns."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Handle(str):
    """A hook's name that can also remove it; as a context manager it removes it at the end of the block.

    >>> with registry.register(MyHook()) as name:
    ...     train()
    """

    _remove: Callable[[], object]

    def __new__(cls, name: str, remove: Callable[[], object]) -> Handle:
        handle = super().__new__(cls, name)
        handle._remove = remove
        return handle

    def remove(self) -> None:
        """Detach what this handle stands for; once is enough, twice is harmless."""
        remove, self._remove = self._remove, _nothing
        remove()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy, or what another process gets, is the plain name."""
        return str, (str(self),)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def _nothing() -> None:
    return None
