"""How validation errors of pydantic become error messages."""

from pydantic import BaseModel

from hookline.config.errors import raises_config_error
from hookline.config.references import Resolved
from hookline.errors import ConfigError, got, shown


def test_a_long_value_is_cut_short() -> None:
    """An error message stays readable whatever the value."""
    assert shown("x" * 500) == f"'{'x' * 56}… (str)"


def test_a_resolved_secret_is_shown_as_its_reference() -> None:
    """The value of an environment variable never gets into an error message, wherever it stands."""
    secret = Resolved("hunter2", "${env:PASSWORD}")
    assert got(secret) == "which ${env:PASSWORD} does not hold"
    assert got([secret, {"key": (secret, 1)}]) == "got ['${env:PASSWORD}', {'key': ('${env:PASSWORD}', 1)}] (list)"


def test_the_outermost_class_reports_the_path() -> None:
    """A decorated class inside another one does not cut the path short."""

    @raises_config_error(lambda path: "inner.", lambda path: ["size"])
    class Inner(BaseModel):
        size: int

    @raises_config_error(lambda path: "", lambda path: ["parts"])
    class Outer(BaseModel):
        parts: list[Inner]

    try:
        Outer(parts=[{"size": 1}, {"size": "big"}])  # type: ignore[list-item]
    except ConfigError as error:
        assert error.path == "parts.1.size"
        assert error.__cause__ is None
    else:
        raise AssertionError("not refused")
