"""A run that was killed continues in its trackers."""

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked_runs import history_of, make_trainer, offline_files, read_offline

from hookline import MLflowTracker, TensorBoardTracker, WandbTracker

HERE = Path(__file__).parent


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow uses what SQLAlchemy 2.1 deprecates
def test_a_killed_run_continues_in_every_tracker(tmp_path: Path) -> None:
    """There is one run in each, which has what the resumed attempt logged exactly once.

    What a tracker's thread had not written when the process was killed is not repeated.
    """
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    path = os.pathsep.join([str(HERE.parents[1] / "helpers"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("WANDB_SERVICE", None)  # a process that is killed has its own, not one that survives it
    killed = subprocess.run([sys.executable, str(HERE / "killed_run.py"), uri], env=environment)
    assert killed.returncode == 9
    (run_dir,) = Path("runs").iterdir()
    wandb = WandbTracker(mode="offline", system_metrics=False, timeout=600.0)
    make_trainer(TensorBoardTracker(timeout=600.0), wandb, MLflowTracker(uri, timeout=600.0)).fit(resume=run_dir)
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    steps = sorted(scalar.step for scalar in events.Reload().Scalars("train/loss"))  # the files come in any order
    assert steps[-4:] == [5, 6, 7, 8] and len(set(steps)) == len(steps)
    rows = list(history_of(read_offline(offline_files(run_dir)[-1])))
    assert [row["trainer/step"] for row in rows if "train/loss" in row] == [5, 6, 7, 8]
    assert {path.name for path in offline_files(run_dir)} == {f"run-{run_dir.name}.wandb"}
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("hookline").experiment_id])
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(steps)[-4:] == [5, 6, 7, 8] and run.info.status == "FINISHED"
