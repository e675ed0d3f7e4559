"""Public names as frozen lists: a change needs a diff here and a page in docs/project/decisions/."""

from dataclasses import fields

import pytest

import hookline
import pytest_hookline
from hookline import HooksConfig, RunConfig, testing
from hookline.config.hooks import RESERVED
from hookline.core.catalog import CATALOG
from hookline.core.plugins import HOOKS
from hookline.trainer.options import TrainerOptions

NAMES = """
    AccelerateTrainer
    ActivationStats BaseTrainer CheckpointHook ClipNorm ConsoleLogHook DebugHook EMAHook EarlyStopping ForwardHook
    GenericTrainer GradientMonitor HookManager HookRegistry HookRunner HooklineError HooksConfig Identity JSONLogHook
    LayerSeries LearningRateMonitor LoadedRun LossSpike MLflowTracker ModelCheckpoint NanForensics NotifyHook Profiler
    ResumableSampler RunConfig RunControl Sample Schedule SimpleTrainer StallWatchdog StepContext StopTraining
    TensorBoardTracker Tracker TrackioTracker WandbTracker
    ThroughputMonitor Trainer TrainerConfig TrainerHooks TrainingHook UpdateHook allow_host attach get_trainer
    load_config ConfusionMatrix SamplePredictions
    Image MediaRow Table read_media register_metric
    load_run not_an_event read_layers read_metrics register_data register_hook register_loss register_model
    register_optimizer register_scheduler register_trainer replay_crash trainer_from_config
"""

RUN = "config device epoch model optimizer state step tokens_seen trainer"
BATCH = f"{RUN} batch batch_idx dataloader_idx dataloader_name"
EVENTS = {
    "on_train_start on_train_begin": f"{RUN} resumed",
    "on_epoch_start on_epoch_begin": RUN,
    "on_train_batch_start on_batch_begin on_batch_start": BATCH,
    "on_forward": "epoch inputs kwargs live_output memory model module name output phase seconds step trainer",
    "on_before_backward": f"{BATCH} loss",
    "on_after_backward": f"{BATCH} loss",
    "on_gradients_ready": f"{BATCH} grads loss",
    "on_update": "epoch grads model state step trainer",
    "on_gradient_clip": f"{BATCH} grad_norm",
    "on_before_optimizer_step on_pre_optimizer_step": f"{BATCH} grad_norm grads loss lr optimizer_idx",
    "on_after_optimizer_step": f"{BATCH} grad_norm grads loss lr optimizer_idx",
    "on_step_skipped": f"{BATCH} loss optimizer_idx reason",
    "on_train_batch_end on_batch_end": f"{BATCH} loss metrics output target",
    "on_step_end": f"{BATCH} ctx grad_norm loss lr",
    "on_validation_start on_eval_begin on_eval_start": RUN,
    "on_validation_batch_start": BATCH,
    "on_validation_batch_end": f"{BATCH} loss metrics output target",
    "on_validation_end on_eval_end": f"{RUN} metrics",
    "on_epoch_end": f"{RUN} metrics",
    "on_checkpoint_save": f"{RUN} checkpoint_path path",
    "on_checkpoint_load": f"{RUN} checkpoint_path path",
    "on_exception": f"{RUN} exception",
    "on_train_end on_training_end": f"{RUN} reason",
}

RESERVED_KEYS = "name as enabled every at start stop before after on_error ranks"
TRAINER_KEYS = """
    accumulate async_save compile console debug deterministic enable_intervention fast_dev_run init_from
    limit_train_batches loader_end loader_schedule loader_weights
    loss_weight max_epochs max_grad_norm max_steps name notes on_save_error output_dir overfit_batches parallel
    precision rank_timeout record replicas report resume sanity_batches scheduler_interval seed shard_modules
    sync_each_batch tags trainable_only validate_every warn_above
"""
HOOKS_KEYS = """
    early_stopping_config enable_early_stopping_hook enable_gradient_monitor enable_logging_hook enable_lr_monitor
    enable_model_checkpoint_hook forward gradient_monitor_config hook_classes hook_configs lifecycle logging_config
    lr_monitor_config model_checkpoint_config update
"""
BUILT_IN = """
    ablate activation_stats add_activation capture centralize checkpoint clip_adaptive clip_norm clip_value
    confusion_matrix console_log
    debug debug_training early_stopping ema freeze gradient_flow gradient_monitor grokfast identity json_log link_norms
    loss_spike lr_monitor mask measure mlflow monitor nan_forensics noise normalize notify patch profiler
    replace_activation sample_predictions sample_text scale scale_activation sign skip_nonfinite spike_guard
    stall_watchdog steer
    tensorboard throughput trackio wandb
"""


TESTING = """
    EventRecorder Lifecycle MemorySink assert_harmless assert_resumable assert_within_budget lifecycles small_trainer
"""
FIXTURES = """
    assert_hook_harmless assert_hook_resumable assert_hook_within_budget hookline_lifecycle hookline_recorder
    hookline_sink
"""


def test_names_for_tests() -> None:
    """`hookline.testing` and the pytest plugin export exactly these names."""
    assert testing.__all__ == TESTING.split()
    is_fixture = {
        name: isinstance(value, type(pytest_hookline.hookline_sink)) for name, value in vars(pytest_hookline).items()
    }
    assert [name for name in sorted(is_fixture) if is_fixture[name]] == FIXTURES.split()


def test_public_names() -> None:
    """`hookline` exports exactly these names, and each can be loaded."""
    assert list(hookline.__all__) == sorted(NAMES.split())
    assert all(getattr(hookline, name) is not None for name in hookline.__all__)


@pytest.mark.parametrize("spellings", EVENTS)
def test_event_arguments(spellings: str) -> None:
    """Each event has exactly these aliases and arguments."""
    name, *aliases = spellings.split()
    assert sorted(CATALOG[name].aliases) == aliases
    assert sorted(CATALOG[name].attributes) == sorted(EVENTS[spellings].split())


def test_events() -> None:
    """The list has every event, in the order of a run."""
    assert [spellings.split()[0] for spellings in EVENTS] == list(CATALOG)


def test_config_keys() -> None:
    """A config file has exactly these keys."""
    sections = "data hooks loss metrics model optimizer scheduler trackers trainer"
    assert sorted(RunConfig.model_fields) == sections.split()
    assert sorted(field.name for field in fields(TrainerOptions)) == TRAINER_KEYS.split()
    assert sorted(HooksConfig.model_fields) == HOOKS_KEYS.split()
    assert sorted(RESERVED) == sorted(RESERVED_KEYS.split())


def test_built_in_hooks() -> None:
    """The built-in hooks have exactly these names."""
    assert sorted(HOOKS.built_in) == BUILT_IN.split()
