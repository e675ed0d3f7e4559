"""The schema of configs, as pydantic models. Errors name the path of a wrong key or value and the nearest valid key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator
from pydantic.dataclasses import dataclass

from hookline.config.errors import raises_config_error
from hookline.errors import ConfigError, got, nearest
from hookline.trainer.options import TrainerOptions

Entries = list[str | dict[str, Any]]
"""Hooks in order: each a registered name, or a mapping with `name` and its parameters."""


def _keys(path: tuple[str, ...], top: type) -> list[str]:
    """Return the keys of the mapping at a path of a config whose outermost class is `top`."""
    owner = {"hooks": HooksConfig, "trainer": TrainerOptions}.get(path[-1]) if path else top
    if owner is None:
        return []
    if isinstance(owner, type) and issubclass(owner, BaseModel):
        return list(owner.model_fields)
    return [item.name for item in fields(owner)]  # type: ignore[arg-type]  # the others are dataclasses


class Component(BaseModel):
    """A component that a config names: `name`, and every other key is a parameter of its factory."""

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


@raises_config_error(lambda path: "hooks.", lambda path: _keys(path, HooksConfig))
class HooksConfig(BaseModel):
    """Which hooks a run has: lists by kind, or switches and class paths. Both forms may be mixed.

    >>> HooksConfig(enable_logging_hook=True, logging_config={"log_every_n_batches": 5})  # doctest: +SKIP
    >>> HooksConfig(update=[{"name": "clip_norm", "max_norm": 1.0}])  # doctest: +SKIP
    """

    model_config = ConfigDict(extra="forbid")

    lifecycle: Entries | None = None
    forward: Entries | None = None
    update: Entries | None = None

    enable_logging_hook: StrictBool = False
    logging_config: dict[str, Any] = Field(default_factory=dict)
    enable_gradient_monitor: StrictBool = False
    gradient_monitor_config: dict[str, Any] = Field(default_factory=dict)
    enable_model_checkpoint_hook: StrictBool = False
    model_checkpoint_config: dict[str, Any] = Field(default_factory=dict)
    enable_early_stopping_hook: StrictBool = False
    early_stopping_config: dict[str, Any] = Field(default_factory=dict)
    enable_lr_monitor: StrictBool = False
    lr_monitor_config: dict[str, Any] = Field(default_factory=dict)

    hook_classes: list[str] = Field(default_factory=list)
    hook_configs: dict[str, dict[str, Any]] = Field(default_factory=dict)


@raises_config_error(
    lambda path: "" if path[:1] == ("hooks",) else "trainer.", lambda path: _keys(path, TrainerConfig)
)
@dataclass(config=ConfigDict(extra="forbid", strict=True), kw_only=True)
class TrainerConfig(TrainerOptions):
    """Every option of a run, and its hooks: what `GenericTrainer` takes. The options are those of `TrainerOptions`."""

    hooks: HooksConfig = Field(default_factory=HooksConfig)

    def options(self, **changes: Any) -> TrainerOptions:
        """Return the options without the hooks, with some of them changed."""
        return TrainerOptions(**{**_option_values(self), **changes})


@raises_config_error(
    lambda path: "",
    lambda path: _keys(path, RunConfig),
    when_missing="; `hookline example` prints a whole config to start from",
)
class RunConfig(BaseModel):
    """A whole run: what to train, on what, how, and with which hooks. A config file holds one of these."""

    model_config = ConfigDict(extra="forbid")

    model: Component
    data: Component
    optimizer: Component
    scheduler: Component | None = None
    loss: Component | None = None
    trainer: TrainerOptions = Field(default_factory=TrainerOptions)
    hooks: HooksConfig = Field(default_factory=HooksConfig)

    @field_validator("trainer", mode="before")
    @classmethod
    def _reject_bools(cls, given: Any) -> Any:
        """Reject true and false where a number is expected; pydantic would take true for 1."""
        for option in fields(TrainerOptions):
            value = given.get(option.name) if isinstance(given, Mapping) else None
            if isinstance(value, bool) and option.type != "bool":
                raise ConfigError(f"trainer.{option.name}", f"expected {option.type}, {got(value)}")
        return given

    @property
    def debug(self) -> bool:
        """Whether every hook's failure ends the run."""
        return self.trainer.debug

    def as_mapping(self) -> dict[str, Any]:
        """Return everything as plain values that can be written and read again, without unused hook settings."""
        return {**self.model_dump(), "hooks": self.hooks.model_dump(exclude_defaults=True)}


def as_run_config(config: Any) -> RunConfig:
    """Return a `RunConfig` as it is, or make one from a mapping."""
    if isinstance(config, RunConfig):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError("", f"expected a mapping with {', '.join(RunConfig.model_fields)}, {got(config)}")
    _check_string_keys(config)
    return RunConfig(**config)


def as_trainer_config(config: Any) -> TrainerConfig:
    """Return what `GenericTrainer` was given as a `TrainerConfig`.

    That is a `TrainerConfig`, a `HooksConfig`, a `RunConfig`, a dict with the keys of one of the first two, or None.
    """
    if isinstance(config, TrainerConfig):
        return config
    if isinstance(config, HooksConfig):
        return TrainerConfig(hooks=config)
    if isinstance(config, RunConfig):
        return TrainerConfig(**_option_values(config.trainer), hooks=config.hooks)
    if isinstance(config, TrainerOptions):
        return TrainerConfig(**_option_values(config))
    if config is None:
        return TrainerConfig()
    if not isinstance(config, Mapping):
        raise ConfigError("", f"config: expected a TrainerConfig, a HooksConfig or a dict, {got(config)}")
    _check_string_keys(config)
    options, hooks = _keys((), TrainerConfig), _keys((), HooksConfig)
    if not config or any(key in options for key in config):
        return TrainerConfig(**config)
    if any(key in hooks for key in config):
        return TrainerConfig(hooks=HooksConfig(**config))
    key = next(iter(config))
    raise ConfigError(key, f"unknown key; {nearest(key, [*options, *hooks], 40)}")


def _option_values(options: TrainerOptions) -> dict[str, Any]:
    return {item.name: getattr(options, item.name) for item in fields(TrainerOptions)}


def _check_string_keys(config: Mapping[Any, Any]) -> None:
    for key in config:
        if not isinstance(key, str):
            raise ConfigError(str(key), f"expected a key that is a word, {got(key)}")
