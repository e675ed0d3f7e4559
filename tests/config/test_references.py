"""References to the environment."""

import copy

import pytest

from hookline.config.references import Resolved, resolve_references, restore_references
from hookline.errors import ConfigError
from hookline.record.redaction import redact

WRITTEN = {"hooks": {"lifecycle": [{"name": "x", "url": "https://h/${env:TOKEN}"}]}, "n": "${env:N}", "plain": "a"}
VARIABLES = {"TOKEN": "s3cret", "N": "5"}


def test_references_are_resolved_everywhere() -> None:
    """References inside strings, lists and mappings are replaced; the written tree stays as it was."""
    resolved = resolve_references(WRITTEN, VARIABLES)
    assert resolved["hooks"]["lifecycle"][0]["url"] == "https://h/s3cret"
    assert (resolved["n"], resolved["plain"]) == ("5", "a")
    assert WRITTEN["n"] == "${env:N}"


def test_references_come_back_for_the_record() -> None:
    """The recorded config holds the references, also where the value has become a number."""
    settings = {**resolve_references(WRITTEN, VARIABLES), "n": 5, "default": 1}
    restored = restore_references(settings, WRITTEN)
    assert redact(restored) == {**WRITTEN, "default": 1}
    assert restored["hooks"]["lifecycle"][0]["url"] == "https://h/s3cret"  # so that the record knows what to hide


def test_the_record_writes_the_reference() -> None:
    """A resolved string knows its reference, which is what redaction writes in its place."""
    value = resolve_references("${env:TOKEN}", VARIABLES)
    assert isinstance(value, Resolved)
    assert redact({"anything": value}) == {"anything": "${env:TOKEN}"}


def test_a_copy_keeps_its_reference() -> None:
    """Copying a resolved string, as making a record does, does not turn it into a bare secret."""
    value = copy.deepcopy({"x": Resolved("s3cret", "${env:TOKEN}")})["x"]
    assert (value, value.reference) == ("s3cret", "${env:TOKEN}")


def test_a_missing_variable_is_named_with_its_path() -> None:
    """The error says where the reference stands, which variable is not set, and the nearest that is."""
    with pytest.raises(ConfigError) as caught:
        resolve_references({"a": [{"b": "${env:TOKN}"}]}, VARIABLES)
    assert caught.value.path == "a.0.b"
    assert caught.value.problem == "the environment variable 'TOKN' is not set; did you mean 'TOKEN'?"


def test_other_references_are_refused() -> None:
    """Something that only looks like a reference is an error, not text."""
    with pytest.raises(ConfigError, match=r"x: \$\{file:/etc\} is not a reference"):
        resolve_references({"x": "${file:/etc}"})
