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
from hookline.events.schedule import Quantity, Schedule
from hookline.hooks.metric_hook import MODES, better, metric_key, numbers
from hookline.hooks.named_hook import NamedHook, is_of_the_run, is_trial, made_again
from hookline.hooks.notifications import Outbox
from hookline.hooks.parameters import number, one_of, text, whole_number
from hookline.hooks.webhook import Webhook
from hookline.record.redaction import keep_secret, redact_text

OCCASIONS = ("training_end", "best_model", "exception", "early_stop", "hook_failure", "heartbeat")
HOUR = 3600.0  # seconds: nobody waits longer for a message
LONGEST_TEXT = 3000  # characters; Slack cuts at about 4000
STOPPED = "stopped by "


class NotifyHook(NamedHook):
    """Posts to a webhook, in the JSON that Slack takes, when something in `notify_on` happens to the run.

    `notify_on` holds any of training_end, best_model, exception, early_stop, hook_failure and heartbeat. The end of a
    run is told once: as the exception, else as the early stop, else as the end. `best_model` follows `monitor` at every
    validation; `heartbeat` says how often to say that the run is alive.

    Messages go out from a thread of their own: training neither waits for them nor fails with them. The end of the run
    waits up to `wait_at_end` seconds for what is still queued. A `fast_dev_run` sends nothing. The URL is a secret:
    write ``${env:NAME}`` in a config; no record, message or error shows more of it than its host.
    """

    built_in = True
    name = "notify"
    saves = ("best",)

    def __init__(
        self,
        webhook_url: str,
        notify_on: str | Sequence[str] = ("training_end", "best_model"),
        monitor: str = "val/loss",
        mode: str = "min",
        heartbeat: int | str = "1 h",
        timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 1.0,
        queue: int = 100,
        wait_at_end: float = 10.0,
    ) -> None:
        self.webhook_url, self.heartbeat = webhook_url, heartbeat
        self._told: set[Any] = set()
        self._trainer: Any = None
        self._unwatch: Any = None
        self._failed = False
        with _the_url_kept_out():
            self.notify_on = [one_of(one, OCCASIONS, "notify_on") for one in _listed(notify_on)]
            self.monitor, self.mode = text(monitor, "monitor"), one_of(mode, MODES, "mode")
            self.timeout, self.backoff = number(timeout, "timeout", 0.01, HOUR), number(backoff, "backoff", 0, HOUR)
            self.retries, self.queue = whole_number(retries, "retries", 0), whole_number(queue, "queue")
            self.wait_at_end = number(wait_at_end, "wait_at_end", 0, HOUR)
            every = _every(heartbeat)
            self.schedule = every if "heartbeat" in self.notify_on else None
            webhook = Webhook(webhook_url, timeout)
        keep_secret(webhook_url)
        self.best = self._worst = math.inf if mode == "min" else -math.inf
        self._outbox = Outbox(webhook.post, limit=queue, retries=retries, backoff=backoff, on_failure=self._undelivered)
        if "heartbeat" not in self.notify_on:  # an event nobody hears costs nothing
            self.on_step_end = None  # type: ignore[assignment]
        if "best_model" not in self.notify_on:
            self.on_validation_end = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> NotifyHook:
        """A hook with the same parameters that has told nothing yet: its queue and its run stay with this one."""
        return made_again(self, NotifyHook, memo)

    def setup(self, name: str, registry: Any = None) -> None:
        """Listen to the desk where failures of hooks are treated."""
        super().setup(name)
        if "hook_failure" in self.notify_on:
            self._unwatch = registry.desk.watch(self._on_incident)

    def close(self) -> None:
        """Let go of the desk, and see the last messages off."""
        if self._unwatch is not None:
            self._unwatch()
        outbox = self._outbox
        left = outbox.close(self.wait_at_end)
        if left:
            logger.warning("hook %r: %d messages did not go out within %g s", self.called, left, self.wait_at_end)
        counts = {"sent": outbox.sent, "failed": outbox.failed, "dropped": outbox.dropped, "unsent": left}
        self.note(self._trainer, "notified", **counts)
        self._unwatch = self._trainer = None

    # ---- what is told ----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, resumed: bool = False) -> None:
        """Another run, which has another best."""
        self._trainer, self._failed = trainer, False
        self._told.clear()
        if not resumed:
            self.best = self._worst

    def on_step_end(self, trainer: Any, step: int, epoch: int, loss: float) -> None:
        """On the schedule of `heartbeat`, and only then is the loss read."""
        of = f" of {trainer.total_steps}" if trainer.total_steps else ""
        self.tell(f"alive at step {step}{of}, epoch {epoch}, loss {loss:.4g}")

    def on_validation_end(self, metrics: Mapping[str, Any], step: int, epoch: int, trainer: Any = None) -> None:
        """A validation that somebody makes before or after the run, or inside another one, is no news of it."""
        if not is_of_the_run(trainer):
            return
        value = numbers(metrics).get(metric_key(self.monitor))
        if value is None:
            self._miss(metrics)
        elif better(self.mode, value, self.best):  # NaN is not
            before = f" (before: {self.best:.4g})" if math.isfinite(self.best) else ""
            self.best = value
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
        if incident.kind in ("failed", "disabled") and incident.hook != self.called and what not in self._told:
            self._told.add(what)
            self.tell(f"hook {incident.hook!r} in {incident.event}, step {incident.step}: {incident.message}")

    def _miss(self, metrics: Mapping[str, Any]) -> None:
        if self.monitor not in self._told:
            self._told.add(self.monitor)
            nearby = nearest(metric_key(self.monitor), metrics)
            logger.warning("hook %r: no metric %r; %s", self.called, self.monitor, nearby)

    # ---- how it is told --------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """Queue a message of your own wording, with the run's name before it and secrets taken out of it."""
        if is_trial(self._trainer):
            return
        run = getattr(self._trainer, "run_id", None)
        whole = redact_text(f"[{run or 'hookline'} on {platform.node()}] {text}")
        self._outbox.put(json.dumps({"text": _escaped(whole[:LONGEST_TEXT])}).encode("ascii"))

    def _undelivered(self, why: str) -> None:
        """In the outbox's thread: a message was given up. The console hears of each reason once."""
        if why not in self._told:
            self._told.add(why)
            logger.warning("hook %r: a message was not delivered: %s", self.called, why)
        self.note(self._trainer, "notification_failed", why=why)


@contextmanager
def _the_url_kept_out() -> Iterator[None]:
    """A registry adds a constructor's arguments to the errors that it wraps, but leaves its own kind as it is."""
    try:
        yield
    except (ConfigError, TypeError, ValueError) as error:
        raise RegistrationError(f"notify: {error}") from None


def _listed(given: Any) -> list[Any]:
    if not isinstance(given, (str, list, tuple, set, frozenset)):
        choices = ", ".join(OCCASIONS)
        raise ConfigError("notify_on", f"expected a list of {choices}, or [] for none of them; got {given!r}")
    return [given] if isinstance(given, str) else list(given)


def _every(heartbeat: Any) -> Schedule:
    period = Quantity.parse(heartbeat, "heartbeat")
    if period.amount <= 0:
        raise ConfigError("heartbeat", f"{heartbeat!r} is never due; leave it out of notify_on to have none")
    return Schedule(every=period)


def _escaped(text: str) -> str:
    """Slack reads these three as its own marks."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
