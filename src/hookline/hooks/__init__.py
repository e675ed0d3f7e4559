"""The built-in hooks: written against the same public API as anybody's.

To add one: its file, and a line here.
"""

BUILT_IN: dict[str, str] = {
    "activation_stats": "hookline.hooks.monitoring:ActivationStats",
    "capture": "hookline.activations.capture:Capture",
    "checkpoint": "hookline.hooks.checkpointing:CheckpointHook",
    "clip_norm": "hookline.gradients.transforms:ClipNorm",
    "console_log": "hookline.hooks.console:ConsoleLogHook",
    "debug": "hookline.activations.debug:Debug",
    "gradient_flow": "hookline.activations.flow:GradientFlowHook",
    "identity": "hookline.gradients.transforms:Identity",
    "json_log": "hookline.hooks.monitoring:JSONLogHook",
    "monitor": "hookline.activations.monitor:Monitor",
    "sample_text": "hookline.jobs.sample_text:SampleText",
}
