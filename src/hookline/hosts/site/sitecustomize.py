"""Python imports this file as it starts, because `hookline run` puts its folder on PYTHONPATH. Standard library only.

It runs the `sitecustomize` that would have run without it, and waits for `import torch`: a process that never imports
torch loads nothing else of Hookline. PYTHONPATH stays as it is, so that processes which this one starts are watched,
too.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

TYPE_CHECKING = False  # typing takes 5 ms to import
if TYPE_CHECKING:
    from typing import Any


class AfterTorch:
    """A finder that has `hookline.hosts.watch` begin once torch is imported, and then leaves."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that others have for torch; asking for it is not an import, so this finder stays."""
        if name != "torch":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec: Any = next(filter(None, others), None)
        loader: Any = getattr(spec, "loader", None)
        if hasattr(loader, "exec_module"):
            loader.exec_module = self._execute
        return spec

    def _execute(self, module: Any) -> None:
        loader = module.__spec__.loader
        del loader.exec_module
        try:
            loader.exec_module(module)
        except BaseException as error:  # the traceback looks like a plain import's
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if "hookline.cli" in sys.modules:  # One of Hookline's own commands: it records what it trains.
            return
        try:
            from hookline.hosts.watch import begin

            begin()
        except Exception as error:  # Hookline is not installed for this Python, for instance
            del os.environ["HOOKLINE_RUN"]  # The processes that this one starts need not repeat it.
            with suppress(Exception):
                print(f"hookline: nothing is recorded by {sys.executable}: {error}", file=sys.stderr)


def leave() -> None:
    """Let the next `sitecustomize` on the path be imported in place of this one."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes 20 ms to import
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]  # noqa: PTH100
    this_module = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this_module  # the import in progress expects it


if "HOOKLINE_RUN" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
leave()
