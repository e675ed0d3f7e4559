"""`%load_ext hookline`: record what the cells of a notebook train, a run for each cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline.hosts.options import Options
from hookline.hosts.watch import Watch

_watches: dict[int, tuple[Watch, Any]] = {}


def load(shell: Any) -> None:
    """Watch the cells of an IPython shell from the next one on."""
    here = Path.cwd()
    watch = Watch(Options(output=str(here / "runs"), directory=str(here)), prints=True, owns_process=False)

    def end_cell(result: Any) -> None:
        watch.end_cell(result.error_before_exec or result.error_in_exec)

    watch.start()
    shell.events.register("post_run_cell", end_cell)
    _watches[id(shell)] = watch, end_cell


def unload(shell: Any) -> None:
    """Stop watching the cells."""
    watch, end_cell = _watches.pop(id(shell))
    watch.end()
    watch.stop()
    shell.events.unregister("post_run_cell", end_cell)
