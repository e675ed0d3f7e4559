"""A parameter and a module have one name, whatever wraps the model or a part of it."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import builders
import pytest
import torch
from builders import make_batches
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hookline import EarlyStopping, EMAHook, GradientMonitor, HookManager, read_layers
from hookline.activations.monitor import Monitor
from hookline.checkpoints.store import read_checkpoint
from hookline.gradients.gradient_flow import gradient_flow


class Inner(nn.Module):
    """A part whose attribute has the name that data parallelism gives a wrapped model."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.module(batch)


def plain() -> nn.Sequential:
    """A model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(Inner(), nn.BatchNorm1d(4), nn.Linear(4, 2))


def compiled(module: nn.Module) -> Any:
    """Compile without a backend."""
    return torch.compile(module, backend="eager")


def data_parallel(module: nn.Module) -> nn.Module:
    """Wrap for data parallelism over no devices, as on a machine that has none."""
    wrapper = nn.DataParallel(module)
    wrapper.device_ids = []
    return wrapper.cpu()  # one device would have taken the module


def part_compiled() -> nn.Module:
    """Compile one part."""
    model = plain()
    model[0] = compiled(model[0])
    return model


def checkpointed() -> nn.Module:
    """Wrap a compiled part for activation checkpointing, and the model for data parallelism."""
    model = plain()
    model[0] = checkpoint_wrapper(compiled(model[0]))
    return data_parallel(model)


WRAPPED: dict[str, Callable[[], Any]] = {
    "plain": plain,
    "compiled": lambda: compiled(plain()),
    "a part compiled": part_compiled,
    "data parallel": lambda: data_parallel(plain()),
    "compiled data parallel": lambda: compiled(data_parallel(plain())),
    "checkpointed": checkpointed,
}
NAMES = ["0.module.weight", "0.module.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
MODULES = ["0", "0.module", "1", "2"]
wrapped = pytest.mark.parametrize("wrap", WRAPPED)


OPTIONS = {"data": make_batches(4, features=4, targets=2), "record": True}
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


@wrapped
def test_every_name_is_the_models_own(wrap: str) -> None:
    """In patterns, in the records of activations and gradients, in averages and in checkpoints."""
    monitor = Monitor(metrics=["mean"], modules=["0", "re:.*module", "class:BatchNorm1d", "2"])
    trainer = make_trainer(monitor, GradientMonitor(log_frequency=1), average := EMAHook(), model=WRAPPED[wrap]())
    trainer.add_hook("scale", factor=0.5, params=["0.module.*", "class:BatchNorm1d"])
    trainer.train()
    assert all(entry.failures.total == 0 for entry in trainer.hooks.entries())
    layers = read_layers(trainer.run_dir)
    assert sorted(layers["activations"].names) == MODULES and list(layers["gradients"].names) == NAMES
    assert list(average.average) == NAMES and list(trainer.params) == NAMES
    assert trainer.describe()["model"]["class"] == "Sequential"
    assert [row.name for row in gradient_flow(trainer.model).rows] == NAMES
    sections, _ = read_checkpoint(trainer.save_checkpoint("now"))
    assert list(sections["model"]) == list(plain().state_dict())


@wrapped
def test_captures_have_the_models_names(wrap: str) -> None:
    """A pattern and a module that is passed as an object select the same; a wrapper stands for what it wraps."""
    model = WRAPPED[wrap]()
    manager = HookManager()
    with manager.capturing(model, "*") as cache:
        model(torch.ones(4, 4))
    assert sorted({state.name for state in cache.states}) == MODULES
    if wrap == "a part compiled":
        manager.watch(model)
        manager.register_capture_hook(model[0], "it")
        model(torch.ones(4, 4))
        assert [state.name for state in manager.get_captured_states("it")] == ["0"]


@wrapped
@pytest.mark.parametrize("other", ["plain", "compiled", "checkpointed"])
def test_a_checkpoint_fits_the_model_however_it_is_wrapped(wrap: str, other: str) -> None:
    """Weights, optimizer, average and best weights; the run continues with the same bits."""
    stopping = EarlyStopping(monitor="train/loss", restore_best_weights=True)
    first = train(EMAHook(), stopping, model=WRAPPED[wrap]())
    second = make_trainer(average := EMAHook(), model=WRAPPED[other]())
    second.load_checkpoint(first.save_checkpoint("now"))
    assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))
    average.update(second.model)
    assert list(average.average) == NAMES


def test_a_module_may_have_the_name_of_a_wrappers_attribute() -> None:
    """The wrapper's class decides, not the text of the name."""
    model = nn.ModuleDict({"_orig_mod": nn.Linear(4, 2)})
    names = dict(model.named_parameters())
    model.forward = model["_orig_mod"].forward
    trainer = train(model=model)
    assert trainer.params.keys() == names.keys()
    sections, _ = read_checkpoint(trainer.save_checkpoint("now"))
    assert sections["model"].keys() == names.keys()


SHARDED = """
import torch
from torch import distributed as dist, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from hookline._names import plain_modules, plain_parameters, plain_state_dict

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
make = lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
for wrap in (
    nn.parallel.DistributedDataParallel,
    lambda model: torch.compile(nn.parallel.DistributedDataParallel(model)),
    lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
):
    model = wrap(make())
    found = list(plain_parameters(model))
    assert found == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"], found
    assert list(plain_modules(model)) == ["", "0", "1", "1.0"], list(plain_modules(model))
    assert list(plain_state_dict(model)) == list(make().state_dict()), list(plain_state_dict(model))
"""


def test_models_of_several_processes_have_plain_names() -> None:
    """DDP, compiled DDP and FSDP, in a process that is a group of its own."""
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
