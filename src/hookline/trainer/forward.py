"""Moved to step_fn.py."""

from hookline.events.batches import tensors_of as tensors_of
from hookline.trainer.step_fn import StepFunction as StepFunction
from hookline.trainer.step_fn import count_tokens as count_tokens
