"""The command `hookline`: its arguments, what only a command line may allow, and how errors are shown.

Each command is a module, imported when it is run; `COMMANDS` is the list. Nothing imports this folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from hookline import __version__
from hookline._console import (
    CommandOutput,
    OutputError,
    drop_unwritten_output,
    is_terminal,
    print_line,
    printable,
    replace_missing_characters,
)
from hookline._words import nearest
from hookline.cli.completion import SHELLS, PrintCompletion
from hookline.cli.find_run import resolve_run
from hookline.errors import ConfigError, HooklineError, error_text, notes_of
from hookline.record.outcome import Outcome

DONE, FAILED = Outcome.COMPLETED.exit_code, Outcome.FAILED.exit_code
NON_FINITE, INTERRUPTED = Outcome.NON_FINITE.exit_code, Outcome.INTERRUPTED.exit_code
USAGE, CLOSED_PIPE, TERMINATED = 2, 141, 143
EXIT_CODES = {
    DONE: "done; also for a run that a hook stopped",
    FAILED: "training failed, a check found something, or the output could not be written",
    USAGE: "wrong config or usage, or a record that cannot be written; nothing was trained",
    NON_FINITE: "the run ended with weights that are NaN or infinite",
    INTERRUPTED: "interrupted by Ctrl-C, after a checkpoint was saved; the command that continues the run is printed",
    CLOSED_PIPE: "the reader of the output closed the pipe",
    TERMINATED: "ended by SIGTERM, as by Ctrl-C",
}

_LONGEST_MESSAGE = 2000  # characters


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {word!r}")
    return int(word)


PERMISSIONS = {"--allow": "allow", "--allow-host": "allow_host", "--import": "imports"}  # not for a config to give
_RUN_NAMES = (
    "`latest` is the newest run in runs/, DIR/latest the newest in DIR; "
    "its name or the beginning or end of its id is enough"
)
_REPEATED: dict[str, Any] = {"action": "append", "default": []}
# Every argument of a command: its name (for an option as it is written) and, where it has a value, what stands for it.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "config CONFIG": {"nargs": "?", "help": "a YAML, TOML or JSON file; without one, the default job"},
    "pattern PATTERN": {"nargs": "?", "help": "a name, a glob or re:regex, as for a hook's `modules:`"},
    "words a.b=value": {"nargs": "*", "default": [], "help": "change a value: trainer.seed=1, hooks.ema.decay=0.99"},
    "run RUN": {"help": f"a run's directory; {_RUN_NAMES}"},
    "runs RUN": {"nargs": "+", "help": f"runs' directories; {_RUN_NAMES}"},
    "directory DIR": {"nargs": "?", "default": "runs", "help": "the directory of the runs (runs)"},
    "run RUN|CHECKPOINT": {"help": f"the directory of a run, or of the checkpoint to continue from; {_RUN_NAMES}"},
    "path CHECKPOINT": {"help": "the checkpoint's directory"},
    "crash CRASH": {"help": "a crash's folder, for instance runs/…/crashes/step-00000042"},
    "hooks NAME": {"nargs": "?", "help": "one hook in full"},
    "--hook NAME": {**_REPEATED, "help": "add this hook; hooks.NAME.key=value sets its parameters"},
    "--fast-dev-run N": {"type": int, "help": "try N batches of everything and write nothing"},
    "--output DIR": {"help": "where the run's directory is created (trainer.output_dir)"},
    "--output FILE": {"help": "write it to this file"},
    "--output FOLDER": {"help": "write the files into this directory, new or empty (<run_id>-export)"},
    "--to FORMAT": {"required": True, "choices": ("csv", "parquet", "jsonl"), "help": "csv, parquet or jsonl"},
    "--fork": {"action": "store_true", "help": "begin a new run from there, with its own directory"},
    "--steps N": {"type": _positive, "default": 20, "help": "how many steps to compare (20)"},
    "--event NAME": {"help": "one event"},
    "--name TEXT": {"help": "the run's name; an empty one removes it"},
    "--name WORD": {"help": "only runs whose name contains this"},
    "--notes TEXT": {"help": "a text about the run; an empty one removes it"},
    "--tag TAG": {**_REPEATED, "help": "add this tag"},
    "--tag WORD": {**_REPEATED, "help": "only runs with this tag"},
    "--untag TAG": {**_REPEATED, "help": "remove this tag"},
    "--outcome OUTCOME": {"help": "only runs that ended like this, such as failed, or are running or killed"},
    "--sort KEY": {"default": "started", "help": "started, id, name, outcome, best, steps or duration (started)"},
    "--reverse": {"action": "store_true", "help": "print them in the opposite order"},
    "--limit N": {"type": _positive, "help": "print at most N"},
    "--lines N": {"type": _positive, "default": 10, "help": "print the last N first (10)"},
    "--metric NAME": {**_REPEATED, "help": "draw this metric; without one, train/loss and val/loss"},
    "--metrics": {"action": "store_true", "help": "print all metrics of the run, and nothing else"},
    "--log": {"action": "store_true", "help": "draw the values on a logarithmic axis"},
    "--output IMAGE": {"help": "write an .svg or .png file instead; needs matplotlib, hookline[plot]"},
    "--json": {"action": "store_true", "help": "print JSON, for programs"},
    "--weights CHECKPOINT": {"help": "the weights, of a checkpoint or a run, if the crash folder has none"},
    "--device DEVICE": {"help": "where to run, such as cpu or cuda:1; by default the best there is"},
    "--import MODULE": {**_REPEATED, "dest": "imports", "help": "import your module first, for what it registers"},
    "--allow PREFIX": {**_REPEATED, "help": "let the config import from this package of yours"},
    "--allow-host HOST": {**_REPEATED, "help": "let webhooks connect to this local or private host"},
    "--debug": {"action": "store_true", "help": "show the traceback of an error"},
}
_TRUST = ("--import MODULE", "--allow PREFIX", "--allow-host HOST")
_RUN = ("--device DEVICE", *_TRUST)
_OVERRIDES = "words a.b=value"
_FROM_CONFIG = ("config CONFIG", _OVERRIDES)
_FILTERS = ("--tag WORD", "--outcome OUTCOME", "--name WORD")
COMMANDS: dict[str, tuple[str, Sequence[str]]] = {
    "train": ("train from a config", (*_FROM_CONFIG, "--hook NAME", "--fast-dev-run N", "--output DIR", *_RUN)),
    "example": ("print the config of the default job, to start from", ()),
    "resume": ("continue a run from its newest good checkpoint", ("run RUN|CHECKPOINT", _OVERRIDES, "--fork", *_RUN)),
    "runs": (
        "list the runs of a directory",
        ("directory DIR", *_FILTERS, "--sort KEY", "--reverse", "--limit N", "--json"),
    ),
    "label": (
        "print or change the name, tags and notes of a run",
        ("run RUN", "--name TEXT", "--tag TAG", "--untag TAG", "--notes TEXT", "--json"),
    ),
    "tail": ("print the last metrics and events of a run, and follow it", ("run RUN", "--lines N", "--json")),
    "plot": (
        "draw metrics of runs over each other",
        ("runs RUN", "--metric NAME", "--log", "--output IMAGE", "--json"),
    ),
    "show": (
        "print one run at a glance: outcome, curves, alerts, costs, checkpoints",
        ("run RUN", "--metrics", "--json"),
    ),
    "compare": ("compare runs, and find the first step at which they part", ("runs RUN", "--json")),
    "checkpoints": ("list the checkpoints of a run, and verify them", ("run RUN", "--json")),
    "verify-checkpoint": ("check that one checkpoint is as it was written", ("path CHECKPOINT", "--json")),
    "verify": ("find out which hooks change training", (*_FROM_CONFIG, "--hook NAME", "--steps N", "--json", *_RUN)),
    "explain": (
        "print which hooks run when and why",
        (*_FROM_CONFIG, "--hook NAME", "--event NAME", "--json", *_TRUST),
    ),
    "events": ("print the events of a run with their arguments", ("--event NAME", "--json")),
    "hooks": ("print the hooks that a config may name", ("hooks NAME", "--json", "--import MODULE")),
    "schema": ("print the JSON Schema of config files", ("--output FILE", "--import MODULE")),
    "modules": ("print the modules of a model", ("config CONFIG", "pattern PATTERN", _OVERRIDES, "--json", *_RUN)),
    "export": ("write the record of a run as tables", ("run RUN", "--to FORMAT", "--output FOLDER", "--json")),
    "report": ("write report.html, of one run or of several to compare", ("runs RUN", "--output FILE")),
    "replay": ("run the batch of a crash again", ("crash CRASH", "--weights CHECKPOINT", "--json", *_RUN)),
}


class Parser(argparse.ArgumentParser):
    """A parser that prints as the commands do: argparse itself ignores that its help cannot be written."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stderr:
            print_line(message, file, end="")
        else:
            CommandOutput().write(message)

    def error(self, message: str) -> NoReturn:
        """End the command with an error of argparse, which has no remedy in it."""
        self.fail(f"{message}; see {self.prog} --help")

    def fail(self, message: str) -> NoReturn:
        """Print one line, as for every other error, and exit."""
        self.exit(USAGE, f"hookline: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status, also if its output cannot be written."""
    replace_missing_characters(sys.stdout)
    stop: SystemExit | None = None
    try:
        status = run_command(sys.argv[1:] if arguments is None else arguments)
    except OutputError as error:
        drop_unwritten_output()
        return print_output_failure(error)
    except SystemExit as error:  # of argparse, which has printed help or an error, or of code of the user
        status, stop = 0, error
    failure = drop_unwritten_output()
    if failure is not None and not status:
        return print_output_failure(failure)
    if stop is not None:
        raise stop
    return status


def run_command(arguments: Sequence[str]) -> int:
    """Parse the arguments, run the command they name, and return the exit status."""
    parser = make_parser()
    options = read_arguments(parser, arguments)
    options.arguments = list(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        for argument in {"run", "runs", "weights"} & vars(options).keys():
            given = getattr(options, argument)
            if given is not None:
                listed = given if isinstance(given, list) else [given]
                is_run = argument != "weights"  # which may also be a checkpoint
                found = [resolve_run(one, must_exist=is_run) for one in listed]
                setattr(options, argument, found if isinstance(given, list) else found[0])
        with user_imports(options):
            return int(import_module(f"hookline.cli.{options.module}").run(options))
    except OutputError:
        raise
    except KeyboardInterrupt:
        print_line("hookline: interrupted", sys.stderr)
        return INTERRUPTED
    except Exception as error:
        references = sys.modules.get("hookline.config.references")  # importing it would take longer than the command
        return print_error(error, options.debug, USAGE, hide=references.without_values if references else str)


def read_arguments(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; words (the config, overrides) may stand before, after and between the options."""
    command = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if command is not None and command not in COMMANDS:
        parser.fail(f"no command is named {command!r}; {nearest(command, COMMANDS, '`hookline --help`')}")
    # argparse takes words in one group only, and its parse_intermixed_args knows no subcommands: words after an option
    # are in the rest.
    options, rest = parser.parse_known_args(arguments)
    takes_words = hasattr(options, "words")
    unknown = [word for word in rest if word.startswith("-") or not takes_words]
    if unknown:
        hint = ""
        if takes_words:
            from hookline.cli.config_args import suggest_override

            hint = f"; to change a value of the config, write {suggest_override(unknown[0], arguments)}"
        parser.fail(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    first = (getattr(options, name, None) for name in ("config", "pattern"))
    options.words = [*(word for word in first if word is not None), *getattr(options, "words", []), *rest]
    return options


@contextmanager
def user_imports(options: argparse.Namespace) -> Iterator[None]:
    """Import the modules of `--import`, and let webhooks connect to the hosts of `--allow-host`.

    Typing `--import` or `--allow` is consent to running the code that is there. Until the command ends, modules of the
    current directory are found first, and those hosts are allowed.
    """
    modules, allowed, hosts = (getattr(options, name, []) for name in ("imports", "allow", "allow_host"))
    here = str(Path.cwd())
    with ExitStack() as stack:
        if modules or allowed:
            sys.path.insert(0, here)
            stack.callback(lambda: sys.path.remove(here) if here in sys.path else None)  # that code may have removed it
        for name in modules:
            import_user_module(name)
        if hosts:  # a command that sends nothing need not load the webhook client
            from hookline.hooks.webhook import hosts_allowed

            stack.enter_context(hosts_allowed(hosts))
        yield


def import_user_module(name: str) -> None:
    """Import a module, so that its decorators register what they decorate."""
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        # './parts/mine.py' was probably meant as 'parts.mine'.
        guess = ".".join(part for part in Path(name).with_suffix("").parts if part != ".")
        valid = bool(guess) and all(part.isidentifier() for part in guess.split("."))
        remedy = f"write --import {guess if valid else 'mypackage.mymodule'}"
        raise HooklineError(f"--import {name}: is not the name of a module; {remedy}")
    try:
        import_module(name)
    except Exception as error:
        from hookline.config.factory import search_path_hint

        why = f"{type(error).__name__}: {error}{search_path_hint(error, name)}"
        raise HooklineError(f"--import {name}: cannot import {name!r}: {why}") from error


def print_output_failure(error: OutputError) -> int:
    """Say why standard output cannot be written, unless its reader left (`| head`), and return the exit status."""
    if isinstance(error.cause, BrokenPipeError):
        return CLOSED_PIPE
    print_line(f"hookline: error: {error}", sys.stderr)
    return FAILED


def print_error(error: BaseException, debug: bool, status: int, hide: Callable[[str], str] = str) -> int:
    """Print an error, on one line unless stderr is a terminal, and return the exit status.

    Args:
        error: The error.
        debug: Whether to print the traceback, too.
        status: The exit status.
        hide: Removes secrets from the message, which may come from any library.
    """
    if debug:
        print_line(hide("".join(traceback.format_exception(error))), sys.stderr, end="")
    # Our messages are whole sentences; those of others need the name of their class ("KeyError: 'x'").
    ours = isinstance(error, HooklineError)
    text = str(error) if ours else error_text(error)
    place = f"{error.path}: " if isinstance(error, ConfigError) and error.path else ""  # a path holds no secrets
    notes = "".join(f"; {note}" for note in notes_of(error))  # which hook raised it, for instance
    hint = "" if ours or debug else " (--debug shows the traceback)"
    message = one_line(f"{place}{hide(text.removeprefix(place))}{hide(notes)}")
    line = f"hookline: error: {message}{hint}"
    if is_terminal(sys.stderr):  # a terminal would break the line inside a word; files and pipes get one line
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print_line(line, sys.stderr)
    return status


def one_line(text: str) -> str:
    """Make a message safe for the console: no line breaks, no control characters, of bounded length."""
    half = _LONGEST_MESSAGE // 2
    cut = text if len(text) <= _LONGEST_MESSAGE else f"{text[:half]} … {text[-half:]}"  # the remedy is at the end
    return printable(" ".join(cut.split()))


def make_parser() -> Parser:
    """Define the commands and their options."""
    parser = Parser(
        prog="hookline",
        usage="hookline COMMAND ...",
        description="Watch, debug and change a PyTorch training run without forking its loop.",
        epilog=f"`hookline train` trains a small demo model.\n`hookline COMMAND --help` describes a command.\n"
        f"{exit_code_table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hookline {__version__}", help="print the version")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar="SHELL",
        help="print a script that completes commands in bash or zsh",
    )
    parser.set_defaults(command=None, debug=False)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", prog="hookline")
    for name, (about, keys) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        command.set_defaults(module="checkpoints" if name == "verify-checkpoint" else name)
        usage = ["hookline", name]
        for key in (*keys, "--debug"):
            argument, _, value = key.partition(" ")
            settings = {**_ARGUMENTS[key], **({"metavar": value} if value else {})}
            if settings.get("action") == "append":
                settings["help"] += " (may be repeated)"
            command.add_argument(argument, **settings)
            if settings.get("required"):
                usage.append(key)
            elif not argument.startswith("-"):
                words = {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ..."}
                usage.append(words.get(settings.get("nargs", ""), value))
        command.usage = " ".join([*usage, "[options]"])
    return parser


def exit_code_table() -> str:
    """Return the exit codes and their meanings, as `--help` prints them."""
    width = min(shutil.get_terminal_size().columns - 2, 100)
    lines = [
        textwrap.fill(about, width, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
        for code, about in EXIT_CODES.items()
    ]
    return "\n".join(["\nexit codes:", *lines])
