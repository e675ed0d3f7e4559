"""Events: one table has every kind that Hookline writes, and everything that shows events reads it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hookline
from hookline.record.events import EVENTS, describe_event

SOURCE = Path(hookline.__file__).parent
WRITERS = {"note", "event", "_record"}
WHILE_RUNNING = {"hook_{incident.kind}": set[str](), "{name}_changed": {"loss_fn_changed", "step_fn_changed"}}
"""Kinds that are put together while the program runs, and what they can be; incidents are found where they are made."""


def written_kinds() -> Iterator[str]:
    """Yield every kind that a file of Hookline writes."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            for argument in node.args[:2]:  # a hook's own `note` has the trainer before the kind
                if name == "Incident" and argument is node.args[0] and isinstance(argument, ast.Constant):
                    yield f"hook_{argument.value}"
                elif name in WRITERS and isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value
                elif name in WRITERS and isinstance(argument, ast.JoinedStr):
                    yield from WHILE_RUNNING[ast.unparse(argument)[2:-1]]


def test_the_table_has_every_kind_that_is_written_and_no_other() -> None:
    assert set(written_kinds()) == EVENTS.keys()


def test_what_was_changed_at_a_resume_is_said_in_a_sentence() -> None:
    event = {"kind": "hooks_changed", "step": 4, "added": ["ema"], "removed": [], "reordered": False}
    assert describe_event(event) == "resumed with other hooks: added ema; removed none; reordered: False"
