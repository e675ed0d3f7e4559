"""Make docs/events.md from the event catalogue, and the tables in other pages that are made from code.

A made table stands between two comment lines of its page, ``<!-- made: NAME -->`` and ``<!-- made: end -->``.
Run it after a change of the catalogue, of the trainer's options or of a built-in hook: `make docs`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import hookline
from hookline.cli.hooks import first_sentence, kind_of, parameter_list
from hookline.events.catalog import ARGUMENT_ALIASES, ARGUMENTS, CATALOG, Event
from hookline.registry.names import HOOKS
from hookline.trainer.options import TrainerOptions

DOCS = Path(__file__).resolve().parent.parent / "docs"

HEAD = """# Events

Made by `make docs` from the catalogue in `src/hookline/events/catalog.py`; do not edit.
`hookline events` prints the same.

A hook's method has the name of an event and names the arguments it wants, in any order; how that works is told in
[hooks.md](hooks.md). An event that nobody hears costs one branch.

## The order of a run
"""

AFTER_DIAGRAM = """
`on_checkpoint_save` comes after `on_step_end` or `on_epoch_end`, whichever asked for it. When a run is resumed,
`on_checkpoint_load` comes before `on_train_start`. `on_exception` may come at any time after the record is open.

## The arguments

A cost is paid only at events where a hook that is due names the argument. "host read" waits for the device.
"""


def events_page() -> str:
    """The whole of docs/events.md."""
    return "\n".join(_page_lines()) + "\n"


def options_table() -> str:
    """The trainer's options, as docs/training.md shows them."""
    kinds = get_type_hints(TrainerOptions)
    rows = [
        (f"`{one.name}`", f"`{_written(one.default)}`", one.metadata["about"] + _choices(kinds[one.name]))
        for one in fields(TrainerOptions)
    ]
    return "\n".join(_table(("option", "default", "what it does"), rows))


def hooks_table() -> str:
    """The built-in hooks, as docs/config.md shows them."""
    factories = {name: HOOKS.find(name) for name in HOOKS.built_in}
    rows = [
        (f"`{name}`", kind_of(factory), _visible(first_sentence(factory)), _as_code(parameter_list(factory)))
        for name, factory in factories.items()
    ]
    return "\n".join(_table(("name", "kind", "what it does", "parameters"), rows))


def names_table() -> str:
    """Everything that `hookline` exports, as docs/api.md shows it."""
    rows = [(f"`{name}`", _visible(first_sentence(getattr(hookline, name)))) for name in hookline.__all__]
    return "\n".join(_table(("name", "what it is"), rows))


MADE_TABLES: dict[str, tuple[str, Callable[[], str]]] = {  # name in the markers -> page and maker
    "trainer options": ("training.md", options_table),
    "built-in hooks": ("config.md", hooks_table),
    "public names": ("api.md", names_table),
}


def with_table(page: str, name: str, table: str) -> str:
    """The page with what stands between the markers of that name replaced."""
    begin, end = f"<!-- made: {name} -->", "<!-- made: end -->"
    found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", page, re.DOTALL)
    if found is None:
        raise SystemExit(f"the page has no lines {begin} and {end} around its table of {name}")
    return f"{page[: found.start()]}{begin}\n{table}\n{end}{page[found.end() :]}"


def _page_lines() -> Iterator[str]:
    yield HEAD
    yield "```"
    yield from diagram()
    yield "```"
    yield AFTER_DIAGRAM
    yield from _table(("argument", "what it is", "cost"), [_argument_row(name) for name in ARGUMENTS])
    yield "\n## The events, one by one"
    for event in CATALOG.values():
        yield from _section(event)


def diagram() -> Iterator[str]:
    """Every event in order, set in between the start and the end of what it is part of."""
    around: list[str] = []
    for event in CATALOG.values():
        if around and event.name == f"{around[-1]}_end":
            around.pop()
        yield f"{'  ' * len(around) + event.name:<33}{event.fires}"
        if event.name.endswith("_start"):
            around.append(event.name.removesuffix("_start"))


def _argument_row(name: str) -> tuple[str, str, str]:
    also = "".join(f", `{alias}`" for alias, meant in ARGUMENT_ALIASES.items() if meant == name)
    return f"`{name}`{also}", ARGUMENTS[name].meaning, ARGUMENTS[name].cost


def _section(event: Event) -> Iterator[str]:
    yield f"\n### {event.name}\n"
    if event.aliases:
        yield f"Also spelled {_as_code(event.aliases)}.\n"
    yield f"{event.doc}\n"
    scheduled = "a hook's schedule gates it" if event.inner else "always arrives, whatever the schedule"
    rows = [
        ("when", event.fires),
        ("gradients", event.gradients),
        ("schedule", scheduled),
        ("arguments", ", ".join(_with_cost(event, name) for name in event.attributes)),
        ("fired by hand", f"`{event.name}({', '.join(event.order)})`"),
    ]
    yield from _table((f"{event.kind} event", ""), rows)


def _with_cost(event: Event, name: str) -> str:
    return f"`{name}`" if event.free(name) else f"`{name}` ({ARGUMENTS[name].cost})"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _as_code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _visible(text: str) -> str:
    """A sentence in which ``<name>`` is not taken for a tag."""
    return text.replace("<", "&lt;")


def _choices(kind: object) -> str:
    """The words that an option may be, where it is a choice of some."""
    return f": {' or '.join(f'`{word}`' for word in get_args(kind))}" if get_origin(kind) is Literal else ""


def _written(default: object) -> str:
    """A default as a config file has it."""
    words = {None: "null", True: "true", False: "false"}
    return words[default] if default is None or isinstance(default, bool) else str(default)


def main() -> None:
    """Write the page and the tables, and say where they are."""
    DOCS.mkdir(exist_ok=True)
    (DOCS / "events.md").write_text(events_page(), encoding="utf-8")
    print("wrote docs/events.md")
    for name, (page, make) in MADE_TABLES.items():
        path = DOCS / page
        path.write_text(with_table(path.read_text(encoding="utf-8"), name, make()), encoding="utf-8")
        print(f"wrote the table of {name} in docs/{page}")


if __name__ == "__main__":
    main()
