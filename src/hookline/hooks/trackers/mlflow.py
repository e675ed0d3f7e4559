"""`mlflow`: send the record to an MLflow server, or to a local store."""

from __future__ import annotations

import os
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Literal, Unpack
from urllib.parse import urlsplit
from urllib.request import url2pathname

from hookline._parameters import MADE_FROM_FILE
from hookline.errors import RegistrationError, TrainingError
from hookline.hooks.trackers.base import TrackedRun, Tracker, flatten, values_of
from hookline.hooks.webhook import PORTS, check_addresses, check_url
from hookline.record import strict_json

if TYPE_CHECKING:
    from hookline._keywords import QueueKeywords

RUN_ID = "hookline.run_id"
MAX_METRICS, MAX_PARAMS = 1000, 100  # MLflow accepts this many in one call.
MAX_PARAM_LENGTH = 6000  # MLflow accepts this many characters.
MAX_EVENTS = 10_000  # The newest ones become an artifact.
STORES = ("file", "sqlite")  # schemes of local stores
REMOTE_NAMES = ("databricks", "databricks-uc", "uc")  # MLflow reads these as servers, although they look like paths.
SETTINGS = {"MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""Both would draw from Python's `random` in a thread: the pauses between retries, and whether telemetry is sent."""
STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}  # FAILED otherwise

_typed: set[str] = set()  # stores that a person has typed
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MLflowTracker(Tracker):
    """Sends the record to MLflow: parameters, metrics with their steps, tags, events, images and tables.

    The run has the tag ``hookline.run_id``, which a resumed run uses to find it again. MLflow has no histograms.

    Args:
        tracking_uri: A local store, such as ``sqlite:///mlflow.db``; in a config file, it must be in the working
            directory or next to the runs. Or a server: like a webhook's, its host must be public and use https, unless
            it was allowed by `allow_host`, and redirects are not followed. By default, the value of
            MLFLOW_TRACKING_URI.
        experiment: The name of the experiment, which is created if there is none.
        layers: Which statistics per layer to send: "all", each as a metric; otherwise none.
        queue_mb: How many megabytes of rows may wait.
        timeout: Seconds that the end of the run waits for queued rows.
        every: How often to send a metric, in steps; by default each of its values.
    """

    built_in = True
    name = "mlflow"
    package = extra = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "hookline",
        layers: Literal["histograms", "all", "none"] = "none",
        **settings: Unpack[QueueKeywords],
    ) -> None:
        super().__init__(layers, **settings)
        self.tracking_uri, self.experiment = tracking_uri, experiment
        self._server: tuple[str, int, bool] | None = None  # checked again once its address is known
        scheme = str(tracking_uri).partition(":")[0]
        if scheme in PORTS:
            parts, host, is_allowed = check_url(str(tracking_uri), "tracking_uri")
            self._server = host, parts.port or PORTS[scheme], is_allowed
        elif tracking_uri is not None and not is_local(tracking_uri):
            raise RegistrationError("tracking_uri: expected a local store or https://host; set MLFLOW_TRACKING_URI")
        is_consented = self._server is not None or tracking_uri is None or tracking_uri in _typed
        self._is_confined = MADE_FROM_FILE.get() and not is_consented

    def check(self, run: TrackedRun) -> None:
        """Keep the store of a config file inside the working directory, or the directory of its runs."""
        if not self._is_confined:
            return
        path = path_of(str(self.tracking_uri))
        inside = [Path.cwd(), *([] if run.directory is None else [run.directory.parent.resolve()])]
        if path is None or not any(path.resolve().is_relative_to(folder) for folder in inside):
            remedy = f"type it on the command line (trackers.{self.registered_name}.tracking_uri=…)"
            why = "is outside of the working directory and the directory of the runs, so a config file cannot choose it"
            where = f"hook {self.registered_name!r}: tracking_uri {str(self.tracking_uri)!r}"
            raise TrainingError(f"{where} {why}; {remedy} or set MLFLOW_TRACKING_URI")

    def import_package(self) -> None:
        """Import MLflow, with settings that the environment may replace."""
        # A server could redirect to hosts that a config must not name.
        redirects = {} if self._server is None else {"MLFLOW_ALLOW_HTTP_REDIRECTS": "false"}
        for name, value in {**SETTINGS, **redirects}.items():
            os.environ.setdefault(name, value)
        super().import_package()

    def open(self, run: TrackedRun) -> None:
        """Create the run, or find it by its tag."""
        from mlflow import MlflowClient
        from mlflow.entities import RunTag

        if self._server is not None:
            check_addresses(*self._server)
        self._client = client = MlflowClient(self.tracking_uri)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        known = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if known is None else known.experiment_id
        earlier = client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.run_id}'", max_results=1)
        tags = {RUN_ID: run.run_id, **{f"hookline.tag.{clean(tag)}": "true" for tag in run.tags}}
        commit = (run.description.get("git") or {}).get("commit")
        texts = {"mlflow.note.content": run.notes, "hookline.commit": commit}
        tags |= {key: text for key, text in texts.items() if text}
        if earlier:
            self._id, sent = earlier[0].info.run_id, set(earlier[0].data.params)
            client.update_run(self._id, status="RUNNING")
            client.log_batch(self._id, tags=[RunTag(key, str(value)) for key, value in tags.items()])
        else:
            made = client.create_run(experiment, tags=tags, run_name=run.name or run.run_id)
            self._id, sent = made.info.run_id, set()
        self._log_params(run.config, sent)

    def _log_params(self, config: Mapping[str, Any], sent: set[str]) -> None:
        """Send the parameters that MLflow does not have yet; it refuses to change one."""
        from mlflow.entities import Param

        values = {clean(path): str(value)[:MAX_PARAM_LENGTH] for path, value in flatten(config)}
        new = [Param(key, value) for key, value in values.items() if key not in sent]
        for part in parts_of(new, MAX_PARAMS):
            self._client.log_batch(self._id, params=part)

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Send each number at its step and time."""
        self._log_metrics([(values_of(row), row["step"], row["time"]) for row in rows])

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send statistics as metrics."""
        self._log_metrics([(values, step, time())])

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep events for an artifact at the end of the run."""
        self._events.extend(rows)

    def write_media(self, rows: Sequence[Any]) -> None:
        """Send images and tables as artifacts; a table as the JSON that MLflow's own tables are."""
        for row in rows:
            name = f"{clean(row.name).replace('/', '_')}-{row.step:08d}"
            if (png := getattr(row.content, "png", None)) is not None:
                self._log_file(f"{name}.png", png)
            else:
                table = {"columns": list(row.content.columns), "data": [list(line) for line in row.content.rows]}
                self._log_file(f"{name}.json", strict_json.dumps(table).encode())

    def finish(self, run: Mapping[str, Any]) -> None:
        """Send the events and end the run with a status by its outcome."""
        if self._events:
            lines = "".join(strict_json.dumps(row) + "\n" for row in self._events)
            self._client.log_text(self._id, lines, "events.jsonl")
        outcome = str(run.get("outcome"))
        self._client.set_tag(self._id, "hookline.outcome", outcome)
        self._client.set_terminated(self._id, STATUS.get(outcome, "FAILED"))

    def _log_metrics(self, rows: Sequence[tuple[Mapping[str, float], int, float]]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(clean(name), value, int(at * 1000), step)
            for values, step, at in rows
            for name, value in values.items()
        ]
        for part in parts_of(metrics, MAX_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def _log_file(self, name: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(content)
            self._client.log_artifact(self._id, str(Path(folder) / name), "media")


@contextmanager
def stores_allowed(uris: Iterable[str]) -> Iterator[None]:
    """Allow local stores anywhere inside a block, for those typed on a command line."""
    before = set(_typed)
    _typed.update(uris)
    try:
        yield
    finally:
        _typed.intersection_update(before)


def path_of(uri: str) -> Path | None:
    """Return the path of a local store as MLflow reads it; None if it is not clearly a path."""
    if uri.startswith("sqlite:"):
        text = uri.removeprefix("sqlite:///").partition("?")[0]
        if text.startswith(("sqlite:", "file:")):  # SQLite has its own URIs that begin with file:
            return None
    else:
        text = url2pathname(urlsplit(uri).path if uri.startswith("file:") else uri)
    path = Path(text)
    # MLflow creates every directory of a path, even those that ".." leaves again.
    return path if path == Path(os.path.normpath(path)) else None


def is_local(uri: str) -> bool:
    """Return whether a URI that is not a URL names a local store: a path, or one with the scheme of a store."""
    scheme, colon, _ = uri.partition(":")
    is_path = not colon or (len(scheme) == 1 and scheme.isalpha())  # a drive of Windows
    return scheme in STORES or (is_path and uri not in REMOTE_NAMES)


def clean(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits and _ - . : / space, as a path without empty parts."""
    parts = [part for part in _NOT_IN_NAMES.sub("_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:250] or "_"


def parts_of(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield the items in parts of a given size."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
