"""Keep secrets out of everything that is written: the record, checkpoints' meta, messages and the log.

A secret is recognised by its key's name, by its value's shape, and by its origin: the value of a reference in the
config, and what stands under a secret's name in the config or the environment. A password has no shape, but an
exception that quotes one (``401 for abc123…``) is written without it, because the run knows its own secrets.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from typing import Any
from weakref import WeakSet

from hookline.errors import SHORTEST_HIDDEN, hidden
from hookline.record import strict_json

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
# "token" means a piece of text at least as often as a credential, so keys with these words keep their value.
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
_TOKEN = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|[sr]k-|[sr]k_live_|[sr]k_test_|npm_|pypi-|xox[abeprs]-|xapp-|AKIA|ASIA|AIza"
    r"|ya29\.|SG\.|eyJ)[A-Za-z0-9_.-]{16,}"
    r"|\b\d{8,10}:[A-Za-z0-9_-]{35}\b"  # a Telegram bot's
    r"|\bbearer\s+[A-Za-z0-9._~+/=-]{8,}|(?<=authorization: )\S.*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.IGNORECASE,
)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")
_SHORTEST_TOKEN = 15  # characters of the shortest secret that is recognised by shape; a named one needs = or :
_SHORTEST_PART = 12  # characters of a URL's path: a shorter part may be an ordinary word

_logger = logging.getLogger("hookline")
_formatter = logging.Formatter()
_open_log_filters = 0


# ---- secrets known by their origin -----------------------------------------------------------------------------------


class SecretValues:
    """The secret values of one run; as long as this object exists, no redacted text contains them."""

    def __init__(self) -> None:
        self.replacements: dict[str, str] = {}
        _instances.add(self)

    def add(self, secrets: Iterable[tuple[str, str]]) -> None:
        """Add secrets, each with its replacement; short ones are left out, as they occur in ordinary words."""
        self.replacements.update((secret, text) for secret, text in secrets if len(secret) >= SHORTEST_HIDDEN)


_instances: WeakSet[SecretValues] = WeakSet()
for_good = SecretValues()  # of no run in particular, kept until the process ends


def secrets_of_run(config: Any) -> SecretValues:
    """Collect the secrets of a run's config and of the environment."""
    secrets = SecretValues()
    secrets.add(find_secrets([config, os.environ]))
    return secrets


def add_secret_url(url: str) -> None:
    """Remove a URL, its path and long parts of the path from every text from now on, whatever the words around."""
    path = _SCHEME_AND_HOST.sub("", url)
    parts = (path, path.lstrip("/"), path.partition("?")[0], *_LONG_PARAMETER.findall(path.replace("/", " ")))
    for_good.add((one, REDACTED) for one in (str.__str__(url), *parts) if one == url or len(one) >= _SHORTEST_PART)


def redact_values(text: str) -> str:
    """Return a text without the secret values of any run in this process."""
    if len(text) < SHORTEST_HIDDEN:
        return text
    return hidden(text, {secret: other for one in list(_instances) for secret, other in one.replacements.items()})


def find_secrets(value: Any, under_secret_key: bool = False, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield every text in a config that is secret by its origin, with its replacement.

    That is the value of a reference, and what stands under a key that names a secret. Paths are left out, because a
    record contains many and has to name them.
    """
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for key, item in value.items():
            yield from find_secrets(item, under_secret_key or is_secret_key(key), depth + 1)
    elif isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        for item in value:
            yield from find_secrets(item, under_secret_key, depth + 1)
    elif isinstance(value, str):
        is_secret = under_secret_key or hasattr(value, "reference")
        if is_secret and not value.startswith(("/", "~", "${")):
            yield str.__str__(value), _reference_of(value) or REDACTED


# ---- structures ------------------------------------------------------------------------------------------------------


def redact(value: Any) -> Any:
    """Return a plain copy of a config or an ``argv`` with every secret replaced.

    Values that came from a reference (a string with an attribute ``reference``, or the text itself) become the
    reference, ``${env:NAME}``. Values under keys that look like secrets, URLs with credentials and texts with the shape
    of a token become ``<redacted>``; None, booleans and empty strings are not secret and stay.

    >>> redact({"lr": 0.1, "api_key": "abc", "url": "https://me:pw@host/x", "pad_token": "<pad>"})
    {'lr': 0.1, 'api_key': '<redacted>', 'url': '<redacted>', 'pad_token': '<pad>'}
    """
    return _redact(value, 0)


def is_secret_key(key: Any) -> bool:
    """Return whether a key's name says that its value is a secret: ``hf_token`` does, ``pad_token`` does not."""
    return isinstance(key, str) and _names_secret(str.__str__(key))


def _redact(value: Any, depth: int) -> Any:
    if type(value) in _NO_SECRETS:  # first, because most of what is written are numbers
        return value
    if type(value) is str:  # next, because `isinstance(…, Mapping)` takes longer
        return _redact_leaf(value)
    if depth > _MAX_DEPTH:  # a config that contains itself
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        return _redact_items(value, depth)
    if strict_json.is_dataclass_instance(value):
        return _redact_items(strict_json.field_values(value), depth)
    if isinstance(value, (list, tuple)):
        return _redact_sequence(value, depth)
    if isinstance(value, (set, frozenset)):
        return _redact_sequence(strict_json.simplify(value), depth)
    return _redact_leaf(value)


def _redact_items(mapping: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
    clean: dict[Any, Any] = {}
    for key, value in mapping.items():
        if type(key) is str and type(value) in _NO_SECRETS and not _names_secret(key):  # most fields of a record
            name, plain = _redact_name(key), value
        else:
            name, plain = _redact_key(key), _hide(value, depth) if is_secret_key(key) else _redact(value, depth + 1)
        clean[strict_json.free_name(name, clean) if name in clean else name] = plain
    return clean


def _redact_sequence(values: Iterable[Any], depth: int) -> list[Any]:
    """Redact items; in an ``argv``, what follows ``--token`` is its value."""
    clean: list[Any] = []
    after_secret_flag = False
    for value in values:
        is_flag = isinstance(value, str) and _FLAG.fullmatch(value) is not None
        clean.append(_hide(value, depth) if after_secret_flag and not is_flag else _redact(value, depth + 1))
        after_secret_flag = is_flag and is_secret_key(value)
    return clean


def _redact_key(key: Any) -> Any:
    if type(key) in _NO_SECRETS:
        return key
    return _redact_name(key if type(key) is str else strict_json.key_text(key))


@lru_cache(maxsize=1024)  # a record has the same keys line after line
def _redact_name(name: str) -> str:
    return _TOKEN.sub(REDACTED, _URL.sub(_redact_url, name))


def _redact_leaf(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Enum):
        return _reference_of(value) or redact_text(value)
    plain = strict_json.simplify(value)
    return redact_text(plain) if isinstance(plain, str) else plain


def _hide(value: Any, depth: int) -> Any:
    """Replace a value under a secret's name."""
    if value is None or value == "" or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _reference_of(value) or REDACTED
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:  # the keys help a reader, the values stay hidden
        return {_redact_key(key): _hide(item, depth + 1) for key, item in value.items()}
    return REDACTED


def _reference_of(value: str) -> str | None:
    """Return the reference that a value was resolved from, or the value itself if it is one.

    The text around a reference may contain another secret; then None is returned.
    """
    written = getattr(value, "reference", value)
    if not isinstance(written, str) or "${" not in written or not _REFERENCE.search(written):
        return None
    around = _REFERENCE.sub("", written)
    harmless = not around or (written is not value and redact_text(around) == around)
    return str.__str__(written) if harmless else None


@lru_cache(maxsize=1024)  # a record has the same keys line after line
def _names_secret(name: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    if not _SECRET_WORDS.isdisjoint(words) or not _SECRET_PAIRS.isdisjoint(itertools.pairwise(words)):
        return True
    return words[-1:] == ["token"] and _TEXT_TOKEN_WORDS.isdisjoint(words)


# ---- texts -----------------------------------------------------------------------------------------------------------


def redact_text(text: str) -> str:
    """Return a text (a message, a command line) without the secrets in it; all other words stay."""
    text = redact_values(str.__str__(text))
    if len(text) < _SHORTEST_TOKEN and "=" not in text and ":" not in text:  # most words that Hookline writes
        return text
    text = _URL.sub(_redact_url, text)
    text = _ASSIGNMENT.sub(_redact_assignment, text)
    text = _YAML_PAIR.sub(_redact_yaml_pair, text)
    return _TOKEN.sub(REDACTED, text)


def _redact_url(match: re.Match[str]) -> str:
    url = match.group()
    if _SECRET_URL.search(url):
        return REDACTED
    for name, value in _QUERY_PAIR.findall(url):
        named = name.lower() in _SECRET_PARAMETERS or is_secret_key(name)
        if value and (named or _LONG_PARAMETER.fullmatch(value)):
            return REDACTED
    return url


def _redact_assignment(match: re.Match[str]) -> str:
    name, equals, value = match.groups()
    if not is_secret_key(name) or _REFERENCE.fullmatch(value) or value == REDACTED:
        return match.group()
    return f"{name}{equals}{REDACTED}"


def _redact_yaml_pair(match: re.Match[str]) -> str:
    """Redact pairs inside braces or before a URL; a sentence such as "token: expected a text" has no secret."""
    inside = match.string[: match.start()].rstrip().endswith(("{", ","))
    return _redact_assignment(match) if inside or "://" in match.group(3) else match.group()


# ---- the log ---------------------------------------------------------------------------------------------------------


@contextmanager
def redacted_log() -> Iterator[None]:
    """Keep secrets out of Hookline's log inside the block: a hook that raises may quote one in its traceback.

    Runs may overlap; the last one to end removes the filter.
    """
    global _open_log_filters
    _open_log_filters += 1
    _logger.addFilter(_redact_log_record)  # a logger adds the same filter once
    try:
        yield
    finally:
        _open_log_filters -= 1
        if not _open_log_filters:
            _logger.removeFilter(_redact_log_record)


def _redact_log_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = redact_text(record.getMessage()), ()
    if record.exc_info and not record.exc_text:
        record.exc_text = redact_values(_formatter.formatException(record.exc_info))
    return True
