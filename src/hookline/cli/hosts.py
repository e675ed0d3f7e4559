"""`--allow-host`: hosts that webhooks may lead to although they are local or private."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def allowed_hosts(options: argparse.Namespace) -> Iterator[None]:
    """What the command line allows, until the command is over."""
    hosts = getattr(options, "allow_hosts", [])
    if not hosts:  # a command that talks to nobody need not load what talks
        yield
        return
    from hookline.hooks.webhook import hosts_allowed

    with hosts_allowed(hosts):
        yield
