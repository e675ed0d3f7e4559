"""Fixtures for the tests of reading runs."""

from record_fixtures import no_secrets_of_other_tests, record

__all__ = ["no_secrets_of_other_tests", "record"]
