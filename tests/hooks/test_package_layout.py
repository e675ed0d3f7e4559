"""A user's package of hooks may be organised by functionality, as document 002 proposes."""

from pathlib import Path

import pytest
from builders import train

from hookline import HooksConfig

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
    """A package with document 002's six modules is named in a config, module by module, and each hook runs."""
    package = tmp_path / "layout_of_document_002"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for module in MODULES:
        (package / f"{module}.py").write_text(HOOK.format(module=module))
    monkeypatch.syspath_prepend(tmp_path)
    entries = [{"name": f"layout_of_document_002.{module}.Counts"} for module in MODULES]
    trainer = train(hooks=HooksConfig(lifecycle=entries))
    assert [trainer.hooks.get(module).steps for module in MODULES] == [4] * 5
