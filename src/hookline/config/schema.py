"""The schema of configs, as pydantic models. Errors name the path of a wrong key or value and the nearest valid key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from hookline._text import first_of
from hookline._words import nearest
from hookline.errors import ConfigError, got
from hookline.trainer.options import OPTIONS_PAGE, TrainerOptions

Path = tuple[str, ...]
Entries = list[str | dict[str, Any]]
"""Hooks in order: each a registered name, or a mapping with `name` and its parameters."""

HOOKS_PAGE = "`hookline help config`"
_PATHS_SHOWN = 5
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_NOT_A_MAPPING = ("model_type", "model_attributes_type", "dataclass_type", "dict_type")


# ---- errors --------------------------------------------------------------------------------------------------------


def raise_config_errors(cls: type, prefix: str = "", when_missing: str = "") -> None:
    """Make the constructor of a class raise a ConfigError for wrong values.

    It is replaced after the class is finished, so that pydantic still builds the class directly where it is a field of
    another one, and the outermost class reports the whole path.

    Args:
        cls: A pydantic model or dataclass.
        prefix: Begins every path that is not below the section `hooks`.
        when_missing: Ends messages about missing top-level keys.
    """
    construct = cls.__init__  # type: ignore[misc]  # of this very class

    @wraps(construct)
    def checked_init(self: Any, *args: Any, **values: Any) -> None:
        try:
            construct(self, *args, **values)
        except ValidationError as error:
            raise _config_error(error, values, cls, prefix, when_missing) from None

    cls.__init__ = checked_init  # type: ignore[misc]


def _config_error(error: ValidationError, given: Any, top: type, prefix: str, when_missing: str) -> ConfigError:
    """Describe the most likely cause of a validation error, and list the paths of the other problems.

    A misspelt key comes first, because it may be the key that is missing elsewhere; keys missing from one mapping are
    one problem.
    """
    by_path: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_path(detail, given), []).append(detail)

    def dotted(path: Path) -> str:
        return ("" if path[:1] == ("hooks",) else prefix) + ".".join(path)

    path, details = min(by_path.items(), key=lambda item: item[1][0]["type"] not in _UNKNOWN)
    where, problem, covered = dotted(path), _problem(path, details, top), [path]
    absent = [other for other in by_path if by_path[other][0]["type"] in _MISSING]
    siblings = [other for other in absent if other[:-1] == path[:-1]]
    if path in absent and len(siblings) > 1:
        *most, last = [sibling[-1] for sibling in siblings]
        where, problem, covered = dotted(path[:-1]), f"{', '.join(most)} and {last} are missing", siblings
    for word in ("missing", "wrong"):
        paths = [other for other in by_path if other not in covered and (other in absent) == (word == "missing")]
        if paths:
            problem += f" (also {word}: {first_of([*map(dotted, paths)], _PATHS_SHOWN)})"
    if len(path) == 1 and path in absent:
        problem += when_missing
    return ConfigError(where.rstrip("."), problem)


def _path(detail: ErrorDetails, given: Any) -> Path:
    """Return the path of an error in the given values, without the union alternatives that pydantic adds to it."""
    path: list[str] = []
    for part in detail["loc"]:
        if detail["type"] in _MISSING and part == detail["loc"][-1]:
            return (*path, str(part))
        is_key = isinstance(given, Mapping) and part in given
        is_index = isinstance(given, Sequence) and isinstance(part, int) and part < len(given)
        if not is_key and not is_index:
            break
        path.append(str(part))
        given = given[part]
    return tuple(path)


def _problem(path: Path, details: list[ErrorDetails], top: type) -> str:
    """Say what is wrong at a path, and what would be right."""
    kind = details[0]["type"]
    if kind in _MISSING:
        return "is missing"
    if kind in _UNKNOWN:
        above, key = path[:-1], path[-1]
        here = _keys(above, top)
        # The key may be valid one level lower or higher.
        for place in [(*above, inner) for inner in here] + ([above[:-1]] if above else []):
            if key in _keys(place, top):
                return f"unknown key; did you mean '{'.'.join((*place, key))}'?"
        page = HOOKS_PAGE if here == _keys(("hooks",), top) else OPTIONS_PAGE
        return f"unknown key; {nearest(key, here, page)}"
    expected: dict[str, None] = {}
    for detail in details:
        # pydantic's message is 'Input should be a valid integer, unable to parse …'; 'a valid integer' is enough.
        message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        short = message if detail["type"] == "literal_error" else message.partition(",")[0]
        if detail["type"] in _NOT_A_MAPPING:
            short = f"a mapping with {', '.join(keys[:3])}, …" if (keys := _keys(path, top)) else "a mapping"
        expected[short] = None
    return f"expected {' or '.join(expected)}, {got(details[0]['input'])}"


def _keys(path: Path, top: type) -> list[str]:
    """Return the keys of the mapping at a path of a config whose outermost class is `top`."""
    owner = {"hooks": HooksConfig, "trainer": TrainerOptions}.get(path[-1]) if path else top
    if owner is None:
        return []
    if issubclass(owner, BaseModel):
        return list(owner.model_fields)
    return [item.name for item in fields(owner)]  # type: ignore[arg-type]  # the others are dataclasses


# ---- the schema ----------------------------------------------------------------------------------------------------


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


class HooksConfig(BaseModel):
    """The hooks of a run: lists by kind, or switches and class paths. Both forms may be mixed.

    >>> HooksConfig(enable_logging_hook=True, logging_config={"log_every_n_batches": 5})  # doctest: +SKIP
    >>> HooksConfig(update=[{"name": "clip_norm", "max_norm": 1.0}])  # doctest: +SKIP
    """

    model_config = ConfigDict(extra="forbid")

    lifecycle: Entries | None = None
    forward: Entries | None = None
    update: Entries | None = None

    # A StrictBool refuses "yes" and 1, which pydantic would take for true; a typo must not turn on a hook.
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


@dataclass(config=ConfigDict(extra="forbid", strict=True), kw_only=True)
class TrainerConfig(TrainerOptions):
    """Every option of a run, and its hooks: what `GenericTrainer` takes. The options are those of `TrainerOptions`."""

    hooks: HooksConfig = Field(default_factory=HooksConfig)

    def options(self) -> TrainerOptions:
        """Return the options without the hooks."""
        return TrainerOptions(**{name: value for name, value in vars(self).items() if name != "hooks"})


class RunConfig(BaseModel):
    """A whole run: the model, its data, how to train it, and the hooks. A config file holds one of these."""

    # Not strict, unlike TrainerConfig: references resolve to strings, which have to become numbers.
    model_config = ConfigDict(extra="forbid")

    model: Component
    data: Component
    optimizer: Component
    scheduler: Component | None = None
    loss: Component | None = None
    metrics: list[Component] | None = None
    trainer: TrainerOptions = Field(default_factory=TrainerOptions)
    hooks: HooksConfig = Field(default_factory=HooksConfig)
    trackers: Entries | None = None
    """Lifecycle hooks that send the record elsewhere; they count as entries of `hooks.lifecycle`."""

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
        unused = {name for name in ("metrics", "trackers") if not getattr(self, name)}
        return {**self.model_dump(exclude=unused), "hooks": self.hooks.model_dump(exclude_unset=True)}


raise_config_errors(HooksConfig, "hooks.")
raise_config_errors(TrainerConfig, "trainer.")
raise_config_errors(RunConfig, when_missing="; `hookline example` prints a whole config to start from")


def as_hooks_config(config: Any) -> HooksConfig:
    """Return the hooks of a config: of a mapping with them alone, or of a whole config with a section `hooks`.

    A pydantic model counts as a mapping of its fields that are not None. In a mapping, null is an empty value, as in
    YAML: `update: null` lists no update hooks, not even the default one.
    """
    if isinstance(config, HooksConfig):
        return config
    if isinstance(config, RunConfig):
        return config.hooks
    if isinstance(config, BaseModel):
        config = config.model_dump(exclude_none=True)
    _check_mapping(config, "hooks", "a mapping with lifecycle, forward, update")
    if "hooks" in config:
        return as_hooks_config(config["hooks"] or {})
    given = {key: value for key, value in config.items() if value is not None}
    if "update" in config:
        given.setdefault("update", [])
    if isinstance(parameters := given.get("hook_configs"), Mapping):
        given["hook_configs"] = {key: {} if value is None else value for key, value in parameters.items()}
    return HooksConfig(**given)


def as_run_config(config: Any) -> RunConfig:
    """Return the `RunConfig` of a mapping."""
    _check_mapping(config, "", f"a mapping with {', '.join(RunConfig.model_fields)}")
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
        listed = config.hooks
        if config.trackers:
            listed = listed.model_copy(update={"lifecycle": [*(listed.lifecycle or ()), *config.trackers]})
        return TrainerConfig(**vars(config.trainer), hooks=listed)
    if isinstance(config, TrainerOptions):
        return TrainerConfig(**vars(config))
    if config is None:
        return TrainerConfig()
    _check_mapping(config, "config", "a TrainerConfig, a HooksConfig or a dict")
    options, hooks = _keys((), TrainerConfig), _keys((), HooksConfig)
    if not config or any(key in options for key in config):
        return TrainerConfig(**config)
    if any(key in hooks for key in config):
        return TrainerConfig(hooks=HooksConfig(**config))
    key = next(iter(config))
    raise ConfigError(key, f"unknown key; {nearest(key, [*options, *hooks])}")


def _check_mapping(config: Any, path: str, expected: str) -> None:
    if not isinstance(config, Mapping):
        raise ConfigError(path, f"expected {expected}, {got(config)}")
    for key in config:
        if not isinstance(key, str):
            raise ConfigError(str(key), f"expected a key that is a word, {got(key)}")
