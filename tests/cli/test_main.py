"""The command line: what it prints, and its exit status."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Captured, error_of, line_of_error, output_of, python
from small_config import config_with

import hookline
from hookline import HookManager, TrainingHook, __version__, register_hook
from hookline.cli import EXIT_CODES, main
from hookline.core.catalog import CATALOG
from hookline.core.plugins import HOOKS
from hookline.errors import RegistrationError

SMALL = config_with("{name: console_log, costs: false}")


@pytest.fixture(autouse=True)
def small_config() -> None:
    """Write a config for a very short run into the current directory."""
    Path("small.yaml").write_text(SMALL, encoding="utf-8")


def test_without_arguments_it_prints_help(capsys: Captured) -> None:
    """`hookline` alone lists its commands."""
    out = output_of(capsys, [])
    assert all(command in out for command in ("train", "explain", "events", "hooks"))


def test_version(capsys: Captured) -> None:
    """`--version` prints the version."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hookline {__version__}\n"


def test_both_modules_can_be_run() -> None:
    """`python -m hookline` and `python -m hookline.cli` run the command, and return its exit status."""
    for module in ("hookline", "hookline.cli"):
        done = python("-m", module, "train", "none.yaml")
        assert done.returncode == 2
        assert done.stderr.startswith("hookline: error: none.yaml: cannot be read")


def test_printing_help_imports_nothing_heavy() -> None:
    """Printing help imports neither torch, rich, pydantic nor yaml."""
    code = (
        "import sys, hookline.cli as c; c.main([]); assert not {'torch', 'rich', 'pydantic', 'yaml'} & set(sys.modules)"
    )
    assert python("-c", code).returncode == 0


def test_parsing_imports_no_torch() -> None:
    """The help of every command and a usage error come at once: a command imports torch when it runs."""
    code = (
        "import sys; from hookline.cli import COMMANDS, main\n"
        "for words in (*([name, '--help'] for name in COMMANDS), ['train', '--max-steps', '3']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "usage: hookline replay CRASH [options]" in done.stdout
    assert done.stderr.endswith("write trainer.max_steps=3\n")


def test_a_command_imports_only_its_own_module() -> None:
    """`hookline train --help` imports the module of no other command, and the list of commands none at all."""
    code = (
        "import sys; from hookline.cli import COMMANDS, main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "names = {name: 'hookline.cli.' + name.replace('-', '_') for name in COMMANDS}\n"
        "print('imported', [name for name, module in names.items() if module in sys.modules])\n"
    )
    for words, imported in (([], []), (["train", "--help"], ["train"]), (["trian"], [])):
        done = python("-c", code, *words)
        assert done.stdout.splitlines()[-1] == f"imported {imported}", done.stderr


def test_a_command_that_cannot_be_imported(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation is one line, and Ctrl-C while a command is imported is said once."""
    monkeypatch.setitem(sys.modules, "hookline.cli.events", None)
    assert "ModuleNotFoundError" in line_of_error(capsys, "events", "--json")
    assert "Traceback" in error_of(capsys, ["events", "--debug"])

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hookline.cli.import_module", interrupt)
    assert main(["events"]) == 130
    assert capsys.readouterr().err == "hookline: interrupted\n"


def test_train_ends_with_the_record_s_path(capsys: Captured) -> None:
    """After training, the last line is the directory of the run, inside --output."""
    last = Path(output_of(capsys, ["train", "small.yaml", "--output", "there", "trainer.max_steps=3"]).splitlines()[-1])
    assert last.parent == Path("there").absolute()
    assert "max_steps: 3" in (last / "config.yaml").read_text(encoding="utf-8")


def test_fast_dev_run_writes_nothing(capsys: Captured) -> None:
    """`--fast-dev-run` trains one batch and leaves no directory."""
    assert output_of(capsys, ["train", "small.yaml", "--fast-dev-run", "1"]).splitlines()[-1] == "no record was written"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("trainr.max_steps=1", "trainr: unknown key; did you mean 'trainer'?"),
        ("trainer.max_steps=many", "trainer.max_steps: expected a valid integer, got 'many' (str)"),
        ("model.widht=3", "model.widht: char_gpt has no parameter 'widht'; did you mean 'width'?"),
        ("model.name=chargpt", "model.name: there is no model named 'chargpt'; did you mean 'char_gpt'?"),
        ("model.width=[1]", "model: char_gpt cannot be created"),
        ("data.path=nowhere", "data: no file matches"),
        ("optimizer.lr=fast", "optimizer.lr: expected float | torch.Tensor, got 'fast' (str)"),
        ("trainer.max_steps", "trainer.max_steps: an override needs a value: trainer.max_steps=value"),
        ("trainer.max_steps=", "trainer.max_steps: missing value after '='; write trainer.max_steps=null"),
        ("hooks.console_log.log_evry=1", "has no parameter 'log_evry'"),
        ("hooks.console_log.every=banana", "hooks.lifecycle.0.every: "),
        ("hooks.console_log.on_error=ignore", "hooks.lifecycle.0.on_error: "),
        (
            "hooks.console_log.log_every_n_batches=often",
            "hooks.lifecycle.0: console_log.log_every_n_batches: expected an integer of at least 1, got 'often' (str)",
        ),
        ("hooks.lifecycle=[consol_log]", "hooks.lifecycle.0.name: there is no hook named 'consol_log'"),
        ("hooks.lifecycle=[os.system]", "hooks.lifecycle.0.name: 'os.system' is not allowed"),
        ("hooks.lifecycle=3", "hooks.lifecycle: expected a valid list, got 3 (int)"),
        ("other.yaml", "one config at a time"),
    ],
)
def test_a_bad_config_is_one_line(capsys: Captured, word: str, expected: str) -> None:
    """A wrong config is reported in one line on stderr, with status 2."""
    assert expected in line_of_error(capsys, "train", "small.yaml", word)


def test_debug_shows_the_traceback(capsys: Captured) -> None:
    """`--debug` prints the traceback of a config error."""
    assert "Traceback" in error_of(capsys, ["train", "none.yaml", "--debug"])


@pytest.mark.parametrize(("failure", "status"), [(RuntimeError("boom"), 1), (KeyboardInterrupt(), 130)])
def test_a_failed_run_says_where_its_record_is(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, failure: BaseException, status: int
) -> None:
    """The status is 1 for a failed run and 130 for Ctrl-C; the last line is the path of the record."""

    def fail(*args: object, **batch: object) -> None:
        raise failure

    monkeypatch.setattr("hookline.demo.char_gpt.CharGPT.forward", fail)
    assert main(["train", "small.yaml"]) == status
    out, error = capsys.readouterr()
    record = out.splitlines()[-1]
    if status == 1:
        assert any(line.startswith("hookline: error: RuntimeError: boom (") for line in error.splitlines())
    else:
        assert out.splitlines()[-3].startswith("interrupted (KeyboardInterrupt): 0 steps")
        assert out.splitlines()[-2] == f"report: runs/{Path(record).name}/report.html"
        assert error == (
            "hookline: to continue from the first step, because there is no checkpoint:\n"
            f"  cd {Path.cwd()} && hookline resume runs/{Path(record).name}\n"
        )
    assert "Traceback" not in error
    assert (Path(record) / "run.json").exists()


def test_a_run_whose_working_directory_was_removed(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as it would have, and says why it cannot be continued; hooks that print paths do not fail."""
    config, gone = Path("small.yaml").resolve(), tmp_path / "gone"
    hooks = "hooks.lifecycle=[console_log, {name: checkpoint, every: 1}, interrupt]"
    gone.mkdir()
    monkeypatch.chdir(gone)

    class Interrupt(TrainingHook):
        """Removes the working directory in the first step, and is interrupted in the second."""

        def on_step_end(self, step: int) -> None:
            if step == 1:
                gone.rmdir()
            else:
                raise KeyboardInterrupt

    register_hook("interrupt")(Interrupt)
    assert main(["train", str(config), f"trainer.output_dir={tmp_path / 'kept'}", hooks]) == 130
    out, error = capsys.readouterr()
    assert error == "hookline: the run cannot be continued: FileNotFoundError: [Errno 2] No such file or directory\n"
    run = Path(out.splitlines()[-1])
    assert json.loads((run / "run.json").read_text())["outcome"] == "interrupted"
    assert "hook failure" not in out and f"saved {run / 'checkpoints' / 'step-00000001'}" in out


def test_ctrl_c_without_a_record(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a trial run, or in a command that does not train, is said once."""

    def interrupt(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hookline.demo.char_gpt.CharGPT.forward", interrupt)
    assert main(["train", "small.yaml", "--fast-dev-run", "1"]) == 130
    assert capsys.readouterr().err == ""
    assert main(["train", "small.yaml", "trainer.console=false", "--fast-dev-run", "1"]) == 130
    assert capsys.readouterr() == ("no record was written\n", "hookline: interrupted\n")
    monkeypatch.setattr("hookline.cli.hooks.run", interrupt)
    assert main(["hooks"]) == 130
    assert capsys.readouterr().err == "hookline: interrupted\n"


def test_an_output_that_cannot_be_written_is_refused(capsys: Captured) -> None:
    """A record that cannot be created before the first step is reported like a wrong config: one line, status 2."""
    Path("taken").write_text("", encoding="utf-8")
    assert "cannot make the run's directory in taken" in line_of_error(
        capsys, "train", "small.yaml", "--output", "taken"
    )


def test_all_missing_keys_are_named_at_once(capsys: Captured) -> None:
    """The error for a config with hooks only lists all required keys."""
    Path("few.yaml").write_text("hooks: {}\n", encoding="utf-8")
    error = line_of_error(capsys, "train", "few.yaml")
    assert error.startswith("hookline: error: model, data and optimizer are missing; `hookline example` prints ")


def test_the_example_is_the_default_job(capsys: Captured) -> None:
    """`hookline example` prints the default config with its comments, and a copy of it trains."""
    text = output_of(capsys, ["example"])
    Path("copy.yaml").write_text(text)
    assert text.startswith("# The default job") and "optimizer:\n" in text
    assert main(["train", "copy.yaml", "--fast-dev-run", "1"]) == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--max_steps", "3"], "--max_steps; to change a value of the config, write trainer.max_steps=3"),
        (["--max-steps=3"], "trainer.max_steps=3"),
        (["--epochs", "2"], "trainer.max_epochs=2"),
        (["--seed"], "trainer.seed=value"),
        (["--gradient-accumulation-steps", "4"], "trainer.accumulate=4"),
        (["--resume-from-checkpoint=x"], "a.b=value, for instance trainer.max_steps=100 or optimizer.lr=1e-3"),
        (["--lr", "3"], "a.b=value, for instance trainer.max_steps=100 or optimizer.lr=1e-3"),
    ],
)
def test_an_unknown_option_suggests_an_override(capsys: Captured, words: list[str], hint: str) -> None:
    """The error for an option such as --max-steps suggests the override that sets that value."""
    with pytest.raises(SystemExit) as caught:
        main(["train", "small.yaml", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(hint)


def test_unknown_options_are_refused(capsys: Captured) -> None:
    """A misspelt option, and words for a command that takes none, are usage errors."""
    for words in (["train", "--outptu"], ["events", "extra"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
    assert "unrecognized arguments: extra" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export r", "the following arguments are required: --to; see hookline export --help"),
        ("resume", "the following arguments are required: RUN|CHECKPOINT; see hookline resume --help"),
        ("plot", "the following arguments are required: RUN; see hookline plot --help"),
        ("runs --limit 0", "argument --limit: expected an integer of at least 1, got '0'; see hookline runs --help"),
        ("train --hook", "argument --hook: expected one argument; see hookline train --help"),
        ("--debug events", "unrecognized arguments: --debug"),
        ("hooks ema extra", "unrecognized arguments: extra"),
    ],
)
def test_wrong_usage_is_one_line(capsys: Captured, words: str, message: str) -> None:
    """The line names the argument, and the help of the command where argparse has no remedy."""
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", f"hookline: error: {message}\n")


def test_overrides_may_follow_options(capsys: Captured) -> None:
    """Overrides may be given before, between and after options."""
    assert main(["explain", "small.yaml", "--allow", "x", "hooks.console_log.log_every_n_batches=7"]) == 0
    assert "every 7 batches" in capsys.readouterr().out


def test_events_lists_the_catalog(capsys: Captured) -> None:
    """Every event is listed with its aliases, within 80 columns; arguments with a cost are marked."""
    out = output_of(capsys, ["events"])
    assert all(f"\n{name}" in out for name in CATALOG)
    assert "on_train_batch_end  (on_batch_end)" in out
    assert "loss*, metrics*" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_one_event_in_full(capsys: Captured) -> None:
    """`--event` takes any spelling, and prints meaning and cost of every argument; an error names the nearest."""
    out = output_of(capsys, ["events", "--event", "eval_end"])
    assert out.startswith("on_validation_end  (on_eval_end)")
    assert "[host read]" in out
    assert "did you mean" in line_of_error(capsys, "events", "--event", "on_trian_end")


def test_hooks_lists_every_hook(capsys: Captured) -> None:
    """Every registered hook is listed with kind, origin, parameters and defaults, as a config would have them."""
    out = output_of(capsys, ["hooks"])
    assert all(f"{name}  " in out for name in HOOKS.names())
    assert "clip_norm  update, built-in\n" in out
    assert "parameters  max_norm, norm_type=2.0, params=null\n" in out
    assert "save_every_n_epochs=1, save_every_n_steps=null" in out.replace("\n" + " " * 16, " ")
    assert max(map(len, out.splitlines())) <= 80


def test_a_hook_that_cannot_be_imported_does_not_hide_others(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken plugin is listed with its error; the other hooks are still listed."""
    table = {**HOOKS.built_in, "broken": "hookline.no_such_module:Hook"}
    monkeypatch.setattr(HOOKS, "built_in", table)
    out = output_of(capsys, ["hooks"])
    assert "cannot be imported: ModuleNotFoundError" in out
    assert "console_log" in out


def test_defaults_are_written_as_in_a_config_or_as_python_writes_them(capsys: Captured) -> None:
    """A default that no config can have does not hide the other hooks."""

    class OddDefault(TrainingHook):
        """Does nothing."""

        def __init__(self, table: Any = {("a", 1): 2.0}, limit: float = float("inf"), mark: str = "…") -> None:  # noqa: B006
            del table, limit, mark

        def on_step_end(self) -> None: ...

    register_hook("odd_default")(OddDefault)
    out = " ".join(output_of(capsys, ["hooks"]).split())
    assert "clip_norm" in out and "table={('a', 1): 2.0}" in out and "limit=inf" in out and 'mark="…"' in out


def test_a_docstring_that_is_not_a_text_does_not_hide_others(capsys: Captured) -> None:
    """A class may define it as a property for its instances; the schema can be made as well."""

    class Unusual:
        __doc__ = property(lambda self: "of an instance")

        def on_step_end(self) -> None: ...

    register_hook("unusual")(Unusual)
    out = output_of(capsys, ["hooks"])
    assert "(it has no docstring)" in out and "clip_norm" in out
    assert main(["hooks", "unusual"]) == 0 and main(["schema"]) == 0


def test_an_empty_config_is_not_the_default_one(capsys: Captured) -> None:
    """An unset variable of a shell script must not train the default job."""
    assert "is not the name of a config file" in error_of(capsys, ["explain", ""])


@pytest.mark.parametrize(("name", "takes"), [("early_stopping", True), ("confusion_matrix", False), ("wandb", False)])
def test_a_hook_offers_a_schedule_only_where_one_has_an_effect(capsys: Captured, name: str, takes: bool) -> None:
    """A hook that is never called inside steps rejects a schedule, so its description does not offer one."""
    _, _, keys = " ".join(output_of(capsys, ["hooks", name]).split()).partition("the entry also takes ")
    assert ("start" in keys) is takes and "on_error" in keys
    if not takes:
        with pytest.raises(RegistrationError, match="listens to no event inside steps"):
            HookManager().register(name, start=2)


def test_one_hook_in_full(capsys: Captured) -> None:
    """`hooks NAME` prints the whole description, every parameter's meaning and default, and how to use the hook."""
    out = " ".join(output_of(capsys, ["hooks", "checkpoint"]).split())
    assert out.startswith("checkpoint lifecycle, built-in Saves checkpoints and keeps the newest")
    assert "save_last Save at every evaluation and at the end of a run that ends cleanly," in out
    assert "hookline train --hook checkpoint" in out
    assert "clip_norm" not in out
    out = output_of(capsys, ["hooks", "clip_norm"])
    assert "    hooks: {update: [{name: clip_norm, max_norm: ...}]}\n" in out
    assert "hookline train --hook clip_norm hooks.clip_norm.max_norm=...\n" in out
    assert "did you mean 'clip_norm'?" in line_of_error(capsys, "hooks", "clip_nrom")


def test_every_hook_can_be_printed_in_full(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the width of the terminal, also a narrow one."""
    monkeypatch.setenv("COLUMNS", "60")
    for name in HOOKS.names():
        lines = output_of(capsys, ["hooks", name]).splitlines()
        assert lines[0].startswith(f"{name}  ")
        assert max(len(line) for line in lines if " " in line.strip()) <= 80, name


def test_a_hook_can_be_added(capsys: Captured) -> None:
    """`--hook` adds a registered hook to the config's, in the list of its kind, and overrides set its parameters."""
    added = ["--hook", "ema", "hooks.ema.decay=0.5", "--hook", "clip_norm", "hooks.clip_norm.max_norm=2"]
    out = output_of(capsys, ["explain", "small.yaml", *added])
    assert "console_log" in out and "ema" in out and "clip_norm" in out
    record = Path(output_of(capsys, ["train", "small.yaml", *added]).splitlines()[-1])
    hooks = yaml.safe_load((record / "config.yaml").read_text(encoding="utf-8"))["hooks"]
    assert hooks["lifecycle"][-1] == {"name": "ema", "decay": 0.5}
    assert hooks["update"] == [{"name": "clip_norm", "max_norm": 2}]


def test_a_hook_that_cannot_be_added(capsys: Captured) -> None:
    """An unknown name, one that the config has, a missing parameter and a dotted path are errors with a remedy."""
    assert "did you mean 'ema'?" in line_of_error(capsys, "train", "small.yaml", "--hook", "emma")
    twice = line_of_error(capsys, "train", "small.yaml", "--hook", "console_log")
    assert "--hook console_log: the config already has it; hooks.console_log.key=value changes it" in twice
    assert "max_norm" in line_of_error(capsys, "train", "small.yaml", "--hook", "clip_norm")
    assert "there is no hook named 'os.system'" in line_of_error(capsys, "train", "small.yaml", "--hook", "os.system")


def test_the_device_can_be_chosen(capsys: Captured) -> None:
    """`--device` is where the model runs; one that does not exist is an error of usage."""
    assert " on cpu " in output_of(capsys, ["train", "small.yaml", "--device", "cpu"])
    assert main(["modules", "small.yaml", "--device", "cpu"]) == 0
    capsys.readouterr()
    for command in ("train", "verify", "modules"):
        assert "'abacus' is not a device" in line_of_error(capsys, command, "small.yaml", "--device", "abacus")
        assert "'cuda:99' cannot be used here" in line_of_error(capsys, command, "small.yaml", "--device", "cuda:99")


def test_latest_is_the_run_that_was_started_last(capsys: Captured) -> None:
    """`latest` names a run for every command that takes one, by the time of its start and not by its name."""
    assert "latest: no run is in runs/; pass a run's directory" in line_of_error(capsys, "resume", "latest")
    runs = []
    for _ in range(2):
        assert main(["train", "small.yaml", "--hook", "checkpoint", "hooks.checkpoint.save_every_n_steps=1"]) == 0
        runs.append(Path(capsys.readouterr().out.splitlines()[-1]))
    first = runs[0].rename(runs[0].with_name("zzz"))
    Path("runs/other").mkdir()
    Path("runs/other/run.json").write_text("not JSON", encoding="utf-8")
    assert "step-00000002  good" in output_of(capsys, ["checkpoints", "latest"])
    assert main(["resume", "latest", "trainer.max_steps=3", "--device", "cpu"]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1]) == runs[1]
    Path("there").mkdir()
    first.rename("there/only")
    assert main(["resume", "there/latest", "trainer.max_steps=4"]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1]) == Path("there/only").absolute()


def test_exit_codes_are_listed(capsys: Captured) -> None:
    """Every exit code that the commands use is in `--help` and in docs/reference/commands.md, with the same meaning."""
    used = {value for name, value in vars(hookline.cli).items() if name.isupper() and type(value) is int}
    assert set(EXIT_CODES) == used - {hookline.cli._MAX_MESSAGE_LENGTH}
    page = (Path(__file__).parents[2] / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    table = page.partition("| code | meaning |\n| --- | --- |\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [f"| `{code}` | {about} |" for code, about in EXIT_CODES.items()]
    main([])
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(f"{code} {about}" for code, about in EXIT_CODES.items()) in out


def test_completion_scripts(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--print-completion` prints a script with commands, options and hooks; without shtab, what to install."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", "bash"])
    assert caught.value.code == 2
    assert "pip install 'hookline[completion]'" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "shtab")
    pytest.importorskip("shtab")
    for shell in ("bash", "zsh"):
        with pytest.raises(SystemExit) as caught:
            main(["--print-completion", shell])
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in ("verify-checkpoint", "--fast-dev-run", "nan_forensics", "on_step_end"))


def test_bash_completes(capsys: Captured) -> None:
    """The script completes commands, options and the names of hooks in bash."""
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    Path("script").write_text(capsys.readouterr().out, encoding="utf-8")
    for words, expected in (("tr", "train"), ("train --fa", "--fast-dev-run"), ("train --hook nan", "nan_forensics")):
        ask = (
            f"source ./script; COMP_WORDS=(hookline {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_hookline"
        )
        done = subprocess.run([bash, "-c", f'{ask}; echo "${{COMPREPLY[*]}}"'], capture_output=True, text=True)
        assert done.stdout.strip() == expected


def test_explain_shows_order_and_reason(capsys: Captured) -> None:
    """`explain` prints the hooks of an event, their order and the reason, also the clip_norm of max_grad_norm."""
    out = output_of(capsys, ["explain", "small.yaml", "trainer.max_grad_norm=1.0", "--event", "on_update"])
    assert "clip_norm" in out
    out = output_of(capsys, ["explain", "small.yaml"])
    assert "on_train_batch_end\n" in out
    assert "1. console_log (every 10 batches)" in out
    assert "on_exception" not in out
    assert not Path("runs").exists()


def test_a_misspelt_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """The error for a misspelt command names the nearest one, and lists all of them."""
    with pytest.raises(SystemExit) as exit_:
        main(["trian", "config.yaml"])
    assert exit_.value.code == 2
    assert "no command is named 'trian'; did you mean 'train'? `hookline --help` lists all " in capsys.readouterr().err


def test_errors_are_wrapped_on_a_terminal(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, long errors are broken between words; the text is that of the one line in a pipe."""
    line = line_of_error(capsys, "train", "trainer.max_setps=20")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    lines = error_of(capsys, ["train", "trainer.max_setps=20"]).splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 40
    assert " ".join(part.strip() for part in lines) == line.strip()


def test_warnings_are_lines() -> None:
    """Warnings of Hookline are printed like errors; those of other code keep their category and place in the code."""
    killed = Path(__file__).parents[1] / "golden_reading" / "records" / "20260102-030404-aaaaaaae"
    done = python("-m", "hookline", "export", str(killed), "--to", "csv", "--output", "tables")
    assert done.returncode == 0 and "metrics.csv" in done.stdout
    torn = "line 5 was torn because the run was killed; the other lines were read"
    assert done.stderr == f"hookline: warning: {killed}/metrics.jsonl: {torn}\n"
    Path("own.py").write_text("import warnings\nwarnings.warn('old', FutureWarning)\n")
    done = python("-m", "hookline", "hooks", "ema", "--import", "own")
    assert done.returncode == 0
    assert done.stderr == f"{Path.cwd()}/own.py:2: FutureWarning: old\n  warnings.warn('old', FutureWarning)\n"


def test_a_warning_is_safe_and_wrapped_on_a_terminal(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may contain what a file has, and is broken between words, like an error; afterwards Python shows warnings."""

    def warn(*args: object) -> int:
        with warnings.catch_warnings(action="default"):
            warnings.warn("a\x1b[31m file\nwith " + "word " * 9, RuntimeWarning, stacklevel=1)
        return 0

    before = warnings.showwarning
    monkeypatch.setattr("hookline.cli.hooks.run", warn)
    line = error_of(capsys, ["hooks"], 0)
    assert line == "hookline: warning: a\\x1b[31m file with " + " ".join(["word"] * 9) + "\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    lines = error_of(capsys, ["hooks"], 0).splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 40
    assert " ".join(part.strip() for part in lines) == line.strip()
    assert warnings.showwarning is before


def hookline_with(arguments: list[str], stdout: Any, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a new process that prints to this descriptor, block-buffered as in a shell."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "hookline", *arguments]
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": ":".join(sys.path), **environment},
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["hooks", "example", "schema", "--help", "train --help", "--version"])
def test_commands_that_cannot_print(command: str, unbuffered: str) -> None:
    """A closed pipe ends a command quietly with 141, as a shell expects; a full disk in one line on stderr, with 1."""
    reader, writer = os.pipe()
    os.close(reader)
    done = hookline_with(command.split(), writer, PYTHONUNBUFFERED=unbuffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            done = hookline_with(command.split(), full, PYTHONUNBUFFERED=unbuffered)
        problem = "hookline: error: standard output cannot be written: No space left on device\n"
        assert (done.returncode, done.stderr) == (1, problem)


@pytest.mark.parametrize("command", [["hooks"], ["example"], ["schema"], ["replay", "--help"]])
def test_commands_print_in_any_encoding(command: list[str]) -> None:
    """Characters that the console's encoding lacks are replaced."""
    done = hookline_with(command, subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout and not done.stderr
    if command == ["schema"]:
        assert json.loads(done.stdout)


def test_training_ignores_that_it_cannot_print() -> None:
    """The status is that of the run, and the record is whole; a full disk is mentioned on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    done = hookline_with(["train", "small.yaml"], writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            done = hookline_with(["train", "small.yaml"], full, PYTHONIOENCODING="ascii")
        assert done.returncode == 0
        assert done.stderr == "hookline: error: standard output cannot be written: No space left on device\n"
    for run in Path("runs").iterdir():
        assert json.loads((run / "run.json").read_text(encoding="utf-8"))["outcome"] == "completed"
