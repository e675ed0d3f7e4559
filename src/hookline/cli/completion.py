"""`hookline --print-completion SHELL`: print a script that completes commands, options, files and names in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from hookline.cli.output import CommandOutput

SHELLS = ("bash", "zsh")
# Arguments that are paths.
FILES, DIRECTORIES = ("config", "output", "data"), ("run", "path", "crash", "weights", "checkpoint")


class PrintCompletion(argparse.Action):
    """Print the script and exit, as `--version` does."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Print the script; shtab makes it from the parser."""
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs the package shtab: pip install 'hookline[completion]'")
        from hookline.cli import COMMANDS, make_parser
        from hookline.core.catalog import CATALOG
        from hookline.core.plugins import HOOKS

        names = {"hooks": HOOKS.names(), "hook": HOOKS.names(), "event": list(CATALOG)}
        parser = make_parser(*COMMANDS)
        commands: Any = next(action.choices for action in parser._actions if action.dest == "command")
        parsers = [parser, *commands.values()]
        for action in (action for each in parsers for action in each._actions):
            if action.dest in FILES + DIRECTORIES:
                action.complete = shtab.FILE if action.dest in FILES else shtab.DIRECTORY
            elif action.dest in names:
                action.choices = names[action.dest]
        CommandOutput().write(f"{shtab.complete(parser, shell=values)}\n")
        parser.exit()
