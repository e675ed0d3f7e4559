"""Hookline: watch, debug and change a PyTorch training run without forking its loop.

Every public name is imported from here, and loaded on first use. Type checkers read `__init__.pyi`, which
tools/public_stub.py generates from the table below.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "ActivationStats": "hooks.activation_stats",
    "BaseTrainer": "trainer.trainer",
    "CheckpointHook": "hooks.checkpoint",
    "ClipNorm": "gradients.transforms",
    "ConsoleLogHook": "hooks.console_log",
    "DebugHook": "hooks.debug_training",
    "EMAHook": "hooks.ema",
    "EarlyStopping": "hooks.early_stopping",
    "ForwardHook": "core.base",
    "GenericTrainer": "build",
    "GradientMonitor": "hooks.gradient_monitor",
    "HookManager": "activations.manager",
    "HookRegistry": "core.registry",
    "HookRunner": "core.registry",
    "HooklineError": "errors",
    "HooksConfig": "config.schema",
    "Identity": "gradients.transforms",
    "JSONLogHook": "hooks.json_log",
    "LayerSeries": "record.reader",
    "LearningRateMonitor": "hooks.lr_monitor",
    "LossSpike": "hooks.loss_spike",
    "ModelCheckpoint": "hooks.checkpoint",
    "NanForensics": "hooks.nan_forensics.hook",
    "NotifyHook": "hooks.notify",
    "Profiler": "hooks.profiler",
    "ResumableSampler": "trainer.data.sampler",
    "RunConfig": "config.schema",
    "RunControl": "core.run_control",
    "Sample": "core.sampling",
    "Schedule": "core.schedule",
    "SimpleTrainer": "build",
    "StallWatchdog": "hooks.stall_watchdog",
    "StepContext": "core.base",
    "StopTraining": "errors",
    "ThroughputMonitor": "hooks.throughput",
    "Trainer": "trainer.trainer",
    "TrainerConfig": "config.schema",
    "TrainerHooks": "core.base",
    "TrainingHook": "core.base",
    "UpdateHook": "core.base",
    "allow_host": "hooks.webhook",
    "get_trainer": "build",
    "load_config": "config.load",
    "not_an_event": "core.base",
    "read_layers": "record.reader",
    "read_metrics": "record.reader",
    "register_data": "core.plugins",
    "register_hook": "core.plugins",
    "register_loss": "core.plugins",
    "register_model": "core.plugins",
    "register_optimizer": "core.plugins",
    "register_scheduler": "core.plugins",
    "register_trainer": "core.plugins",
    "replay_crash": "hooks.nan_forensics.dump",
    "trainer_from_config": "build",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    value = getattr(import_module(f"hookline.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
