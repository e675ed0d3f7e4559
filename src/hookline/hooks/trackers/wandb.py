"""`wandb` and `trackio`: send the record to Weights & Biases, or to a package with the same interface."""

from __future__ import annotations

import io
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Unpack

from hookline._fs import refuse_link
from hookline.errors import TrainingError
from hookline.hooks.trackers.base import Histogram, TrackedRun, Tracker, event_text, values_of
from hookline.record.events import EVENTS

if TYPE_CHECKING:
    from hookline._keywords import TrackerKeywords

STEP = "trainer/step"
MAX_BINS = 512  # The limit of wandb.
MAX_EVENTS = 1000  # The newest ones are in the table of events.
HONORED = {"mode"}  # The keys that `wandb offline` and `wandb online` write to wandb/settings in the current folder.
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_-]")


class WandbTracker(Tracker):
    """Sends the record to Weights & Biases: metrics over the trainer's step, histograms, images, tables and alerts.

    The run's id is the record's id, so a resumed run continues; a tracker with a name other than ``wandb``, such as the
    second of two, adds its name. The API key is never a parameter: log in with ``wandb login`` or set WANDB_API_KEY.
    Neither the code nor the command line is sent, and from git only the commit. Other settings, such as the server, are
    environment variables of wandb: a config must not be able to send the key to another host.

    Args:
        project: The project.
        entity: The user or team; the default one if not given.
        group: A group of runs.
        mode: "online", "offline" (files for ``wandb sync``) or "disabled"; by default the value of WANDB_MODE.
        directory: Where the files are written; ``wandb`` in the run's directory if not given.
        system_metrics: Whether wandb measures processor, memory and GPU by itself.
        layers: Which statistics per layer to send: "histograms", "all" or "none".
        queue_mb: How many megabytes of rows may wait.
        timeout: Seconds that the end of the run waits for queued rows.
        every: How often to send a metric, in steps; by default each of its values.
    """

    built_in = True
    name = "wandb"
    package = extra = "wandb"

    def __init__(
        self,
        project: str = "hookline",
        entity: str | None = None,
        group: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        directory: str | None = None,
        system_metrics: bool = True,
        **settings: Unpack[TrackerKeywords],
    ) -> None:
        super().__init__(**settings)
        self.project, self.entity, self.group, self.directory = project, entity, group, directory
        self.mode, self.system_metrics = mode, system_metrics

    def import_package(self) -> None:
        """Import the package; a WANDB_MODE without a value is removed, because wandb considers it invalid."""
        if os.environ.get("WANDB_MODE") == "":
            del os.environ["WANDB_MODE"]
        super().import_package()

    def check(self, run: TrackedRun) -> None:
        """Require a login unless offline: wandb would ask for a key on the terminal during the run."""
        if run.directory is not None and self.directory is None:
            refuse_link(run.directory / "wandb")  # a run from elsewhere must not point to arbitrary directories
        wandb = import_module(self.package)
        settings = wandb.setup().settings
        path, ignored = ignore_settings_here(settings)
        if ignored:
            places = f"set them in {settings.settings_system} or as environment variables such as WANDB_BASE_URL"
            self.warn(f"ignores {', '.join(ignored)} of {path}; {places}")
        mode = self.mode or os.environ.get("WANDB_MODE") or settings.mode
        self._is_online = mode not in ("offline", "disabled", "dryrun")
        before, settings.silent = settings.silent, True  # it would ask the server for the name of the user
        try:
            is_logged_in = self._is_online and wandb.login(prompt=False, verify=False)
        finally:
            settings.silent = before
        if self._is_online and not is_logged_in:
            remedy = "run `wandb login`, set WANDB_API_KEY, or give mode: offline"
            raise TrainingError(f"hook {self.registered_name!r}: you are not logged in to wandb; {remedy}")

    def open(self, run: TrackedRun) -> None:
        """Begin or continue the run with the record's id."""
        self._package = import_module(self.package)
        self._events: deque[tuple[Any, ...]] = deque(maxlen=MAX_EVENTS)
        self._run = self._init(run)

    def _id_of(self, run: TrackedRun) -> str:
        """Return the run's id, with the tracker's name unless that is the usual one: two trackers need two ids."""
        if self.registered_name == self.name:
            return run.run_id
        return f"{run.run_id}-{_NOT_IN_IDS.sub('_', self.registered_name)}"

    def _init(self, run: TrackedRun) -> Any:
        settings = {
            "console": "off",  # it would replace sys.stdout
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "x_disable_meta": True,  # it has the command line, which may contain secrets
            "x_save_requirements": False,
            "silent": True,
            "symlink": False,  # a run's directory has no links to elsewhere
            "finish_timeout": self.timeout,  # at interpreter exit, too
            "x_disable_stats": not self.system_metrics,
        }
        directory = self.directory or (None if run.directory is None else str(run.directory))
        tracked = self._package.init(
            project=self.project, entity=self.entity, group=self.group, mode=self.mode, dir=directory,
            id=self._id_of(run), resume="allow" if self._is_online else None, reinit="create_new",
            name=run.name or run.run_id, notes=run.notes, tags=list(run.tags) or None, config=config_of(run),
            settings=self._package.Settings(**settings),
        )  # fmt: skip
        # wandb drops values of a step that is not the newest, which late statistics and resumed runs have. So its own
        # step counts rows, and the trainer's step is the axis of every metric.
        tracked.define_metric(STEP)
        tracked.define_metric("*", step_metric=STEP)
        return tracked

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Send a row of history for each row."""
        for row in rows:
            self._log({**values_of(row), "epoch": row["epoch"]}, row["step"])

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send the statistics of a series as one row of history."""
        self._log(dict(values), step)

    def write_histogram(self, step: int, histogram: Histogram) -> None:
        """Send a histogram with the record's own bins, or with wider ones if there are too many."""
        tag, edges, counts = histogram.merged(MAX_BINS)
        self._log({tag: self._package.Histogram(np_histogram=(counts, edges))}, step)

    def write_events(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep events for a table at the end of the run; send problems at once as alerts."""
        for row in rows:
            text = event_text(row)
            self._events.append((row["time"], row["step"], row["kind"], text))
            known = EVENTS.get(row["kind"])
            if known is not None and known.trackers_alert:
                self._run.alert(title=row["kind"], text=f"step {row['step']}: {text}")

    def write_media(self, rows: Sequence[Any]) -> None:
        """Send images and tables."""
        for row in rows:
            if (png := getattr(row.content, "png", None)) is not None:
                from PIL import Image

                media = self._package.Image(Image.open(io.BytesIO(png)))
            else:
                media = self._table(row.content.columns, row.content.rows)
            self._log({row.name: media}, row.step)

    def finish(self, run: Mapping[str, Any]) -> None:
        """Send the table of events and the outcome."""
        if self._events:
            table = self._table(("time", "step", "kind", "text"), self._events)
            self._log({"events": table}, run.get("counters", {}).get("step") or 0)
        self._end(run)

    def _end(self, run: Mapping[str, Any]) -> None:
        self._run.summary.update({"outcome": run.get("outcome"), "reason": run.get("reason")})
        self._run.finish(exit_code=int(run.get("outcome") in ("failed", "interrupted", "non_finite")))

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log({**values, STEP: step})

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]] | deque[tuple[Any, ...]]) -> Any:
        return self._package.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)


class TrackioTracker(WandbTracker):
    """Sends the record to trackio, a local tracker with the interface of Weights & Biases.

    A resumed run continues under its name, which is the id as for ``wandb``. Everything stays on this machine unless
    trackio's environment variables, such as TRACKIO_SPACE_ID, say otherwise.

    Args:
        project: The project.
        group: A group of runs.
        layers: Which statistics per layer to send: "histograms", "all" or "none".
        queue_mb: How many megabytes of rows may wait.
        timeout: Seconds that the end of the run waits for queued rows.
        every: How often to send a metric, in steps; by default each of its values.
    """

    built_in = True
    name = "trackio"
    package = extra = "trackio"

    def __init__(
        self, project: str = "hookline", group: str | None = None, **settings: Unpack[TrackerKeywords]
    ) -> None:
        super().__init__(project, group=group, **settings)

    def check(self, run: TrackedRun) -> None:
        """Require nothing: trackio works without an account."""

    def _init(self, run: TrackedRun) -> Any:
        return self._package.init(
            project=self.project, name=self._id_of(run), group=self.group, config=config_of(run), resume="allow",
            embed=False,
        )  # fmt: skip

    def _end(self, run: Mapping[str, Any]) -> None:
        self._run.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values, step=step)


def ignore_settings_here(settings: Any) -> tuple[str, list[str]]:
    """Undo the settings from wandb/settings in the current folder; return the file's path and the names of settings.

    wandb reads that file when it is set up, and a folder may come from elsewhere: it could send the API key to its own
    server, or the record to its own account.
    """
    path = type(settings)().settings_workspace  # WANDB_DIR, which `settings` has applied, does not move this file
    file = ConfigParser(interpolation=None, strict=False)
    with suppress(ConfigParserError, OSError, UnicodeError):  # wandb ignores such a file, too
        file.read(path)
    keys = set(file["default"]) if "default" in file else set()
    ignored = sorted(keys & set(type(settings).model_fields) - HONORED)
    if ignored:
        clean = type(settings)(root_dir=os.devnull)  # a path at which no such file can exist
        clean.settings_system = settings.settings_system
        clean.update_from_system_settings()
        clean.update_from_env_vars(dict(os.environ))
        for key in ignored:
            setattr(settings, key, getattr(clean, key))
    return path, ignored


def config_of(run: TrackedRun) -> dict[str, Any]:
    """Return the config, together with the fields that identify the run."""
    about = {key: run.description.get(key) for key in ("run_id", "seed", "config_hash", "lineage")}
    about["git"] = {"commit": (run.description.get("git") or {}).get("commit")}
    return {**run.config, "hookline": {**about, "name": run.name, "tags": list(run.tags), "notes": run.notes}}
