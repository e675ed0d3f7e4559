"""Where a run came from: its id, the code's commit, the config's hash, the machine. None of it can fail."""

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
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hookline.record import jsonsafe
from hookline.record.redaction import redact

GIT_TIMEOUT_S = 5.0

_DIGITS = string.digits + string.ascii_lowercase
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def new_run_id() -> str:
    """A file-name-safe id that sorts by start time: UTC to the microsecond, then four random characters.

    The randomness is the system's, so training's random streams are untouched.
    """
    now = datetime.now(UTC)
    chance = "".join(secrets.choice(_DIGITS) for _ in range(4))
    return f"{now:%Y%m%d-%H%M%S}-{_base36(now.microsecond, width=4)}{chance}"


def _base36(number: int, width: int) -> str:
    text = ""
    for _ in range(width):
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def unknown_git_state() -> dict[str, Any]:
    """What is recorded where no commit can be told."""
    return {"commit": "unknown", "dirty": None, "diff_hash": None}


def git_state(directory: Path | str) -> dict[str, Any]:
    """The commit, whether tracked files differ from it, and a hash of the difference (None if there is none).

    Untracked files do not count, or a directory of runs would make every run dirty. Without git, a
    repository or a commit, or when git does not answer within 5 s in all, what is not known is "unknown" or
    None.
    """
    deadline = time.monotonic() + GIT_TIMEOUT_S
    state = unknown_git_state()
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
    """What one git command printed, or None when it failed. It asks, locks and monitors nothing."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        finished = subprocess.run(
            command,
            env=quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.0, deadline - time.monotonic()),
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return finished.stdout


def config_hash(config: Any) -> str:
    """The sha256 of a config's meaning: key order is irrelevant, a tuple equals a list, all else shows.

    ``1``, ``1.0``, ``"1"`` and ``True`` are four different values.
    """
    text = json.dumps(_canonical(config, 0), separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _canonical(value: Any, depth: int) -> Any:
    """A JSON value that differs whenever the meaning does: containers and unusual types carry their kind."""
    if depth > 48:  # a config that contains itself
        return ["deep", type(value).__name__]
    if isinstance(value, Mapping):
        return _canonical_items(value, depth)
    if isinstance(value, (list, tuple)):
        return ["list", *(_canonical(item, depth + 1) for item in value)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted((_canonical(item, depth + 1) for item in value), key=json.dumps)]
    if jsonsafe.is_dataclass_instance(value):
        return [type(value).__qualname__, _canonical(jsonsafe.field_values(value), depth + 1)]
    return _canonical_leaf(value, depth)


def _canonical_items(value: Mapping[Any, Any], depth: int) -> Any:
    pairs = [[_canonical(key, depth + 1), _canonical(item, depth + 1)] for key, item in value.items()]
    return ["dict", *sorted(pairs, key=json.dumps)]


def _canonical_leaf(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) in (int, float):
        return _canonical_number(value)
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), _canonical(value.tolist(), depth + 1)]
    if callable(value) and hasattr(value, "__qualname__"):
        return ["callable", getattr(value, "__module__", None), value.__qualname__]
    plain = jsonsafe.simplify(value)  # an address in a repr would change from process to process
    return [type(value).__qualname__, _ADDRESS.sub("", jsonsafe.dumps(plain))]


def _canonical_number(value: int | float) -> Any:
    """Finite numbers as they are (JSON keeps 1 and 1.0 apart); the others unlike the string "NaN"."""
    plain = jsonsafe.simplify(value)
    return [type(value).__name__, plain] if isinstance(plain, str) else plain


def environment() -> dict[str, Any]:
    """The software and the machine. Names the GPUs only if CUDA is in use already: asking would start it."""
    return {
        "hookline": _own_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": _gpu_names(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "hostname": platform.node(),
        "argv": redact(sys.argv),
    }


def _own_version() -> str:
    try:
        return metadata.version("hookline")
    except metadata.PackageNotFoundError:
        return "unknown"


def _gpu_names() -> list[str]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
