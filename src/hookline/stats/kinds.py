# mypy: implicit-reexport
"""Moved to hookline.stats.tensor_meta."""

from hookline.stats.tensor_meta import PLAIN_TYPES as PLAIN  # noqa: F401
from hookline.stats.tensor_meta import TensorMeta as Kinds  # noqa: F401
from hookline.stats.tensor_meta import tensor_meta as kinds_of  # noqa: F401
