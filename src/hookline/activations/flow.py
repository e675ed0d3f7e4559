"""Moved to `hookline.activations.gradient_flow`."""

from hookline.activations.gradient_flow import VERDICT_METRICS as COUNTED
from hookline.activations.gradient_flow import GradientFlow as GradientFlow
from hookline.activations.gradient_flow import GradientFlowHook as GradientFlowHook
from hookline.activations.gradient_flow import Limits as Limits
from hookline.activations.gradient_flow import Verdict as Verdict
from hookline.activations.gradient_flow import gradient_flow as gradient_flow
from hookline.activations.gradient_flow import gradient_norms as gradient_norms
from hookline.activations.gradient_flow import judge_norms as judge_norms

__all__ = [
    "COUNTED",
    "GradientFlow",
    "GradientFlowHook",
    "Limits",
    "Verdict",
    "gradient_flow",
    "gradient_norms",
    "judge_norms",
]
