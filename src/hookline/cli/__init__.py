"""The command `hookline`. Each command lies in a module of its own, which is imported when it is called."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from hookline import __version__
from hookline.errors import ConfigError, HooklineError, nearest

Commands = argparse._SubParsersAction  # argparse has no public name for it

FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143

_LONGEST_MESSAGE = 2000  # characters

_CONFIG = "a YAML, TOML or JSON file; without one, the default job"
_PATTERN = "a name, a glob or re:regex, as hooks have it under `modules:`"
_OVERRIDES = "changes one value, for instance trainer.max_steps=100 or hooks.clip_norm.max_norm=0.5"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0, 1 (training failed), 2 (wrong config or usage), 130 (Ctrl-C) or 143 (SIGTERM).
    """
    parser = make_parser()
    options = read_arguments(parser, sys.argv[1:] if arguments is None else arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        from hookline.cli.hosts import allowed_hosts
        from hookline.cli.own_code import own_code

        with own_code(options), allowed_hosts(options):
            return int(import_module(options.module).run(options))
    except BrokenPipeError:  # the reader has seen enough (`hookline events | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return tell_interrupted()
    except Exception as error:
        references = sys.modules.get("hookline.config.references")  # to import it would take longer than the command
        return tell_error(error, options.debug, USAGE, hide=references.without_values if references else str)


def read_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Words (the config, overrides) may stand before, after and between the options."""
    _check_command(parser, arguments)
    options, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(options, "words")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], options, arguments)}")
    if rest:
        options.words += rest
    return options


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """A misspelt command is told the nearest one."""
    known = next(action.choices for action in parser._actions if isinstance(action, Commands))
    word = next((word for word in arguments if not word.startswith("-")), None)
    if word is not None and word not in known:
        parser.error(f"there is no command {word!r}; {nearest(word, known)}")


def _hint(unknown: str, options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """What an option that does not exist was probably meant to change: a value of the config."""
    if not unknown.startswith("-") or not hasattr(options, "words"):
        return ""
    from hookline.cli.settings import meant_override

    return f"; a value of the config is changed by {meant_override(unknown, arguments)}"


def tell_interrupted(where: str = "") -> int:
    """Ctrl-C is no error. Returns the exit status."""
    print(f"hookline: interrupted{where}", file=sys.stderr, flush=True)
    return INTERRUPTED


def tell_error(error: BaseException, debug: bool, status: int, hide: Callable[[str], str] = str) -> int:
    """One line for what went wrong; the whole traceback only on request. Returns the exit status.

    `hide` takes secrets out of the words, which may be anybody's.
    """
    if debug:
        print(hide("".join(traceback.format_exception(error))), end="", file=sys.stderr, flush=True)
    ours = isinstance(error, HooklineError)
    text = str(error) if ours else f"{type(error).__name__}: {error}".rstrip(": ")
    place = f"{error.path}: " if isinstance(error, ConfigError) and error.path else ""  # of our own making
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))  # which hook it was, say
    hint = "" if ours or debug else " (--debug shows the traceback)"
    words = f"{place}{hide(text.removeprefix(place))}{hide(notes)}"
    print(f"hookline: error: {one_line(words)}{hint}", file=sys.stderr, flush=True)
    return status


def one_line(text: str) -> str:
    """A message for the console, whoever chose its words: no line breaks, nothing a terminal obeys, not endless."""
    half = _LONGEST_MESSAGE // 2
    cut = text if len(text) <= _LONGEST_MESSAGE else f"{text[:half]} … {text[-half:]}"  # the remedy stands at the end
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in " ".join(cut.split()))


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="hookline",
        description="Watch, debug and change a PyTorch training run without forking its loop.",
        epilog="hookline train trains a small model at once; hookline COMMAND --help says what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"hookline {__version__}")
    parser.set_defaults(command=None, debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_train(commands)
    _add(commands, "example", "example", "print the config of the default job, to begin your own with")
    _add_resume(commands)
    _add_checkpoints(commands)
    _add_verify(commands)
    _add_explain(commands)
    _add_events(commands)
    _add_hooks(commands)
    _add_schema(commands)
    _add_modules(commands)
    _add_replay(commands)
    return parser


def _add(commands: Commands[argparse.ArgumentParser], name: str, module: str, about: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    parser.set_defaults(module=f"hookline.cli.{module}")
    return parser


def _add_config(parser: argparse.ArgumentParser, pattern: bool = False) -> None:
    """What a config is made of and, where a command takes them, patterns."""
    words = {"CONFIG": _CONFIG, "PATTERN": _PATTERN, "a.b=value": _OVERRIDES}
    if not pattern:
        del words["PATTERN"]
    meaning = ". ".join(f"{word}: {what}" for word, what in words.items())
    parser.add_argument("words", nargs="*", metavar=" | ".join(words), help=meaning)
    _add_allow(parser)


def _add_allow(parser: argparse.ArgumentParser) -> None:
    """What a config alone may not do: import the user's own code, reach hosts that are not public."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PREFIX",
        help="let the config import from this package of yours (may be repeated)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        dest="allow_hosts",
        metavar="HOST",
        help="let webhooks lead to this local or private host (may be repeated)",
    )
    _add_import(parser)


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this module of yours first, for what it registers (may be repeated)",
    )


def _add_train(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "train", "train", "train what a config describes")
    _add_config(parser)
    parser.add_argument("--fast-dev-run", type=int, metavar="N", help="try N batches of everything and write nothing")
    parser.add_argument("--output", metavar="DIR", help="where the run's directory is made (trainer.output_dir)")


def _add_resume(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "resume", "resume", "go on with a run, from its newest whole checkpoint")
    parser.add_argument("run", metavar="RUN", help="the run's directory, or one of its checkpoints")
    parser.add_argument("words", nargs="*", metavar="a.b=value", help=f"a.b=value: {_OVERRIDES}")
    parser.add_argument("--fork", action="store_true", help="begin a new run from there, with its own directory")
    _add_allow(parser)


def _add_checkpoints(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "checkpoints", "checkpoints", "the checkpoints of a run, and whether they are whole")
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    one = _add(commands, "verify-checkpoint", "verify_checkpoint", "whether a checkpoint is as it was written")
    one.add_argument("path", metavar="PATH", help="the checkpoint's directory")


def _at_least_one(word: str) -> int:
    """A number of an option that means nothing below 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1; got {word!r}")
    return int(word)


def _add_verify(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "verify", "verify", "which hooks of a config change training, when and through what")
    _add_config(parser)
    parser.add_argument("--steps", type=_at_least_one, default=20, metavar="N", help="how many steps to compare (20)")


def _add_explain(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "explain", "explain", "which hook of a config runs when, in which order and why")
    _add_config(parser)
    parser.add_argument("--event", metavar="NAME", help="only this event")


def _add_modules(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "modules", "modules", "the modules of a config's model, and which a pattern selects")
    _add_config(parser, pattern=True)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_events(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "events", "events", "the events of a run, in order, and what hooks may name there")
    parser.add_argument("--event", metavar="NAME", help="one event in full")


def _add_hooks(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "hooks", "hooks", "the hooks that a config may name, with their parameters")
    _add_import(parser)


def _add_schema(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "schema", "schema", "the JSON Schema of config files, for editors")
    parser.add_argument("--output", metavar="FILE", help="write it to this file")
    _add_import(parser)


def _add_replay(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "replay", "replay", "run the batch of a crash again, to the same NaN")
    parser.add_argument("crash", metavar="CRASH", help="a crash's folder, for instance runs/…/crashes/step-00000042")
    parser.add_argument("--weights", metavar="CHECKPOINT", help="the weights, for a crash without its own")
    parser.add_argument("--device", metavar="DEVICE", help="where to run it; by default the best device there is")
    _add_allow(parser)
