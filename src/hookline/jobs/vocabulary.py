"""Characters as numbers."""

import string
from collections.abc import Iterable

_KEPT_CHARACTERS = frozenset(string.digits + string.ascii_letters + string.punctuation + " \n\t")


class Vocabulary:
    """Characters and their numbers; every character it does not know is the one symbol with number 0.

    >>> vocab = Vocabulary.of_text("abba")
    >>> vocab.encode("bay")
    [2, 1, 0]
    >>> vocab.decode([2, 1])
    'ba'
    """

    UNKNOWN = "\N{REPLACEMENT CHARACTER}"

    def __init__(self, characters: Iterable[str]) -> None:
        self.symbols = (self.UNKNOWN, *sorted(set(characters) - {self.UNKNOWN}))
        self._ids = {symbol: number for number, symbol in enumerate(self.symbols)}

    @classmethod
    def of_text(cls, text: str) -> "Vocabulary":
        """Build from the characters of `text` that are printable ASCII, newline or tab."""
        return cls(_KEPT_CHARACTERS.intersection(text))

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Give one number per character."""
        unknown = self._ids[self.UNKNOWN]
        return [self._ids.get(character, unknown) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Give the text back; unknown characters come out as U+FFFD."""
        return "".join(self.symbols[number] for number in ids)
