"""Names that a config may use: built-ins, what decorators add, entry points; nothing can be shadowed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hookline import HooklineError
from hookline.core import plugins
from hookline.core.plugins import HOOKS, PluginTable, load_reference
from hookline.core.provided import PROVIDED
from hookline.errors import RegistrationError

TABLE = {"ordered": "collections:OrderedDict"}


def make(monkeypatch: pytest.MonkeyPatch, **points: Callable[[], Any]) -> PluginTable:
    """A namespace of one's own with one built-in and these entry points."""
    found = [SimpleNamespace(name=name, load=load) for name, load in points.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "hookline.things" else [])
    monkeypatch.setitem(PROVIDED, "things", f"{__name__}:TABLE")
    return PluginTable("thing", "things")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference leads to this module's table, wherever pytest imported it to."""
    monkeypatch.setattr(
        plugins,
        "load_reference",
        lambda reference: TABLE if reference.endswith(":TABLE") else load_reference(reference),
    )


def test_built_ins_decorated_and_entry_points_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three kinds of names lead to their factory, and each says where it comes from."""
    things = make(monkeypatch, plugged=lambda: list)
    assert things.add("mine")(dict) is dict
    assert [things.find(name).__name__ for name in ("ordered", "mine", "plugged")] == ["OrderedDict", "dict", "list"]
    assert things.names() == ["mine", "ordered", "plugged"]
    assert [things.origin(name) for name in things.names()] == ["registered", "built-in", "entry point"]


def test_a_name_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a built-in nor one's own can be replaced by a second decorator."""
    things = make(monkeypatch)
    things.add("mine")(dict)
    for taken in ("mine", "ordered"):
        with pytest.raises(RegistrationError, match=f"the thing '{taken}' is registered already"):
            things.add(taken)(list)
    assert things.find("mine") is dict


def test_an_entry_point_cannot_shadow_a_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package cannot slip its own code under a built-in name, and is not even imported."""

    def never() -> None:
        raise AssertionError("imported")

    things = make(monkeypatch, ordered=never)
    assert things.find("ordered").__name__ == "OrderedDict" and things.origin("ordered") == "built-in"


def test_looking_a_name_up_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking a config touches no plug-in's code."""

    def never() -> None:
        raise AssertionError("imported")

    assert "plugged" in make(monkeypatch, plugged=never)


def test_a_miss_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices are listed."""
    with pytest.raises(HooklineError, match="there is no thing named 'orderd'; did you mean 'ordered'"):
        make(monkeypatch).find("orderd")


def test_every_built_in_hook_loads() -> None:
    """The table names nothing that is not there."""
    for name in ("identity", "clip_norm", "console_log", "checkpoint", "json_log", "activation_stats"):
        assert isinstance(HOOKS.find(name), type)
