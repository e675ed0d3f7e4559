"""Make docs/images/train.svg: run the default job for 200 steps and draw what it prints, as a terminal shows it.

Run it by hand on a quiet machine when the output has changed; its figures differ from machine to machine.
"""

import io
import os
import re
import subprocess
import sys
import tempfile

from pages import DOCS
from rich.console import Console
from rich.text import Text

COLUMNS = 96
COMMAND = ["train", "trainer.max_steps=200", "hooks.sample_text.enabled=false"]


def main() -> None:
    """Run the command in an empty folder and write the picture."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONIOENCODING": "utf-8"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hookline", *COMMAND]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        printed = done.stdout.replace(f"{folder}/", "")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ hookline {' '.join(COMMAND)}", style="bold"))
    console.print(Text.from_ansi(printed), end="")
    path = DOCS / "images" / "train.svg"
    path.parent.mkdir(exist_ok=True)
    picture = console.export_svg(title="hookline train")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # the viewer's own font: nothing is fetched
    path.write_text(picture, encoding="utf-8")
    print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
