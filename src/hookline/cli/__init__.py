"""The command `hookline`: its commands, the permissions that only a command line can grant, and the display of errors.

Each command is a module with its arguments, imported when it is typed. Nothing imports this folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hookline import __version__
from hookline._console import is_terminal, print_line, printable
from hookline._words import nearest
from hookline.cli.arguments import resolve_runs, suggest_override
from hookline.cli.completion import SHELLS, PrintCompletion
from hookline.cli.output import CommandOutput, OutputError, drop_unwritten_output, replace_missing_characters
from hookline.errors import ConfigError, HooklineError, error_text, notes_of
from hookline.record.outcome import TERMINATED, Outcome

DONE, FAILED = Outcome.COMPLETED.exit_code, Outcome.FAILED.exit_code
NON_FINITE, INTERRUPTED = Outcome.NON_FINITE.exit_code, Outcome.INTERRUPTED.exit_code
USAGE, CLOSED_PIPE = 2, 141
EXIT_CODES = {
    DONE: "success, even when a hook stopped the run",
    FAILED: "training failed, a check found something, or the output could not be written",
    USAGE: "invalid config or usage, or the record cannot be written; nothing was trained",
    NON_FINITE: "the run ended with NaN or infinite weights, or nan_forensics stopped it",
    INTERRUPTED: "interrupted by Ctrl-C after saving a checkpoint; the command that resumes the run is printed",
    CLOSED_PIPE: "the reader of the output closed the pipe",
    TERMINATED: "ended by SIGTERM; otherwise like Ctrl-C",
}

_MAX_MESSAGE_LENGTH = 2000  # characters: a screen

# The purpose of each command, in the order of `hookline --help`. Each command is a module of that name with
# `ARGUMENTS` and `run`. It is imported when it is typed, and imports slow packages (torch) only in `run`.
COMMANDS = {
    "train": "train from a config",
    "run": "run an unmodified training script, and record its training",
    "example": "print the config of the default job, to start from",
    "resume": "continue a run from its newest good checkpoint",
    "evaluate": "measure a trained model on its validation data, or on other data",
    "predict": "write a trained model's predictions, one line of JSON per example",
    "runs": "list the runs of a directory",
    "label": "print or change the name, tags and notes of a run",
    "tail": "print the last metrics and events of a run, and follow it",
    "plot": "plot metrics of one or more runs, one chart each",
    "show": "print one run at a glance: outcome, curves, alerts, costs, checkpoints",
    "compare": "compare runs, and find the first step at which they diverge",
    "checkpoints": "list the checkpoints of a run, and verify them",
    "verify-checkpoint": "check that a checkpoint is undamaged",
    "verify": "check which hooks change training",
    "explain": "print which hooks run when and why",
    "events": "print the events of a run with their arguments",
    "hooks": "list the hooks that you can use in a config",
    "schema": "print the JSON Schema of config files",
    "modules": "print the modules of a model",
    "export": "export the record of a run as tables",
    "report": "write report.html for one run, or for several to compare",
    "replay": "replay the batch of a crash",
    "help": "read the documentation offline",
}


class UsageError(HooklineError):
    """A command line has a wrong command or wrong arguments."""


class Parser(argparse.ArgumentParser):
    """A parser that omits options from its usage, raises its errors, and prints like the commands."""

    def add_arguments_of(self, command: str) -> None:
        """Add the arguments of a command, whose module is imported, and those that all commands have."""
        usage = [self.prog]
        for name, settings in module_of(command).ARGUMENTS.items():
            action = self.add_argument(name, **settings)
            if action.required or not action.option_strings:  # words and required options, such as RUN --to FORMAT
                value = str(action.metavar)
                forms = {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ..."}
                usage += [*action.option_strings, forms.get(str(action.nargs), value)]
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self.usage = " ".join([*usage, "[options]"])

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; the config and overrides may come before, after and between the options."""
        # argparse accepts positional arguments in one group only, and its parse_intermixed_args does not support
        # subcommands, so words after an option end up in the rest.
        options, rest = self.parse_known_args(arguments)
        takes_words = hasattr(options, "words")
        unknown = [word for word in rest if word.startswith("-") or not takes_words]
        if unknown:
            override = suggest_override(unknown[0], arguments) if takes_words else ""
            hint = f"; to change a value of the config, write {override}" if takes_words else ""
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        # Only the help distinguishes these from other words, which may also come first.
        named = (getattr(options, name, None) for name in ("config", "pattern"))
        options.words = [*(word for word in named if word is not None), *getattr(options, "words", []), *rest]
        return options

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error, which names no remedy."""
        raise UsageError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        CommandOutput().write(message)  # argparse itself ignores a failure to write its help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status, even if its output cannot be written."""
    replace_missing_characters(sys.stdout)
    stop: SystemExit | None = None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = print_warning
            status = run_command(sys.argv[1:] if arguments is None else arguments)
    except OutputError as error:
        drop_unwritten_output()
        return print_output_failure(error)
    except SystemExit as error:  # argparse raises it after printing help, and user code may raise it, too
        status, stop = 0, error
    failure = drop_unwritten_output()
    if failure is not None and not status:
        return print_output_failure(failure)
    if stop is not None:
        raise stop
    return status


def run_command(arguments: Sequence[str]) -> int:
    """Parse the arguments, run the command they name, and return the exit status."""
    debug = "--debug" in arguments  # until they are parsed, which imports the command
    try:
        options = read_arguments(arguments)
        options.arguments, debug = list(arguments), options.debug
        if options.command is None:
            make_parser().print_help()
            return 0
        resolve_runs(options)
        with user_imports(options):
            return int(module_of(options.command).run(options))
    except UsageError as error:
        print_line(f"hookline: error: {error}", sys.stderr)
        raise SystemExit(USAGE) from None
    except OutputError:
        raise
    except KeyboardInterrupt:
        print_line("hookline: interrupted", sys.stderr)
        return INTERRUPTED
    except Exception as error:
        references = sys.modules.get("hookline.config.references")  # importing it would take longer than the command
        return print_error(error, debug, USAGE, hide=references.without_values if references else str)


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; only the module of the command that it names is imported.

    Raises:
        UsageError: If the command does not exist, or does not take these arguments.
    """
    typed = next((word for word in arguments if not word.startswith("-")), "")
    if typed not in COMMANDS and [typed] == list(arguments[:1]):
        raise UsageError(f"no command is named {typed!r}; {nearest(typed, COMMANDS, '`hookline --help`')}")
    return make_parser(typed).read(arguments)


def module_of(command: str) -> ModuleType:
    """Import the module of a command."""
    return import_module(f"hookline.cli.{command.replace('-', '_')}")


@contextmanager
def user_imports(options: argparse.Namespace) -> Iterator[None]:
    """Import the modules of `--import`, and let webhooks connect to the hosts of `--allow-host`.

    Typing `--import` or `--allow` is consent to running the code in it. Until the command ends, modules of the
    current directory are found first, and those hosts are allowed.
    """
    modules, allowed, hosts = (getattr(options, name, []) for name in ("imports", "allow", "allow_host"))
    try:
        here = str(Path.cwd())
    except OSError as error:  # in such a place, torch's libraries end the process without a helpful message
        raise HooklineError("the current directory was removed; change to one that exists (cd ..)") from error
    with ExitStack() as stack:
        if modules or allowed:
            sys.path.insert(0, here)
            # The user's code may have removed it.
        stack.callback(lambda: sys.path.remove(here) if here in sys.path else None)
        for name in modules:
            import_user_module(name)
        if hosts:  # a command that sends nothing need not load the webhook client
            from hookline.hooks.webhook import hosts_allowed

            stack.enter_context(hosts_allowed(hosts))
        overrides = (word.partition("=") for word in getattr(options, "words", []))
        if stores := [value for name, _, value in overrides if name.endswith(".tracking_uri")]:
            from hookline.hooks.trackers.mlflow import stores_allowed

            stack.enter_context(stores_allowed(stores))
        yield


def import_user_module(name: str) -> None:
    """Import a module, so that its decorators register what they decorate."""
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        # './parts/mine.py' was probably meant as 'parts.mine'.
        guess = ".".join(part for part in Path(name).with_suffix("").parts if part != ".")
        valid = bool(guess) and all(part.isidentifier() for part in guess.split("."))
        remedy = f"write --import {guess if valid else 'mypackage.mymodule'}"
        raise HooklineError(f"--import {name}: not a module name; {remedy}")
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
    # Our messages are whole sentences; other exceptions need the name of their class ("KeyError: 'x'").
    ours = isinstance(error, HooklineError)
    text = str(error) if ours else error_text(error)
    place = f"{error.path}: " if isinstance(error, ConfigError) and error.path else ""  # a path holds no secrets
    notes = "".join(f"; {note}" for note in notes_of(error))  # Notes say which hook raised it, for instance.
    hint = "" if ours or debug else " (--debug shows the traceback)"
    message = one_line(f"{place}{hide(text.removeprefix(place))}{hide(notes)}")
    _print_wrapped(f"hookline: error: {message}{hint}")
    return status


def print_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print a `RuntimeWarning`, as Hookline's are, like an error; others with their place in the code, as Python does.

    The arguments are those of `warnings.showwarning`, which this function replaces.
    """
    if issubclass(category, RuntimeWarning):
        _print_wrapped(f"hookline: warning: {one_line(str(message))}")
    else:
        print_line(warnings.formatwarning(message, category, filename, lineno, line), sys.stderr, end="")


def _print_wrapped(line: str) -> None:
    """Print a line on stderr; a terminal would break it inside a word, files and pipes get one line."""
    if is_terminal(sys.stderr):
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print_line(line, sys.stderr)


def one_line(text: str) -> str:
    """Make a message safe for the console: no line breaks, no control characters, of bounded length."""
    half = _MAX_MESSAGE_LENGTH // 2
    cut = text if len(text) <= _MAX_MESSAGE_LENGTH else f"{text[:half]} … {text[-half:]}"  # the remedy is at the end
    return printable(" ".join(cut.split()))


def make_parser(*commands: str) -> Parser:
    """Define all commands by name; those that are passed here also get their arguments."""
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
    subparsers = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", prog="hookline")
    for name, about in COMMANDS.items():
        command = subparsers.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        if name in commands:
            command.add_arguments_of(name)
    return parser


def exit_code_table() -> str:
    """Return the exit codes and their meanings, as `--help` prints them."""
    width = min(shutil.get_terminal_size().columns - 2, 100)
    lines = [
        textwrap.fill(about, width, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
        for code, about in EXIT_CODES.items()
    ]
    return "\n".join(["\nexit codes:", *lines])
