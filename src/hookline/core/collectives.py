"""Refuse collectives in hooks that do not declare them with `collective = True`.

A collective must be called by all ranks in the same order. One in a hook that fails on one rank, or that only some
ranks call, would be paired with a collective of training, and silently put its numbers into gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from hookline.core.base import hook_attribute
from hookline.core.catalog import Event
from hookline.errors import RankError

if TYPE_CHECKING:
    from hookline.core.dispatch import BoundHook
    from hookline.core.registry import Registry

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # torch.distributed's operators


class _RefuseCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise RankError at the first collective that is called in a hook."""

    def __init__(self, guard: CollectiveGuard, hook: str, event: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard, self._hook, self._event = guard, hook, event

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "namespace", "") in _NAMESPACES and not self._guard.allowed:
            raise RankError(
                f"hook {self._hook!r} calls a collective in {self._event} ({func}) and does not declare it: set "
                "collective = True on the hook, use the process group trainer.ranks.group, and call it on all ranks. "
                "Numbers for the record need none: trainer.log adds them up. If it was a forward pass of the wrapped "
                "model, use `with trainer.inference() as model` in a hook that is called on all ranks"
            )
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # DTensor then calls the collectives that the operation needs, which come back here
        return func(*args, **kwargs or {})


class CollectiveGuard:
    """A wrapper of a registry's dispatch, for runs on several ranks; it costs a call of a hook 2 to 4 µs."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.allowed = False

    def wrap(self, event: Event, hook: BoundHook) -> BoundHook:
        """Return a listener of an event as it is called."""
        if self._may_call(hook.built_in, hook.owner):
            return hook
        call, mode = hook.call, _RefuseCollectives(self, hook.hook, event.name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self._refusing(mode):
                return call(*args, **kwargs)

        return hook.with_call(guarded)

    def around(self, hook: str, method: str) -> AbstractContextManager[None]:
        """Return the context for a hook's method that is not an event, such as `state_dict`.

        `setup` is left alone: it runs when the hook is registered, before any run.
        """
        entry = self._registry.entry(hook) if hook in self._registry else None
        if method == "setup" or entry is None or self._may_call(entry.built_in, entry.hook):
            return nullcontext()
        return self._refusing(_RefuseCollectives(self, hook, method))

    def _may_call(self, built_in: bool, hook: Any) -> bool:
        return self._registry.ranks.world_size == 1 or built_in or bool(hook_attribute(hook, "collective"))

    @contextmanager
    def _refusing(self, mode: _RefuseCollectives) -> Iterator[None]:
        before, self.allowed = self.allowed, False  # a validation or a save may call them, but their hooks may not
        try:
            with mode:
                yield
        finally:
            self.allowed = before

    @contextmanager
    def allow(self, method: str) -> Iterator[None]:
        """Run a method that involves all ranks, even if the hook that calls it declares no collectives.

        Args:
            method: How errors name the method.

        Raises:
            RankError: If the hook that calls it is not called on all ranks, which would wait for the others.
        """
        ranks = self._registry.ranks
        if ranks.world_size > 1 and (name := self._registry.calling_hook()) is not None:
            on = self._registry.entry(name).ranks
            if on is not None and not (isinstance(on, frozenset) and on.issuperset(range(ranks.world_size))):
                where = "the first rank of each machine" if isinstance(on, str) else f"ranks {sorted(on)}"
                raise RankError(
                    f"hook {name!r} calls {method}, which needs all ranks, but it is called on {where} only: "
                    "leave out its `ranks`, and call it on all of them without a condition; rank 0 writes for all"
                )
        before, self.allowed = self.allowed, True
        try:
            yield
        finally:
            self.allowed = before
