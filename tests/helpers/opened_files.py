"""Which files a block opens to read them, as Python reports it; what libraries open by themselves is not seen."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR
_opened: list[str] | None = None


def _note_open(event: str, arguments: Any) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str) and not arguments[2] & WRITES:
        _opened.append(arguments[0])


sys.addaudithook(_note_open)  # for good: hooks of this kind cannot be removed


@contextmanager
def opened_files() -> Iterator[list[Path]]:
    """Yield a list that has the files after the block, each as often as it was opened."""
    global _opened
    files: list[Path] = []
    _opened = []
    try:
        yield files
    finally:
        names, _opened = _opened, None
        files += [path for name in names if not (path := Path(name).resolve()).is_dir()]
