"""Checkpoints' names made from templates: ``epoch_{epoch}_loss_{val/loss:.2f}``.

A template may come from anybody's config file, and metrics may have any name. So a field is looked up, never evaluated;
formats are short; and whatever a value looks like, no name leads out of the directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter

from hookline.errors import ConfigError

LONGEST = 150  # characters, of the 255 that file systems take: temporary names are longer
ALWAYS_THERE = ("epoch", "step")
RESERVED = ("best", "last", "manifest.json")  # links go by the first two; the last makes a folder a checkpoint

_SAFE = re.compile(r"[A-Za-z0-9._=-]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]+")
_FORMAT = re.compile(r"0?\d{0,2}(\.\d{1,2})?[deEfgG]?")


class FileName:
    """A template for a checkpoint's name, checked when it is made.

    >>> FileName("epoch_{epoch}_loss_{val/loss:.2f}").fill(3, 120, {"val/loss": 0.1234})
    'epoch_3_loss_0.12'
    >>> FileName("{epoch}-{val/loss:.2f}", with_names=True).fill(3, 120, {"val/loss": 0.1234})
    'epoch=3-val_loss=0.12'
    """

    def __init__(self, template: str, with_names: bool = False, path: str = "filename") -> None:
        self.template, self.with_names, self._path = template, with_names, path
        try:
            parts = list(Formatter().parse(template))
        except (TypeError, ValueError) as error:
            raise self._refusal(f"{error}; write fields as {{epoch}} or {{val/loss:.2f}}") from None
        self._parts = [(text, field, form or "") for text, field, form, _ in parts]
        for text, field, form, conversion in parts:
            self._check(text, field, form or "", conversion)
        if not template or template.startswith(".") or len(template) > LONGEST or template in RESERVED:
            words = f"not empty, without a leading dot, at most {LONGEST} characters, and not {' or '.join(RESERVED)}"
            raise self._refusal(f"a name must be {words}")

    @property
    def fields(self) -> list[str]:
        """The metrics it names."""
        return [field for _, field, _ in self._parts if field and field not in ALWAYS_THERE]

    def fill(self, epoch: int, step: int, metrics: Mapping[str, float]) -> str:
        """The name at a step; a metric that was not measured there is written as 'none'."""
        values = {**metrics, "epoch": epoch, "step": step}
        name = "".join(text + self._filled(field, form, values) for text, field, form in self._parts)
        safe = _UNSAFE.sub("_", name)[:LONGEST]
        return f"_{safe}" if safe.startswith(".") or safe in RESERVED else safe

    def _filled(self, field: str | None, form: str, values: Mapping[str, float]) -> str:
        if field is None:
            return ""
        value = format(values[field], form) if field in values else "none"
        return f"{field}={value}" if self.with_names else value

    def _check(self, text: str, field: str | None, form: str, conversion: str | None) -> None:
        if not _SAFE.fullmatch(text):
            raise self._refusal(f"{_UNSAFE.findall(text)[0]!r} cannot be in a name; use letters, digits and . _ = -")
        if field == "" or conversion:
            raise self._refusal("a field is a metric's name, and perhaps a format: {val/loss:.2f}")
        if field is not None and not self._fits(field, form):
            example = "08d" if field in ALWAYS_THERE else ".2f"
            raise self._refusal(f"{form!r} is no format for {field}; {example!r} is one")

    def _fits(self, field: str, form: str) -> bool:
        """Whether the value will take the format: counts are whole numbers, metrics are not."""
        if not _FORMAT.fullmatch(form):
            return False
        try:
            format(1 if field in ALWAYS_THERE else 1.0, form)
        except ValueError:
            return False
        return True

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(self._path, f"{self.template!r}: {problem}")
