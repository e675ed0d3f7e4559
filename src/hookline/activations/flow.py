"""Moved to `hookline.activations.gradient_flow`."""

from hookline.activations.gradient_flow import (  # noqa: F401
    VERDICT_METRICS as COUNTED,
)
from hookline.activations.gradient_flow import (  # noqa: F401
    GradientFlow,
    GradientFlowHook,
    Limits,
    Verdict,
    gradient_flow,
    gradient_norms,
    judge_norms,
)
