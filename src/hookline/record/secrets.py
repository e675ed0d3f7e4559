"""Replace secrets in text: as they are, and in the encodings that messages, URLs and headers use."""

from __future__ import annotations

import base64
import html
import json
import re
import string
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

SHORTEST_SECRET = 8  # characters; shorter strings occur in ordinary words
_UNRESERVED = f"{string.ascii_letters}{string.digits}-._~".encode("ascii")
_NOT_ESCAPED = (_UNRESERVED, _UNRESERVED + b"/", b"")  # by percent-encoding in a query, in a path, and of every byte


def replace_secrets(text: str, replacements: Mapping[str, str]) -> str:
    """Replace secrets in text: the longest first, in upper or lower case, and in common encodings."""
    lowered = text.lower()
    quoted = {
        spelling: replacement
        for secret, replacement in replacements.items()
        for spelling in spellings(secret)
        if spelling.form.lower() in lowered
    }
    if not quoted:
        return text
    longest_first = sorted(quoted, key=lambda spelling: -len(spelling.form))  # one may contain another
    pattern = "|".join(f"({spelling.pattern})" for spelling in longest_first)
    others = [quoted[spelling] for spelling in longest_first]
    return re.sub(pattern, lambda match: others[(match.lastindex or 1) - 1], text, flags=re.IGNORECASE)


class Spelling(NamedTuple):
    """One way to write a word, with a pattern that also covers neighboring characters that reveal a part of it."""

    form: str
    pattern: str


@lru_cache(maxsize=1024)
def spellings(word: str) -> tuple[Spelling, ...]:
    """Return a word as it is, as a repr, JSON or HTML has it, percent-encoded once or twice, in hex and in base64."""
    data = word.encode("utf-8", "surrogatepass")
    escaped = ["".join(chr(byte) if byte in safe else f"%{byte:02X}" for byte in data) for safe in _NOT_ESCAPED]
    plain = [word, repr(word)[1:-1], json.dumps(word)[1:-1], *escaped, escaped[0].replace("%20", "+"), data.hex()]
    plain += [text.replace("%", "%25") for text in escaped[:2]]
    plain += [html.escape(word), "".join(f"\\u{ord(char):04x}" if char in "&<>'" else char for char in plain[2])]
    patterns = {form: re.escape(form) for form in plain}
    for before in range(3):  # how many bytes the rest of a string may shift the word by
        encoded = base64.b64encode(bytes(before) + data).decode("ascii").rstrip("=")
        # The first and last characters depend on the characters around the word, but reveal a part of it.
        standard = encoded[(0, 2, 3)[before] : (before + len(data)) * 8 // 6]
        for form in (standard, standard.replace("+", "-").replace("/", "_")):
            patterns[form] = f"[A-Za-z0-9+/_-]{{0,3}}{re.escape(form)}[A-Za-z0-9+/_-]{{0,3}}={{0,2}}"
    return tuple(Spelling(form, pattern) for form, pattern in patterns.items())
