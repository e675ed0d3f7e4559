"""No built-in hook runs blind in a host: it does what it does in our trainer, or is refused by name with the reason."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_parameters import NEEDED
from hosted_loops import ADAPTERS, Loop, digest, make_batches
from safetensors.torch import save_file

from hookline import HookManager, read_layers, read_media, read_metrics
from hookline.core.base import hook_attribute
from hookline.core.plugins import HOOKS
from hookline.errors import RegistrationError

NAMES = [name for name in HOOKS.names() if name != "trackio"]  # a package that the tests do without
HOSTS = ("attach", *ADAPTERS)
UNAWARE = ("bare", "run")
"""Loops that report neither batches nor validations: `attach` without an optional line, and `hookline run`."""
REFUSED = {
    (host, name): "knows_validation_batches"
    for host in (*HOSTS, *UNAWARE)
    for name in ("confusion_matrix", "sample_predictions")
}
# Lightning calls `training_step`, and not the module itself, whose recorded call could be run again.
REFUSED |= {("lightning", name): "can_rerun" for name in ("nan_forensics", "debug_training")}
REFUSED |= {(host, name): "knows_batches" for host in UNAWARE for name in ("checkpoint", "profiler", "throughput")}
REFUSED |= {("bare", "loss_spike"): "knows_loss"}
REFUSED |= {("run", "early_stopping"): "can_stop", ("run", "nan_forensics"): "can_stop"}
REFUSED |= {("run", "debug_training"): "can_rerun"}  # The call of the first step was not seen.
WARNED = {("bare", "early_stopping"): "'val/loss' was never evaluated: no validation happened in 2 steps"}
"""`hl.validation` may come at any time, so its absence is known at the end."""
UNREPORTED = {"bare": {"train/loss", "train/epoch_loss", "val/loss"}, "run": {"train/epoch_loss", "val/loss"}}
INTERVENE = "intervenes, but interventions are disabled: pass enable_intervention=True"


def config_of(name: str) -> dict[str, Any]:
    manager = HookManager(enable_intervention=True)
    manager.register(name, **NEEDED.get(name, {}))
    kind = manager.entry(manager.list_hooks()[0].name).kinds[0]
    every = {"every": 1} if kind == "forward" or name in ("gradient_monitor", "throughput") else {}
    return {kind: [{"name": name, **NEEDED.get(name, {}), **every}]}


def effects(loop: Loop) -> dict[str, Any]:
    """Return what a run has left: weights, and the names of everything it has written."""
    directory = Path("runs") / loop.control.run_id
    rows = read_metrics(directory)
    return {
        "weights": digest(loop.model),
        "metrics": {name for row in rows for name in row},
        "layers": {name: (series.names, series.steps) for name, series in read_layers(directory).items()},
        "media": {row.name for row in read_media(directory)},
        "files": {path.name for path in directory.iterdir()},
        "failures": [hook.failures for hook in loop.control.hooks.list_hooks()],
    }


@cache
def in_our_trainer(name: str) -> dict[str, Any]:
    return effects(train("trainer", name, options={"enable_intervention": True}))


def train(host: str, name: str, **options: Any) -> Loop:
    save_file({"1/1/outputs/0": torch.ones(8)}, "states.safetensors")
    data, val_data = make_batches(2), make_batches(1, seed=2)
    return Loop(host, config_of(name), epochs=1, data=data, val_data=val_data, **options).run()


@pytest.mark.parametrize("host", [*HOSTS, *UNAWARE])
@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_works_or_is_refused(host: str, name: str, caplog: Any, capsys: Any) -> None:
    """It changes the same bits and writes the same kinds of rows and files as in our trainer, or is refused."""
    options: dict[str, Any] = {} if host == "run" else {"hooks": HookManager(enable_intervention=True)}
    intervenes = hook_attribute(HOOKS.find(name), "intervene")
    if intervenes and host != "run":
        with pytest.raises(RegistrationError, match=f"'{name}' {INTERVENE}"):
            train(host, name)
    if need := REFUSED.get((host, name)):
        if host == "run" and need != "can_rerun":  # The script trains on; the line is on its standard error.
            assert train(host, name).control is None
            refusal = capsys.readouterr().err
        else:
            with pytest.raises(RegistrationError) as caught:
                train(host, name, **options)
            refusal = str(caught.value)
        assert re.search(rf"'{name}' needs a run that .*`{need}`", refusal), refusal
        return
    expected, left = dict(in_our_trainer(name)), effects(train(host, name, **options))
    assert WARNED.get((host, name), "") in caplog.text
    assert left.pop("metrics") >= expected.pop("metrics") - UNREPORTED.get(host, set())  # Hosts log more.
    if host == "run":  # Its forward hooks begin with the second step.
        expected["layers"] = {
            series: (names, steps[1:] if series == "activations" else steps)
            for series, (names, steps) in expected["layers"].items()
        }
        assert not intervenes or left.pop("weights") != expected.pop("weights")
    assert left == expected


@pytest.mark.parametrize("host", HOSTS)
def test_early_stopping_needs_a_validation(host: str) -> None:
    """Without validation data, a hook that waits for it is refused, with what to change in the host."""
    if host == "attach":
        pytest.skip("a loop of your own can always validate")
    config = {"lifecycle": [{"name": "early_stopping", "monitor": "val/loss"}]}
    remedies = {"lightning": "`validation_step`", "transformers": "`eval_strategy`", "ignite": "`evaluator=`"}
    with pytest.raises(RegistrationError, match=r"'early_stopping' needs a run that can validate") as caught:
        Loop(host, config).run()
    assert remedies[host] in str(caught.value)


def test_loss_spike_needs_a_loss() -> None:
    """In Ignite only `hl.backward` tells the loss in time; elsewhere the host does."""
    config = {"lifecycle": [{"name": "loss_spike"}]}
    with pytest.raises(RegistrationError, match=r"'loss_spike' needs a run that knows the loss.*hl\.backward"):
        Loop("ignite", config, options={"tells_loss": False}).run()
    for host in ADAPTERS:
        assert Loop(host, config).run().control.record.run["outcome"] == "completed"


@pytest.mark.parametrize("host", HOSTS)
def test_nan_forensics_finds_the_module(host: str) -> None:
    """With `step_fn` a bad batch is run again: the run stops before the step, and the report names the module."""
    data = make_batches()
    data[2]["inputs"][0, 0] = torch.nan
    options = {"step_fn": lambda model, batch: model(**batch)["loss"]}
    if host == "lightning":  # the module of Lightning has no forward
        from hosted_loops import Net

        options = {"step_fn": lambda model, batch: Net.forward(model, **batch)["loss"]}
    loop = Loop(host, {"lifecycle": [{"name": "nan_forensics"}]}, data=data, attach_options=options).run()
    assert loop.control.stopped_by == "nan_forensics" and loop.control.step == 3
    assert all(param.isfinite().all() for param in loop.model.parameters())
    (crash,) = (Path("runs") / loop.control.run_id).glob("**/crash.json")
    assert "batch['inputs']" in crash.read_text()


def test_fsdp1_and_deepspeed_are_refused() -> None:
    """What the host has wrapped the model in counts, too."""

    class FullyShardedDataParallel(torch.nn.Module): ...

    from hookline import HooklineError
    from hookline.lightning import Hooks

    with pytest.raises(HooklineError, match=r"FSDP1 is not supported.*use FSDP2"):
        Hooks().begin_run(torch.nn.Linear(1, 1), None, wrapped=FullyShardedDataParallel())
