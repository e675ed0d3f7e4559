"""Pages and commands that messages refer to exist, and have what the message says that they have."""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import (
    GenericTrainer,
    HooklineError,
    HookRegistry,
    HookRunner,
    HooksConfig,
    SimpleTrainer,
    TrainerConfig,
    TrainingHook,
    get_trainer,
    load_config,
    register_hook,
    register_optimizer,
    trainer_from_config,
)
from hookline.activations.monitor import METRICS, Monitor
from hookline.build import generic_trainer
from hookline.cli import COMMANDS, main
from hookline.cli.help import find_pages
from hookline.core.catalog import CATALOG, SPELLINGS
from hookline.core.entry import OPTIONS
from hookline.core.plugins import HOOKS, OPTIMIZERS, SCHEDULERS
from hookline.trainer.options import TrainerOptions

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = re.compile(rf"hookline (?:COMMAND|{'|'.join(COMMANDS)}|--help)\b[^`\n;:.)]*")
NOT_LISTS = {
    "hookline example", "hookline verify", "hookline train", "hookline train --hook NAMENAME",
    "hookline predict", "hookline replay --weights",
    "hookline COMMAND", "hookline COMMAND --help", "hookline hooks NAME prints one hook in full",
    "hookline events --event NAME prints one event in full",
    "hookline checkpoints NAME", "hookline verify-checkpoint NAME/NAME",
    "hookline label NAME", "hookline plot", "hookline replay", "hookline resume NAME", "hookline resume RUN",
    "hookline run", "hookline run train", "hookline runs", "hookline show RUN --metrics", "hookline help",
    "hookline help TOPIC prints a page",
}  # fmt: skip
"""References in messages that do not promise a list, or one that needs a run (tests/cli/test_plot.py has it)."""


def texts(path: Path) -> Iterator[str]:
    """Yield the texts of a source file that are not docstrings; what is inserted in them is NAME."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= set(map(id, node.values))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "NAME" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def references() -> set[str]:
    """Return every page and command that a text of the source names."""
    files = sorted((ROOT / "src").rglob("*.py"))
    return {found.strip() for path in files for text in texts(path) for found in REFERENCE.findall(text)}


def shown(reference: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints."""
    capsys.readouterr()
    with suppress(SystemExit):  # of --help
        assert main(reference.split()[1:]) == 0
    return capsys.readouterr().out


def linear(make: Callable[..., Any]) -> Callable[[], Any]:
    """Return a call of a constructor of trainers with an unknown keyword."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: make(model, [torch.ones(1, 1)], optimizer, "cpu", zzz=1)


def run_config(**more: Any) -> dict[str, Any]:
    return {"model": "char_gpt", "data": "stdlib_text", "optimizer": "sgd", **more}


OPTION_NAMES = [item.name for item in fields(TrainerOptions)]
CAUSES: list[tuple[Callable[[], Any], Iterable[str]]] = [
    (linear(SimpleTrainer), inspect.signature(SimpleTrainer).parameters),
    (linear(lambda model, _, *more, **wrong: GenericTrainer({}, model, more[0], **wrong)),
     inspect.signature(GenericTrainer).parameters),
    (linear(lambda *given, **wrong: get_trainer("generic", *given, **wrong)),
     inspect.signature(generic_trainer).parameters),
    (lambda: TrainerOptions.make({"zzz": 1}), OPTION_NAMES),
    (lambda: TrainerConfig(zzz=1), [*OPTION_NAMES, "hooks"]),
    (lambda: trainer_from_config(run_config(trainer={"zzz": 1})), OPTION_NAMES),
    (lambda: load_config({}, ["trainer.zzz=1"]), OPTION_NAMES),
    (lambda: HooksConfig(zzz=1), HooksConfig.model_fields),
    (lambda: trainer_from_config(run_config(hooks={"zzz": 1})), HooksConfig.model_fields),
    (lambda: GenericTrainer({"hooks": {"zzz": 1}}, torch.nn.Linear(1, 1), None), HooksConfig.model_fields),
    (lambda: load_config({}, ["hooks.zzz.a=1"]), HooksConfig.model_fields),
    (lambda: trainer_from_config(run_config(scheduler="zzz")), SCHEDULERS.built_in),
    (lambda: Monitor(metrics=["zzz"]), METRICS),
    (lambda: HookRegistry().register("zzz"), HOOKS.built_in),
    (lambda: HookRegistry().register("early_stopping", zzz=1),
     [*inspect.signature(HOOKS.find("early_stopping")).parameters, *(one for one in OPTIONS if one != "every")]),
    (lambda: HookRegistry().register(print, event="zzz"), SPELLINGS),
    (lambda: HookRegistry().register(type("H", (), {"on_zzz": lambda self: None})()), SPELLINGS),
    (lambda: HookRegistry().register(lambda zzz: None, event="step_end"), CATALOG["on_step_end"].argument_names),
    (lambda: HookRunner().register(lambda *zzz: None, event="step_end"), CATALOG["on_step_end"].argument_names),
    (lambda: main(["zzz"]), COMMANDS),
]  # fmt: skip
PROMISE = re.compile(r"(`hookline [^`]+`) lists all(?: (\d+))?")


@pytest.fixture(autouse=True)
def only_built_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests in this process have registered: errors then refer to other commands."""
    for plugins in (HOOKS, OPTIMIZERS, SCHEDULERS):
        monkeypatch.setattr(plugins, "_added", {})


def message(cause: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text of the error that a call raises, or prints as a command does."""
    with pytest.raises((HooklineError, TypeError, SystemExit)) as failed:
        cause()
    return capsys.readouterr().err if isinstance(failed.value, SystemExit) else str(failed.value)


@pytest.mark.parametrize("index", range(len(CAUSES)))
def test_what_lists_all_names_has_them(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The page or the output of the command has each valid name as a word."""
    cause, valid = CAUSES[index]
    said = " ".join(message(cause, capsys).split())
    promised = PROMISE.search(said)
    assert promised, said
    text, names = shown(promised[1].strip("`"), capsys), set(valid)
    assert promised[2] in (None, str(len(names))), said
    assert [name for name in sorted(names) if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)] == []


def test_every_reference_of_the_source_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Pages exist, commands have the options, and what lists names is in the table above."""
    found = references()
    for reference in sorted(found):
        if reference.startswith("hookline help ") and "TOPIC" not in reference:
            assert reference.split()[2] in find_pages(), reference
            continue
        command = reference.split()[1]
        if command in COMMANDS:
            text = shown(f"hookline {command} --help", capsys)
            assert [one for one in re.findall(r"--[\w-]+", reference) if one not in text] == [], reference
    said = [" ".join(message(cause, capsys).split()) for cause, _ in CAUSES]
    promised = {match[1].strip("`") for one in said if (match := PROMISE.search(one))}
    promised = {re.sub("early_stopping|on_step_end", "NAME", one) for one in promised}
    assert found - NOT_LISTS == promised | {"hookline hooks --import MODULE"}


def test_only_built_in_names_are_looked_for_on_a_page() -> None:
    """Neither a page nor a command without the module has what a script registered."""
    register_hook("mine")(TrainingHook)
    for number in range(9):
        register_optimizer(f"mine_{number}")(torch.optim.SGD)
    with pytest.raises(HooklineError, match=r"`hookline hooks --import MODULE` lists all \d+$"):
        HookRegistry().register("zzz")
    with pytest.raises(HooklineError, match=r"there is no optimizer named 'zzz'; there are \d+, such as"):
        trainer_from_config(run_config(optimizer="zzz"))
    config = {"hooks": {"lifecycle": [{"name": "ema", "as": f"ema_{number}"} for number in range(10)]}}
    with pytest.raises(HooklineError, match=r"no hook of this config has that name; there are 10, such as"):
        load_config(config, ["hooks.zzz.decay=1"])


def test_the_messages_of_the_troubleshooting_page_are_in_the_source() -> None:
    """Each heading of docs/help/troubleshooting.md is a part of a text of the source; "…" is what it inserts."""
    page = (ROOT / "docs" / "help" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    everything = "\n".join(text for path in (ROOT / "src").rglob("*.py") for text in texts(path))
    everything = re.sub("%[sdr]", "…", everything.replace("NAME", "…"))
    assert [message for message in messages if message not in everything] == []
    assert len(messages) >= 25
