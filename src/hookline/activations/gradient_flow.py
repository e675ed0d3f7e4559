"""Gradient flow under the path that users import it from; the code is in `hookline.gradients.gradient_flow`."""

from hookline.gradients.gradient_flow import GradientFlow, GradientFlowHook, GradientRow, gradient_flow

__all__ = ["GradientFlow", "GradientFlowHook", "GradientRow", "gradient_flow"]
