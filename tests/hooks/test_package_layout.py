"""A user's package of hooks may be organised by functionality, as seed 002 proposes."""

from pathlib import Path

import pytest
import torch

from hookline import HooksConfig, get_trainer

MODULES = ["monitoring", "optimization", "checkpointing", "debugging", "integration"]
HOOK = """
from hookline import TrainingHook

class Counts(TrainingHook):
    name = "{module}"
    steps = 0

    def on_step_end(self, step):
        self.steps = step
"""


@pytest.mark.req("002-79")
def test_hooks_are_organised_by_functionality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with seed 002's six modules is named in a config, module by module, and each hook runs."""
    package = tmp_path / "layout_of_seed_002"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for module in MODULES:
        (package / f"{module}.py").write_text(HOOK.format(module=module))
    monkeypatch.syspath_prepend(tmp_path)
    entries = [{"name": f"layout_of_seed_002.{module}.Counts"} for module in MODULES]
    model = torch.nn.Linear(2, 1)
    trainer = get_trainer(
        "simple", model, [(torch.ones(2, 2), torch.ones(2, 1))] * 3, torch.optim.SGD(model.parameters(), 0.1), "cpu",
        loss_fn=torch.nn.functional.mse_loss, record=False, console=False, hooks=HooksConfig(lifecycle=entries),
    )  # fmt: skip
    trainer.train()
    assert [trainer.hooks.get(module).steps for module in MODULES] == [3] * 5
