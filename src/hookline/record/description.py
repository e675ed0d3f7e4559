"""What a record says about a run: the fields of run.json and of an event, the same on disk and in memory."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

from hookline.errors import RecordError, nearest
from hookline.record import provenance
from hookline.record.known_secrets import KnownSecrets
from hookline.record.redaction import redact, secrets_in

OUTCOMES = ("completed", "stopped", "interrupted", "failed")


def known_secrets(config: Any) -> KnownSecrets:
    """What no text of a run may show: the secrets of its config and of the environment, while its record keeps this."""
    known = KnownSecrets()
    known.learn(secrets_in([config, os.environ]))
    return known


def describe_run(run_id: str, config: Any, seed: int | None, hooks: list[dict[str, Any]]) -> dict[str, Any]:
    """run.json's fields at the start. The hash is of the redacted config, so it tells nobody a secret."""
    now = provenance.utc_now()
    return {
        "run_id": run_id,
        "started": now,
        "git": provenance.unknown_git_state(),
        "config_hash": provenance.config_hash(config),
        "environment": {},
        "seed": seed,
        "hooks": redact(hooks),
        "lineage": None,
        "attempts": [{"started": now, "pid": os.getpid(), "host": platform.node()}],
        "outcome": None,
    }


def note_the_end(
    run: dict[str, Any],
    outcome: str,
    reason: str | None,
    hooks: list[dict[str, Any]],
    costs: list[dict[str, Any]],
    counters: dict[str, Any],
    *,
    lost: int,
) -> None:
    """Add the end to run.json's fields; the attempt keeps its own, for a resumed run starts with none."""
    end = {"outcome": outcome, "reason": redact(reason), "closed": provenance.utc_now()}
    run.update(end, hooks=redact(hooks), costs=costs, counters=counters, lost=lost)
    if run.get("attempts"):
        run["attempts"][-1].update(end)


def event_line(kind: str, step: int | None, fields: dict[str, Any]) -> dict[str, Any]:
    """One line of events.jsonl, without secrets."""
    return {"time": round(time.time(), 6), "kind": kind, "step": step, **redact(fields)}


def check_outcome(outcome: str) -> None:
    """Refuse an outcome that no reader of run.json would know."""
    if outcome not in OUTCOMES:
        raise RecordError(f"{outcome!r} is no outcome of a run; {nearest(outcome, OUTCOMES)}")
