"""Learning at once that there is a compiler in the process.

Dynamo takes a second or two to import: too long for those who never compile, who would otherwise pay for it with their
first forward hook. Yet hooks must be known to it before it compiles anything. So whoever was there before it is told
when its import ends. (Whoever has made an optimizer has it already.)
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

COMPILER = "torch._dynamo"

logger = logging.getLogger("hookline")
_waiting: list[weakref.WeakMethod[Callable[[], None]]] = []


def when_imported(call: Callable[[], None]) -> None:
    """Have a method called when the compiler has been imported, which it has not now."""
    once = weakref.WeakMethod(call)
    if once not in _waiting:
        _waiting.append(once)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """Is asked for every module that is imported, and has an answer for one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != COMPILER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        return spec


class _Telling(Loader):
    """Loads as the loader it stands for, and tells those who wait."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self._loader  # for whoever asks the module where it came from
        self._loader.exec_module(module)
        if _finder in sys.meta_path:  # not before: somebody may only have asked whether there is a compiler
            sys.meta_path.remove(_finder)
        waiting, _waiting[:] = list(_waiting), []
        for call in filter(None, (once() for once in waiting)):
            _tell(call)


def _tell(call: Callable[[], None]) -> None:
    """What goes wrong here must not look as if the import had."""
    try:
        call()
    except Exception:
        logger.warning("forward hooks may not be heard in compiled code", exc_info=True)


_finder = _Finder()
