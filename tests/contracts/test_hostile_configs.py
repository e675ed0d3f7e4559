"""A hostile config: none of it is imported or executed, nothing is written, and the error is one line."""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from commands import error_of, output_of

from hookline import load_config, trainer_from_config
from hookline.cli import main
from hookline.core import plugins
from hookline.errors import ConfigError

SECONDS, MEGABYTES = 20.0, 200  # seconds of processor time: several times what a busy machine needs
EXECUTES = (
    "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen",
    "pickle.find_class", "ctypes.dlopen", "socket.connect", "shutil.", "os.remove", "os.rename", "os.mkdir",
)  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PACKAGE = "pretend_parts"
COMMANDS = ("train", "explain", "modules", "verify")  # that read a config

Captured = pytest.CaptureFixture[str]

_watching: list[list[str]] = []
_our_own: set[str] = set()  # what good configs have us compile as well: the annotations of our own classes


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
    if event.startswith(EXECUTES) or writes:
        _watching[-1].append(described(event, arguments))


def described(event: str, arguments: tuple[Any, ...]) -> str:
    if event == "exec":  # a code object, whose repr is another each time
        code = arguments[0]
        return f"exec {code.co_filename} {code.co_names} {code.co_code.hex()}"
    return f"{event} {arguments[:2]}"


sys.addaudithook(_audit)


@contextmanager
def nothing_happens() -> Iterator[None]:
    """Fail if anything is imported, compiled, started, sent, deleted or opened for writing, or takes too long."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    modules = set(sys.modules)
    _watching.append([])
    try:
        yield
    finally:
        seen = _watching.pop()
    assert [event for event in seen if event not in _our_own] == []
    assert set(sys.modules) - modules == set()
    assert time.process_time() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1024


def yaml(**sections: str) -> str:
    """Return a valid config, with some of its sections replaced or added."""
    small = {
        "model": "{name: char_gpt, context: 16, width: 8, heads: 2, layers: 1}",
        "data": "{name: stdlib_text, context: 16, batch_size: 2, max_bytes: 60000}",
        "optimizer": "{name: sgd, lr: 0.01}",
        "trainer": "{max_steps: 1, validate_every: null, sanity_batches: 0}",
    }
    return "".join(f"{key}: {value}\n" for key, value in {**small, **sections}.items())


def hook(entry: str) -> str:
    return yaml(hooks=f"{{lifecycle: [{entry}]}}")


@dataclass
class Hostile:
    """One config, further command-line arguments, and what the error must contain."""

    text: str | bytes
    says: str
    words: tuple[str, ...] = ()
    suffix: str = ".yaml"


DOTTED = [
    "os.system", "logging.os.system", "subprocess.run", "builtins.exec", "builtins.__import__",
    "hookline.build.torch.hub.load", "hookline.cli.main", "torch.hub.load", "__main__.anything",
    "pretend_parts_of_others.Hook",
]  # fmt: skip
FOREIGN = [  # what lies about in a package that is allowed, and is not of it
    "os.system", "hooks.os.system", "hooks.os", "hooks.system", "hooks.run", "hooks.partial", "hooks.bound",
    "hooks.random", "hooks.torch_load", "hooks.TrainingHook", "hooks.__builtins__", "hooks.__loader__",
    "hooks.__class__", "hooks.Mine.__init__", "hooks.Mine.__init__.__globals__", "hooks.table", "nothing.Hook",
]  # fmt: skip
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
)
NOT_ALLOWED, NO_PATH, NO_CLASS = "is not allowed", "is not a dotted path", "is not a hook class of that package"

CASES: dict[str, Hostile] = {
    **{f"hook {name}": Hostile(hook(name), NOT_ALLOWED) for name in DOTTED},
    **{f"class {name}": Hostile(yaml(hooks=f"{{hook_classes: [{name}]}}"), NOT_ALLOWED) for name in DOTTED},
    **{
        f"{part} os.system": Hostile(yaml(**{part: "{name: logging.os.system, command: ls}"}), NOT_ALLOWED)
        for part in ("model", "data", "optimizer", "scheduler", "loss")
    },
    **{
        f"odd {name!r}": Hostile(hook(json.dumps(name)), NO_PATH)
        for name in (".os", "os.", "os..system", "a b.c", "a.b()")
    },
    "a name that looks like another": Hostile(hook("\uff4f\uff53.system"), NOT_ALLOWED),  # wide letters
    "a name from the environment": Hostile(yaml(model='"${env:HOSTILE_NAME}"'), NOT_ALLOWED),
    "an allowed prefix of nothing": Hostile(hook("os.system"), NOT_ALLOWED, ("--allow", "")),
    "a prefix that is only a beginning": Hostile(hook(f"{PACKAGE}_not.Hook"), NOT_ALLOWED, ("--allow", PACKAGE)),
    # YAML
    **{
        f"tag {tag}": Hostile(yaml(model=f"{{name: {tag}}}"), "is refused")
        for tag in ("!!python/object/apply:os.system [ls]", "!!python/name:os.system x", "!!python/module:os x",
                    "!!python/object/new:type [x]", "!!binary aGk=", "!!set {a}", "!mine x",
                    "!<tag:yaml.org,2002:python/none> x")
    },
    "a tag under another name": Hostile(
        f"%TAG ! tag:yaml.org,2002:python/\n---\n{yaml(model='!object/apply:os.system [ls]')}",
        "the tag '!!python/object/apply:os.system' is refused",
    ),
    "an alias bomb": Hostile(BOMB, "the alias '*a0' is refused"),
    "a merge bomb": Hostile(MERGE_BOMB, "the alias '*a0' is refused"),
    "a value that contains itself": Hostile("model: &a [*a]", "the alias '*a' is refused"),
    "an alias to nothing": Hostile("model: *x", "the alias '*x' is refused"),
    "a merge with a number": Hostile("model: {<<: 3}", "the merge key '<<' is refused"),
    "ten megabytes of nesting": Hostile("[" * 10_000_000, "is the limit; move large data"),
    "nesting": Hostile("model: " + "[" * 200_000, "nested deeper than"),
    "nesting by indentation": Hostile("".join(f"{' ' * i}a:\n" for i in range(600)), "nested deeper than"),
    "nesting by question marks": Hostile("? " * 100_000, "nested deeper than"),
    "many values": Hostile("model: [" + "1," * 120_000 + "]", "more than 10000 values"),
    "many keys": Hostile("{" + ",".join(f"k{i}: 1" for i in range(20_000)) + "}", "more than 10000 values"),
    "many anchors": Hostile("model: [" + ",".join(f"&a{i} 1" for i in range(10_001)) + "]", "more than 10000 values"),
    "many lines": Hostile("model: x\n" + " x\n" * 80_000, "are missing"),
    "many blank lines": Hostile("\n" * 249_000, "it is empty"),
    "two documents": Hostile(yaml() + "---\n" + yaml(), "is not valid YAML"),
    "a newer YAML": Hostile("%YAML 9.9\n---\n" + yaml(), "is not valid YAML"),
    "a key twice": Hostile(yaml() + "model: other\n", "the key 'model' appears twice"),
    "a day that never was": Hostile("model: 2001-13-45", "does not exist"),
    "a letter that never was": Hostile('model: "\\UFFFFFFFF"', "does not exist"),
    # numbers
    "counting in sixties": Hostile("model: 1" + ":1" * 100_000, "more than 100 digits"),
    "sixties and a point": Hostile("model: 1" + ":1" * 40_000 + ".5", "more than 100 digits"),
    "a long number": Hostile("model: " + "9" * 200_000, "more than 100 digits"),
    "a long hexadecimal": Hostile("model: 0x" + "f" * 200_000, "more than 100 digits"),
    "a seed that no generator takes": Hostile(yaml(trainer="{seed: 99999999999999999999}"), "more than 64 bits"),
    "a number of steps that never ends": Hostile(yaml(trainer=f"{{max_steps: 0x{'f' * 90}}}"), "more than 64 bits"),
    # keys and text
    "a number as a key": Hostile(yaml() + "1: 2\n", "expected a key that is a word"),
    "nothing as a key": Hostile(yaml() + "~: 2\n", "expected a key that is a word"),
    "a list as a key": Hostile(yaml() + "? [1]\n: 2\n", "is not valid YAML"),
    "a number as a parameter": Hostile(yaml(model="{name: char_gpt, 1: 2}"), "expected a key that is a word"),
    "a number as a hook's parameter": Hostile(hook("{name: json_log, 1: 2}"), "expected a key that is a word"),
    "a key that clears the screen": Hostile(yaml() + '"\\e[2J": 1\n', "invalid key"),
    "a key of many lines": Hostile(yaml() + '"a\\nhookline: trained": 1\n', "invalid key"),
    "a key without end": Hostile(yaml() + f"? {'k' * 100_000}\n: 1\n", "invalid key"),
    "a parameter's name that clears": Hostile(hook('{name: json_log, "\\e[2J": 1}'), "invalid key"),
    "a hook's name that clears": Hostile(hook('"\\e[2J"'), "printable"),
    "an instance's name that clears": Hostile(hook('{name: json_log, as: "\\e]0;owned\\a"}'), "printable"),
    "an instance's name of two lines": Hostile(hook('{name: json_log, as: "a\\nb"}'), "expected a name"),
    "an instance that is a number": Hostile(hook("{name: json_log, as: 3}"), "expected a name"),
    "an instance without a name": Hostile(hook('{name: json_log, as: ""}'), "expected a name"),
    "a name without end": Hostile(hook("x" * 100_000), "there is no hook named"),
    "a model's name without end": Hostile(yaml(model="x" * 100_000), "there is no model named"),
    "half a letter": Hostile(yaml(model='"\\ud800"'), "printable"),
    "ranks that are no ranks": Hostile(hook('{name: json_log, ranks: "0"}'), "expected 'all', 'zero'"),
    "an order that is none": Hostile(hook("{name: json_log, before: [[1]]}"), "expected a name or a list"),
    # files
    "an output of two names": Hostile(yaml(trainer='{max_steps: 1, output_dir: "runs\\0/etc"}'), "printable"),
    "an output that clears": Hostile(yaml(trainer='{max_steps: 1, output_dir: "/proc/\\e[2J"}'), "printable"),
    "a log of two names": Hostile(hook('{name: json_log, path: "a\\0b"}'), "printable"),
    "weights of two names": Hostile(yaml(trainer='{max_steps: 1, init_from: "a\\0b"}'), "printable"),
    "data of two names": Hostile(yaml(data='{name: stdlib_text, path: "a\\0b"}'), "printable"),
    "a pattern that leads away": Hostile(yaml(data="{name: stdlib_text, path: /tmp, pattern: /etc/*}"), "data"),
    **{
        f"a checkpoint named {name}": Hostile(hook(f"{{name: checkpoint, filename: {json.dumps(name)}}}"), "filename")
        for name in ("../x", "/etc/x", "a/b", ".hidden", "best", "{epoch!r}", "{epoch:>999999999}", "{}", "{epoch",
                     "x" * 500)
    },
    # references
    "a reference to a file": Hostile(hook('{name: json_log, path: "${file:/etc/passwd}"}'), "is not a reference"),
    "a reference to code": Hostile(hook('{name: json_log, path: "${python:1+1}"}'), "is not a reference"),
    "a reference of a shell": Hostile(hook('{name: json_log, path: "$(ls) ${HOME}"}'), "is not a reference"),
    "a reference to nothing": Hostile(hook('{name: json_log, path: "${env:}"}'), "is not set"),
    "a reference in a reference": Hostile(hook('{name: json_log, path: "${env:${env:HOME}}"}'), "is never closed"),
    "a reference without end": Hostile(hook('{name: json_log, path: "${env:HOME"}'), "is never closed"),
    "a reference's name without end": Hostile(yaml(model='"${env:' + "x" * 90_000 + '}"'), "is not set"),
    # bytes
    "no UTF-8": Hostile(b"model: \xff\xfe", "is not UTF-8 text"),
    "UTF-16": Hostile(yaml().encode("utf-16"), "is not UTF-8 text"),
    "a NUL": Hostile(b"model: x\x00", "is not valid YAML"),
    "an escape": Hostile(b"model: \x1b[2J", "is not valid YAML"),
    # the other formats
    **{
        f"{suffix}: {what}": Hostile(text, says, suffix=suffix)
        for suffix, what, text, says in (
            (".json", "dotted path", '{"model": "os.system", "data": "stdlib_text", "optimizer": "sgd"}', NOT_ALLOWED),
            (".json", "key twice", '{"model": 1, "model": 2}', "appears twice"),
            (".json", "nesting", "[" * 240_000, "nested deeper than"),
            (".json", "nesting that is read", '{"a":' + "[" * 60 + "]" * 60 + "}", "nested deeper than"),
            (".json", "many values", '{"a": [' + "1," * 100_000 + "1]}", "more than 10000 values"),
            (".json", "a long number", '{"a": ' + "9" * 200_000 + "}", "more than 100 digits"),
            (".json", "a large number", '{"a": ' + "9" * 40 + "}", "more than 64 bits"),
            (".json", "half a letter", '{"\\ud800": 1}', "invalid key"),
            (".json", "a control character", '{"a": "\\u001b[2J"}', "printable"),
            (".json", "a mark and nothing", b"\xef\xbb\xbf", "it is empty"),
            (".toml", "dotted path", 'model = "os.system"\ndata = "stdlib_text"\noptimizer = "sgd"', NOT_ALLOWED),
            (".toml", "key twice", "model = 1\nmodel = 2", "is not valid TOML"),
            (".toml", "nesting", "a = " + "[" * 240_000, "nested deeper than"),
            (".toml", "nesting by dots", "a." * 120_000 + "a = 1", "nested deeper than"),
            (".toml", "nesting by quoted dots", '"a b" . ' * 30_000 + "a = 1", "nested deeper than"),
            (".toml", "nesting by tables", "[" + "a." * 120_000 + "a]", "nested deeper than"),
            (".toml", "many tables", "[[a]]\n" * 40_000, "is too large"),
            (".toml", "a string without end", '"' + '\\"' * 120_000, "is not valid TOML"),
            (".toml", "a long number", "a = " + "9" * 200_000, "is not valid TOML"),
            (".toml", "a long hexadecimal", "a = 0x" + "f" * 200_000, "more than 64 bits"),
            (".toml", "a control character", 'a = "\\u001b[2J"', "printable"),
            (".py", "code", "import os", "is not the name of a config file"),
        )
    },
    # the command line
    "an override with a tag": Hostile(yaml(), "is refused", ("model.width=[!!python/name:os.system x]",)),
    "an override of two names": Hostile(yaml(), "printable", ('trainer.output_dir="a\\0b"',)),
    "an override without end": Hostile(yaml(), "is nested deeper", ("model.width=" + "[" * 100_000,)),
    "an override of many levels": Hostile(yaml(), "is too large", ("model." + "a." * 2_000 + "a=1",)),
    "an override into Python": Hostile(yaml(), "has no parameter '__class__'", ("model.__class__=x",)),
    "an override with a dotted path": Hostile(yaml(), NOT_ALLOWED, ("loss.name=os.system",)),
    "another file with a NUL": Hostile(yaml(), "one config at a time", ("a\0.yaml",)),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def everything_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what valid and wrong configs import, so that the imports of a hostile one are noticed."""
    for module in (*(f"cli.{command}" for command in (*COMMANDS, "resume")), "verify"):
        import_module(f"hookline.{module}")
    folder = tmp_path_factory.mktemp("good")
    good = yaml(hooks="{lifecycle: [json_log, {name: checkpoint, filename: good}]}")
    tried = (("a.yaml", good, 0), ("b.yaml", hook("wrong"), 2), ("c.toml", "=", 2), ("d.json", "{", 2))
    for name, text, status in tried:
        (folder / name).write_text(text)
        _watching.append([])
        try:
            assert main(["train", str(folder / name), "--output", str(folder)]) == status
        finally:
            _our_own.update(event for event in _watching.pop() if event.startswith(("compile", "exec")))


def refusal(capsys: Captured, *words: str) -> str:
    """Return the one line that a refused command prints; nothing else may happen or be left behind."""
    before = sorted(Path.cwd().rglob("*"))
    with nothing_happens():
        status = main(words)
    out, err = capsys.readouterr()
    assert status == 2 and "Traceback" not in out
    assert err.startswith("hookline: error: ") and err.endswith("\n") and len(err) < 2500
    assert err[:-1].isprintable() and "--debug" not in err  # one line, ours, and harmless to a terminal
    assert sorted(Path.cwd().rglob("*")) == before
    return err


def test_the_checks_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: a started program, an import, a written file and a lost second are noticed."""
    with pytest.raises(AssertionError, match=r"os\.system"), nothing_happens():
        os.system("true")
    with pytest.raises(AssertionError, match="open"), nothing_happens():
        (tmp_path / "x").write_text("")
    sys.modules.pop("colorsys", None)
    with pytest.raises(AssertionError, match="colorsys"), nothing_happens():
        import_module("colorsys")
    with pytest.raises(AssertionError, match="compile"), nothing_happens():
        eval("1 + 1")
    monkeypatch.setitem(globals(), "SECONDS", 0.1)
    with pytest.raises(AssertionError, match="process_time"), nothing_happens():
        began = time.process_time()
        while time.process_time() - began < SECONDS:
            pass


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_config_is_refused(case: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one line with status 2, in bounded time and memory; nothing is imported, executed or written."""
    hostile = CASES[case]
    monkeypatch.setenv("HOSTILE_NAME", "logging.os.system")
    config = Path(f"hostile{hostile.suffix}")
    config.write_bytes(hostile.text if isinstance(hostile.text, bytes) else hostile.text.encode())
    assert hostile.says in refusal(capsys, "train", str(config), *hostile.words)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write and import a realistic package that contains many names of other packages."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("import os, subprocess\n")
    (folder / "hooks.py").write_text(
        "import functools, os\n"
        "import torch\n"
        "from os import system\n"
        "from random import random\n"
        "from subprocess import run\n"
        "from hookline import TrainingHook\n"
        "torch_load, table, bound = torch.hub.load, {'a': 1}, [].append\n"
        "partial = functools.partial(os.system, 'touch was-here')\n"
        "class Mine(TrainingHook):\n"
        "    def on_train_end(self): print('mine')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import_module(f"{PACKAGE}.hooks")
    yield PACKAGE
    for module in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[module]


@pytest.mark.parametrize("part", ["hook", "model"])
@pytest.mark.parametrize("name", FOREIGN)
def test_an_allowed_package_gives_its_own_names_only(name: str, part: str, package: str, capsys: Captured) -> None:
    """With `--allow`, a config can name what the package defines, and not what it imports."""
    dotted = f"{package}.{name}"
    Path("c.yaml").write_text(hook(dotted) if part == "hook" else yaml(model=f"{{name: {dotted}, command: ls}}"))
    assert dotted in refusal(capsys, "train", "c.yaml", "--allow", package)


def test_what_is_allowed_works(package: str, capsys: Captured) -> None:
    """A control: the package's own hook is found, made and called."""
    Path("c.yaml").write_text(hook(f"{package}.hooks.Mine"))
    assert "mine" in output_of(capsys, ["train", "c.yaml", "--allow", package])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_checks_the_config(command: str, capsys: Captured) -> None:
    """All commands apply the same checks to a config."""
    hostile = "{name: logging.os.system, command: ls}"
    Path("c.yaml").write_text(yaml(model=hostile, hooks=f"{{lifecycle: [{hostile}]}}"))
    assert NOT_ALLOWED in refusal(capsys, command, "c.yaml")


def test_a_recorded_config_is_checked(capsys: Captured) -> None:
    """`resume` applies the same checks to the config of a run."""
    Path("run").mkdir()
    Path("run/run.json").write_text("{}")
    Path("run/config.yaml").write_text(yaml(model="{name: logging.os.system, command: ls}"))
    assert NOT_ALLOWED in refusal(capsys, "resume", "run")


def test_a_file_stays_a_file_in_code() -> None:
    """What `load_config` has read is checked as a file, even if the caller does not pass that on."""
    Path("c.yaml").write_text(yaml(model="{name: logging.os.system, command: ls}"))
    config, from_file = load_config("c.yaml")
    assert from_file
    with nothing_happens(), pytest.raises(ConfigError, match=NOT_ALLOWED):
        trainer_from_config(config)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an installed package whose entry points have the names of built-ins, and one whose module is missing."""
    meta = tmp_path / "site" / "shadow-1.0.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: shadow\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(
        "[hookline.hooks]\njson_log = shadow_plugin:Hook\ngone = shadow_gone:Hook\n"
        "[hookline.models]\nchar_gpt = shadow_plugin:Hook\n[hookline.optimizers]\nsgd = shadow_plugin:Hook\n"
    )
    (tmp_path / "site" / "shadow_plugin.py").write_text("open('was-here', 'w')\nraise SystemExit('owned')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for table in (plugins.HOOKS, plugins.MODELS, plugins.OPTIMIZERS):
        fresh = plugins.PluginTable(table.noun, table.plural)
        monkeypatch.setitem(vars(table), "plugins", fresh.plugins)


def test_an_entry_point_cannot_replace_a_built_in(installed: None) -> None:
    """Built-ins are found first; a plugin of the same name is never imported."""
    assert [point.value for point in plugins.HOOKS.plugins["json_log"]] == ["shadow_plugin:Hook"]  # a control
    assert plugins.HOOKS.origin("json_log") == plugins.MODELS.origin("char_gpt") == "built-in"
    Path("c.yaml").write_text(hook("json_log"))
    assert main(["train", "c.yaml"]) == 0
    assert "shadow_plugin" not in sys.modules and not Path("was-here").exists()


def test_an_entry_point_without_its_module(installed: None, capsys: Captured) -> None:
    """The error names the entry point and the module that is missing."""
    Path("c.yaml").write_text(hook("gone"))
    error = error_of(capsys, ["train", "c.yaml"])
    assert error.count("\n") == 1 and "--debug" not in error
    assert "the hook 'gone' of shadow 1.0" in error and "shadow_gone" in error


def test_a_byte_order_mark_is_accepted() -> None:
    """A control: the mark that Windows editors write before UTF-8 text is accepted."""
    Path("c.yaml").write_bytes(b"\xef\xbb\xbf" + yaml().encode())
    assert main(["train", "c.yaml"]) == 0


@pytest.mark.parametrize("command", ["train", "explain"])
def test_markup_in_names_is_text(command: str, capsys: Captured) -> None:
    """Names in brackets are printed as they are written, also in tables."""
    names_given = ["[link=https://x]y", "[/nope]", "[red]z[/red]"]
    entries = ", ".join(f"{{name: {kind}, as: '{name}'}}" for kind, name in zip(
        ("json_log", "console_log", "lr_monitor"), names_given, strict=True
    ))  # fmt: skip
    Path("c.yaml").write_text(yaml(hooks=f"{{lifecycle: [{entries}]}}"))
    out = output_of(capsys, [command, "c.yaml"])
    assert [name for name in names_given if name not in out] == [] and "\x1b" not in out
