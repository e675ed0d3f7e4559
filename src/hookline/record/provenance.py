"""Describe where a run came from, as run.json stores it: id, commit, config hash and machine.

Nothing here raises if a piece of information is unavailable.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import string
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookline import __version__, _device
from hookline.record import strict_json
from hookline.record.redaction import redact

GIT_TIMEOUT_S = 5.0
UNKNOWN_GIT_STATE: dict[str, Any] = {"commit": "unknown", "dirty": None, "diff_hash": None}

_DIGITS = string.digits + string.ascii_lowercase
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

# A repository's config can name programs that git runs, and the repository may be a stranger's. These keep git from
# running any: a monitor of the file system, hooks, a bare repository hidden in a folder, and the transports by which a
# partial clone fetches objects that it lacks. Filters are disabled by name, see `_without_filters`.
_NO_PROGRAMS = (
    "-c", "core.fsmonitor=", "-c", f"core.hooksPath={os.devnull}", "-c", "safe.bareRepository=explicit", "--no-pager",
)  # fmt: skip
_NO_PROGRAMS_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none",
}  # fmt: skip
# Looking into a submodule would start a git there, with the submodule's own config. For a binary file, the full ids of
# both versions are enough.
_DIFF = ("diff", "HEAD", "--full-index", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")


def new_run_id() -> str:
    """Return an id that sorts by start time and can name a file: UTC to the microsecond, then four random characters.

    The randomness comes from the system, so training's random streams do not change.
    """
    now = datetime.now(UTC)
    microsecond = np.base_repr(now.microsecond, 36).lower().zfill(4)
    return f"{now:%Y%m%d-%H%M%S}-{microsecond}{''.join(secrets.choice(_DIGITS) for _ in range(4))}"


# ---- code and machine ------------------------------------------------------------------------------------------------


def git_state(directory: Path | str) -> dict[str, Any]:
    """Return the commit, whether tracked files differ from it, and a hash of the difference (None if there is none).

    Untracked files do not count, because a directory of runs would make every run dirty, nor do changes inside
    submodules. Without git, a repository or a commit, or if git does not answer within 5 s in total, unknown fields are
    "unknown" or None. Git runs no program that a config names: a file that a filter would convert is compared as it is
    on disk if its time or size changed.
    """
    deadline = time.monotonic() + GIT_TIMEOUT_S
    state = dict(UNKNOWN_GIT_STATE)
    head = _git(directory, deadline, "rev-parse", "--verify", "HEAD") or b""
    commit = head.decode("ascii", "replace").strip()
    if not _COMMIT.fullmatch(commit):
        return state
    state["commit"] = commit
    options = _without_filters(_git(directory, deadline, "config", "--list", "--name-only", "-z"))
    diff = None if options is None else _git(directory, deadline, *options, *_DIFF)
    if diff is not None:
        state["dirty"] = bool(diff)
        state["diff_hash"] = hashlib.sha256(diff).hexdigest() if diff else None
    return state


def _without_filters(names: bytes | None) -> list[str] | None:
    """Return the options of git that switch off every filter among the names of a config; None if that is impossible.

    A filter is a program that converts files between disk and repository, and that a comparison would run.
    """
    if names is None:
        return None
    keys = [os.fsdecode(name) for name in names.split(b"\0")]
    filters = dict.fromkeys(key.rpartition(".")[0] for key in keys if key.startswith("filter."))
    if any("=" in name for name in filters):  # git would read another key
        return None
    off = ("clean=", "process=", "smudge=", "required=false")
    return [word for name in filters for setting in off for word in ("-c", f"{name}.{setting}")]


def _git(directory: Path | str, deadline: float, *arguments: str) -> bytes | None:
    """Return the output of a git command; None if it failed.

    It prompts for nothing, takes no locks, and runs no program that a config names.
    """
    try:
        return subprocess.run(
            ["git", *_NO_PROGRAMS, "-C", str(directory), *arguments],
            env={**os.environ, **_NO_PROGRAMS_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.0, deadline - time.monotonic()),
            check=True,
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, Any]:
    """Return the software and the machine; GPUs are named only if CUDA is in use, because asking would start it."""
    return {
        "hookline": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": _device.device_names(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "hostname": platform.node(),
        "argv": redact(sys.argv),
    }


# ---- the config's hash -----------------------------------------------------------------------------------------------


def config_hash(config: Any) -> str:
    """Return the sha256 of the meaning of a redacted config: the order of keys does not count.

    ``1``, ``1.0``, ``"1"`` and ``True`` are four different values.
    """
    text = json.dumps(_canonical(config), separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _canonical(value: Any) -> Any:
    """Return a JSON value that differs whenever the meaning does: containers and unusual numbers carry their kind."""
    if isinstance(value, dict):
        pairs = [[_canonical(key), _canonical(item)] for key, item in value.items()]
        return ["dict", *sorted(pairs, key=json.dumps)]
    if isinstance(value, list):
        return ["list", *map(_canonical, value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    # JSON distinguishes 1 from 1.0; NaN must differ from the string "NaN", and a huge integer from its digits.
    plain = strict_json.simplify(value)
    return [type(value).__name__, plain] if isinstance(plain, str) else plain
