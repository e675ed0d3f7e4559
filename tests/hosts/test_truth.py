"""The table of hosts: what `hookline events --host` prints, and that it is about events and capabilities that exist."""

import json

import pytest

from hookline.cli import main
from hookline.core.catalog import CAPABILITIES, CATALOG
from hookline.hosts.truth import HOSTS


@pytest.mark.parametrize("name", HOSTS)
def test_the_truth_is_about_what_exists(name: str) -> None:
    """A host says something about every event, a remedy for what it cannot do, and how it stops."""
    host = HOSTS[name]
    assert host.lacks.keys() <= CAPABILITIES.keys() and host.cannot <= host.lacks.keys() and host.stop
    assert host.events.keys() <= CATALOG.keys()
    assert all(host.meaning(event) for event in CATALOG.values())


def test_events_of_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what events mean there; in JSON, for programs."""
    assert main(["events", "--host", "lightning"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "on_before_backward the loss of the micro-batch; Lightning's own is divided" in text
    assert "on_validation_batch_start never: validation batches stay" in text
    assert "stop sets `trainer.should_stop`" in text
    assert main(["events", "--host", "ignite", "--event", "on_epoch_end", "--json"]) == 0
    (event,) = json.loads(capsys.readouterr().out)
    assert event["host"] == "ignite" and event["means"].startswith("late, at EPOCH_STARTED")


def test_an_unknown_host(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the nearest one."""
    assert main(["events", "--host", "lightnin"]) == 2
    assert "there is no host 'lightnin'; did you mean 'lightning'?" in capsys.readouterr().err
