"""One contract for every hook that a config may name: adding a built-in hook adds its tests."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches
from hook_parameters import NEEDED
from safetensors.torch import save_file
from torch import nn

from hookline import GenericTrainer, HookManager, HooksConfig
from hookline.config.hooks import RESERVED
from hookline.core.plugins import HOOKS
from hookline.testing import assert_harmless, assert_resumable, lifecycles
from hookline.testing.runs import SyntheticTrainer

ON_DISK = ["checkpoint", "mlflow", "tensorboard", "wandb"]
TRAINED = [name for name in HOOKS.names() if name != "trackio"]  # a package that the tests do without


@pytest.fixture(autouse=True)
def source_of_patch(own_directory: None) -> None:
    """Write the activations that `patch` needs."""
    save_file({"1/1/outputs/0": torch.ones(8)}, "states.safetensors")


def entry(name: str) -> dict[str, Any]:
    return {"name": name, **NEEDED.get(name, {})}


def on_disk() -> SyntheticTrainer:
    return SyntheticTrainer(Path("runs"))


def kind_of(name: str) -> str:
    manager = HookManager(enable_intervention=True)
    manager.register(name, **NEEDED.get(name, {}))
    return manager.entry(manager.list_hooks()[0].name).kinds[0]


def make_trainer(name: str, **options: Any) -> GenericTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = HooksConfig(**{kind_of(name): [entry(name)]})
    options["enable_intervention"] = getattr(HOOKS.find(name), "intervene", False)
    return GenericTrainer(config, model, optimizer, device="cpu", loss_fn=nn.functional.mse_loss, **options)


@pytest.mark.parametrize("name", HOOKS.names())
def test_every_hook_is_documented_and_named(name: str) -> None:
    """The class has a docstring, has the name that configs use, and is marked as built in."""
    hook = HOOKS.find(name)
    assert hook.__doc__ and hook.name == name
    assert vars(hook)["built_in"] is True


@pytest.mark.parametrize("name", HOOKS.names())
def test_its_parameters_can_be_given_by_name(name: str) -> None:
    """No parameter of its constructor has a name that the registry keeps for itself: it could never be set.

    Only `name` may be there, which is the instance's own and which `as` gives, and `every`, which is passed on.
    """
    taken = set(RESERVED) - {"name", "every"}
    assert [parameter for parameter in inspect.signature(HOOKS.find(name)).parameters if parameter in taken] == []


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in ON_DISK])
def test_every_hook_survives_every_lifecycle(name: str) -> None:
    """It fails at no event when a run accumulates, skips, has two ranks or is ended by an exception at any event."""
    for lifecycle in lifecycles():
        if not lifecycle.resumes_at:  # the next test has these
            lifecycle.run(name, **NEEDED.get(name, {}))


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in ON_DISK])
def test_every_hook_resumes_exactly(name: str) -> None:
    """A run that is killed at any event and resumed ends as one without interruption."""
    assert_resumable(name, **NEEDED.get(name, {}))


@pytest.mark.parametrize("name", ON_DISK)
def test_what_needs_a_disk_trains_saves_and_resumes(name: str) -> None:
    """Made from a config, the hook trains without failure, is saved with the run, and another one loads its state."""
    trainer = make_trainer(name)
    trainer.fit(make_batches(6, features=4), make_batches(2, features=4), max_epochs=1)
    trainer.save_checkpoint()
    assert [hook.failures for hook in trainer.hooks.list_hooks()] == [0] * len(trainer.hooks)
    saved = trainer.hooks.state_dict()
    second = make_trainer(name)
    second.fit(make_batches(6, features=4), make_batches(2, features=4), max_epochs=2, resume=trainer.run_dir)
    assert second.step == 12 and second.run_id == trainer.run_id
    assert set(second.hooks.state_dict()) == set(saved)


@pytest.mark.parametrize("name", TRAINED)
def test_every_hook_leaves_nothing_behind(name: str) -> None:
    """After removal there is no torch hook on the model, and the hook was closed once."""
    trainer = make_trainer(name)
    trainer.fit(make_batches(1, features=4), make_batches(1, features=4), max_epochs=1)
    entry_of = trainer.hooks.entry(name)
    trainer.remove_hook(name)
    assert entry_of.closed
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("name", [name for name in TRAINED if not HOOKS.find(name).intervenes])
def test_an_observer_changes_nothing(name: str) -> None:
    """A hook that does not declare changes leaves every batch, activation, gradient and weight as it is."""
    assert_harmless(name, on_disk if name in ON_DISK else SyntheticTrainer, **NEEDED.get(name, {}))
