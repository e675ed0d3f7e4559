"""Hookline: watch, debug and change a PyTorch training run without forking its loop.

Every public name is imported from here, and loaded on first use. Type checkers read `__init__.pyi`, which
tools/public_stub.py generates from the table below.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "ActivationStats": "hooks.monitoring",
    "BaseTrainer": "trainer.trainer",
    "CheckpointHook": "hooks.checkpointing",
    "ClipNorm": "gradients.transforms",
    "ConsoleLogHook": "hooks.console",
    "DebugHook": "hooks.debugging",
    "EMAHook": "hooks.ema",
    "EarlyStopping": "hooks.early_stopping",
    "ForwardHook": "registry.base",
    "GenericTrainer": "build",
    "GradientMonitor": "hooks.gradient_monitor",
    "HookManager": "activations.manager",
    "HookRegistry": "registry.registry",
    "HookRunner": "registry.runner",
    "HooklineError": "errors",
    "HooksConfig": "config.schema",
    "Identity": "gradients.transforms",
    "JSONLogHook": "hooks.monitoring",
    "LayerSeries": "record.layer_series",
    "LearningRateMonitor": "hooks.learning_rate",
    "LossSpike": "hooks.spikes",
    "ModelCheckpoint": "hooks.checkpointing",
    "NanForensics": "hooks.forensics",
    "NotifyHook": "hooks.integration",
    "Profiler": "hooks.profiling",
    "ResumableSampler": "trainer.sampler",
    "RunConfig": "config.schema",
    "RunControl": "trainer.run_control",
    "Sample": "events.sample",
    "Schedule": "events.schedule",
    "SimpleTrainer": "build",
    "StallWatchdog": "hooks.watchdog",
    "StepContext": "events.context",
    "StopTraining": "errors",
    "ThroughputMonitor": "hooks.throughput",
    "Trainer": "trainer.trainer",
    "TrainerConfig": "config.schema",
    "TrainerHooks": "registry.base",
    "TrainingHook": "registry.base",
    "UpdateHook": "registry.base",
    "allow_host": "hooks.webhook",
    "get_trainer": "build",
    "load_config": "config.load",
    "not_an_event": "registry.base",
    "read_layers": "record.layer_series",
    "read_metrics": "record.reader",
    "register_data": "registry.names",
    "register_hook": "registry.names",
    "register_loss": "registry.names",
    "register_model": "registry.names",
    "register_optimizer": "registry.names",
    "register_scheduler": "registry.names",
    "register_trainer": "registry.names",
    "replay_crash": "hooks.crash",
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
