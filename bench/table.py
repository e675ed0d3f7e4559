"""A table of results, printed as it is saved: Markdown that lines up."""

import os
import platform
import shlex
import sys
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Table:
    """One benchmark's results: a title, rows of text, and what a reader must know to trust them."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The table in Markdown, its columns padded to line up in a terminal, with the notes below."""
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        lines = [
            aligned(self.columns, widths),
            "|" + "|".join("-" * (width + 2) for width in widths) + "|",
            *(aligned(row, widths) for row in self.rows),
        ]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)])


def aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    """One line of the table: the first cell to the left, numbers to the right."""
    first = cells[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "| " + " | ".join([first, *rest]) + " |"


def cpu_name() -> str:
    """The processor's name as Linux gives it, elsewhere as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_lines() -> list[str]:
    """The accelerator, if there is one, with what its kernels were made by."""
    if not torch.cuda.is_available():
        return []
    triton = f", triton {version('triton')}" if find_spec("triton") else ""
    return [f"- device: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}{triton}"]


def circumstances() -> list[str]:
    """Where and with what the numbers were made."""
    command = shlex.join(["python", "-m", "bench", *sys.argv[1:]])
    return [
        f"- date: {date.today().isoformat()}",
        *device_lines(),
        f"- processor: {cpu_name()}, {os.cpu_count()} cores, one torch thread",
        f"- python {platform.python_version()}, torch {torch.__version__}",
        f"- command: `{command}`",
    ]


def save(table: Table, name: str) -> Path:
    """Write the table with its circumstances to bench/results/<date>-<name>.md."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-{name}.md"
    page = [f"# {table.title}", "", *circumstances(), "", table.text(), ""]
    path.write_text("\n".join(page), encoding="utf-8")
    return path
