"""Names that a config may use: built-ins, what decorators add, entry points; each name has one source."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline import HooklineError
from hookline.core import plugins
from hookline.core.plugins import HOOKS, PluginTable, load_reference, unread_entry_points
from hookline.core.provided import PROVIDED
from hookline.errors import RegistrationError

TABLE = {"ordered": "collections:OrderedDict"}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The reference leads to this module's table, wherever pytest imported it to, and packages can be installed."""
    monkeypatch.setattr(
        plugins,
        "load_reference",
        lambda reference: TABLE if reference.endswith(":TABLE") else load_reference(reference),
    )
    monkeypatch.setitem(PROVIDED, "things", f"{__name__}:TABLE")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield
    for module in set(sys.modules) - before:
        del sys.modules[module]


def install(package: str, offers: str, module: str | None = None, group: str = "hookline.things") -> None:
    """Install a package whose module has the package's name, with these lines of entry points; None for no module."""
    meta = Path(f"{package}-1.0.dist-info")
    meta.mkdir()
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(f"[{group}]\n{offers}\n")
    if module is not None:
        Path(f"{package}.py").write_text(module)


def make() -> PluginTable:
    """A namespace of one's own with one built-in, and what is installed."""
    return PluginTable("thing", "things")


def test_built_ins_decorated_and_entry_points_are_found() -> None:
    """All three kinds of names lead to their factory, and each says where it comes from."""
    install("acme", "plugged = builtins:list")
    things = make()
    assert things.add("mine")(dict) is dict
    assert [things.find(name).__name__ for name in ("ordered", "mine", "plugged")] == ["OrderedDict", "dict", "list"]
    assert things.names() == ["mine", "ordered", "plugged"]
    assert [things.origin(name) for name in things.names()] == ["registered", "built-in", "acme 1.0"]
    assert not any(map(things.refused, things.names()))


def test_a_name_is_given_once() -> None:
    """Neither a built-in nor one's own can be replaced by a second decorator."""
    things = make()
    things.add("mine")(dict)
    for taken in ("mine", "ordered"):
        with pytest.raises(RegistrationError, match=f"the thing '{taken}' is registered already"):
            things.add(taken)(list)
    assert things.find("mine") is dict


def test_an_entry_point_cannot_shadow_a_built_in() -> None:
    """An installed package cannot slip its own code under a built-in name, and is not even imported."""
    install("acme", "ordered = acme:Thing", "raise AssertionError('imported')")
    things = make()
    assert things.find("ordered").__name__ == "OrderedDict" and things.origin("ordered") == "built-in"
    refused = "the thing 'ordered' of acme 1.0 is refused: a package cannot replace a built-in"
    assert things.refused("ordered") == refused


def test_two_packages_cannot_offer_one_name() -> None:
    """Which one is meant depends on the order of installation, so neither is imported; other names still work."""
    install("acme", "twice = acme:Thing\nmine = acme:Thing", "class Thing: ...")
    install("other", "twice = other:Thing", "raise AssertionError('imported')")
    things = make()
    assert "twice" in things and things.origin("twice") == "acme 1.0 and other 1.0"
    with pytest.raises(RegistrationError, match=r"'twice' has several sources \(acme 1\.0, other 1\.0\); rename"):
        things.find("twice")
    assert things.find("mine").__module__ == "acme"


def test_code_and_a_package_cannot_offer_one_name() -> None:
    """What the user's code registers does not silently replace what a package offers, nor the other way round."""
    install("acme", "plugged = acme:Thing", "raise AssertionError('imported')")
    things = make()
    things.add("plugged")(dict)
    with pytest.raises(RegistrationError, match=r"'plugged' has several sources \(registered, acme 1\.0\)"):
        things.find("plugged")


def test_a_package_may_register_what_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decorator and its entry point are one source, before and after it is imported."""
    code = "import hookline\n@hookline.register_hook('plugged')\nclass Thing: ..."
    install("acme", "plugged = acme:Thing", code, group="hookline.hooks")
    monkeypatch.setitem(vars(HOOKS), "plugins", PluginTable("hook", "hooks").plugins)
    assert [HOOKS.find("plugged").__name__ for _ in range(2)] == ["Thing", "Thing"]
    assert HOOKS.origin("plugged") == "acme 1.0"


@pytest.mark.parametrize(
    ("module", "value", "why"),
    [
        (None, "acme:Thing", "cannot be loaded: ModuleNotFoundError: No module named 'acme'"),
        ("import no_such_module", "acme:Thing", "cannot be loaded: ModuleNotFoundError: No module named 'no_such"),
        ("raise SystemExit('needs a GPU')", "acme:Thing", "cannot be loaded: SystemExit: needs a GPU"),
        ("", "acme:Thing", "cannot be loaded: AttributeError"),
        ("", "acme Thing", "cannot be loaded: "),
        ("", "acme", "is not a class or function, got <module 'acme'"),
    ],
)
def test_a_broken_plugin_is_named_with_its_package(module: str | None, value: str, why: str) -> None:
    """The error has the package, its version, the entry point and the reason; no other name is affected."""
    install("acme", f"plugged = {value}", module)
    things = make()
    with pytest.raises(RegistrationError) as caught:
        things.find("plugged")
    assert str(caught.value).startswith(f"the thing 'plugged' of acme 1.0 ({value}) {why}")
    assert things.find("ordered")


def test_a_damaged_package_breaks_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """If the installed packages cannot be read, built-ins and registered names work, and a warning says so."""
    install("acme", "this line has no equals sign")
    things = make()
    things.add("mine")(dict)
    with caplog.at_level(logging.WARNING, "hookline"):
        assert things.find("ordered") and things.find("mine") is dict and not things.refused("ordered")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "plugins are unavailable, because the installed packages cannot be read"
    ]


def test_a_group_that_is_not_read_is_known() -> None:
    """A sink is a hook; its author learns that a group of its own would be ignored."""
    install("acme", "db = acme:Sink", group="hookline.sinks")
    install("other", "db = other:Sink", group="hookliner.sinks")
    assert [(point.name, point.group) for point in unread_entry_points()] == [("db", "hookline.sinks")]


def test_looking_a_name_up_imports_nothing() -> None:
    """Checking a config touches no plug-in's code."""
    install("acme", "plugged = acme:Thing", "raise AssertionError('imported')")
    assert "plugged" in make()


def test_a_miss_names_the_nearest() -> None:
    """The choices are listed."""
    with pytest.raises(HooklineError, match="there is no thing named 'orderd'; did you mean 'ordered'"):
        make().find("orderd")


def test_every_built_in_hook_loads() -> None:
    """The table names nothing that is not there."""
    for name in ("identity", "clip_norm", "console_log", "checkpoint", "json_log", "activation_stats"):
        assert isinstance(HOOKS.find(name), type)
