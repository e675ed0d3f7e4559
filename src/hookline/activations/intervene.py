"""Moved to `hookline.activations.interventions`."""

from hookline.activations.interventions import (  # noqa: F401
    Ablate,
    Add,
    Intervention,
    Patch,
    Replace,
    Scale,
    Steer,
)
