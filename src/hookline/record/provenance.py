"""Describe where a run came from, as run.json stores it: id, commit, config hash and machine.

Nothing here raises if a piece of information cannot be found out.
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
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hookline import _device
from hookline.record import strict_json
from hookline.record.redaction import redact

GIT_TIMEOUT_S = 5.0
UNKNOWN_GIT_STATE: dict[str, Any] = {"commit": "unknown", "dirty": None, "diff_hash": None}

_DIGITS = string.digits + string.ascii_lowercase
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def new_run_id() -> str:
    """Return an id that sorts by start time and can name a file: UTC to the microsecond, then four random characters.

    The randomness comes from the system, so training's random streams do not change.
    """
    now = datetime.now(UTC)
    microseconds, digits = now.microsecond, ""
    for _ in range(4):
        microseconds, digit = divmod(microseconds, 36)
        digits = _DIGITS[digit] + digits
    return f"{now:%Y%m%d-%H%M%S}-{digits}{''.join(secrets.choice(_DIGITS) for _ in range(4))}"


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# ---- code and machine ------------------------------------------------------------------------------------------------


def git_state(directory: Path | str) -> dict[str, Any]:
    """Return the commit, whether tracked files differ from it, and a hash of the difference (None if there is none).

    Untracked files do not count, because a directory of runs would make every run dirty. Without git, a repository or a
    commit, or if git does not answer within 5 s in total, unknown fields are "unknown" or None.
    """
    deadline = time.monotonic() + GIT_TIMEOUT_S
    state = dict(UNKNOWN_GIT_STATE)
    head = _git(directory, deadline, "rev-parse", "--verify", "HEAD") or b""
    commit = head.decode("ascii", "replace").strip()
    if not _COMMIT.fullmatch(commit):
        return state
    state["commit"] = commit
    diff = _git(directory, deadline, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    if diff is not None:
        state["dirty"] = bool(diff)
        state["diff_hash"] = hashlib.sha256(diff).hexdigest() if diff else None
    return state


def _git(directory: Path | str, deadline: float, *arguments: str) -> bytes | None:
    """Return the output of a git command, None if it failed; it prompts for nothing and takes no locks."""
    try:
        return subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.0, deadline - time.monotonic()),
            check=True,
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, Any]:
    """Return the software and the machine; GPUs are named only if CUDA is in use, because asking would start it."""
    try:
        version = metadata.version("hookline")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "hookline": version,
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
    # JSON keeps 1 and 1.0 apart; NaN must differ from the string "NaN", and a huge integer from its digits.
    plain = strict_json.simplify(value)
    return [type(value).__name__, plain] if isinstance(plain, str) else plain
