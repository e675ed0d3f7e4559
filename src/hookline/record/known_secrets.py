"""Secrets that are known by where they came from: their text is replaced wherever it would be written.

A password has no shape. But a run knows its own: what a reference stood for, and what stood under a secret's name.
An exception that quotes one (`401 for abc123…`) is recorded without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from hookline.errors import SHORTEST_HIDDEN, hidden


class KnownSecrets:
    """The secrets of one run. As long as somebody keeps this object, no text that is redacted shows them."""

    def __init__(self) -> None:
        self.instead: dict[str, str] = {}
        _holders.add(self)

    def learn(self, secrets: Iterable[tuple[str, str]]) -> None:
        """Take each secret, and what to write in its place; short ones are left."""
        self.instead.update((secret, instead) for secret, instead in secrets if len(secret) >= SHORTEST_HIDDEN)


_holders: WeakSet[KnownSecrets] = WeakSet()
for_good = KnownSecrets()  # of no run in particular: kept until the process ends


def without_known(text: str) -> str:
    """A text without the secrets that any run in this process knows."""
    if len(text) < SHORTEST_HIDDEN:
        return text
    return hidden(text, {secret: instead for holder in list(_holders) for secret, instead in holder.instead.items()})
