"""The command `hookline`: its arguments, what only a command line may allow, and how errors are shown.

Each command is a module, imported when it is run; `make_parser` has the list. Nothing imports this folder.
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
from typing import Any

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
from hookline.cli.completion import SHELLS, PrintCompletion
from hookline.cli.latest import resolve_latest
from hookline.errors import ConfigError, HooklineError, error_text, nearest

Commands = argparse._SubParsersAction  # argparse has no public name for it

DONE, FAILED, USAGE, NON_FINITE, INTERRUPTED, CLOSED_PIPE, TERMINATED = 0, 1, 2, 3, 130, 141, 143
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

_CONFIG = "a YAML, TOML or JSON file; without one, the default job"
_PATTERN = "a name, a glob or re:regex, as for a hook's `modules:`"
_LATEST = "`latest` is the newest run in runs/, DIR/latest the newest in DIR"
_OVERRIDES = "changes one value, for instance trainer.max_steps=100 or hooks.clip_norm.max_norm=0.5"
PERMISSIONS = {  # what a config alone may not do: the option, its attribute, its metavar and its help
    "--allow": ("allow", "PREFIX", "let the config import from this package of yours"),
    "--allow-host": ("allow_hosts", "HOST", "let webhooks connect to this local or private host"),
    "--import": ("imports", "MODULE", "import this module of yours first, for what it registers"),
}


class Parser(argparse.ArgumentParser):
    """A parser that prints as the commands do: argparse itself ignores that its help cannot be written."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stderr:
            print_line(message, file, end="")
        else:
            CommandOutput().write(message)


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
        for argument in {"run", "weights"} & vars(options).keys():
            if getattr(options, argument) is not None:
                setattr(options, argument, resolve_latest(getattr(options, argument)))
        with user_imports(options):
            return int(import_module(options.module).run(options))
    except OutputError:
        raise
    except KeyboardInterrupt:
        print_line("hookline: interrupted", sys.stderr)
        return INTERRUPTED
    except Exception as error:
        references = sys.modules.get("hookline.config.references")  # importing it would take longer than the command
        return print_error(error, options.debug, USAGE, hide=references.without_values if references else str)


def read_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; words (the config, overrides) may stand before, after and between the options."""
    known = next(action.choices for action in parser._actions if isinstance(action, Commands))
    command = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if command is not None and command not in known:
        parser.error(f"there is no command {command!r}; {nearest(command, known)}")
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
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if rest:
        options.words += rest
    return options


@contextmanager
def user_imports(options: argparse.Namespace) -> Iterator[None]:
    """Import the modules of `--import`, and let webhooks connect to the hosts of `--allow-host`.

    Typing `--import` or `--allow` is consent to running the code that is there. Until the command ends, modules of the
    current directory are found first, and those hosts are allowed.
    """
    modules, allowed, hosts = (getattr(options, name, []) for name in ("imports", "allow", "allow_hosts"))
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
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))  # which hook raised it, for instance
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


def make_parser() -> argparse.ArgumentParser:
    """Define the commands and their options."""
    codes = exit_code_table()
    parser = Parser(
        prog="hookline",
        description="Watch, debug and change a PyTorch training run without forking its loop.",
        epilog=f"`hookline train` trains a small demo model.\n`hookline COMMAND --help` describes a command.\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hookline {__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print a completion script for this shell (needs hookline[completion])",
    )
    parser.set_defaults(command=None, debug=False)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")

    train = _add(commands, "train", "train what a config describes")
    _add_config(train)
    train.add_argument("--fast-dev-run", type=int, metavar="N", help="try N batches of everything and write nothing")
    train.add_argument("--output", metavar="DIR", help="where the run's directory is created (trainer.output_dir)")
    _add_hook(train)
    _add_device(train)

    _add(commands, "example", "print the config of the default job, to start from")

    resume = _add(commands, "resume", "continue a run from its newest good checkpoint")
    resume.add_argument("run", metavar="RUN", help=f"the run's directory, or one of its checkpoints; {_LATEST}")
    resume.add_argument("words", nargs="*", metavar="a.b=value", help=_OVERRIDES)
    resume.add_argument("--fork", action="store_true", help="begin a new run from there, with its own directory")
    _add_device(resume)
    _add_permissions(resume)

    checkpoints = _add(commands, "checkpoints", "list the checkpoints of a run, and verify them")
    checkpoints.add_argument("run", metavar="RUN", help=f"the run's directory; {_LATEST}")
    one = _add(commands, "verify-checkpoint", "check that one checkpoint is as it was written", "checkpoints")
    one.add_argument("path", metavar="PATH", help="the checkpoint's directory")

    verify = _add(commands, "verify", "find out which hooks change training, and through what")
    _add_config(verify)
    verify.add_argument("--steps", type=_positive, default=20, metavar="N", help="how many steps to compare (20)")
    _add_hook(verify)
    _add_device(verify)

    explain = _add(commands, "explain", "print which hooks run when, in which order and why")
    _add_config(explain)
    explain.add_argument("--event", metavar="NAME", help="only this event")
    _add_hook(explain)

    events = _add(commands, "events", "print the events of a run with their arguments")
    events.add_argument("--event", metavar="NAME", help="one event in full")

    hooks = _add(commands, "hooks", "print the hooks a config may name, and their parameters")
    hooks.add_argument("hooks", nargs="?", metavar="NAME", help="one hook in full")
    _add_permissions(hooks, "--import")

    schema = _add(commands, "schema", "print the JSON Schema of config files, for editors")
    schema.add_argument("--output", metavar="FILE", help="write it to this file")
    _add_permissions(schema, "--import")

    modules = _add(commands, "modules", "print the modules of a model, or those of a pattern")
    _add_config(modules, pattern=True)
    modules.add_argument("--json", action="store_true", help="print JSON, for programs")
    _add_device(modules)

    replay = _add(commands, "replay", "run the batch of a crash again, to reproduce its NaN")
    replay.add_argument("crash", metavar="CRASH", help="a crash's folder, for instance runs/…/crashes/step-00000042")
    replay.add_argument(
        "--weights", metavar="CHECKPOINT", help="the weights, of a checkpoint or a run, if the crash folder has none"
    )
    _add_device(replay)
    _add_permissions(replay)
    return parser


def _add(commands: Commands[Parser], name: str, about: str, module: str = "") -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    parser.set_defaults(module=f"hookline.cli.{module or name}")
    return parser


def _add_config(parser: argparse.ArgumentParser, pattern: bool = False) -> None:
    words = {"CONFIG": _CONFIG, **({"PATTERN": _PATTERN} if pattern else {}), "a.b=value": _OVERRIDES}
    meaning = ". ".join(f"{word}: {about}" for word, about in words.items())
    parser.add_argument("words", nargs="*", metavar=" | ".join(words), help=meaning)
    _add_permissions(parser)


def _add_hook(parser: argparse.ArgumentParser) -> None:
    about = "add this hook to the config's; hooks.NAME.key=value sets its parameters (may be repeated)"
    parser.add_argument("--hook", action="append", default=[], metavar="NAME", help=about)


def _add_device(parser: argparse.ArgumentParser) -> None:
    about = "where to run, for instance cpu or cuda:1; by default the best device there is"
    parser.add_argument("--device", metavar="DEVICE", help=about)


def exit_code_table() -> str:
    """Return the exit codes and their meanings, as `--help` prints them."""
    width = min(shutil.get_terminal_size().columns - 2, 100)
    lines = [
        textwrap.fill(about, width, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
        for code, about in EXIT_CODES.items()
    ]
    return "\n".join(["\nexit codes:", *lines])


def _add_permissions(parser: argparse.ArgumentParser, *options: str) -> None:
    """Add these options of `PERMISSIONS`, or all of them."""
    for option in options or PERMISSIONS:
        name, metavar, about = PERMISSIONS[option]
        about = f"{about} (may be repeated)"
        parser.add_argument(option, action="append", default=[], dest=name, metavar=metavar, help=about)


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {word!r}")
    return int(word)
