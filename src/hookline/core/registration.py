"""Read a hook when it is registered: its listeners, its name, and whether its declarations make sense."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from hookline._parameters import names
from hookline._words import meant, nearest
from hookline.core.base import DEFAULTS, ForwardHook, Hook, UpdateHook, hook_attribute, is_built_in
from hookline.core.catalog import CAPABILITIES, CATALOG, SPELLINGS, Events, find_event
from hookline.core.entry import OPTIONS, DerivedName, parse_ranks
from hookline.core.plugins import HOOKS, load_reference
from hookline.core.provided import PROVIDED
from hookline.core.schedule import Schedule
from hookline.core.signature import Listener, read_signature
from hookline.errors import ConfigError, RegistrationError, got, with_article
from hookline.ranks import Ranks

METHODS = ("setup", "close", "check_run", "before_first_step", "after_last_step")
"""Methods that are called although they are not events."""
OTHER_METHODS = (*SPELLINGS, *METHODS, "init", "clear_states", "state_dict", "load_state_dict")
MAIN_EVENTS: dict[type, str] = {ForwardHook: "on_forward", UpdateHook: "on_update"}


def read_hook(
    hook: Any, event: str | None, parameters: Mapping[str, Any], options: dict[str, Any]
) -> tuple[Any, dict[str, Listener]]:
    """Make a hook if a class, a name or a dotted path is given, and read its listeners.

    Args:
        hook: The hook to register.
        event: The event of a function.
        parameters: The parameters of the hook's constructor.
        options: The options that were given; changed as by `make_hook`.

    Returns:
        The hook object and its listeners.

    Raises:
        RegistrationError: If the hook implements no event, misspells one, or names arguments that an event lacks.
    """
    is_finished = bool(event) or not isinstance(hook, (str, type))
    for key in parameters if is_finished else ():  # It has no constructor to call, so this is a misspelt option.
        raise RegistrationError(f"{key!r} is not an option of a hook; {nearest(key, OPTIONS)}")
    if event:
        row, spelling = find_event(event), event if event.startswith("on_") else f"on_{event}"
        return hook, {row.name: read_signature(hook, row, spelling, getattr(hook, "__name__", "function"))}
    instance = hook if is_finished else load_reference(PROVIDED["make_hook"])(hook, parameters, options)
    listeners = find_listeners(instance)
    # Methods that are not events, such as `setup`, are called, too.
    cls = type(instance)
    is_called = isinstance(instance, Hook) and any(getattr(cls, name) is not getattr(Hook, name) for name in METHODS)
    if isinstance(instance, Mapping):
        raise RegistrationError("a dict is not a hook; put it into a hooks config, such as {'lifecycle': [{…}]}")
    if not listeners and not is_called:
        raise RegistrationError(
            f"{getattr(instance, '__name__', cls.__name__)!r} listens to no event: give a function its event "
            f"(event=…), or a class a method named after one{_method_hint(instance)}"
        )
    for kind, method in MAIN_EVENTS.items():
        if isinstance(instance, kind) and method not in listeners:
            raise RegistrationError(f"{cls.__name__!r} is {with_article(kind.__name__)} without a method {method!r}")
    return instance, listeners


def find_listeners(hook: Any) -> dict[str, Listener]:
    """Return a hook's listeners by the canonical names of their events.

    Along an inheritance chain, the most derived spelling of an event wins; two in one class are rejected.

    Raises:
        RegistrationError: If a method only looks like an event, or names arguments that its event lacks.
    """
    owner = type(hook).__name__
    listeners: dict[str, Listener] = {}
    taken: set[str] = set()
    for namespace in (getattr(hook, "__dict__", {}), *(vars(cls) for cls in type(hook).__mro__ if cls is not Events)):
        here: dict[str, str] = {}
        for name, value in namespace.items():
            if not name.startswith("on_") or not _is_event_method(value):
                continue
            event = SPELLINGS.get(name)
            if event is None:
                raise RegistrationError(
                    f"{owner}.{name}: no event is named {name!r}; {nearest(name, SPELLINGS, '`hookline events`')}. "
                    "Mark a method that is not an event with @hookline.not_an_event"
                )
            if event.name in here:
                raise RegistrationError(
                    f"{owner} defines {here[event.name]} and {name}, two spellings of one event; keep one"
                )
            here[event.name] = name
            if event.name not in taken and _is_event_method(getattr(hook, name)):
                listeners[event.name] = read_signature(getattr(hook, name), event, name, owner)
        taken |= set(here)
    for name in names(hook_attribute(hook, "events_when_not_due"), "events_when_not_due"):
        if name not in listeners:
            problem = f"{owner}.events_when_not_due: it does not listen to {name!r}"
            raise RegistrationError(f"{problem}; {nearest(name, listeners)}")
    return listeners


def _is_event_method(value: Any) -> bool:
    """Return whether it can be called and is not marked.

    A subclass drops an inherited event with ``on_… = None`` or with the mark.
    """
    method = callable(value) or isinstance(value, (staticmethod, classmethod))
    marked = (getattr(body, "__hookline_not_an_event__", False) for body in (value, getattr(value, "__func__", value)))
    return method and not any(marked)


def _method_hint(hook: Any) -> str:
    """Name the event that a method of the hook seems to mean, such as `step_end`; "" if there is none."""
    methods = [name for name in dir(type(hook)) if not name.startswith("_") and callable(getattr(type(hook), name))]
    events = {name: event for name in methods if name not in OTHER_METHODS and (event := meant(name, SPELLINGS))}
    return "".join(f"; did you mean {event!r} by {name!r}?" for name, event in list(events.items())[:1])


def hook_name(hook: Any, type_name: str = "") -> str:
    """Return the name of a hook that was registered without one.

    It is the name given to the object, for example by ``super().__init__("my_hook")``. Otherwise it is derived from the
    first of these that exists: the `name` in the body of its class; the name of its type, by which a config or code
    requested it or under which its class was registered; an inherited `name`; that of a function; or the class in snake
    case.

    >>> hook_name(JSONLogHook())
    'json_log_hook'
    """
    given, cls = hook_attribute(hook, "name"), type(hook)
    inherited = getattr(cls, "name", None)
    if isinstance(given, str) and given and given != inherited:
        return given
    # A user's function may make a built-in hook, whose name the user did not choose.
    chosen = None if is_built_in(cls) else vars(cls).get("name")
    for name in (chosen, type_name, HOOKS.name_of(cls), inherited, getattr(hook, "__name__", None)):
        if isinstance(name, str) and name:
            return DerivedName(name)
    return DerivedName(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower())


def hook_parameters(hook: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a hook's parameters for the record: its constructor's, as the instance holds them."""
    try:
        keys = list(inspect.signature(type(hook)).parameters)
    except (TypeError, ValueError):
        return dict(given)
    held = {name: getattr(hook, name) for name in keys if name != "name" and hasattr(hook, name)}
    return {**given, **held}  # A module that was passed may be held weakly.


# ---- what a hook declares --------------------------------------------------------------------------------------------


def check_attributes(hook: Any, name: str, listeners: Container[str], ranks: Ranks) -> None:
    """Reject an attribute of a user's hook whose name is read from hooks, if its value cannot be meant that way.

    Raises:
        RegistrationError: The message names the attribute and the expected value.
    """
    attributes: Mapping[str, Any] = getattr(hook, "__dict__", {})
    namespaces = [attributes, *(vars(cls) for cls in type(hook).__mro__ if not cls.__module__.startswith("hookline."))]
    for attribute in sorted(READ_AS.keys() & set().union(*namespaces)):
        value = next(namespace[attribute] for namespace in namespaces if attribute in namespace)
        is_computed = isinstance(value, property) or inspect.ismemberdescriptor(value)
        if value is None or is_computed or (attribute in READ_BY and READ_BY[attribute] not in listeners):
            continue
        is_right, expected = READ_AS[attribute]
        is_wrong = not is_right(value)
        if attribute == "ranks" and attribute in attributes and not is_wrong:
            # In a class it is a declaration; on an object it may be anything, such as the ranks of matrices.
            chosen, expected = parse_ranks(value), f"ranks of this run, which has {ranks.world_size}"
            is_wrong = isinstance(chosen, frozenset) and min(chosen) >= ranks.world_size
        if is_wrong:
            raise RegistrationError(
                f"{name!r}: Hookline reads the attribute {attribute!r} of hooks and expects {expected}, {got(value)}; "
                "rename it if it means something else"
            )


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Iterable) and all(isinstance(item, str) for item in value))


def _are_ranks(value: Any) -> bool:
    try:
        parse_ranks(value)
    except ConfigError:
        return False
    return True


def _is_selection(value: Any) -> bool:
    patterns = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return all(isinstance(item, (str, torch.Tensor)) or callable(item) for item in patterns)


_FLAG = (lambda value: isinstance(value, bool)), "True or False"
_METHOD = callable, "a method"
_SELECTION = _is_selection, "a name, a pattern, a class, a predicate or a list of these"
READ_AS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: _FLAG for name, default in DEFAULTS.items() if isinstance(default, bool)},
    **{name: _METHOD for name, default in DEFAULTS.items() if callable(default)},
    **{name: (_are_names, "names") for name, default in DEFAULTS.items() if isinstance(default, tuple)},
    "state_dict": _METHOD,
    "load_state_dict": _METHOD,
    "unsaved_hint": (lambda value: isinstance(value, str), "a string"),
    "intervenes": _FLAG,
    "check_finite": _FLAG,
    "modules": _SELECTION,
    "params": _SELECTION,
    "ranks": (_are_ranks, "'all', 'zero', 'local-zero', a rank or a list of ranks"),
    "schedule": (lambda value: isinstance(value, Schedule), "a Schedule (pass every=… for a period)"),
}
"""Attributes of hooks that are checked at registration, and the expected values."""
READ_BY = {"modules": "on_forward", "params": "on_update"}
"""Attributes that are read only if the hook listens to an event."""


def check_needs(hook: Any, name: str) -> tuple[str, ...]:
    """Return the capabilities that a hook needs.

    Raises:
        RegistrationError: If one of its `needs` is not a capability of runs; the message suggests the nearest one.
    """
    needs = names(hook_attribute(hook, "needs"), "needs")
    for capability in needs:
        if capability not in CAPABILITIES:
            nearby = nearest(capability, CAPABILITIES)
            raise RegistrationError(f"{name!r} needs {capability!r}, which is not a capability of runs; {nearby}")
    return needs


def check_schedule(hook: Any, listeners: Iterable[str], schedule: Schedule) -> None:
    """Reject a schedule for a hook that is called at no event inside steps.

    Raises:
        RegistrationError: If there is a schedule; the message says what would be right.
    """
    if schedule == Schedule() or any(CATALOG[event].inner for event in listeners):
        return
    takes_every = schedule.every is not None and "every" in inspect.signature(type(hook)).parameters
    remedy = _with_period(hook, str(schedule.every)) if takes_every else "leave the schedule out"
    where = f"this {type(hook).__name__} listens to no event inside steps"
    raise RegistrationError(f"{schedule} has no effect: {where}; {remedy}")


def _with_period(hook: Any, every: str) -> str:
    """Say how to make a built-in hook with a period, or why it cannot have this one."""
    others = hook_parameters(hook, {})
    try:
        type(hook)(**{name: others[name] for name in others if name not in hook.every_aliases}, every=every)
    except ConfigError as refused:
        return str(refused)
    return f"pass every={every!r} to {type(hook).__name__} instead"
