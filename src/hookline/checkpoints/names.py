"""Make checkpoint names from templates such as ``epoch_{epoch}_loss_{val/loss:.2f}``.

Templates come from config files and metrics may have any name. Fields are therefore looked up and never evaluated,
formats are short, and no value can make a name point outside the directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter

from hookline.errors import ConfigError

MAX_LENGTH = 150  # File systems accept 255 characters, and temporary names are longer.
COUNTERS = ("epoch", "step")
RESERVED = ("best", "last", "manifest.json")  # two names of links, and the file that makes a directory a checkpoint

_SAFE = re.compile(r"[A-Za-z0-9._=-]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]+")
_FORMAT = re.compile(r"0?\d{0,2}(\.\d{1,2})?[deEfgG]?")


class NameTemplate:
    """A template for checkpoint names; raises `ConfigError` at construction if it is invalid.

    >>> NameTemplate("epoch_{epoch}_loss_{val/loss:.2f}").fill(3, 120, {"val/loss": 0.1234})
    'epoch_3_loss_0.12'
    >>> NameTemplate("{epoch}-{val/loss:.2f}", with_names=True).fill(3, 120, {"val/loss": 0.1234})
    'epoch=3-val_loss=0.12'

    Args:
        template: The text, with fields as in `str.format`: ``epoch``, ``step`` or the name of a metric.
        with_names: Whether every value is preceded by ``name=``.
    """

    def __init__(self, template: str, with_names: bool = False) -> None:
        self.template, self.with_names = template, with_names
        try:
            parts = list(Formatter().parse(template))
        except (TypeError, ValueError) as error:
            raise self._error(f"{error}; write fields as {{epoch}} or {{val/loss:.2f}}") from None
        self._parts = [(text, field, form or "") for text, field, form, _ in parts]
        for text, field, form, conversion in parts:
            if not _SAFE.fullmatch(text):
                raise self._error(f"{_UNSAFE.findall(text)[0]!r} cannot be in a name; use letters, digits and . _ = -")
            if field == "" or conversion:
                raise self._error("a field is a metric's name, optionally with a format: {val/loss:.2f}")
            if field is not None and not _accepts(field, form or ""):
                example = "08d" if field in COUNTERS else ".2f"
                raise self._error(f"{form!r} is not a format for {field}; try {example!r}")
        if not template or template.startswith(".") or len(template) > MAX_LENGTH or template in RESERVED:
            rule = f"not empty, without a leading dot, at most {MAX_LENGTH} characters, and not {' or '.join(RESERVED)}"
            raise self._error(f"a name must be {rule}")

    @property
    def fields(self) -> list[str]:
        """The metrics that the template names."""
        return [field for _, field, _ in self._parts if field and field not in COUNTERS]

    def fill(self, epoch: int, step: int, metrics: Mapping[str, float]) -> str:
        """Return the name for a step; a metric that was not measured then is written as 'none'."""
        values, name = {**metrics, "epoch": epoch, "step": step}, ""
        for text, field, form in self._parts:
            name += text
            if field is not None:
                name += f"{field}=" if self.with_names else ""
                name += format(values[field], form) if field in values else "none"
        # Metrics may have any name and value, so the resulting name is checked again.
        safe = _UNSAFE.sub("_", name)[:MAX_LENGTH]
        return f"_{safe}" if safe.startswith(".") or safe in RESERVED else safe

    def _error(self, problem: str) -> ConfigError:
        return ConfigError("filename", f"{self.template!r}: {problem}")


def _accepts(field: str, form: str) -> bool:
    """Return whether a field's value accepts the format: epoch and step are integers, metrics are floats."""
    if not _FORMAT.fullmatch(form):  # checked first: a width of ten digits would take gigabytes
        return False
    try:
        format(1 if field in COUNTERS else 1.0, form)
    except ValueError:
        return False
    return True
