# mypy: implicit-reexport
"""Moved to hookline.stats.borrowed."""

from hookline.stats.borrowed import borrowing as lending  # noqa: F401
from hookline.stats.borrowed import is_borrowed as on_loan  # noqa: F401
from hookline.stats.borrowed import threads as lenders  # noqa: F401
