"""Keep secrets out of everything that is written: the record, checkpoints' meta, messages and the log.

A secret is recognized by its key's name, by its value's shape, and by its origin: the value of a reference in the
config, and what stands under a secret's name in the config or the environment. A password has no shape, but an
exception that quotes one (``401 for abc123…``) is written without it, because the run knows its own secrets.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache, partial
from typing import Any
from weakref import WeakSet

from hookline._console import logger, printable
from hookline._limits import MAX_DEPTH
from hookline.errors import before_cut, traceback_text
from hookline.record import strict_json
from hookline.record.secrets import SHORTEST_SECRET, replace_secrets

REDACTED = "<redacted>"

_NO_SECRETS = frozenset({float, int, bool, type(None)})
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset({
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "webhook", "webhooks",
    "passcode", "credential", "credentials", "authorization", "bearer", "cookie", "cookies", "jwt",
    "apikey", "apikeys", "privatekey", "accesskey", "secretkey", "authkey", "authtoken", "accesstoken", "refreshtoken",
    "clientsecret",
})  # fmt: skip
_SECRET_PAIRS = frozenset({
    ("api", "key"), ("api", "keys"), ("private", "key"), ("access", "key"), ("auth", "key"), ("ssh", "key"),
    ("signing", "key"), ("encryption", "key"), ("auth", "header"), ("connection", "string"),
    ("account", "key"), ("api", "tokens"), ("auth", "tokens"), ("access", "tokens"), ("refresh", "tokens"),
    ("private", "keys"), ("access", "keys"), ("ssh", "keys"), ("master", "key"), ("service", "key"), ("storage", "key"),
    ("subscription", "key"), ("functions", "key"), ("license", "key"), ("consumer", "key"), ("deploy", "key"),
})  # fmt: skip
# "token" means a piece of text at least as often as a credential, so keys with these words keep their value.
_TEXT_TOKEN_WORDS = frozenset({
    "pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "image", "start", "end", "stop", "newline",
    "prefix", "suffix", "per", "next", "first", "last", "each", "by", "max", "min", "num", "n",
})  # fmt: skip

_REFERENCE = re.compile(r"\$\{[^{}]+\}")
# A name or a scheme is read once, from its first character on: a million letters take a moment, not hours.
_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]++://[^\s'\"<>]+")
_SCHEME_AND_HOST = re.compile(r"[^/]*//[^/]*")
_SECRET_URL = re.compile(r"://[^/?#]*@|webhook|://hooks\.", re.IGNORECASE)
_QUERY_PAIR = re.compile(r"[?&;#]([^=&;#]+)=([^&;#]*)")
_SECRET_PARAMETERS = frozenset({"key", "sig", "signature", "code", "auth"})
_LONG_PARAMETER = re.compile(r"[A-Za-z0-9._~%+/=-]{20,}")
_ASSIGNMENT = re.compile(r"(?<![\w.-])([\w.-]++)(['\"]?\s?=\s?|['\"]\s?:\s?)('[^']*'|\"[^\"]*\"|[^\s,;&)]+)")
_YAML_PAIR = re.compile(r"(?<![\w.-])([A-Za-z][\w.-]*)(:\s*)('[^']*'|\"[^\"]*\"|\$\{[^{}]*\}|[^\s,}\]]+)")
_LOOKS_RANDOM = re.compile(r"(?=.*[A-Za-z])(?=.*\d).{8,}")

# How the tokens of vendors begin, as they document it; the rest is random. No ordinary name begins like the first
# ones, so 16 characters of any kind are a token.
_OWN_PREFIXES = (
    "sk-(?:ant|proj)-", "nvapi-", "lsv2_(?:pt|sk)_", "pcsk_", "kgat_", "wandb_v1_", "tvly-", "github_pat_",
    "gl(?:pat|ptt|cbt|imt|agent|soat|ffct|oas)-", "dckr_[op]at_", "ccipat_", "figd_", "lin_(?:api|oauth)_",
    "pscale_(?:tkn|pw|oauth)_", "tskey-", "sb_secret_", "sntry[su]_", r"dt0c01\.", "gocspx-", r"ya29\.", "cfpat-",
    "avns_", "xox[abeoprs]-", r"xoxe\.", "xapp-", "xkeysib-", "shp(?:at|ca|pa|ss)_", "[sr]k_live_", "whsec_",
    "sq0(?:atp|csp)-",
)  # fmt: skip
# Names begin like these as well (sk-learn-pipeline, hf_bert_base_uncased), so a token has 16 letters and digits in a
# row, not letters alone, or exactly the length that its vendor gives it: one of Hugging Face has 34 letters.
_PREFIXES = (
    # models and machine learning
    "hf_", "api_org_", "[sr]k-", "gsk_", "xai-", "pplx-", "r8_", "fw_", "rpa_", "jina_", "cpk_", "csk-",
    # code, packages and builds
    "gh[pousr]_", "gl(?:dt|rt|ft)-", "npm_", "pypi-", "rubygems_", "bkua_", "clojars_", "pul-", "pmak-", "sq[apu]_",
    "ntn_",
    # clouds, databases and monitoring
    r"dp\.(?:pt|st|ct|sa|scim|audit)\.", r"hv[sbr]\.", "do[opr]_v1_", "nfp_", "fo1_", "fm[12][ar]?_", "hrku-", "sbp_",
    "gl(?:sa|c)_", "nra[kl]-", "p8e-", "age-secret-key-1", "pnu_", "rdme_",
    # messages, shops and payments
    "[sr]k_(?:test|prod)_", "shippo_(?:live|test)_", "flwseck_", "duffel_(?:live|test)_", "ez[at]k", "pat-(?:na|eu)1-",
    r"sl\.", "secret_", "fio-u-", "tfp_",
    # any other vendor's that follows the same convention
    "[a-z][a-z0-9]{1,9}_(?:live|test|prod|pat|tkn|key|secret|token)_(?=[a-z0-9]{24})",
)  # fmt: skip
_RANDOM = "[A-Za-z0-9_.=-]{0,60}?(?=[A-Za-z]{0,60}[0-9])[A-Za-z0-9]{16}[A-Za-z0-9_.=~-]*"
_OF_KNOWN_LENGTH = (
    "(?:(?:hf|api_org)_[A-Z]{34}|(?:gh[pousr]|npm)_[A-Z0-9]{36}|gl(?:dt|rt|ft)-[A-Z0-9_-]{20}(?![_-]))(?![A-Z0-9])"
)
_TOKEN = re.compile(
    rf"(?<![A-Za-z0-9])(?:(?:{'|'.join(_OWN_PREFIXES)})[A-Za-z0-9_.=~-]{{16,}}"
    rf"|(?:{'|'.join(_PREFIXES)}){_RANDOM}|{_OF_KNOWN_LENGTH})"
    # In their own case: these have no separator, and words begin like them.
    r"|(?-i:(?<![A-Za-z0-9])(?:"
    r"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9]|LTAI|AKID|AKCp|cmVmd)[A-Za-z0-9]{16,}"
    r"|(?:AIza|ATATT3|ATCTT3|EAAA|EAACEd)[A-Za-z0-9_=-]{24,}"
    r"|dapi[0-9a-f]{32}(?:-\d)?|SK[0-9a-f]{32}|key-[0-9a-f]{32}|[0-9a-f]{32}-us\d{1,2}"
    r"|eyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_.-]{10,}|eyJ[A-Za-z0-9_.-]{16,}|SG\.[A-Za-z0-9_.-]{16,}|FlyV1 \S{16,}"
    r"|[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{16,}|pat[A-Za-z0-9]{14}\.[0-9a-f]{64}"
    r"|[MNO][A-Za-z0-9_-]{23,25}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}"  # a Discord bot's
    r"|[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31,34}))"  # The secret of an Azure application.
    r"|\b\d{8,10}:[A-Za-z0-9_-]{35}\b"  # a Telegram bot's
    r"|\bbearer\s+[A-Za-z0-9._~+/=-]{8,}|(?:(?<=authorization:)|(?<=authorization: )|(?<=cookie: ))\S.*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.IGNORECASE,
)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")
_MIN_TOKEN_LENGTH = 15  # characters of the shortest secret that is recognized by shape; a named one needs = or :
_MIN_PART_LENGTH = 12  # characters of a URL's path: a shorter part may be an ordinary word


# ---- secrets known by their origin -----------------------------------------------------------------------------------


class SecretValues:
    """The secret values of one run; as long as this object exists, no redacted text contains them."""

    def __init__(self) -> None:
        self.replacements: dict[str, str] = {}
        _instances.add(self)

    def add(self, secrets: Iterable[tuple[str, str]]) -> None:
        """Add secrets, each with its replacement; short ones are skipped, because they occur in ordinary words."""
        self.replacements.update((secret, text) for secret, text in secrets if len(secret) >= SHORTEST_SECRET)
        _read_key.cache_clear()


_instances: WeakSet[SecretValues] = WeakSet()
for_good = SecretValues()  # Secrets of no particular run, kept until the process ends.


def add_secret_url(url: str) -> None:
    """From now on, remove a URL, its path and long parts of the path from every string, in any context."""
    path = _SCHEME_AND_HOST.sub("", url)
    parts = (path, path.lstrip("/"), path.partition("?")[0], *_LONG_PARAMETER.findall(path.replace("/", " ")))
    for_good.add(
        (text, REDACTED) for text in (str.__str__(url), *parts) if text == url or len(text) >= _MIN_PART_LENGTH
    )


def redact_values(text: str) -> str:
    """Return a string without the secret values of any run in this process."""
    if len(text) < SHORTEST_SECRET:
        return text
    known = list(_instances)
    return replace_secrets(text, {secret: other for values in known for secret, other in values.replacements.items()})


def find_secrets(value: Any, under_secret_key: bool = False, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield every string in a config that is secret by its origin, with its replacement.

    That is the value of a reference, and what stands under a key that names a secret. Paths are left out, because a
    record contains many and has to name them.
    """
    if isinstance(value, Mapping) and depth <= MAX_DEPTH:
        for key, item in value.items():
            yield from find_secrets(item, under_secret_key or is_secret_key(key), depth + 1)
    elif isinstance(value, (list, tuple)) and depth <= MAX_DEPTH:
        for item in value:
            yield from find_secrets(item, under_secret_key, depth + 1)
    elif isinstance(value, str):
        is_secret = under_secret_key or hasattr(value, "reference")
        if is_secret and not value.startswith(("/", "~", "${")):
            yield str.__str__(value), _reference_of(value) or REDACTED


# ---- structures ------------------------------------------------------------------------------------------------------


def redact(value: Any, *, is_secret: bool = False, depth: int = 0) -> Any:
    """Return a plain copy of a config or an ``argv`` with every secret replaced.

    Values that came from a reference (a string with an attribute ``reference``, or the text itself) become the
    reference, ``${env:NAME}``. Values under keys that look like secrets, URLs with credentials and strings with the
    shape of a token become ``<redacted>``; None, booleans and empty strings are not secret and stay.

    >>> redact({"lr": 0.1, "api_key": "abc", "url": "https://me:pw@host/x", "pad_token": "<pad>"})
    {'lr': 0.1, 'api_key': '<redacted>', 'url': '<redacted>', 'pad_token': '<pad>'}

    Args:
        value: The config, or a part of it.
        is_secret: Whether the value is under a key that names a secret.
        depth: The number of containers around the value.
    """
    if type(value) in _NO_SECRETS:  # first, because most of what is written is numbers
        return REDACTED if is_secret and type(value) in (int, float) else value
    if isinstance(value, str) and not isinstance(value, Enum):
        return _reference_of(value) or (REDACTED if is_secret and value else redact_text(value))
    if depth > MAX_DEPTH:  # a config that contains itself
        return f"<{type(value).__name__}>"
    if is_secret and not isinstance(value, Mapping):
        return REDACTED
    if strict_json.is_dataclass_instance(value):
        value = strict_json.field_values(value)
    if isinstance(value, Mapping):  # under a secret's name, the keys help a reader and the values stay hidden
        clean: dict[Any, Any] = {}
        for key, item in value.items():
            name, hide = key, is_secret
            if type(key) not in _NO_SECRETS:
                name, names_secret = _read_key(key if type(key) is str else strict_json.key_text(key))
                name, hide = strict_json.free_name(name, clean) if name in clean else name, is_secret or names_secret
            clean[name] = redact(item, is_secret=hide, depth=depth + 1)
        return clean
    plain = value if isinstance(value, (list, tuple)) else strict_json.simplify(value)
    if isinstance(plain, (list, tuple)):
        items: list[Any] = []
        after_secret_flag = False  # in an ``argv``, what follows ``--token`` is its value
        for item in plain:
            is_flag = isinstance(item, str) and _FLAG.fullmatch(item) is not None
            items.append(redact(item, is_secret=after_secret_flag and not is_flag, depth=depth + 1))
            after_secret_flag = is_flag and is_secret_key(item)
        return items
    return redact_text(plain) if isinstance(plain, str) else plain


def is_secret_key(key: Any) -> bool:
    """Return whether a key's name says that its value is a secret: ``hf_token`` does, ``pad_token`` does not."""
    return isinstance(key, str) and _read_key(str.__str__(key))[1]


def redact_name(name: Any) -> str:
    """Return the name of a metric or a layer without the secrets in it; a known name takes 0.1 µs."""
    return _read_key(name if type(name) is str else strict_json.key_text(name))[0]


@lru_cache(maxsize=8192)  # a record has the same keys and names line after line
def _read_key(name: str) -> tuple[str, bool]:
    """Return a key without the secrets in it, and whether it names one."""
    words = [word.lower() for word in _WORDS.findall(name)]
    names_secret = (
        not _SECRET_WORDS.isdisjoint(words)
        or not _SECRET_PAIRS.isdisjoint(itertools.pairwise(words))
        or (words[-1:] == ["token"] and _TEXT_TOKEN_WORDS.isdisjoint(words))
    )
    return redact_text(name), names_secret


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


# ---- texts -----------------------------------------------------------------------------------------------------------


def redact_text(text: str) -> str:
    """Return a string (a message, a command line) without the secrets in it; all other words stay."""
    text = redact_values(str.__str__(text))
    if len(text) < _MIN_TOKEN_LENGTH and "=" not in text and ":" not in text:  # most words that Hookline writes
        return text
    for shape, redacted in _RULES:
        text = shape.sub(redacted, text)
    return text


before_cut.append(redact_text)


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
    """Redact pairs that are data: inside braces, in a header, before a URL, a quoted string or one that looks random.

    A sentence such as "token: expected a string" has no secret.
    """
    name, colon, value = match.groups()
    is_data = "-" in name or match.string[: match.start()].rstrip().endswith(("{", ","))
    if colon != ":":
        is_data = is_data or "://" in value or value[0] in "'\"" or _LOOKS_RANDOM.fullmatch(value) is not None
    return _redact_assignment(match) if is_data else match.group()


_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (_URL, _redact_url), (_ASSIGNMENT, _redact_assignment), (_YAML_PAIR, _redact_yaml_pair), (_TOKEN, REDACTED),
)  # fmt: skip


# ---- the log ---------------------------------------------------------------------------------------------------------


@contextmanager
def redacted_log() -> Iterator[None]:
    """Keep secrets and control characters out of Hookline's log inside the block: exceptions may quote either."""
    # Runs may overlap, and a logger has the same filter only once, so each run adds one that equals no other.
    redact_record = partial(_redact_log_record)
    logger.logger.addFilter(redact_record)
    try:
        yield
    finally:
        logger.logger.removeFilter(redact_record)


def _redact_log_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(redact_text(record.getMessage())), ()
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not record.exc_text:
        record.exc_text = printable(redact_values(traceback_text(error).rstrip("\n")))
    return True
