"""Continue the run of processes that a launcher starts again: torchrun does so, with --max-restarts, if one fails."""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline._console import logger
from hookline._fs import describe_process
from hookline.checkpoints.find import run_directory
from hookline.errors import RecordError
from hookline.record.json_lines import read_json

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

_numbers = count(1)  # of the runs of this process: a script that starts again makes the same runs in the same order


def describe_launch() -> dict[str, Any] | None:
    """Return launch and number of a run that begins, for run.json; None if no launcher would start it again."""
    launch, number = os.environ.get("TORCHELASTIC_RUN_ID"), next(_numbers)
    if launch is None:
        return None
    if launch == "none":  # torchrun's default for all launches; the process that starts the others tells them apart
        launch = "{host}-{pid}-{started}".format(**describe_process(os.getppid()))
    return {"id": launch, "run": number}


def continued_run(trainer: Trainer, resume: str | Path | None) -> Path | None:
    """Return the run that an earlier start of this launch began, None if there is none; all ranks call this.

    It continues from its newest whole checkpoint, wherever the first start began.

    Args:
        trainer: The trainer, with the `launch` of the run that begins.
        resume: What the script asks to resume from.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if trainer.launch is None or restarts == 0 or not trainer.options.record:
        return None
    places = [Path(trainer.options.output_dir)]
    if resume is not None and (run := run_directory(Path(resume))) is not None:
        places.append(run.parent)
    found = trainer.ranks.first(partial(_find, places, trainer.launch))
    if found is not None:
        logger.warning("the processes were started again (restart %d): continuing %s", restarts, found)
    return None if found is None else Path(found)


def _find(places: list[Path], launch: dict[str, Any]) -> str | None:
    """Return the newest run of a launch."""
    for place in places:
        runs = sorted(place.iterdir(), reverse=True) if place.is_dir() else []
        for run in runs:
            try:
                attempts = read_json(run / "run.json").get("attempts", [])
            except (OSError, RecordError):
                continue
            attempts = attempts if isinstance(attempts, list) else []
            if any(isinstance(one, dict) and one.get("launch") == launch for one in attempts):
                return str(run)
    return None
