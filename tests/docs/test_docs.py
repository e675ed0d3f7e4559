"""Documents run: every block of the README and the pages, and every example.

Python blocks of a page share a namespace and run in order. What a line promises with a comment ``# -> text`` must be
printed, in that order. A block that begins with ``# needs package`` runs where the package is installed. YAML blocks
with hooks load, and `hookline` commands in console blocks parse. A block that begins with a file's name in a comment is
that file, and the page's commands that need no other files are run with it.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import output_of

import hookline
from hookline import load_config
from hookline.cli import main, read_arguments
from hookline.cli.config_args import read_config
from hookline.core import plugins
from hookline.hooks import webhook

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts)]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
REGISTRIES = (
    plugins.HOOKS,
    plugins.MODELS,
    plugins.DATA,
    plugins.OPTIMIZERS,
    plugins.SCHEDULERS,
    plugins.LOSSES,
    plugins.METRICS,
    plugins.TRAINERS,
)
RUNNABLE = ("hookline events", "hookline hooks")
NEXT = "-- next example --"
# One interpreter for all of them: importing torch takes longer than any example.
RUN_EACH = f"""
import runpy, sys
for example in sys.argv[1:]:
    print({NEXT!r}, flush=True)
    runpy.run_path(example, run_name="__main__")
"""

_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)  # indented in a tab of the site
_PROMISE = re.compile(r"# -> (.+)$", re.MULTILINE)
_FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")
_NEEDS = re.compile(r"# needs (\w+)\n")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block, and its place."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """Return a page's path under docs/, by which it is named."""
    return page.relative_to(ROOT / "docs").as_posix() if page.is_relative_to(ROOT / "docs") else page.name


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page that name their language, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, fence.start(3)) + 1, fence[2], textwrap.dedent(fence[3]))
        for fence in _FENCE.finditer(text)
    ]


def files_of(page: Path) -> dict[str, str]:
    """Return the files that a page shows in full, by name."""
    return {found[1]: block.text for block in blocks_of(page) if (found := _FILE_NAME.match(block.text))}


def write_files(page: Path) -> dict[str, str]:
    """Write the page's files into the current directory; a module among them is imported again."""
    files = files_of(page)
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
        sys.modules.pop(name.removesuffix(".py"), None)
    return files


def commands_with(names_of_files: set[str], page: Path) -> list[list[str]]:
    """Return the words of the page's `train` and `explain` commands that need these files and no others."""
    commands = [shlex.split(command)[1:] for where, command in COMMANDS if where.startswith(f"{name_of(page)}:")]
    return [words for words in commands if words[0] in ("train", "explain") and needed_by(words) <= names_of_files]


def needed_by(words: list[str]) -> set[str]:
    """Return the files that a command names: its config, and a module for each --import."""
    options = read_arguments(words)
    configs = {word for word in options.words if "=" not in word}
    return configs | {f"{module}.py" for module in options.imports} or {"the default job"}


def is_runnable(block: Block) -> bool:
    """Return whether what a block needs is installed."""
    needed = _NEEDS.match(block.text)
    return needed is None or importlib.util.find_spec(needed[1]) is not None


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PAGES_WITH_FILES = [page for page in PAGES if files_of(page)]
PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python"})
HOOK_BLOCKS = [block for block in BLOCKS if block.language == "yaml" and "\nhooks:" in f"\n{block.text}"]
COMMANDS = [
    (block.where, line.partition("#")[0].strip())
    for block in BLOCKS
    if block.language == "console"
    for line in block.text.splitlines()
    if line.startswith("hookline")
]


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a page registers or allows afterwards."""
    monkeypatch.setattr(webhook, "_allowed", set())
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_added", dict(registry._added))


def run_block(block: Block, namespace: dict[str, Any]) -> str:
    """Execute a block, with the page's line numbers in tracebacks; return what it printed."""
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        if _NEEDS.match(block.text):
            warnings.simplefilter("ignore")  # another library's
        exec(code, namespace)
    return printed.getvalue()


def check_promises(block: Block, printed: str) -> None:
    """Check that the output contains the text of every ``# -> text``, in order."""
    rest = printed
    for promise in _PROMISE.findall(block.text):
        assert promise in rest, f"{block.where} promises {promise!r}; it printed:\n{printed}"
        rest = rest.partition(promise)[2]


def load_hooks(block: Block, config: Any) -> list[str]:
    """Load the hooks that a YAML block lists, as from a file; return their names."""
    registry = hookline.HookManager(config["hooks"], from_file=True, enable_intervention=True)
    try:
        return list(registry)
    finally:
        registry.close()


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
@pytest.mark.hooks_fail(raises=(hookline.HooklineError, OSError))
def test_python_blocks_run(page: Path) -> None:
    """Every Python block of a page runs after those above it, and prints what its comments promise."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # a reader's process has compiled nothing before
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(page):
        if block.language == "python" and is_runnable(block):
            check_promises(block, run_block(block, namespace))


def test_a_wrong_promise_is_noticed() -> None:
    """A comment that promises what is not printed fails the test, and so does one out of order."""
    block = Block(Path("page.md"), 1, "python", "print(1)  # -> 2\n")
    with pytest.raises(AssertionError, match="promises '2'"):
        check_promises(block, run_block(block, {}))
    swapped = Block(Path("page.md"), 1, "python", "print('a b')  # -> b\n# -> a\n")
    with pytest.raises(AssertionError, match="promises 'a'"):
        check_promises(swapped, run_block(swapped, {}))


@pytest.mark.parametrize("block", HOOK_BLOCKS, ids=lambda block: block.where)
def test_yaml_blocks_with_hooks_load(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every YAML block with hooks can be loaded, and one that is a whole config is valid."""
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("SLACK_URL", "https://hooks.example.org/services/x")
    for module in (other for other in blocks_of(block.page) if other.text.startswith("# myparts.py\n")):
        run_block(module, {"__name__": "myparts"})
    text = re.sub(r"\$\{env:(\w+)\}", lambda found: os.environ[found[1]], block.text)
    Path("block.yaml").write_text(text, encoding="utf-8")
    config, _ = load_config("block.yaml")
    listed = [entry for entries in config["hooks"].values() for entry in entries]
    assert set(load_hooks(block, config)) >= {
        entry if isinstance(entry, str) else entry.get("as", entry["name"]) for entry in listed
    }
    if "model" in config:
        options = hookline.RunConfig(**config).trainer
        assert (options.max_steps or options.max_epochs) is not None


@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=[f"{where}-{command}" for where, command in COMMANDS])
def test_commands_parse(where: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser accepts every `hookline` line of a console block; commands that do not train are run."""
    words = shlex.split(command)[1:]
    write_files(next(page for page in PAGES if name_of(page) == where.partition(":")[0]))
    options = read_arguments(words)
    assert options.command == words[0]
    assert [word for word in getattr(options, "words", []) if word.startswith("-")] == []
    if command.startswith(RUNNABLE):
        assert len(output_of(capsys, words)) > 100


@pytest.mark.parametrize("page", PAGES_WITH_FILES, ids=name_of)
def test_files_on_a_page_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command whose files are on its page runs; training is limited to one batch."""
    files = write_files(page)
    commands = commands_with(set(files), page)
    assert {word for words in commands for word in words} >= {name for name in files if name.endswith(".yaml")}
    for words in commands:
        less = ["data.max_bytes=60000"] if "my.yaml" in words else []
        trial = ["--fast-dev-run", "1"] if words[0] == "train" else []
        assert main([*words, *less, *trial]) == 0, f"{name_of(page)}: {' '.join(words)}\n{capsys.readouterr().err}"


def test_overrides_on_the_pages_are_valid() -> None:
    """Every a.b=value of a console block can be applied to the config in docs/how-to/config.md."""
    shown = next(block for block in HOOK_BLOCKS if name_of(block.page) == "how-to/config.md")
    with_overrides = [shlex.split(command)[1:] for _, command in COMMANDS if "=" in command]
    assert len(with_overrides) >= 5
    Path("shown.yaml").write_text(shown.text, encoding="utf-8")
    for words in with_overrides:
        options = read_arguments(words)
        added = getattr(options, "hook", [])
        overrides = [word for word in options.words if "=" in word]
        assert hookline.RunConfig(**read_config(["shown.yaml", *overrides], hooks=added)[0])


def test_examples_run() -> None:
    """Every example runs as a script, prints its own output and writes nothing to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hookline.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN_EACH, *map(str, EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    printed = dict(zip(EXAMPLES, done.stdout.split(NEXT)[1:], strict=True))
    assert [example.name for example, text in printed.items() if not text.strip()] == []
    assert len(printed) >= 4


def test_the_example_with_several_processes_runs_under_torchrun() -> None:
    """Two processes train one run; each prints its own loss."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hookline.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(ROOT / "examples" / "several_processes.py")
    done = subprocess.run([*torchrun, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 processes (DDP)" in done.stdout and {"rank 0 of 2", "rank 1 of 2"} <= {
        *re.findall(r"rank \d of \d", done.stdout)
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_point_to_files(page: Path) -> None:
    """Every relative link of a page points to a file of the project."""
    made_later = {"docs/project/requirements.md"}  # by `make docs`, from the outcomes of a whole test run
    targets = [found[1] for found in _LINK.finditer(page.read_text(encoding="utf-8"))]
    missing = [one for one in targets if one not in made_later and not (page.parent / one).exists()]
    assert missing == []
