"""Keeping secrets out of all that is written: by the key's name, the value's shape and where it came from."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

from hookline.record import jsonsafe
from hookline.record.known_secrets import for_good, without_known

REDACTED = "<redacted>"

_MAX_DEPTH = 48
_NO_SECRETS = frozenset({float, int, bool, type(None)})
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset({
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "webhook", "webhooks",
    "credential", "credentials", "authorization", "bearer",
    "apikey", "apikeys", "privatekey", "accesskey", "secretkey", "authtoken",
})  # fmt: skip
_SECRET_PAIRS = frozenset({
    ("api", "key"), ("api", "keys"), ("private", "key"), ("access", "key"), ("auth", "key"), ("ssh", "key"),
    ("signing", "key"), ("encryption", "key"), ("auth", "header"), ("connection", "string"),
    ("account", "key"), ("api", "tokens"), ("auth", "tokens"), ("access", "tokens"), ("refresh", "tokens"),
})  # fmt: skip
# "token" means a piece of text at least as often as a credential, so these keep their value.
_TEXT_TOKEN_WORDS = frozenset({
    "pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "image", "start", "end", "stop", "newline",
    "prefix", "suffix", "per", "next", "first", "last", "each", "by", "max", "min", "num", "n",
})  # fmt: skip

_REFERENCE = re.compile(r"\$\{[^{}]+\}")
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_SCHEME_AND_HOST = re.compile(r"[^/]*//[^/]*")
_SECRET_URL = re.compile(r"://[^/?#]*@|webhook|://hooks\.", re.IGNORECASE)
_QUERY_PAIR = re.compile(r"[?&;#]([^=&;#]+)=([^&;#]*)")
_SECRET_PARAMETERS = frozenset({"key", "sig", "signature", "code", "auth"})
_LONG_PARAMETER = re.compile(r"[A-Za-z0-9._~%+/=-]{20,}")
_ASSIGNMENT = re.compile(r"([A-Za-z][\w.-]*)(['\"]?\s?=\s?|['\"]\s?:\s?)('[^']*'|\"[^\"]*\"|[^\s,;&)]+)")
_YAML_PAIR = re.compile(r"(?<![\w.-])([A-Za-z][\w.-]*)(:\s+)('[^']*'|\"[^\"]*\"|\$\{[^{}]*\}|[^\s,}\]]+)")
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|[sr]k-|[sr]k_live_|[sr]k_test_|npm_|pypi-|xox[abeprs]-|xapp-|AKIA|ASIA|AIza"
    r"|ya29\.|SG\.|eyJ)[A-Za-z0-9_.-]{16,}"
    r"|\b\d{8,10}:[A-Za-z0-9_-]{35}\b"  # a Telegram bot's
    r"|\bbearer\s+[A-Za-z0-9._~+/=-]{8,}|(?<=authorization: )\S.*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.IGNORECASE,
)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")
_SHORTEST_TOKEN = 15  # characters that a secret has which is known by its shape; a name beside it takes = or :
_SHORTEST_PART = 12  # characters of a URL's path: a shorter one may stand for something else


def keep_secret(url: str) -> None:
    """From now on take this URL, its path and long parts of that out of every text, whatever the words around are."""
    path = _SCHEME_AND_HOST.sub("", url)
    parts = (path, path.lstrip("/"), path.partition("?")[0], *_LONG_PARAMETER.findall(path.replace("/", " ")))
    for_good.learn((one, REDACTED) for one in (str.__str__(url), *parts) if one == url or len(one) >= _SHORTEST_PART)


def redact(value: Any) -> Any:
    """A plain copy of a config or an ``argv`` with every secret replaced.

    Values that came from a reference (a string with an attribute ``reference``, or the text itself) stay as
    the reference, ``${env:NAME}``. Values under keys that look like secrets, URLs with credentials and known
    shapes of tokens become ``<redacted>``; None, booleans and empty strings hold no secret and stay.

    >>> redact({"lr": 0.1, "api_key": "abc", "url": "https://me:pw@host/x", "pad_token": "<pad>"})
    {'lr': 0.1, 'api_key': '<redacted>', 'url': '<redacted>', 'pad_token': '<pad>'}
    """
    return _redact(value, 0)


def _redact(value: Any, depth: int) -> Any:
    if type(value) in _NO_SECRETS:  # first: most of what is written are numbers
        return value
    if type(value) is str:  # next: asking whether it is a mapping takes longer
        return _redact_leaf(value)
    if depth > _MAX_DEPTH:  # a config that contains itself
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        return _redact_items(value.items(), depth)
    if jsonsafe.is_dataclass_instance(value):
        return _redact_items(jsonsafe.field_values(value).items(), depth)
    if isinstance(value, (list, tuple)):
        return _redact_sequence(value, depth)
    if isinstance(value, (set, frozenset)):
        return _redact_sequence(jsonsafe.simplify(value), depth)
    return _redact_leaf(value)


def _redact_items(items: Iterable[tuple[Any, Any]], depth: int) -> dict[Any, Any]:
    clean: dict[Any, Any] = {}
    for key, value in items:
        if type(key) is str and type(value) in _NO_SECRETS and not _says_secret(key):  # as most of a record's lines
            name, plain = _shown(key), value
        else:
            name, plain = _plain_key(key), _hide(value, depth) if is_secret_key(key) else _redact(value, depth + 1)
        clean[jsonsafe.free_name(name, clean) if name in clean else name] = plain
    return clean


def _plain_key(key: Any) -> Any:
    if type(key) in (int, float, bool, type(None)):
        return key
    return _shown(key if type(key) is str else jsonsafe.key_text(key))


@lru_cache(maxsize=1024)
def _shown(name: str) -> str:
    """A key without what has the shape of a secret; a record's are the same line after line."""
    return _KNOWN_TOKEN.sub(REDACTED, _URL.sub(_redact_url, name))


def _redact_sequence(values: Iterable[Any], depth: int) -> list[Any]:
    """Also an ``argv``: what follows ``--token`` is its value."""
    clean: list[Any] = []
    after_secret_flag = False
    for value in values:
        hidden = after_secret_flag and not _is_flag(value)
        clean.append(_hide(value, depth) if hidden else _redact(value, depth + 1))
        after_secret_flag = _is_flag(value) and is_secret_key(value)
    return clean


def _is_flag(value: Any) -> bool:
    return isinstance(value, str) and _FLAG.fullmatch(value) is not None


def _redact_leaf(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Enum):
        return _reference_of(value) or redact_text(value)
    plain = jsonsafe.simplify(value)
    return redact_text(plain) if isinstance(plain, str) else plain


def _hide(value: Any, depth: int) -> Any:
    """The replacement for a value under a secret's name."""
    if value is None or value == "" or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _reference_of(value) or REDACTED
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:  # the keys help a reader, the values stay hidden
        return {_plain_key(key): _hide(item, depth + 1) for key, item in value.items()}
    return REDACTED


def _reference_of(value: str) -> str | None:
    """The reference that a value was resolved from, or the value itself when it is one.

    The text around a reference may hold a secret of its own; then it is not shown.
    """
    written = getattr(value, "reference", value)
    if not isinstance(written, str) or "${" not in written or not _REFERENCE.search(written):
        return None
    around = _REFERENCE.sub("", written)
    shows_all = not around or (written is not value and redact_text(around) == around)
    return str.__str__(written) if shows_all else None


def secrets_in(value: Any, named: bool = False, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every text in a config that is secret by where it came from, with what is written in its place.

    That is what a reference stood for, and what stands under a key that names a secret (`named`: a key above did).
    Paths are left: a record is full of them, and has to name them.
    """
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for key, item in value.items():
            yield from secrets_in(item, named or is_secret_key(key), depth + 1)
    elif isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        for item in value:
            yield from secrets_in(item, named, depth + 1)
    elif isinstance(value, str) and (named or hasattr(value, "reference")) and not value.startswith(("/", "~", "${")):
        yield str.__str__(value), _reference_of(value) or REDACTED


def is_secret_key(key: Any) -> bool:
    """Whether a key's name says that its value is a secret: ``hf_token`` does, ``pad_token`` does not."""
    return isinstance(key, str) and _says_secret(str.__str__(key))


@lru_cache(maxsize=1024)
def _says_secret(name: str) -> bool:
    """The same for a name; a record's are the same line after line."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not _SECRET_WORDS.isdisjoint(words):
        return True
    if not _SECRET_PAIRS.isdisjoint(itertools.pairwise(words)):
        return True
    return words[-1:] == ["token"] and _TEXT_TOKEN_WORDS.isdisjoint(words)


def redact_text(text: str) -> str:
    """A text (a message, a command line) without the secrets in it; all other words stay."""
    text = without_known(str.__str__(text))
    if len(text) < _SHORTEST_TOKEN and "=" not in text and ":" not in text:  # as most words of ours
        return text
    text = _URL.sub(_redact_url, text)
    text = _ASSIGNMENT.sub(_redact_assignment, text)
    text = _YAML_PAIR.sub(_redact_yaml_pair, text)
    return _KNOWN_TOKEN.sub(REDACTED, text)


def _redact_url(match: re.Match[str]) -> str:
    url = match.group()
    secret = _SECRET_URL.search(url) or any(_is_secret_parameter(*pair) for pair in _QUERY_PAIR.findall(url))
    return REDACTED if secret else url


def _is_secret_parameter(name: str, value: str) -> bool:
    named = name.lower() in _SECRET_PARAMETERS or is_secret_key(name)
    return bool(value) and (named or _LONG_PARAMETER.fullmatch(value) is not None)


def _redact_assignment(match: re.Match[str]) -> str:
    name, equals, value = match.groups()
    if not is_secret_key(name) or _REFERENCE.fullmatch(value) or value == REDACTED:
        return match.group()
    return f"{name}{equals}{REDACTED}"


def _redact_yaml_pair(match: re.Match[str]) -> str:
    """Inside braces, or before a URL; in a sentence such as "token: expected a text" there is no secret."""
    inside = match.string[: match.start()].rstrip().endswith(("{", ","))
    return _redact_assignment(match) if inside or "://" in match.group(3) else match.group()
