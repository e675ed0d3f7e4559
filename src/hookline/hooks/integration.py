"""Telling the world outside: a webhook hears what happens to the run."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hookline.errors import ConfigError, RegistrationError, nearest
from hookline.events.policy import Incident, logger
from hookline.events.schedule import Schedule
from hookline.hooks.notifications import Outbox
from hookline.hooks.webhook import Webhook
from hookline.record.redaction import redact_text
from hookline.registry.base import TrainingHook

OCCASIONS = ("training_end", "best_model", "exception", "early_stop", "hook_failure", "heartbeat")
MODES = ("min", "max")
SMALLEST = {"timeout": 0.01, "retries": 0, "backoff": 0, "queue": 1, "wait_at_end": 0}
LONGEST_TEXT = 3000  # characters; Slack cuts at about 4000
STOPPED = "stopped by "


class NotifyHook(TrainingHook):
    """Posts to a webhook, in the JSON that Slack takes, when something in `notify_on` happens to the run.

    `notify_on` holds any of training_end, best_model, exception, early_stop, hook_failure and heartbeat. The end of a
    run is told once: as the exception, else as the early stop, else as the end. `best_model` follows `monitor` at every
    validation; `heartbeat` says how often to say that the run is alive.

    Messages go out from a thread of their own: training neither waits for them nor fails with them. At the end of the
    run up to `wait_at_end` seconds are given to what is still queued. The URL is a secret: write ``${env:NAME}`` in a
    config; no record, message or error shows more of it than its host.
    """

    built_in = True
    name = "notify"
    saves = ("best",)

    def __init__(
        self,
        webhook_url: str,
        notify_on: Sequence[str] = ("training_end", "best_model"),
        monitor: str = "val/loss",
        mode: str = "min",
        heartbeat: str = "1 h",
        timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 1.0,
        queue: int = 100,
        wait_at_end: float = 10.0,
    ) -> None:
        self.webhook_url, self.heartbeat, self.wait_at_end = webhook_url, heartbeat, wait_at_end
        self.timeout, self.retries, self.backoff, self.queue = timeout, retries, backoff, queue
        self._told: set[Any] = set()
        self._trainer: Any = None
        self._unwatch: Any = None
        self._own_name, self._failed = self.name, False
        with _the_url_kept_out():
            self.notify_on = [_choice(one, OCCASIONS, "notify_on") for one in _listed(notify_on)]
            self.monitor, self.mode = monitor, _choice(mode, MODES, "mode")
            for name, smallest in SMALLEST.items():
                _at_least(getattr(self, name), smallest, name)
            self.schedule = Schedule.parse(every=heartbeat) if "heartbeat" in self.notify_on else None
            webhook = Webhook(webhook_url, timeout)
        self.best = math.inf if mode == "min" else -math.inf
        self._outbox = Outbox(webhook.post, limit=queue, retries=retries, backoff=backoff, on_failure=self._undelivered)
        if "heartbeat" not in self.notify_on:  # an event nobody hears costs nothing
            self.on_step_end = None  # type: ignore[assignment]
        if "best_model" not in self.notify_on:
            self.on_validation_end = None  # type: ignore[assignment]

    def setup(self, registry: Any, name: str) -> None:
        """Listen to the desk where failures of hooks are treated."""
        self._own_name = name
        if "hook_failure" in self.notify_on:
            self._unwatch = registry.desk.watch(self._on_incident)

    def close(self) -> None:
        """Let go of the desk, and see the last messages off."""
        if self._unwatch is not None:
            self._unwatch()
        outbox = self._outbox
        left = outbox.close(self.wait_at_end)
        if left:
            logger.warning("hook %r: %d messages did not go out within %g s", self._own_name, left, self.wait_at_end)
        self._note("notified", sent=outbox.sent, failed=outbox.failed, dropped=outbox.dropped, unsent=left)
        self._unwatch = self._trainer = None

    # ---- what is told ----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any) -> None:
        self._trainer, self._failed = trainer, False
        self._told.clear()

    def on_step_end(self, trainer: Any, step: int, epoch: int, loss: float) -> None:
        """On the schedule of `heartbeat`, and only then is the loss read."""
        of = f" of {trainer.total_steps}" if trainer.total_steps else ""
        self.tell(f"alive at step {step}{of}, epoch {epoch}, loss {loss:.4g}")

    def on_validation_end(self, metrics: Mapping[str, Any], step: int, epoch: int) -> None:
        value = metrics.get(self.monitor)
        if value is None:
            self._miss(metrics)
        elif (value < self.best) if self.mode == "min" else (value > self.best):  # NaN is neither
            before = f" (before: {self.best:.4g})" if math.isfinite(self.best) else ""
            self.best = float(value)
            self.tell(f"new best model: {self.monitor} {value:.4g}{before} at step {step}, epoch {epoch}")

    def on_exception(self, exception: BaseException, step: int) -> None:
        if "exception" in self.notify_on:
            self._failed = True
            self.tell(f"failed at step {step}: {type(exception).__name__}: {exception}")

    def on_train_end(self, step: int, reason: str) -> None:
        best = f"; best {self.monitor} {self.best:.4g}" if math.isfinite(self.best) else ""
        stopped = reason.startswith(STOPPED) and "early_stop" in self.notify_on
        if not self._failed and (stopped or "training_end" in self.notify_on):
            self.tell(f"{reason if stopped else f'ended: {reason}'} after step {step}{best}")

    def _on_incident(self, incident: Incident) -> None:
        """Once for each hook, event and kind of trouble; what this hook does wrong it cannot tell itself."""
        what = (incident.hook, incident.event, incident.kind)
        if incident.kind in ("failed", "disabled") and incident.hook != self._own_name and what not in self._told:
            self._told.add(what)
            self.tell(f"hook {incident.hook!r} in {incident.event}, step {incident.step}: {incident.message}")

    def _miss(self, metrics: Mapping[str, Any]) -> None:
        if self.monitor not in self._told:
            self._told.add(self.monitor)
            logger.warning("hook %r: no metric %r; %s", self._own_name, self.monitor, nearest(self.monitor, metrics))

    # ---- how it is told --------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """Queue a message of your own wording, with the run's name before it and secrets taken out of it."""
        run = getattr(self._trainer, "run_id", None)
        whole = redact_text(f"[{run or 'hookline'} on {platform.node()}] {text}")
        self._outbox.put(json.dumps({"text": _escaped(whole[:LONGEST_TEXT])}).encode("ascii"))

    def _undelivered(self, why: str) -> None:
        """In the outbox's thread: a message was given up. The console hears of each reason once."""
        if why not in self._told:
            self._told.add(why)
            logger.warning("hook %r: a message was not delivered: %s", self._own_name, why)
        self._note("notification_failed", why=why)

    def _note(self, kind: str, **fields: Any) -> None:
        if callable(note := getattr(self._trainer, "note", None)):
            note(kind, by=self._own_name, **fields)


@contextmanager
def _the_url_kept_out() -> Iterator[None]:
    """A registry adds a constructor's arguments to the errors that it wraps, but leaves its own kind as it is."""
    try:
        yield
    except (ConfigError, TypeError, ValueError) as error:
        raise RegistrationError(f"notify: {error}") from None


def _listed(given: Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _choice(given: str, choices: Sequence[str], name: str) -> str:
    if given not in choices:
        raise ConfigError(name, f"{given!r} is no choice; {nearest(str(given), choices)}")
    return given


def _at_least(value: Any, smallest: float, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= smallest:
        raise ConfigError(name, f"expected a number, at least {smallest:g}, got {value!r}")


def _escaped(text: str) -> str:
    """Slack reads these three as its own marks."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
