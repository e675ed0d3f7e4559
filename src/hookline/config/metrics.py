"""Make the metrics that a config or a list names: `name`, `as`, `phases`, and every other key is a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hookline._parameters import names, one_of, parameters_of
from hookline.config.factory import Factory, ImportPolicy, find_factory
from hookline.core.plugins import METRICS
from hookline.errors import ConfigError, HooklineError, got
from hookline.trainer.metrics import PHASES, MetricEntry, is_mean, is_metric_object, problem_with_name

OPTIONS_OF_METRICS = ("as", "phases")  # not `on`: YAML 1.1 reads it as true
_TORCHMETRICS = "torchmetrics"
# The modules of torchmetrics whose classes a file may name: they only compute. Classes of its other modules download
# models or read files that a parameter names.
_COMPUTING = tuple(
    f"{_TORCHMETRICS}.{module}"
    for module in (
        "aggregation", "classification", "clustering", "nominal", "regression", "retrieval", "segmentation",
    )
)  # fmt: skip


def make_metrics(given: Any, policy: ImportPolicy) -> Mapping[str, Any] | None:
    """Make the metrics that a list names; a dict of functions and objects by name is returned as it is.

    Args:
        given: Names and mappings with `name`, or a dict of metrics.
        policy: Which dotted paths may be imported, besides classes of torchmetrics that only compute.

    Returns:
        The metrics by the name they are recorded as.

    Raises:
        ConfigError: If a name, an option or a parameter is wrong, or two metrics have one name.
    """
    if not isinstance(given, (list, tuple)):
        return given  # type: ignore[no-any-return]  # the trainer checks it
    entries = [_entry(entry, f"metrics.{index}") for index, entry in enumerate(given)]
    for index, entry in enumerate(entries):  # every name is checked before the first import
        # A name such as torchmetrics.Accuracy does not reveal the module of its class, which `_make` checks.
        exported = [entry["name"]] if entry["name"].rpartition(".")[0] == _TORCHMETRICS else []
        with_torchmetrics = ImportPolicy((*policy.allow, *_COMPUTING, *exported), policy.from_file)
        with_torchmetrics.check_name(entry["name"], METRICS, f"metrics.{index}.name")
    metrics: dict[str, MetricEntry] = {}
    for index, entry in enumerate(entries):
        name, made = _make(entry, f"metrics.{index}", policy)
        if name in metrics:
            raise ConfigError(
                f"metrics.{index}", f"two metrics are recorded as {name!r}; rename one of them with `as: …`"
            )
        metrics[name] = made
    return metrics


def _entry(given: Any, path: str) -> dict[str, Any]:
    entry = {"name": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        hint = "; a dict takes functions and objects by name" if callable(given) else ""
        raise ConfigError(path, f"expected the name of a metric, or a mapping with `name`, {got(given)}{hint}")
    return dict(entry)


def _make(entry: dict[str, Any], path: str, policy: ImportPolicy) -> tuple[str, MetricEntry]:
    """Make one metric: a class with the parameters, a function with the parameters after output and batch."""
    name, recorded_as, given = entry.pop("name"), entry.pop("as", None), entry.pop("phases", None)
    try:
        made = find_factory(name, METRICS)
    except HooklineError as error:
        raise ConfigError(f"{path}.name", str(error)) from error
    if name.startswith(f"{_TORCHMETRICS}."):
        if not (isinstance(made, type) and is_metric_object(made)):
            raise ConfigError(f"{path}.name", f"{name!r} is not a metric class: it has no update, compute and reset")
        if not f"{made.__module__}.".startswith(tuple(f"{module}." for module in _COMPUTING)):
            policy.check_name(name, METRICS, f"{path}.name")
    factory = Factory(path, name, made, entry, options=OPTIONS_OF_METRICS)
    if isinstance(made, type):
        try:
            metric = factory.make()
        except ConfigError:
            raise
        except Exception as error:  # a package that is missing, for example
            raise ConfigError(path, f"{name} cannot be created: {type(error).__name__}: {error}") from error
    else:
        first_two = [*(parameters_of(made) or {})][:2]
        parameters = factory.check(skip=first_two)
        metric = partial(made, **parameters) if parameters else made
    phases: tuple[str, ...] = PHASES if is_mean(metric) else ("validation",)
    if given is not None:
        phases = tuple(one_of(phase, PHASES, f"{path}.phases") for phase in names(given, f"{path}.phases"))
    if not phases:
        raise ConfigError(f"{path}.phases", f"expected {' or '.join(PHASES)}, {got(given)}")
    if recorded_as is not None and (not isinstance(recorded_as, str) or not recorded_as):
        raise ConfigError(f"{path}.as", f"expected a name, {got(recorded_as)}")
    recorded_as = recorded_as or getattr(metric, "label", None) or name.rpartition(".")[2]
    if problem := problem_with_name(recorded_as, phases):
        raise ConfigError(path, f"{problem}; rename it with `as: …`")
    return recorded_as, MetricEntry(metric, phases)
