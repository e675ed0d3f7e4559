"""Hookline: watch, debug and change a PyTorch training run without forking its loop.

Every public name comes from here; each is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hookline.activations.manager import HookManager
    from hookline.build import GenericTrainer, SimpleTrainer, get_trainer, trainer_from_config
    from hookline.config.loading import load_config
    from hookline.config.schemas import HooksConfig, RunConfig, TrainerConfig
    from hookline.errors import HooklineError, StopTraining
    from hookline.events.context import StepContext
    from hookline.events.sample import Sample
    from hookline.events.schedule import Schedule
    from hookline.gradients.transforms import ClipNorm, Identity
    from hookline.hooks.checkpointing import CheckpointHook, ModelCheckpoint
    from hookline.hooks.console import ConsoleLogHook
    from hookline.hooks.crash import replay_crash
    from hookline.hooks.debugging import DebugHook
    from hookline.hooks.early_stopping import EarlyStopping
    from hookline.hooks.ema import EMAHook
    from hookline.hooks.forensics import NanForensics
    from hookline.hooks.gradient_monitor import GradientMonitor
    from hookline.hooks.integration import NotifyHook
    from hookline.hooks.learning_rate import LearningRateMonitor
    from hookline.hooks.monitoring import ActivationStats, JSONLogHook
    from hookline.hooks.profiling import Profiler
    from hookline.hooks.spikes import LossSpike
    from hookline.hooks.throughput import ThroughputMonitor
    from hookline.hooks.watchdog import StallWatchdog
    from hookline.hooks.webhook import allow_host
    from hookline.record.layer_series import LayerSeries, read_layers
    from hookline.record.reader import read_metrics
    from hookline.registry.base import ForwardHook, TrainerHooks, TrainingHook, UpdateHook, not_an_event
    from hookline.registry.names import (
        register_data,
        register_hook,
        register_loss,
        register_model,
        register_optimizer,
        register_scheduler,
        register_trainer,
    )
    from hookline.registry.registry import HookRegistry
    from hookline.registry.runner import HookRunner
    from hookline.trainer.run_control import RunControl
    from hookline.trainer.sampler import ResumableSampler
    from hookline.trainer.trainer import BaseTrainer, Trainer

_HOMES = {
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
    "HooksConfig": "config.schemas",
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
    "RunConfig": "config.schemas",
    "RunControl": "trainer.run_control",
    "Sample": "events.sample",
    "Schedule": "events.schedule",
    "SimpleTrainer": "build",
    "StallWatchdog": "hooks.watchdog",
    "StepContext": "events.context",
    "StopTraining": "errors",
    "ThroughputMonitor": "hooks.throughput",
    "Trainer": "trainer.trainer",
    "TrainerConfig": "config.schemas",
    "TrainerHooks": "registry.base",
    "TrainingHook": "registry.base",
    "UpdateHook": "registry.base",
    "allow_host": "hooks.webhook",
    "get_trainer": "build",
    "load_config": "config.loading",
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

__all__ = [
    "ActivationStats",
    "BaseTrainer",
    "CheckpointHook",
    "ClipNorm",
    "ConsoleLogHook",
    "DebugHook",
    "EMAHook",
    "EarlyStopping",
    "ForwardHook",
    "GenericTrainer",
    "GradientMonitor",
    "HookManager",
    "HookRegistry",
    "HookRunner",
    "HooklineError",
    "HooksConfig",
    "Identity",
    "JSONLogHook",
    "LayerSeries",
    "LearningRateMonitor",
    "LossSpike",
    "ModelCheckpoint",
    "NanForensics",
    "NotifyHook",
    "Profiler",
    "ResumableSampler",
    "RunConfig",
    "RunControl",
    "Sample",
    "Schedule",
    "SimpleTrainer",
    "StallWatchdog",
    "StepContext",
    "StopTraining",
    "ThroughputMonitor",
    "Trainer",
    "TrainerConfig",
    "TrainerHooks",
    "TrainingHook",
    "UpdateHook",
    "allow_host",
    "get_trainer",
    "load_config",
    "not_an_event",
    "read_layers",
    "read_metrics",
    "register_data",
    "register_hook",
    "register_loss",
    "register_model",
    "register_optimizer",
    "register_scheduler",
    "register_trainer",
    "replay_crash",
    "trainer_from_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    value = getattr(import_module(f"hookline.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
