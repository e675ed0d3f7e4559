"""Cells of a notebook that are run again: a hook that is defined again replaces the earlier one."""

import logging
from typing import Any

import pytest
import torch

import hookline
from hookline import HooklineError, HookRegistry
from hookline.core import plugins
from hookline.testing import small_trainer

CLASS = """
class Report(hookline.TrainingHook):
    def on_epoch_end(self):
        calls.append({})
    def close(self):
        calls.append("closed")
"""
FUNCTION = """
@hooks.on("epoch_end")
def report():
    calls.append({})
"""


class Notebook:
    """Runs cells as a notebook does: each run compiles its source, and all share their names."""

    def __init__(self, hooks: Any) -> None:
        self.calls: list[Any] = []
        self.names = {"__name__": "__main__", "hookline": hookline, "torch": torch, "hooks": hooks, "calls": self.calls}

    def run(self, cell: str) -> None:
        exec(compile(cell, "<cell>", "exec"), self.names)


@pytest.fixture
def notebook(registry: HookRegistry) -> Notebook:
    return Notebook(registry)


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        (CLASS + "hooks.register(Report())", ["report"]),
        (CLASS + "hooks.add_hook(Report(), name='mine')", ["mine"]),
        (CLASS + "hooks.register(Report(), every=2); hooks.register(Report())", ["report", "report_2"]),
        (FUNCTION, ["report"]),
        (CLASS.replace("    def on", "    @torch.no_grad()\n    def on") + "hooks.register(Report())", ["report"]),
        ("for _ in range(2):" + FUNCTION.replace("\n", "\n    "), ["report", "report_2"]),
        ("@hooks.on('train_end')" + FUNCTION, ["report", "report_2"]),
        (
            "def make():" + CLASS.replace("\n", "\n  ") + "\n  hooks.register(Report())\nmake(); make()",
            ["report", "report_2"],
        ),
    ],
)
def test_a_cell_that_runs_again_replaces_its_hooks(
    registry: HookRegistry, cell: str, names: list[str], notebook: Notebook
) -> None:
    """The same names as after the first run, with the new code, and no call of the old one."""
    notebook.run(cell.replace("{}", "1"))
    before = [registry.get(name) for name in registry]
    notebook.run(cell.replace("{}", "2"))
    assert list(registry) == names and not any(registry.get(name) in before for name in registry)
    notebook.calls.clear()
    registry.on_epoch_end(epoch=0)
    assert set(notebook.calls) == {2}


@pytest.mark.parametrize(
    "program",
    [
        "hooks.register(lambda: calls.append(1), event='epoch_end')\n"
        "hooks.register(lambda: calls.append(2), event='epoch_end')",
        "hooks.register(lambda: calls.append(1), event='epoch_end'); "
        "hooks.register(lambda: calls.append(2), event='epoch_end')",
        FUNCTION.format(1).replace("report", "_") + FUNCTION.format(2).replace("report", "_"),
        FUNCTION.format(1) + FUNCTION.format(2),
        CLASS.format(1) + "hooks.register(Report())" + CLASS.format(2) + "hooks.register(Report())",
        "def make(n):\n  if n == 1:\n    def log(): calls.append(1)\n  else:\n    def log(): calls.append(2)\n"
        "  return log\n"
        "for n in (1, 2): hooks.register(make(n), event='epoch_end')",
    ],
)
def test_two_definitions_of_one_program_are_two_hooks(registry: HookRegistry, program: str, notebook: Notebook) -> None:
    """Also if they share module and qualified name, as all lambdas do; the second gets a number."""
    notebook.run(program)
    registry.on_epoch_end(epoch=0)
    assert notebook.calls == [1, 2]


def test_an_edited_cell_replaces_what_has_a_name(registry: HookRegistry, notebook: Notebook) -> None:
    """Python compiles it as another file, where the function may begin at another line."""
    for name in ("report", "_"):
        notebook.run(FUNCTION.replace("report", name))
        exec(compile("\n\n" + FUNCTION.replace("report", name), "<edited cell>", "exec"), notebook.names)
    assert list(registry) == ["report", "_", "__2"]


def test_the_replacement_is_logged_once_and_the_old_hook_is_closed(
    registry: HookRegistry, caplog: pytest.LogCaptureFixture, notebook: Notebook
) -> None:
    """It keeps the position of the old one, whose handle removes nothing any more."""
    notebook.run(CLASS + "handle = hooks.register(Report())")
    registry.register(lambda: notebook.calls.append("other"), event="epoch_end")
    with caplog.at_level(logging.WARNING, "hookline"):
        notebook.run(CLASS.replace("{}", "2") + "hooks.register(Report())")
    assert [record.getMessage() for record in caplog.records] == [
        "hook 'report': replaced, because it was defined again or registered again"
    ]
    assert notebook.calls == ["closed"]
    notebook.names["handle"].remove()
    registry.on_epoch_end(epoch=0)
    assert notebook.calls == ["closed", 2, "other"]


def test_an_edited_event_replaces_too(registry: HookRegistry, notebook: Notebook) -> None:
    """The definition is what counts, not the event that its decorator names."""
    notebook.run(FUNCTION)
    notebook.run(FUNCTION.replace("epoch_end", "train_end"))
    assert list(registry) == ["report"] and list(registry.entry("report").listeners) == ["on_train_end"]


def test_a_hook_that_is_registered_again_is_there_once(registry: HookRegistry, notebook: Notebook) -> None:
    """The same object with other options; it is neither closed nor set up a second time."""
    notebook.run(CLASS + "report = Report()\nhooks.register(report)")
    notebook.run("hooks.register(report, every=5)")
    assert list(registry) == ["report"] and str(registry.entry("report").schedule) == "every 5 steps"
    assert notebook.calls == []


def test_a_replacement_whose_setup_fails_leaves_the_old_hook(registry: HookRegistry, notebook: Notebook) -> None:
    """A cell with a mistake loses nothing."""
    notebook.run(CLASS + "hooks.register(Report())")
    with pytest.raises(ZeroDivisionError):
        notebook.run(CLASS + "    def setup(self): 1 / 0\nhooks.register(Report())")
    registry.on_epoch_end(epoch=0)
    assert list(registry) == ["report"] and len(notebook.calls) == 1 and "closed" not in notebook.calls


def test_an_unrelated_definition_does_not_take_a_chosen_name(notebook: Notebook) -> None:
    """Only the same module and qualified name are the same definition."""
    notebook.run(CLASS + "hooks.register(Report(), 'mine')")
    with pytest.raises(HooklineError, match="'mine' is registered already"):
        notebook.run(CLASS.replace("Report", "Other") + "hooks.register(Other(), 'mine')")


def test_decorated_names_and_trainers_take_the_new_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """`@register_*` gives configs the new class, and a trainer the new function."""
    monkeypatch.setattr(plugins.HOOKS, "_added", {})
    trainer = small_trainer()
    notebook = Notebook(trainer)
    for _ in range(2):
        notebook.run("@hookline.register_hook('again')" + CLASS + FUNCTION)
    assert type(HookRegistry({"lifecycle": ["again"]}).get("again")) is notebook.names["Report"]
    assert [name for name in trainer.hooks if "report" in name] == ["report"]
    trainer.fit(max_epochs=2)
    assert len(notebook.calls) == 2
