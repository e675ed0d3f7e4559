"""References to environment variables."""

import copy

import pytest

from hookline.config.references import Resolved, resolve_references, restore_references
from hookline.errors import ConfigError
from hookline.record.redaction import redact

WRITTEN = {"hooks": {"lifecycle": [{"name": "x", "url": "https://h/${env:TOKEN}"}]}, "n": "${env:N}", "plain": "a"}
VARIABLES = {"TOKEN": "s3cret", "N": "5"}


def test_references_are_resolved_everywhere() -> None:
    """References in strings, lists and mappings are replaced in a copy of the config."""
    resolved = resolve_references(WRITTEN, VARIABLES)
    assert resolved["hooks"]["lifecycle"][0]["url"] == "https://h/s3cret"
    assert (resolved["n"], resolved["plain"]) == ("5", "a")
    assert WRITTEN["n"] == "${env:N}"


def test_references_are_restored_for_the_record() -> None:
    """The recorded config has the references, also where the value became a number."""
    settings = {**resolve_references(WRITTEN, VARIABLES), "n": 5, "default": 1}
    restored = restore_references(settings, WRITTEN)
    assert redact(restored) == {**WRITTEN, "default": 1}
    assert restored["hooks"]["lifecycle"][0]["url"] == "https://h/s3cret"  # so that the record knows what to hide


def test_the_record_writes_the_reference() -> None:
    """A resolved string has its reference, which redaction writes in its place."""
    value = resolve_references("${env:TOKEN}", VARIABLES)
    assert isinstance(value, Resolved)
    assert redact({"anything": value}) == {"anything": "${env:TOKEN}"}


def test_a_copy_keeps_its_reference() -> None:
    """A copy of a resolved string still has its reference."""
    value = copy.deepcopy({"x": Resolved("s3cret", "${env:TOKEN}")})["x"]
    assert (value, value.reference) == ("s3cret", "${env:TOKEN}")


def test_a_missing_variable_is_named_with_its_path() -> None:
    """The error names the path, the variable that is not set, and the nearest one that is."""
    with pytest.raises(ConfigError) as caught:
        resolve_references({"a": [{"b": "${env:TOKN}"}]}, VARIABLES)
    assert caught.value.path == "a.0.b"
    assert caught.value.problem == "the environment variable 'TOKN' is not set; did you mean 'TOKEN'?"


def test_malformed_references_are_refused() -> None:
    """A malformed reference is an error, and not taken as text."""
    with pytest.raises(ConfigError, match=r"x: \$\{file:/etc\} is not a reference"):
        resolve_references({"x": "${file:/etc}"})
