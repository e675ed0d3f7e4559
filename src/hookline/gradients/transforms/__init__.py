"""The built-in update hooks, one idea per file; this module collects their classes.

To add one, write a file here, import its class below, and list its name for configs in hooks/__init__.py.
"""

from hookline.gradients.transforms.clip import ClipAdaptive, ClipNorm, ClipValue
from hookline.gradients.transforms.freeze import Freeze, Mask
from hookline.gradients.transforms.grokfast import Grokfast
from hookline.gradients.transforms.guards import SkipNonfinite, SpikeGuard
from hookline.gradients.transforms.measure import Identity, LinkNorms, Measure
from hookline.gradients.transforms.noise import Noise
from hookline.gradients.transforms.scale import Centralize, Normalize, Scale, Sign

__all__ = [
    "Centralize", "ClipAdaptive", "ClipNorm", "ClipValue", "Freeze", "Grokfast", "Identity", "LinkNorms", "Mask",
    "Measure", "Noise", "Normalize", "Scale", "Sign", "SkipNonfinite", "SpikeGuard",
]  # fmt: skip
