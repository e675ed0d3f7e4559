"""`Handle`, the result of registering a hook, and `HookObjects`, the type of a registry's `hooks`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.core.registry import Registry


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
        """Detach the hook; a second call does nothing."""
        self._remove()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Copy and pickle as the plain name."""
        return str, (str(self),)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


class HookObjects(tuple[Any, ...]):
    """The hook objects of a registry at one moment, and `append`."""

    registry: Registry

    def append(self, hook: Any) -> None:
        """Register a hook."""
        self.registry.register(hook)
