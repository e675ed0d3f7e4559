"""What `mlflow` writes into a local store, read by MLflow's own client."""

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlflow
import pytest
from small_config import PARTS
from tracked_runs import PNG, make_trainer, send_media

from hookline import HooklineError, MLflowTracker, read_metrics
from hookline.cli import main
from hookline.hooks.webhook import hosts_allowed
from hookline.record import read_events

# MLflow uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A new store."""
    return f"sqlite:///{tmp_path}/mlflow.db"


def tracker(uri: str, **options: Any) -> MLflowTracker:
    """Make a tracker that has time: creating a store takes seconds on a busy machine."""
    return MLflowTracker(uri, timeout=600.0, **options)


def runs_of(uri: str) -> list[Any]:
    """Return all runs of a store."""
    client = mlflow.MlflowClient(uri)
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


def curve(uri: str, name: str) -> dict[int, float]:
    """Return the history of a metric of the store's only run."""
    (run,) = runs_of(uri)
    history = mlflow.MlflowClient(uri).get_metric_history(run.info.run_id, name)
    return {metric.step: metric.value for metric in history}


@pytest.mark.req("004-37")
def test_every_metric_reaches_mlflow_at_its_step(uri: str) -> None:
    """Values, steps, parameters, tags and the status are in the store."""
    trainer = make_trainer(tracker(uri, layers="all"))
    trainer.add_hook("gradient_monitor", every=4)
    trainer.on("step_end", name="logs")(lambda trainer, step: trainer.log("odd [name]", 10.0 * step))
    trainer.on("step_end", at=3, name="notes")(lambda trainer: trainer.note("noted", value="why"))
    trainer.train()
    (run,) = runs_of(uri)
    assert run.info.status == "FINISHED" and run.data.tags["hookline.run_id"] == trainer.run_id == run.info.run_name
    assert run.data.params["trainer.max_epochs"] == "2"
    for name in ("train/loss", "val/loss"):
        assert curve(uri, name) == {row["step"]: row[name] for row in read_metrics(trainer.run_dir) if name in row}
    assert curve(uri, "odd _name_")[8] == 80.0 and list(curve(uri, "gradients/0.weight/norm")) == [4, 8]
    folder = Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, tracking_uri=uri, dst_path="artifacts"))
    assert [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()] == ["noted"]


def test_a_config_cannot_send_the_record_behind_a_firewall() -> None:
    """As for webhooks: a server must be public or allowed, and its credentials are not part of a URL."""
    for uri, why in {
        "http://127.0.0.1:5000": "allow_host",
        "https://10.0.0.1": "private address",
        "https://me:secret@example.org": "MLFLOW_TRACKING_PASSWORD",
        **dict.fromkeys(
            ("postgresql://db/x", "databricks", "databricks-uc", "uc", "databricks:me"), "a local store or"
        ),
    }.items():
        with pytest.raises(HooklineError, match=why):
            MLflowTracker(uri)
    with hosts_allowed(["127.0.0.1"]):
        assert MLflowTracker("http://127.0.0.1:5000").tracking_uri == "http://127.0.0.1:5000"
    assert [MLflowTracker(uri).tracking_uri for uri in ("mlruns", "file:mlruns", "C:\\\\runs")]


def write_config(uri: str) -> None:
    """Write a config with a tracker that has time."""
    Path("my.yaml").write_text(f"{PARTS}trackers: [{{name: mlflow, tracking_uri: '{uri}', timeout: 600}}]\n")


@pytest.mark.parametrize(
    "place", ["{out}/x.db", "sqlite:///{out}/x.db", "file://{out}/x", "../out/x", "%2e%2e/out/x",
              "sqlite:///file:{out}/x.db?uri=true", "link/x", "sqlite:///../out/new/../../here/x.db"],
)  # fmt: skip
def test_a_config_file_cannot_choose_a_store_elsewhere(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed on the command line it can be anywhere."""
    out, here = tmp_path / "out", tmp_path / "here"
    out.mkdir()
    here.mkdir()
    (here / "link").symlink_to(out)
    monkeypatch.chdir(here)
    uri = place.format(out=out)
    write_config(uri)
    assert main(["train", "my.yaml"]) == 1 and list(out.iterdir()) == []
    assert "outside of the working directory" in capsys.readouterr().err
    if place.startswith("sqlite:///{"):
        assert main(["train", "my.yaml", f"trackers.mlflow.tracking_uri={uri}"]) == 0
        assert [path.name for path in out.iterdir()] == ["x.db"]


@pytest.mark.parametrize("uri", ["sqlite:///x.db", "sqlite:///runs/x.db"])
def test_a_config_file_can_choose_a_store_here(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the usual place."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    write_config(uri)
    assert main(["train", "my.yaml"]) == 0 and runs_of(uri)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A server that is not available at /busy and redirects from /moved, and the paths of its requests."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(307 if self.path.startswith("/moved") else 503)
            self.send_header("Location", "/busy/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    for name, value in {"MAX_RETRIES": "2", "BACKOFF_FACTOR": "0"}.items():
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    for name in ("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "MLFLOW_ALLOW_HTTP_REDIRECTS"):
        monkeypatch.setenv(name, "")  # so that what the tracker sets is removed after the test
        monkeypatch.delenv(name)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http, hosts_allowed(["127.0.0.1"]):
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", paths
        http.shutdown()


def test_retries_do_not_draw_from_the_streams_of_training(server: tuple[str, list[str]]) -> None:
    """The pauses of MLflow's client have no random part, so that a busy server does not change the run."""
    url, paths = server
    trainer = make_trainer(tracker(f"{url}/busy"), max_steps=1)
    random.seed(3)
    before = random.getstate()
    trainer.train()
    assert [event["kind"] for event in read_events(trainer.run_dir)] == ["tracker_failed"]
    assert len(paths) == 3 and random.getstate() == before


def test_redirects_are_not_followed(server: tuple[str, list[str]]) -> None:
    """A public server could lead to a host that a config must not name."""
    url, paths = server
    trainer = make_trainer(tracker(f"{url}/moved"), max_steps=1)
    trainer.train()
    assert [event["kind"] for event in read_events(trainer.run_dir)] == ["tracker_failed"]
    assert paths and all(path.startswith("/moved") for path in paths)


def test_a_resumed_run_continues(uri: str) -> None:
    """The run is found by its tag; a parameter that has changed keeps its first value, which MLflow requires."""
    trainer = make_trainer(tracker(uri), max_steps=4)
    trainer.add_hook("checkpoint", save_every_n_steps=4)
    trainer.train()
    resumed = make_trainer(tracker(uri), max_steps=8)
    resumed.fit(resume=trainer.run_dir)
    assert list(curve(uri, "train/loss")) == list(range(1, 9))
    assert runs_of(uri)[0].data.params["trainer.max_steps"] == "4"


def test_the_status_follows_the_outcome(uri: str) -> None:
    """A run that raises has failed."""
    trainer = make_trainer(tracker(uri))
    trainer.on("step_end", at=3, name="boom", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    (run,) = runs_of(uri)
    assert (run.info.status, run.data.tags["hookline.outcome"]) == ("FAILED", "failed")


def test_numbers_that_are_not_finite_are_kept(uri: str) -> None:
    """NaN stays NaN; MLflow stores infinity as the largest float."""
    trainer = make_trainer(tracker(uri), max_steps=1)
    trainer.on("step_end", name="logs")(lambda trainer: trainer.log("bad", float("nan")))
    trainer.train()
    assert str(curve(uri, "bad")[1]) == "nan"


def test_images_and_tables_are_artifacts(uri: str) -> None:
    """An image is the PNG as it was logged, a table the JSON of MLflow's own tables."""
    trainer = make_trainer(tracker(uri), max_steps=2)

    @trainer.on("train_start", name="sends", after="mlflow")
    def send() -> None:
        send_media(trainer.hooks.get("mlflow"))

    trainer.train()
    (run,) = runs_of(uri)
    folder = Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, tracking_uri=uri, dst_path="artifacts"))
    assert (folder / "media" / "sample_pixel-00000003.png").read_bytes() == PNG
    table = json.loads((folder / "media" / "sample_table-00000003.json").read_text())
    assert table == {"columns": ["text", "score"], "data": [["a|b", 0.5], ["c", None]]}
