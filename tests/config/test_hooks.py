"""From a config to hooks: two forms, checked as a whole before anything is imported or registered."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hookline import (
    ClipNorm,
    ForwardHook,
    HooklineError,
    HookManager,
    HookRegistry,
    TrainingHook,
    load_config,
    register_hook,
)
from hookline.errors import ConfigError, RegistrationError


class Watch(ForwardHook):
    """A hook whose parameters are named like arguments of the registry."""

    def __init__(
        self, threshold: float = 0.5, event: str = "", origin: str = "", last: int = 0, hook: str = ""
    ) -> None:
        if last is None:
            raise ValueError("no last")
        self.threshold, self.event, self.origin, self.last, self.hook = threshold, event, origin, last, hook

    def on_forward(self, name: str) -> None: ...


class Report(TrainingHook):
    """A lifecycle hook."""

    def on_train_end(self) -> None: ...


@pytest.fixture(autouse=True)
def registered() -> None:
    """Register two hooks for the test."""
    register_hook("watch")(Watch)
    register_hook("report")(Report)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write an importable package with a hook."""
    (tmp_path / "pretend_pkg").mkdir()
    (tmp_path / "pretend_pkg" / "__init__.py").write_text("")
    (tmp_path / "pretend_pkg" / "hooks.py").write_text(
        "from subprocess import run\n"
        "NUMBER = 3\n"
        "class Mine:\n"
        "    def __init__(self, level=1): self.level = level\n"
        "    def on_train_end(self): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [name for name in sys.modules if name.startswith("pretend_pkg")]:
        monkeypatch.delitem(sys.modules, module)
    return "pretend_pkg.hooks"


@pytest.mark.req("000-43")
@pytest.mark.parametrize("kind", [HookRegistry, HookManager])
@pytest.mark.parametrize("text", ["{}", "model: anything\nhooks:\n {}"])
@pytest.mark.parametrize("as_path", [str, Path])
def test_a_registry_is_made_with_a_file(
    kind: Any, text: str, as_path: Any, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path works like the mapping in the file: its references are resolved, and its imports must be allowed."""
    monkeypatch.setenv("NORM", "2.5")
    file = tmp_path / "hooks.yaml"
    hooks = f"{{update: [{{name: clip_norm, max_norm: '${{env:NORM}}'}}], lifecycle: [report, {package}.Mine]}}"
    file.write_text(text.replace("{}", hooks))
    registry = kind(as_path(file), allow=["pretend_pkg"])
    assert list(registry) == ["report", "mine", "clip_norm"] and registry.get("clip_norm").max_norm == 2.5
    with pytest.raises(ConfigError, match="is not allowed: a config file names registered hooks"):
        kind(as_path(file))
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: it does not exist"):
        kind(as_path(tmp_path / "nowhere.yaml"))


@pytest.mark.req("000-01", "000-02", "000-03", "004-27")
def test_a_registry_made_with_a_config_loads_its_hooks() -> None:
    """Lists by kind become hooks of that kind, with their parameters, in order."""
    registry = HookRegistry(
        {
            "forward": [{"name": "watch", "threshold": 0.1}, {"name": "watch", "as": "second"}],
            "update": [{"name": "clip_norm", "max_norm": 1.0}, "identity"],
            "lifecycle": ["report"],
        }
    )
    assert registry.get("watch").threshold == 0.1
    assert [entry.name for entry in registry.entries("forward")] == ["watch", "second"]
    assert [entry.name for entry in registry.entries("update")] == ["clip_norm", "identity"]
    assert [entry.name for entry in registry.entries("lifecycle")] == ["report"]


@pytest.mark.req("004-27")
def test_a_toml_file_configures_hooks() -> None:
    """Hooks written in TOML are registered by kind, with their parameters, in the order of the file."""
    Path("run.toml").write_text(
        '[[hooks.lifecycle]]\nname = "report"\n[[hooks.update]]\nname = "clip_norm"\nmax_norm = 0.5\n'
        '[[hooks.update]]\nname = "identity"\nenabled = false\n',
        encoding="utf-8",
    )
    registry = HookRegistry(load_config("run.toml")[0]["hooks"])
    assert [entry.name for entry in registry.entries("lifecycle")] == ["report"]
    assert [(entry.name, entry.enabled) for entry in registry.entries("update")] == [
        ("clip_norm", True),
        ("identity", False),
    ]
    assert registry.get("clip_norm").max_norm == 0.5


@pytest.mark.req("000-04")
def test_enabled_false_registers_a_disabled_hook() -> None:
    """A hook with `enabled: false` is registered and disabled."""
    registry = HookRegistry({"lifecycle": [{"name": "report", "enabled": False}]})
    assert not registry.is_enabled("report") and registry.slots.on_train_end is not None
    assert "report: disabled" in str(registry.list_hooks())
    assert registry.entry("report").origin == "config"


def test_reserved_keys_are_options_and_all_else_goes_to_the_constructor() -> None:
    """Also parameters that have the names of the registry's arguments go to the constructor."""
    entry = {
        "name": "watch",
        "every": 10,
        "on_error": "raise",
        "ranks": [0],
        "event": "e",
        "origin": "o",
        "last": 3,
        "hook": "h",
    }
    registry = HookRegistry({"forward": [entry]})
    kept = registry.entry("watch")
    assert (kept.hook.event, kept.hook.origin, kept.hook.last, kept.hook.hook) == ("e", "o", 3, "h")
    assert (str(kept.schedule), kept.policy, kept.ranks) == ("every 10 steps", "raise", frozenset({0}))
    assert kept.parameters["event"] == "e" and kept.parameters["threshold"] == 0.5


@pytest.mark.req("000-19")
@pytest.mark.parametrize(
    ("config", "there"),
    [
        ({}, True),
        ({"lifecycle": ["report"]}, True),
        ({"hooks": {}}, True),
        ({"hooks": None}, True),
        ({"update": []}, False),
        ({"update": None}, False),
        ({"hooks": {"update": []}}, False),
        ({"update": [{"name": "clip_norm", "max_norm": 1.0}]}, False),
    ],
)
def test_identity_is_the_default_update_hook(config: dict[str, Any], there: bool) -> None:
    """A config without an `update:` list gets the identity hook; one with a list, even an empty one, does not."""
    registry = HookRegistry(config)
    assert ("identity" in registry) is there
    if there:
        assert registry.entry("identity").origin == "default"


def test_registries_without_a_config_start_empty() -> None:
    """The default update hook is added only when a config is loaded."""
    assert len(HookRegistry()) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"forwards": []}, r"hooks\.forwards: unknown key; did you mean 'forward'"),
        ({"forward": {"name": "watch"}}, r"hooks\.forward: expected a valid list, got \{'name': 'watch'\}"),
        ({"forward": [3]}, r"hooks\.forward\.0: expected a valid string or a mapping, got 3"),
        ({3: []}, "3: expected a key that is a word"),
        ({"forward": [{"as": "x"}]}, r"hooks\.forward\.0: expected a hook's name"),
        ({"forward": ["wacth"]}, r"hooks\.forward\.0\.name: there is no hook named 'wacth'; did you mean 'watch'"),
        ({"forward": [{"name": "watch", "enabled": "no"}]}, r"hooks\.forward\.0\.enabled: expected true or false"),
        ({"forward": [{"name": "watch", "every": "2 epoks"}]}, r"hooks\.forward\.0\.every: .*epoks"),
        ({"forward": ["watch", {"name": "report", "at": "x"}]}, r"hooks\.forward\.1\.at: .*x"),
        ({"forward": [{"name": "watch", "on_error": "rise"}]}, r"hooks\.forward\.0\.on_error: .*rise"),
        ({"forward": [{"name": "watch", "ranks": "0"}]}, r"\.0\.ranks: expected 'all', .*, got '0'"),
        ({"forward": [{"name": "watch", "ranks": True}]}, r"\.0\.ranks: expected 'all', .*, got True"),
        ({"forward": [{"name": "watch", "ranks": [0, "1"]}]}, r"\.ranks: expected 'all', .*, got \[0"),
        ({"forward": [{"name": "watch", "before": 3}]}, r"\.before: expected a name or a list of names, got 3"),
        ({"forward": [{"name": "watch", "after": [3]}]}, r"\.after: expected a name or a list of names, got \[3"),
        ({"forward": [{"name": "watch", "every": True}]}, r"hooks\.forward\.0\.every: True is not a schedule"),
        (
            {"enable_logging_hook": True, "logging_config": {"every": "x"}},
            r"hooks\.logging_config\.every: .*x",
        ),
        (
            {"hook_classes": ["pkg.Mine"], "hook_configs": {"Mine": {"on_error": "x"}}},
            r"hooks\.hook_configs\.Mine\.on_error: .*x",
        ),
        ({"hook_classes": [3]}, r"hooks\.hook_classes\.0: expected a valid string, got 3"),
        ({"hook_classes": ["no path.x"]}, "is not a dotted path"),
        ({"logging_config": {"every": "x"}}, r"hooks\.logging_config\.every: .*x"),
        ({"hook_configs": {"Missing": {}}}, r"hooks\.hook_configs\.Missing: no such class in hook_classes"),
        ({"hook_classes": ["pkg.Mine"], "hook_configs": {"Mime": {}}}, r"Mime: no such class .* did you mean 'Mine'"),
        (
            {"hook_classes": ["pkg.Mine"], "hook_configs": {"pkg.Mine": {}, "Mine": {}}},
            r"hooks\.hook_configs\.Mine: 'pkg\.Mine' is configured twice, by its name and by its path; keep one",
        ),
        (
            {"hook_classes": ["pkg.Mine", "other.Mine"], "hook_configs": {"Mine": {}}},
            r"hooks\.hook_configs\.Mine: several classes .* write its path: pkg\.Mine or other\.Mine",
        ),
        ({"hook_classes": "pkg.Mine"}, r"hooks\.hook_classes: expected a valid list, got 'pkg\.Mine'"),
        ({"hook_classes": ["pkg.Mine"], "hook_configs": {"Mine": 3}}, r"hook_configs\.Mine: expected a mapping, got 3"),
        ({"hook_configs": ["Mine"]}, r"hooks\.hook_configs: expected a mapping"),
        ({"enable_logging_hook": "no"}, r"hooks\.enable_logging_hook: expected a valid boolean, got 'no'"),
        ({"logging_config": 3}, r"hooks\.logging_config: expected a mapping"),
        (
            {"enable_logging_hook": True, "logging_config": {"enabled": "no"}},
            r"hooks\.logging_config\.enabled: expected true or false, got 'no'",
        ),
        (3, "expected a mapping"),
    ],
)
def test_wrong_configs_are_one_clear_error(config: Any, message: str) -> None:
    """Each error has the path, the bad value and the nearest valid one."""
    with pytest.raises(ConfigError, match=message):
        HookRegistry(config)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"name": "watch", "treshold": 1},
            r"hooks\.forward\.0: Watch has no parameter 'treshold'; did you mean 'threshold'",
        ),
        (
            {"name": "watch", "threshold": "high"},
            r"hooks\.forward\.0: Watch\.threshold: expected float, got 'high' \(str\)",
        ),
        ({"name": "watch", "last": None}, r"hooks\.forward\.0: watch cannot be created with last=None: no last"),
        ("nothing_there.Hook", r"hooks\.forward\.0: 'nothing_there\.Hook': cannot import 'nothing_there' \(No module"),
        ("report", r"hooks\.forward\.0: 'report' is a lifecycle hook; list it under `lifecycle:`"),
        ("sign", r"hooks\.forward\.0: 'sign' is an update hook; list it under `update:`"),
        ("clip_norm", r"hooks\.forward\.0: ClipNorm needs the parameter 'max_norm'"),
    ],
)
def test_wrong_hooks_are_refused_with_their_path(entry: Any, message: str) -> None:
    """A misspelt parameter, a missing one and a hook of the wrong kind are reported with their path."""
    with pytest.raises(RegistrationError, match=message):
        HookRegistry({"forward": [entry]})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"patiense": 2}, r"^hooks\.early_stopping_config: .*did you mean 'patience'"),
        ({"patience": -1}, r"^hooks\.early_stopping_config: .*patience: expected an integer"),
    ],
)
def test_the_parameters_of_a_hook_that_is_off_are_checked(parameters: dict[str, Any], message: str) -> None:
    """A mistake is an error even while the hook is off; correct parameters make no hook."""
    with pytest.raises(HooklineError, match=message):
        HookRegistry({"enable_early_stopping_hook": False, "early_stopping_config": parameters})
    off = {"enable_early_stopping_hook": False, "early_stopping_config": {"patience": 2}}
    assert list(HookRegistry(off)) == ["identity"]


def test_a_config_is_loaded_as_a_whole_or_not_at_all() -> None:
    """If the second hook is refused, the first is removed again."""
    registry = HookRegistry()
    with pytest.raises(HooklineError):
        registry.load({"forward": ["watch", {"name": "watch", "as": "b", "treshold": 1}]})
    assert len(registry) == 0


@pytest.mark.req("002-85")
def test_several_hooks_of_one_type_get_numbers(package: str) -> None:
    """The name of the type is numbered, and so is that of a class in hook_classes; `as` must be unique."""
    assert list(HookRegistry({"forward": ["watch", {"name": "watch"}], "update": []})) == ["watch", "watch_2"]
    twice = {"hook_classes": [f"{package}.Mine"] * 2, "hook_configs": {"Mine": {"level": 3}}, "update": []}
    registry = HookRegistry(twice)
    assert list(registry) == ["mine", "mine_2"] and [registry.get(name).level for name in registry] == [3, 3]
    with pytest.raises(RegistrationError, match=r"forward\.1: a hook named 'a' is registered already.*as:"):
        HookRegistry({"forward": [{"name": "watch", "as": "a"}] * 2})


def test_the_name_of_a_type_is_the_name_of_the_instance() -> None:
    """What a config or a decorator calls a hook is what listings, overrides and messages call it."""
    kind = register_hook("readable")(type("SomeHook", (TrainingHook,), {"on_epoch_end": lambda self: None}))
    from_config = HookRegistry({"lifecycle": ["readable", {"name": "readable", "as": "other"}], "update": []})
    assert list(from_config) == ["readable", "other"]
    registry = HookRegistry()
    assert registry.register("readable") == "readable" and registry.register(kind(), "chosen") == "chosen"
    assert registry.register(kind()) == "readable_2"


def test_dotted_paths_in_code_need_no_permission(package: str) -> None:
    """A dict written in code counts as code."""
    registry = HookRegistry({"hook_classes": [f"{package}.Mine"], "hook_configs": {"Mine": {"level": 3, "every": 5}}})
    assert registry.get("mine").level == 3 and str(registry.entry("mine").schedule) == "every 5 steps"


def test_empty_values_of_a_yaml_file_are_empty(package: str) -> None:
    """A key without a value is null in YAML: a class without parameters, a list without entries."""
    config = {"hook_classes": [f"{package}.Mine"], "hook_configs": {"Mine": None}, "lifecycle": None}
    assert HookRegistry(config).get("mine").level == 1


def test_a_wrong_parameter_of_a_class_names_both_places(package: str) -> None:
    """The error names the place of the class and the place of its parameters."""
    with pytest.raises(
        RegistrationError, match=r"^hooks\.hook_classes\.0 with hook_configs\.Mine: Mine has no parameter"
    ):
        HookRegistry({"hook_classes": [f"{package}.Mine"], "hook_configs": {"Mine": {"levle": 3}}})


def test_an_option_that_is_null_counts_as_absent() -> None:
    """An option that is null has no effect."""
    nothing = dict.fromkeys(("every", "at", "start", "stop", "before", "after", "on_error", "ranks"))
    assert "watch" in HookRegistry({"forward": [{"name": "watch", **nothing}]})


def test_dotted_paths_from_a_file_need_an_allowed_prefix(package: str) -> None:
    """A path of a file is refused before anything is imported, unless its prefix is allowed, as a list or a word."""
    config = {"lifecycle": [f"{package}.Mine"]}
    for allow in ((), ("pretend",), ("pretend_pkg.hook",), ("pretend_pkg_evil",)):
        with pytest.raises(ConfigError, match=r"hooks\.lifecycle\.0\.name: .*not allowed.*--allow pretend_pkg"):
            HookRegistry(config, allow=allow, from_file=True)
    assert package not in sys.modules
    assert "mine" in HookRegistry(config, allow=("pretend_pkg",), from_file=True)
    assert "mine" in HookRegistry(config, allow="pretend_pkg", from_file=True)


def test_nothing_is_imported_when_a_later_entry_is_wrong(package: str) -> None:
    """Every name and path is checked before the first import."""
    with pytest.raises(ConfigError, match="wacth"):
        HookRegistry({"lifecycle": [f"{package}.Mine"], "forward": ["wacth"]})
    assert package not in sys.modules


def test_names_that_a_module_imports_are_not_its_hooks(package: str) -> None:
    """An allowed package gives no access to what it imports, such as subprocess.run, or to what is not callable."""
    Path("pretend_pkg/needy.py").write_text("import no_such_package\n")
    for dotted, message in {
        f"{package}.run": "is not a class or function of that package",
        f"{package}.NUMBER": "is not a class or function of that package",
        f"{package}.Mien": "has no 'Mien'; did you mean 'Mine'",
        "no_such_package.Hook": r"cannot import 'no_such_package'.*looks in the current directory \(",
        "pretend_pkg.needy.Hook": r"'pretend_pkg\.needy' \(No module named 'no_such_package'\)$",
    }.items():
        with pytest.raises(HooklineError, match=message):
            HookRegistry({"lifecycle": [dotted]})


@pytest.mark.parametrize("dotted", ["a..b", "a.b()", "a.b; import os", ".a", "a.", "../x.y"])
def test_invalid_dotted_paths_are_rejected(dotted: str) -> None:
    """A path with anything but identifiers and dots is rejected before an import."""
    with pytest.raises(ConfigError, match="is not a dotted path"):
        HookRegistry({"lifecycle": [dotted]})


def test_objects_stay_and_classes_and_names_are_made() -> None:
    """An object is registered as it is; a class or a name is made with the parameters that are given."""
    registry, hook = HookRegistry(), Report()
    registry.register(hook)
    registry.register(ClipNorm, max_norm=2)
    registry.register("watch", threshold=1)
    assert registry.get("report") is hook
    assert (registry.get("clip_norm").max_norm, registry.get("watch").threshold) == (2.0, 1)
    with pytest.raises(RegistrationError, match="'evry' is not an option of a hook; did you mean 'every'"):
        registry.register(Report(), evry=10)


def test_parameters_are_recorded_with_defaults() -> None:
    """The recorded parameters include defaults, and not the name."""
    registry = HookRegistry()
    registry.register(Watch(0.25))
    registry.register(Report())
    watch, report = registry.list_hooks()
    assert watch.parameters == {"threshold": 0.25, "event": "", "origin": "", "last": 0, "hook": ""}
    assert report.parameters == {}


def test_errors_of_a_named_hook_show_its_parameters() -> None:
    """A class passed in code raises what its constructor raises; for a name, the error also shows the parameters."""

    class Refusing(Report):
        def __init__(self, level: int) -> None:
            raise ValueError("no level")

    with pytest.raises(ValueError, match=r"^no level$"):
        HookRegistry().register(Refusing, level=3)
    with pytest.raises(RegistrationError, match="watch cannot be created with event='e', last=None: no last"):
        HookRegistry({"forward": [{"name": "watch", "event": "e", "last": None}]})


def test_a_hook_can_keep_its_parameters_out_of_messages() -> None:
    """A RegistrationError of the constructor is raised as it is: the parameters may be secrets."""

    def picky(url: str) -> Any:
        raise RegistrationError("url: use https")

    register_hook("picky")(picky)
    with pytest.raises(RegistrationError, match=r"^hooks\.lifecycle\.0: url: use https$"):
        HookRegistry({"lifecycle": [{"name": "picky", "url": "http://host/hunter2"}]})


# ---- functions -----------------------------------------------------------------------------------------------------


def double(grads: Any, step: int, factor: float = 2.0) -> Any:
    """Multiplies."""
    return {name: grad * factor for name, grad in grads.items()}


def test_a_function_of_gradients_is_an_update_hook() -> None:
    """It has the function's name; arguments of the event come from the run, all others from the config."""
    register_hook("double")(double)
    registry = HookRegistry({"update": [{"name": "double", "factor": 3.0}]})
    entry = registry.entry("double")
    assert entry.kinds == ["update"] and entry.listeners["on_update"].wanted == ("grads", "step")
    assert entry.hook.on_update({"a": 1}, step=1) == {"a": 3.0}
    with pytest.raises(RegistrationError, match="double has no parameter 'step'"):
        HookRegistry({"update": [{"name": "double", "step": 3}]})


def test_attributes_of_a_function_count_as_those_of_a_class() -> None:
    """A function can select parameters and set its policy by attributes."""

    def picky(grads: Any) -> Any:
        return grads

    picky.params, picky.on_error = "*.weight", "raise"
    register_hook("picky")(picky)
    register_hook("double")(double)
    registry = HookRegistry({"update": ["picky", "double"]})
    assert registry.get("picky").params == "*.weight" and registry.entry("picky").policy == "raise"
    assert registry.get("double").params is None


def test_any_other_function_makes_a_hook() -> None:
    """A registered function that takes no gradients is called with the parameters, and returns the hook."""

    @register_hook("made")
    def made(scale: float) -> ClipNorm:
        return ClipNorm(scale)

    assert HookRegistry({"update": [{"name": "made", "scale": 2}]}).get("made").max_norm == 2.0


@pytest.mark.parametrize("name", ["checkpoint", "lr_monitor", "console_log"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"start": 3}, "every 5 steps, from 3 steps"),
        ({"stop": 30}, "every 5 steps, until 30 steps"),
        ({"at": 7}, "every 5 steps, at 7 steps"),
        ({}, "every 5 steps"),
    ],
)
def test_a_period_that_a_constructor_takes_is_kept_beside_other_options(
    name: str, options: dict[str, Any], expected: str
) -> None:
    """In a config as in code."""
    by_config, by_name, by_object = (
        HookRegistry({"lifecycle": [{"name": name, "every": 5, **options}]}),
        HookRegistry(),
        HookRegistry(),
    )
    by_name.register(name, every=5, **options)
    made = by_config.get(name)
    assert [str(registry.entry(name).schedule) for registry in (by_config, by_name)] == [expected] * 2
    if "at" not in options:
        by_object.register(made, **options)
        assert str(by_object.entry(name).schedule) == expected


def test_points_at_registration_replace_a_default_period() -> None:
    """Nobody gave that period."""
    assert (
        str(HookRegistry({"lifecycle": [{"name": "console_log", "at": 7}]}).entry("console_log").schedule)
        == "at 7 steps"
    )
