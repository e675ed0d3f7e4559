"""Find the name that a wrong one stands for: the nearest, or ours for a word of Lightning, HF, Ignite or Keras."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_FEW = 8  # names that a message lists
_MEANINGS: dict[str, str] = {
    # Our names, with the words of other libraries for them. A message suggests the first name that is valid there; it
    # may suggest a call anywhere. Words without a counterpart come first, because a similar name would mislead.
    "": "max_time limit_val_batches limit_test_batches num_nodes sync_batchnorm inference_mode tokenizer predict_end "
    "predict_batch_end sanity_check_start sanity_check_end configure_optimizers train_dataloader",
    "fit(resume=…)": "resume_from_checkpoint ckpt_path",
    "output_dir get_trainer(output_dir=…)": "dirpath",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps grad_accum grad_accumulation",
    "max_epochs": "epochs num_epochs num_train_epochs n_epochs",
    "max_steps": "iterations iters max_iters max_iterations num_iterations num_steps total_steps train_steps",
    "steps": "iteration iterations iter iters update updates",
    "loaders": "dataloaders dataloader val_loaders val_dataloaders test_loader eval_dataset test_dataset",
    "val_loaders val_dataloader": "val_loader val_dataloader val_dataloaders val_data validation_loader "
    "validation_data eval_dataset eval_dataloader eval_loader valid_loader test_loader testloader valloader",
    "train_loaders dataloader": "train_loader train_loaders dataloader train_dataloader train_dataloaders "
    "train_dataset train_data trainloader data_loader loader per_device_train_batch_size batch_size "
    "dataloader_num_workers data_collator",
    "max_grad_norm clip_norm": "gradient_clip_val max_grad_norm clip_grad_norm grad_clip gradient_clipping",
    "clip_value": "clip_grad_value clip_grad_value_ gradient_clip_value",
    "validate_every": "val_check_interval check_val_every_n_epoch eval_steps eval_strategy eval_every",
    "sanity_batches": "num_sanity_val_steps",
    "precision": "fp16 bf16 amp use_amp mixed_precision",
    "output_dir": "default_root_dir logging_dir log_dir save_dir root_dir",
    "console": "enable_progress_bar progress_bar disable_tqdm",
    "compile": "torch_compile",
    "debug": "detect_anomaly",
    "hooks": "callbacks callback plugins handlers logger loggers enable_checkpointing save_strategy report_to profiler "
    "trackers tracker",
    "scheduler schedulers": "lr_scheduler lr_schedulers lr_scheduler_type warmup_steps warmup_ratio",
    "lr": "learning_rate",
    "optimizer optimizers": "optim optimizer opt learning_rate weight_decay",
    "loss_fn loss": "criterion loss_function compute_loss",
    "metrics": "compute_metrics",
    "step_fn": "training_step train_step",
    "model": "pl_module lightning_module",
    "trainer": "args control engine",
    "device": "accelerator devices gpus",
    "save_every_n_epochs every": "every_n_epochs",
    "save_every_n_steps every hooks": "every_n_train_steps save_steps",
    "every hooks": "log_every_n_steps logging_steps log_interval",
    "every": "every_n_steps interval frequency period",
    "frequency": "logging_interval",
    "on_non_finite": "check_finite",
    "target": "stopping_threshold",
    "save_top_k": "save_total_limit n_saved max_to_keep",
    "monitor": "metric_for_best_model score_function",
    "mode": "greater_is_better",
    "patience": "early_stopping_patience",
    "min_delta": "early_stopping_threshold",
    "restore_best_weights": "load_best_model_at_end",
    # Hooks.
    "checkpoint": "model_checkpoint ModelCheckpoint CheckpointCallback Checkpointer BestModelSaver",
    "early_stopping": "EarlyStoppingCallback early_stop",
    "lr_monitor": "LearningRateMonitor LearningRateLogger lr_logger",
    "console_log": "TQDMProgressBar RichProgressBar ProgressBar ProgressCallback PrinterCallback tqdm print",
    "json_log": "CSVLogger TensorBoardLogger logger JSONLogger",
    "ema": "StochasticWeightAveraging WeightAveraging EMAHandler ExponentialMovingAverage ModelEMA swa",
    "throughput": "ThroughputMonitor DeviceStatsMonitor SpeedMonitor Timer",
    "nan_forensics": "TerminateOnNaN detect_anomaly",
    "gradient_monitor": "grad_norm track_grad_norm GradientNormLogger watch",
    "profiler": "PyTorchProfiler SimpleProfiler",
    # Events.
    "on_train_start": "fit_start started init_end setup_end pretrain_routine_start",
    "on_train_end": "fit_end completed teardown",
    "on_epoch_start": "epoch_started train_epoch_start train_epoch_begin training_epoch_start",
    "on_epoch_end": "epoch_completed train_epoch_end training_epoch_end",
    "on_train_batch_start": "iteration_started get_batch_completed train_batch_begin step_begin step_start "
    "training_step_start substep_begin",
    "on_train_batch_end": "iteration_completed substep_end training_step_end",
    "on_validation_start": "validation_epoch_start test_epoch_start evaluate_begin test_begin test_start eval_started",
    "on_validation_end": "validation_epoch_end test_epoch_end evaluate evaluate_end test_end eval_completed",
    "on_validation_batch_end": "prediction_step validation_step_end test_batch_end",
    "on_before_optimizer_step": "pre_optimizer_step before_zero_grad",
    "on_after_optimizer_step": "optimizer_step",
    "on_checkpoint_save": "save save_checkpoint",
    "on_checkpoint_load": "load_checkpoint",
    "on_exception": "exception_raised keyboard_interrupt",
    "on_step_end": "log",
    # Optimizers, schedules and losses.
    "cosine": "CosineAnnealingLR cosine_annealing",
    "plateau": "ReduceLROnPlateau",
    "warmup_cosine": "get_cosine_schedule_with_warmup cosine_with_warmup",
    "bce_with_logits": "BCEWithLogitsLoss binary_cross_entropy bce",
    "mse": "MSELoss mean_squared_error",
}


def folded(word: str) -> str:
    """Return a word without case, separators and the prefix of events, so that `EarlyStopping` is `early_stopping`."""
    return re.sub(r"[^a-z0-9]", "", word.lower().removeprefix("events.").removeprefix("on_"))


_OURS: dict[str, list[str]] = {}
for _ours, _theirs in _MEANINGS.items():
    for _word in _theirs.split():
        _OURS.setdefault(folded(_word), []).extend(_ours.split())


def nearest(name: str, choices: Iterable[str], see: str = "") -> str:
    """Return the end of a message about an unknown name: the nearest valid names, or all of them if they are few.

    A word that other libraries use for one of the choices is understood, and upper case does not matter.

    >>> nearest("tarin", ["train", "epoch"])
    "did you mean 'train'? Valid: epoch, train"

    Args:
        name: The unknown name.
        choices: The valid names.
        see: The command or page that lists the valid names, if they are many.
    """
    valid = sorted(set(choices))
    if not valid:
        return "there are none"
    is_short = len(valid) <= _FEW
    lower, given = {choice.lower(): choice for choice in reversed(valid)}, name.lower()
    near = difflib.get_close_matches(given, lower, 1 if is_short else 3, 0.5)
    likeness = {choice: difflib.SequenceMatcher(None, choice, given).ratio() for choice in near}
    # A name that is less alike than a misspelt one would be must contain what was given, or the other way round.
    near = [choice for choice in near if likeness[choice] > 0.65 or choice in given or given in choice]
    # Beside the nearest name only those that are about as near.
    close = [lower[choice] for choice in near if likeness[choice] > likeness[near[0]] - 0.1]
    if (known := meant(name, valid)) is not None:
        close = [known] if known else []
    question = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    if is_short:
        return f"{question}{'Valid' if close else 'valid'}: {', '.join(valid)}"
    if see:
        return f"{question}{see} lists all {len(valid)}"
    return question.rstrip() or f"there are {len(valid)}, such as {', '.join(valid[:3])}"


def meant(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that a word stands for: the same in other letters, or another library's word for it.

    It is "" for another library's word without a counterpart, and None for a word that is not known.
    """
    by_fold = {folded(choice): choice for choice in valid if folded(choice)}
    ours = _OURS.get(folded(word))
    names = [by_fold[folded(name)] for name in [word, *(ours or [])] if folded(name) in by_fold]
    names += [name for name in ours or [] if "(" in name]
    return names[0] if names else "" if ours == [] else None
