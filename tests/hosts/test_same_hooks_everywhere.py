"""The same hooks in all seven hosts: our trainer, `attach`, Accelerate, Lightning, transformers, Ignite, `run`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hosted_loops
import pytest
import torch
from hosted_loops import FOREIGN, HOSTS, Loop, Recorder, digest, make_batches

from hookline import read_layers
from hookline.core.catalog import CATALOG

HOOKS = {
    "update": [{"name": "clip_norm", "max_norm": 0.5}],
    "forward": [{"name": "activation_stats", "modules": "0", "every": 1}],
}
OBSERVERS = {"forward": [{"name": "activation_stats"}], "lifecycle": [{"name": "gradient_monitor"}]}


def trained(host: str, **options: Any) -> tuple[Loop, Recorder]:
    recorder = Recorder()
    loop = Loop(host, HOOKS, [recorder], val_data=make_batches(2, seed=2), **options).run()
    return loop, recorder


def statistics(loop: Loop) -> list[Any]:
    """Return what activation_stats has recorded."""
    directory = Path("runs") / loop.control.run_id
    ((name, series),) = read_layers(directory).items()
    return [name, series.steps, series.names, series.values]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_train_the_same_weights_everywhere(accumulate: int) -> None:
    """Clipping and a forward monitor: equal bits of weights, equal events, losses and norms in all hosts."""
    loop, recorder = trained("trainer", accumulate=accumulate)
    in_validation = {"on_validation_batch_start", "on_validation_batch_end"}  # hosts keep these batches to themselves
    expected = [event for event in recorder.events if event not in in_validation]
    assert loop.control.step == 8 // accumulate and len(recorder.losses) == 8 // accumulate
    for host in FOREIGN:
        other, recorded = trained(host, accumulate=accumulate)
        assert digest(other.model) == digest(loop.model), host
        assert recorded.events == expected, host
        assert recorded.losses == pytest.approx(recorder.losses, rel=1e-6), host
        assert recorded.norms == pytest.approx(recorder.norms, rel=1e-6), host
        assert recorded.validated == pytest.approx(recorder.validated, rel=1e-6), host


def test_hooks_measure_the_same_everywhere() -> None:
    """The statistics of activations have the same names, steps and numbers."""
    expected = statistics(trained("trainer")[0])
    for host in FOREIGN:
        found = statistics(trained(host)[0])
        assert found[:3] == expected[:3], host
        assert found[3].tolist() == expected[3].tolist(), host


UNEDITED = """
import sys
import torch
from hosted_loops import Net, digest, make_batches

accumulate, model = int(sys.argv[1]), Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(2):
    for index, batch in enumerate(make_batches(), 1):
        loss = model(**batch)["loss"] / accumulate
        loss.backward()
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
print(digest(model))
"""
NOTES = """
import json
import hookline
from hosted_loops import Recorder

@hookline.register_hook("recorder")
class Notes(Recorder):
    def on_train_end(self) -> None:
        self.events.append("on_train_end")
        with open("noted.json", "w") as file:
            json.dump(vars(self), file)
"""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_unedited_script_trains_the_same_weights(accumulate: int) -> None:
    """`hookline run` knows neither epochs nor validations; what it knows is what the other hosts report."""
    loop, recorder = trained("trainer", accumulate=accumulate)
    Path("script.py").write_text(UNEDITED)
    Path("notes.py").write_text(NOTES)
    Path("hooks.yaml").write_text(json.dumps({"hooks": HOOKS | {"lifecycle": ["recorder"]}}))
    words = ("--hooks", "hooks.yaml", "--import", "notes", "--allow-changes", "--output", "watched", "script.py")
    paths = [str(Path(hosted_loops.__file__).parent), os.environ.get("PYTHONPATH", "")]
    printed = subprocess.check_output(
        [sys.executable, "-m", "hookline.cli", "run", *words, str(accumulate)], text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert printed.strip() == digest(loop.model)
    noted = json.loads(Path("noted.json").read_text())
    unknown = ("on_epoch_", "on_validation_", "on_train_batch_")
    assert noted["events"] == [event for event in recorder.events if not event.startswith(unknown)]
    assert noted["losses"] == pytest.approx(recorder.losses, rel=1e-6)
    assert noted["norms"] == pytest.approx(recorder.norms, rel=1e-6)
    (run,) = Path("watched").iterdir()
    ((name, series),) = read_layers(run).items()
    expected = statistics(loop)
    assert [name, series.names] == [expected[0], expected[2]]
    # The first forward pass is over when the first optimizer steps.
    assert series.steps == expected[1][1:] and series.values.tolist() == expected[3][1:].tolist()


@pytest.mark.parametrize("host", HOSTS)
def test_observers_change_no_bit(host: str) -> None:
    """With dropout, so that random numbers count: weights and random stream are those of a run without Hookline."""
    results = []
    for attaches in (False, True):
        data = make_batches(2, seed=2)
        loop = Loop(host, OBSERVERS, [Recorder()], val_data=data, dropout=0.2, attaches=attaches).run()
        results.append((digest(loop.model), torch.get_rng_state()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("host", FOREIGN)
def test_nothing_stays(host: str) -> None:
    """After the run the model and the optimizer have none of our hooks, and the host its own methods."""
    loop, _ = trained(host)
    for module in loop.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)
    assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks
    if host == "transformers":
        assert not {"compute_loss", "training_step"} & vars(loop.host_trainer).keys()


@pytest.mark.parametrize("host", FOREIGN)
def test_nothing_stays_after_a_failure(host: str) -> None:
    """An exception in the host's loop leaves it, ends the record with it, and leaves nothing on the model."""
    data = make_batches()
    data[2]["labels"] = torch.zeros(3, 3)
    loop = Loop(host, HOOKS, [recorder := Recorder()], data=data)
    with pytest.raises(RuntimeError, match="must match"):
        loop.run()
    run = loop.control.record.run
    assert run["outcome"] == "failed" and "must match" in run["reason"]
    assert recorder.events[-2:] == ["on_exception", "on_train_end"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loop.model.modules())
    assert not loop.optimizer._optimizer_step_pre_hooks


def test_no_host_is_imported_with_hookline() -> None:
    """`import hookline` imports none of the hosts; `hookline.lightning` imports Lightning."""
    code = """
        import sys, hookline
        assert not {"lightning", "transformers", "ignite"} & sys.modules.keys()
        assert hookline.lightning.Hooks and hookline.ignite.attach and hookline.transformers.Hooks
        import lightning
        assert lightning.__file__ != hookline.lightning.__file__
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    subprocess.run([sys.executable, "-W", "ignore", "-c", lines], check=True)


def test_every_event_is_recorded() -> None:
    """The recorder of these tests listens to every lifecycle event of the catalog."""
    lifecycle = {name for name, event in CATALOG.items() if event.kind == "lifecycle"}
    assert lifecycle <= vars(Recorder).keys()
