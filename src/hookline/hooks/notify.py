"""`notify`: post messages about the run to a webhook, from a thread that training does not wait for."""

from __future__ import annotations

import json
import math
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from hookline._parameters import NonEmptyStr, NonNegativeInt, PositiveInt
from hookline._words import nearest
from hookline.core.failures import Incident
from hookline.core.schedule import Quantity, Schedule
from hookline.errors import ConfigError, RegistrationError
from hookline.hooks.base import NamedHook, counts_for_run
from hookline.hooks.metric_hook import find_mode, floats, is_better, metric_key
from hookline.hooks.queue import BackgroundQueue
from hookline.hooks.webhook import MAX_WAIT, DeliveryError, Webhook
from hookline.record.redaction import add_secret_url, redact_text
from hookline.run.control import RunControl

if TYPE_CHECKING:
    from hookline.core.registry import Registry

Topic = Literal["training_end", "best_model", "exception", "early_stop", "hook_failure", "heartbeat"]
MAX_SECONDS = 3600.0  # Upper limit of each parameter in seconds.
MAX_TEXT = 3000  # characters; Slack cuts at about 4000

# Hooks may fail in several threads at once. The lock is not one of the hook, because a lock cannot be copied.
_opening = threading.Lock()


class NotifyHook(NamedHook):
    """Posts to a webhook, in the JSON that Slack accepts, when something in `notify_on` happens.

    The end of a run is one message: the exception if you asked for it, otherwise the early stop or the end. A thread
    sends the messages; training neither waits for them nor fails with them. A `fast_dev_run` sends nothing. The URL is
    a secret: write ``${env:NAME}`` in a config. No record, message or error shows more of it than its host.

    Args:
        webhook_url: Where to post.
        notify_on: Any of training_end, best_model, exception, early_stop, hook_failure and heartbeat.
        monitor: The metric that `best_model` watches; compared after every validation.
        mode: "min" or "max"; by default the metric's name decides. Required if the name suggests neither.
        heartbeat: How often to report that the run is alive, such as "1 h" or a number of steps.
        timeout: Seconds for each attempt to send.
        retries: Number of further attempts.
        backoff: Seconds before the second attempt; each further pause is twice as long.
        queue: How many messages may wait; when it is full, the oldest is dropped.
        wait_at_end: Seconds that the end of the run waits for messages that are still queued.

    Raises:
        ConfigError: If a parameter has an invalid value.
        RegistrationError: If the URL must not be posted to, or the heartbeat is not a period.
    """

    built_in = True
    name = "notify"
    ranks = "zero"
    saves = ("best",)

    def __init__(
        self,
        webhook_url: str,
        notify_on: Topic | Sequence[Topic] = ("training_end", "best_model"),
        monitor: NonEmptyStr = "val/loss",
        mode: Literal["min", "max"] | None = None,
        heartbeat: int | str = "1 h",
        timeout: Annotated[float, Ge(0.01), Le(MAX_SECONDS)] = 10.0,
        retries: NonNegativeInt = 3,
        backoff: Annotated[float, Ge(0), Le(MAX_SECONDS)] = 1.0,
        queue: PositiveInt = 100,
        wait_at_end: Annotated[float, Ge(0), Le(MAX_SECONDS)] = 10.0,
    ) -> None:
        self.webhook_url, self.heartbeat, self.monitor = webhook_url, heartbeat, monitor
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.queue, self.wait_at_end = queue, wait_at_end
        self.notify_on = [notify_on] if isinstance(notify_on, str) else list(notify_on)
        self._incidents: set[tuple[str, str, str]] = set()  # Hook, event and kind of the incidents already reported.
        self._trainer: RunControl | None = None
        self._unsubscribe: Callable[[], None] | None = None
        # From the first message to the end of the run, and how many messages of it were sent and failed.
        self._outbox: tuple[BackgroundQueue, dict[str, int]] | None = None
        self._is_closed = False  # after the end of a run, until the next one begins
        try:
            period = Quantity.parse(heartbeat, "heartbeat")
            if period.amount <= 0:
                raise ConfigError("heartbeat", f"{heartbeat!r} is never due; to disable it, omit it from notify_on")
            self.mode = find_mode(monitor, mode) if "best_model" in self.notify_on else mode or "min"
            self._webhook = Webhook(webhook_url, timeout)
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            # To errors of other types the registry adds the arguments, which include the URL. A value's own methods may
            # raise exceptions other than the first of these.
            raise RegistrationError(f"notify: {error}") from None
        add_secret_url(webhook_url)
        self.best = self._worst = math.inf if self.mode == "min" else -math.inf
        self.schedule = Schedule(every=period) if "heartbeat" in self.notify_on else None
        if "heartbeat" not in self.notify_on:  # events without a listener cost nothing
            self.on_step_end = None  # type: ignore[assignment]
        if "best_model" not in self.notify_on:
            self.on_validation_end = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the registration, the run and the queue out of copies."""
        return {**vars(self), **dict.fromkeys(("_registered_name", "_trainer", "_unsubscribe", "_outbox"))}

    def setup(self, name: str, registry: Registry | None = None) -> None:
        """Subscribe to failures of other hooks."""
        super().setup(name)
        self._is_closed = False
        if "hook_failure" in self.notify_on and registry is not None:
            self._unsubscribe = registry.failures.subscribe(self._on_incident)

    def close(self) -> None:
        """Unsubscribe, and wait for the last messages to be sent."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        with _opening:
            outbox, self._outbox, self._is_closed = self._outbox, None, True
        counts = dict.fromkeys(("sent", "failed", "dropped", "unsent"), 0)
        if outbox is not None:
            queue, posted = outbox
            queue.close(self.wait_at_end)  # its thread notes failures in the run until it is closed
            counts = {**posted, "dropped": queue.dropped, "unsent": queue.left}
        trainer, self._trainer, self._unsubscribe = self._trainer, None, None
        if counts["unsent"]:
            self.warn(f"{counts['unsent']} messages were not sent within {self.wait_at_end:g} s")
        if trainer is not None:
            self.note(trainer, "notified", **counts)

    # ---- what is reported --------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: RunControl, resumed: bool = False) -> None:
        """Start over, unless the run is resumed."""
        self._trainer, self._is_closed = trainer, False
        self._incidents, self._warned_once = set(), frozenset()
        if not resumed:
            self.best = self._worst

    def on_step_end(self, trainer: RunControl, step: int, epoch: int, loss: float) -> None:
        """Report that the run is alive; the loss is read only when that is due."""
        of = f" of {trainer.total_steps}" if trainer.total_steps else ""
        self.tell(f"alive at step {step}{of}, epoch {epoch}, loss {loss:.4g}")

    def on_validation_end(self, trainer: RunControl, metrics: Mapping[str, Any], step: int, epoch: int) -> None:
        """Report a new best value of the metric."""
        if not counts_for_run(trainer):
            return
        key = metric_key(self.monitor)
        value = floats(metrics).get(key)
        if value is None:
            self.warn(f"metric {self.monitor!r} was not measured; {nearest(key, metrics)}", once=key)
        elif is_better(self.mode, value, self.best):
            before = f" (before: {self.best:.4g})" if math.isfinite(self.best) else ""
            self.best = value
            self.tell(f"new best model: {self.monitor} {value:.4g}{before} at step {step}, epoch {epoch}")

    def on_exception(self, exception: BaseException, step: int) -> None:
        """Report the exception."""
        if "exception" in self.notify_on:
            self.tell(f"failed at step {step}: {type(exception).__name__}: {exception}")

    def on_train_end(self, trainer: RunControl, step: int, reason: str) -> None:
        """Report the end, as an early stop if a hook or the user's code requested one."""
        if trainer.status == "error" and "exception" in self.notify_on:
            return  # `on_exception` has reported it
        is_stop = trainer.status == "completed" and trainer.stop_reason is not None and trainer.stopped_by != "signal"
        best = f"; best {self.monitor} {self.best:.4g}" if math.isfinite(self.best) else ""
        if is_stop and "early_stop" in self.notify_on:
            self.tell(f"{reason} after step {step}{best}")
        elif "training_end" in self.notify_on:
            self.tell(f"ended: {reason} after step {step}{best}")

    def _on_incident(self, incident: Incident) -> None:
        """Report another hook's failure, once for each hook, event and kind."""
        what = (incident.hook, incident.event, incident.kind)
        is_failure = incident.kind in ("failed", "disabled") and incident.hook != self.registered_name
        if is_failure and what not in self._incidents:
            self._incidents.add(what)
            self.tell(f"hook {incident.hook!r} in {incident.event}, step {incident.step}: {incident.message}")

    def tell(self, text: str) -> None:
        """Queue a message; the run's name is put before it and secrets are removed.

        A message after the hook was closed is dropped with a warning, because nothing would wait for its delivery.
        """
        if self._trainer is not None and self._trainer.is_trial_run:
            return
        # Several runs may post to one channel, so each message says which run and which machine it is from.
        run = self._trainer.run_id if self._trainer is not None else None
        whole = redact_text(f"[{run or 'hookline'} on {platform.node()}] {text}")[:MAX_TEXT]
        escaped = whole.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")  # Slack's markup
        # Under the lock, so that `close` in another thread does not come between making the queue and filling it.
        with _opening:
            if not self._is_closed:
                if self._outbox is None:  # a run without messages has no thread
                    counts = {"sent": 0, "failed": 0}
                    # When the queue is full, the oldest message is dropped, because the newest matter most.
                    queue = BackgroundQueue(
                        partial(self._post_all, counts), self.queue, drop_oldest=True, on_error=self._on_failure,
                        name="hookline-outbox",
                    )  # fmt: skip
                    self._outbox = queue, counts
                self._outbox[0].put(json.dumps({"text": escaped}).encode("ascii"))
                return
        self.warn("a message arrived after the end of the run and was dropped", once="closed")

    # ---- in the thread that posts ------------------------------------------------------------------------------------

    def _post_all(self, counts: dict[str, int], queue: BackgroundQueue) -> None:
        """Post messages until the queue is closed."""
        while messages := queue.take():
            try:
                self._post(messages[0], queue)
                counts["sent"] += 1
            except DeliveryError as error:
                counts["failed"] += 1
                with suppress(Exception):  # it writes to a record that may be full or closed; other messages follow
                    self._on_failure(error)

    def _post(self, message: bytes, queue: BackgroundQueue) -> None:
        """Post a message, and retry after pauses if that may help; once the queue is closed, without pauses."""
        pause = self.backoff
        for further in reversed(range(self.retries + 1)):
            try:
                self._webhook.post(message)
                return
            except DeliveryError as error:
                if not further or not error.try_again or queue.is_abandoned:
                    raise
                queue.wait_for_close(max(error.wait, min(pause, MAX_WAIT)))
                pause *= 2

    def _on_failure(self, error: BaseException) -> None:
        """Warn about a message that was not delivered, and record it."""
        why = str(error)
        self.warn(f"a message was not delivered: {why}", once=why)
        if self._trainer is not None:
            self.note(self._trainer, "notification_failed", why=why)
