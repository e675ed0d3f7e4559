"""Hookline: watch, debug and change a PyTorch training run without forking its loop.

Every public name is imported from here, and loaded on first use. Type checkers read `__init__.pyi`, which
tools/public_stub.py generates from the table below.
"""

from importlib import import_module
from typing import Any

from hookline.core.provided import PROVIDED as _PROVIDED

__version__ = "0.1.0"

_NAMES = {  # By module.
    "activations.monitor": "ActivationStats",
    "build": "AccelerateTrainer GenericTrainer SimpleTrainer get_trainer trainer_from_config",
    "config.load": "load_config",
    "config.schema": "HooksConfig RunConfig TrainerConfig",
    "core.base": "ForwardHook StepContext TrainerHooks TrainingHook UpdateHook not_an_event",
    "core.plugins": "register_data register_hook register_loss register_metric register_model register_optimizer "
    "register_scheduler register_trainer",
    "core.sampling": "Sample",
    "core.schedule": "Schedule",
    "errors": "HooklineError StopTraining",
    "gradients.transforms": "ClipNorm Identity",
    "hosts.attach": "attach",
    "hooks.checkpoint": "CheckpointHook ModelCheckpoint",
    "hooks.console.hook": "ConsoleLogHook",
    "hooks.early_stopping": "EarlyStopping",
    "hooks.ema": "EMAHook",
    "hooks.gradient_monitor": "GradientMonitor",
    "hooks.json_log": "JSONLogHook",
    "hooks.loss_spike": "LossSpike",
    "hooks.lr_monitor": "LearningRateMonitor",
    "hooks.nan_forensics.dump": "replay_crash",
    "hooks.nan_forensics.hook": "DebugHook NanForensics",
    "hooks.notify": "NotifyHook",
    "hooks.prediction_tables": "ConfusionMatrix SamplePredictions",
    "hooks.profiler": "Profiler",
    "hooks.stall_watchdog": "StallWatchdog",
    "hooks.throughput": "ThroughputMonitor",
    "hooks.trackers.base": "Tracker",
    "hooks.trackers.mlflow": "MLflowTracker",
    "hooks.trackers.tensorboard": "TensorBoardTracker",
    "hooks.trackers.wandb": "TrackioTracker WandbTracker",
    "hooks.webhook": "allow_host",
    "record.format": "Image MediaRow Table",
    "runs.layers": "LayerSeries read_layers",
    "runs.reader": "read_metrics",
    "runs.frames": "LoadedRun load_run",
    "runs.media": "read_media",
    "run.control": "RunControl",
    "run.manager": "HookManager HookRegistry HookRunner",
    "trainer.data.sampler": "ResumableSampler",
    "trainer.trainer": "BaseTrainer Trainer",
}
_ADAPTERS = {"ignite", "lightning", "transformers"}  # modules that import the package of that name
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)

# References from `core` to the folders above it, which it does not import.
_PROVIDED.update(
    hooks="hookline.hooks:BUILT_IN",
    models="hookline.demo:MODELS",
    data="hookline.demo:DATA",
    schedulers="hookline.demo:SCHEDULERS",
    optimizers="hookline.demo:OPTIMIZERS",
    losses="hookline.demo:LOSSES",
    metrics="hookline.trainer.built_in_metrics:BUILT_IN",
    trainers="hookline.build:TRAINERS",
    make_hook="hookline.config.hooks:make_hook",
    load_trainer="hookline.build:load_trainer",
    load_hooks="hookline.config.hooks:load_hooks",
)


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name in _ADAPTERS:
        return import_module(f"hookline.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    value = getattr(import_module(f"hookline.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Record what the cells of a notebook train; IPython calls this for ``%load_ext hookline``."""
    import_module("hookline.hosts.notebook").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stop recording; IPython calls this for ``%unload_ext hookline``."""
    import_module("hookline.hosts.notebook").unload(shell)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
