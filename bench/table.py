"""Print a table of results and save it as Markdown with aligned columns."""

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
    """The results of one benchmark: a title, rows of text, and notes on how they were measured."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the table in Markdown, with its columns padded for a terminal, and the notes below."""
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        lines = [
            aligned(self.columns, widths),
            "|" + "|".join("-" * (width + 2) for width in widths) + "|",
            *(aligned(row, widths) for row in self.rows),
        ]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)])


def aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    """Format one line of the table: the first cell is left-aligned, numbers are right-aligned."""
    first = cells[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "| " + " | ".join([first, *rest]) + " |"


def cpu_name() -> str:
    """Return the processor's name as Linux reports it, or else as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_lines() -> list[str]:
    """Describe the accelerator, if there is one, and the compiler of its kernels."""
    if not torch.cuda.is_available():
        return []
    triton = f", triton {version('triton')}" if find_spec("triton") else ""
    return [f"- device: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}{triton}"]


def circumstances() -> list[str]:
    """Describe the machine and the versions of the measurement."""
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
