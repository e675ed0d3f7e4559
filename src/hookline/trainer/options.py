"""Every option of a run, defined once: constructors take them as keywords, configs under `trainer:`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any, ClassVar, Literal, get_origin, get_type_hints

from hookline._parameters import FinitePositive, NonNegativeInt, PositiveInt, check, names
from hookline._words import nearest
from hookline.core.schedule import Quantity
from hookline.errors import ConfigError, shown
from hookline.record.labels import check_name, check_notes, check_tags

OPTIONS_PAGE = "`hookline help options`"
"""Lists the options, and the other arguments of constructors."""


def option(default: Any, about: str, bounded: Any = None) -> Any:
    """Return a dataclass field with its help text, and its type with the bounds of its value.

    The bounds are not in the annotation: pydantic, which validates config files, would say them in other words.
    """
    return field(default=default, metadata={"about": about, "bounded": bounded})


@dataclass(kw_only=True)
class TrainerOptions:
    """How a run is carried out."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # read when a config file is validated

    max_epochs: int | None = option(None, "epochs to train; 1 unless max_steps is given", NonNegativeInt | None)
    max_steps: int | None = option(None, "optimizer steps to train", NonNegativeInt | None)
    accumulate: int = option(1, "micro-batches per optimizer step", PositiveInt)
    loss_weight: Literal["batches", "samples", "tokens"] = option(
        "batches", "how the micro-batches of a step are weighted"
    )
    max_grad_norm: float | None = option(None, "maximum gradient norm; appends a clip_norm hook to the update chain")
    precision: Literal["fp32", "bf16", "fp16"] = option("fp32", "precision of autocast; fp16 uses a GradScaler")
    validate_every: int | str | None = option("1 epoch", "when to validate: 100, '2 epochs', or null for never")
    sanity_batches: int = option(2, "validation batches to run before the first step; 0 for none", NonNegativeInt)
    scheduler_interval: Literal["step", "epoch"] = option("step", "when schedulers step")
    seed: int | None = option(None, "seed for torch, Python and NumPy, set at the start of a run")
    deterministic: bool = option(False, "use torch's deterministic algorithms")
    compile: bool = option(False, "run the model through torch.compile")
    init_from: str | None = option(None, "checkpoint whose weights the run starts from; nothing else is loaded")
    resume: Literal["auto"] | None = option(
        None, "auto: continue the newest unfinished run of this config in output_dir, or start a new one"
    )
    fast_dev_run: int = option(0, "run this many batches of everything, write nothing, let hooks raise", NonNegativeInt)
    limit_train_batches: int | float | None = option(
        None, "end an epoch after this many batches, or after this share of them (0.1 is a tenth)"
    )
    overfit_batches: int = option(0, "train only on the first N batches of each loader; 0 for all", NonNegativeInt)
    loader_schedule: Literal["sequential", "round_robin", "weighted"] = option(
        "sequential", "how several loaders are combined"
    )
    loader_weights: Mapping[str, float] | None = option(
        None, "relative weight of each loader in the draw; null draws all equally often"
    )
    loader_end: Literal["longest", "shortest"] = option(
        "longest", "which loader ends an epoch of mixed loaders; with longest, shorter ones are restarted"
    )
    on_save_error: Literal["stop", "warn"] = option("stop", "what to do when a save fails: end the run, or warn")
    async_save: bool = option(False, "continue training while a checkpoint is written")
    trainable_only: bool = option(False, "save checkpoints without the frozen parameters; the model must provide them")
    parallel: Literal["auto", "none", "ddp", "fsdp2"] = option(
        "auto", "how several processes share the model; auto: as its wrapper says, else DDP if built from a config"
    )
    shard_modules: str | Sequence[str] | None = option(None, "patterns of the modules that fsdp2 shards one by one")
    replicas: int = option(1, "number of copies of the sharded model, for fsdp2 (HSDP)", PositiveInt)
    sync_each_batch: bool = option(False, "reduce gradients after every micro-batch; saves memory with fsdp2")
    rank_timeout: float = option(
        600.0, "seconds after which a process that makes no progress ends the run", FinitePositive
    )
    output_dir: str = option("runs", "directory in which the run's directory is created")
    name: str | None = option(None, "name of the run; commands accept it in place of the id")
    tags: str | Sequence[str] | None = option(None, "tags of the run, for finding it later")
    notes: str | None = option(None, "notes about the run")
    record: bool = option(True, "write the run's record to disk; false keeps it in memory")
    report: bool = option(True, "write report.html into the run's directory when the run ends")
    console: bool = option(True, "print the run's start, end and progress: a live view, or lines without a terminal")
    enable_intervention: bool = option(False, "let forward hooks with intervene=True change activations")
    warn_above: float | None = option(0.05, "report hooks that take more than this share of the run's time")
    debug: bool = option(False, "let any exception in a hook end the run")

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainerOptions).items():
            if kind is bool or get_origin(kind) is Literal:
                check(getattr(self, name), kind, f"trainer.{name}")
        for item in fields(TrainerOptions):
            if (bounded := item.metadata["bounded"]) is not None:
                check(getattr(self, item.name), bounded, f"trainer.{item.name}")
        if self.resume not in (None, "auto"):
            why = f"expected 'auto' or null, got {shown(self.resume)}; to continue one run call fit(resume=…)"
            raise ConfigError("trainer.resume", why)
        if self.shard_modules is not None:
            names(self.shard_modules, "trainer.shard_modules")
        for name in ("shard_modules", "replicas"):
            if getattr(self, name) not in (None, 1) and self.parallel != "fsdp2":
                why = f"only for parallel='fsdp2', not {self.parallel!r}; leave it out, or set it to null"
                raise ConfigError(f"trainer.{name}", why)
        if self.init_from is not None and not str(self.init_from):
            raise ConfigError("trainer.init_from", "is empty; name a run or a checkpoint, or write null for none")
        for name in ("output_dir", "init_from"):
            path = str(getattr(self, name))
            if re.match(r"\w\w+:/", path):
                why = f"{path!r} is not on a file system: pass the path of a directory, and copy runs elsewhere"
                raise ConfigError(f"trainer.{name}", why)
        # Labels that could not be printed are rejected; an empty string means none.
        if self.name is not None:
            self.name = check_name(self.name, "trainer.name")
        if self.tags is not None:
            self.tags = list(check_tags(self.tags, "trainer.tags"))
        if self.notes is not None:
            self.notes = check_notes(self.notes, "trainer.notes")
        limit = self.limit_train_batches
        is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
        if limit is not None and not is_count and not (isinstance(limit, float) and 0 < limit <= 1):
            raise ConfigError("trainer.limit_train_batches", f"expected a count, or a share such as 0.1, got {limit!r}")
        self._check_loader_schedule()
        if self.validate_every is not None:
            self.validation_period  # noqa: B018 - parsed here so that an invalid one is rejected at once
        if self.fast_dev_run:  # The loaders are not known here, so they apply the limit themselves.
            self.max_epochs, self.record, self.debug = 1, False, True
            if self.validate_every is not None:  # A trial run ends before most periods do.
                self.validate_every = "1 epoch"

    def _check_loader_schedule(self) -> None:
        """Reject weights that are not positive, and options that the loader schedule would ignore."""
        schedule, weights = self.loader_schedule, self.loader_weights
        if self.loader_end == "shortest" and schedule == "sequential":
            raise ConfigError("trainer.loader_end", "loader_schedule='sequential' reads every loader to its end")
        if weights is None:
            return
        if schedule != "weighted":
            raise ConfigError("trainer.loader_weights", f"only for loader_schedule='weighted', not {schedule!r}")
        if not isinstance(weights, Mapping) or not weights:
            raise ConfigError("trainer.loader_weights", f"expected a weight for each loader by name, got {weights!r}")
        for name, weight in weights.items():
            check(weight, FinitePositive, f"trainer.loader_weights.{name}")
        if math.isinf(sum(weights.values())):
            raise ConfigError("trainer.loader_weights", "their sum is too large for a number; only their ratios count")

    @property
    def validation_period(self) -> Quantity | None:
        """`validate_every` as a value."""
        if self.validate_every is None:
            return None
        period = Quantity.parse(self.validate_every, "trainer.validate_every", ("steps", "epochs"))
        if not period.amount:  # hooks that wait for a validation must be able to see that there is none
            raise ConfigError("trainer.validate_every", f"{self.validate_every!r} is never due; write null for never")
        return period

    @property
    def validation_limit(self) -> int | None:
        """The maximum number of batches of each validation loader; None for all."""
        return self.fast_dev_run or self.overfit_batches or None

    @property
    def epochs(self) -> int | None:
        """The maximum number of epochs; None if only max_steps limits the run."""
        return self.max_epochs if self.max_epochs is not None else None if self.max_steps is not None else 1

    @classmethod
    def make(cls, values: dict[str, Any]) -> TrainerOptions:
        """Make options from keywords; an unknown one is rejected, and the error suggests the nearest."""
        check_keywords(cls, values)
        return cls(**values)


def check_keywords(function: Callable[..., Any], given: Iterable[str]) -> None:
    """Reject keywords that a constructor does not take; the error suggests one that it does."""
    accepted = signature(function).parameters
    for key in given:
        if key not in accepted:
            raise ConfigError(f"trainer.{key}", f"unknown option; {nearest(key, accepted, OPTIONS_PAGE)}")
