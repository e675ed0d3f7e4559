"""`hookline --print-completion SHELL`: print a script that completes commands, options, files and names in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from hookline._console import CommandOutput

SHELLS = ("bash", "zsh")
FILES, DIRECTORIES = ("config", "output"), ("run", "path", "crash", "weights")  # arguments that are paths


class PrintCompletion(argparse.Action):
    """Print the script and exit, as `--version` does."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Print the script; shtab makes it from the parser."""
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs the package shtab: pip install 'hookline[completion]'")
        from hookline.core.catalog import CATALOG
        from hookline.core.plugins import HOOKS

        names = {"hooks": HOOKS.names(), "hook": HOOKS.names(), "event": list(CATALOG)}
        for action in _all_actions(parser):
            if action.dest in FILES + DIRECTORIES:
                action.complete = shtab.FILE if action.dest in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.dest in names:
                action.choices = names[action.dest]
        CommandOutput().write(f"{shtab.complete(parser, shell=values)}\n")
        parser.exit()


def _all_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and words of a parser and of its commands."""
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found.extend(_all_actions(command))
    return found
