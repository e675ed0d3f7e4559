"""`hookline run`: scripts that know nothing of Hookline print, return and train what they do without it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_config import config_with

from hookline import hosts
from hookline.hosts.options import Options

SITE = Path(hosts.__file__).parent / "site"
SCRIPTS = Path(__file__).parent / "scripts"
HOOKLINE = (sys.executable, "-m", "hookline.cli", "run")
TIMINGS = re.compile(r"'\w+_(?:runtime|per_second)': [^,}]+")


class Done(NamedTuple):
    """What a process left."""

    code: int
    out: str
    err: str
    directory: Path

    @property
    def runs(self) -> list[Path]:
        return sorted((self.directory / "runs").glob("*"))

    @property
    def record(self) -> dict[str, Any]:
        """The fields of the only run's run.json."""
        (run,) = self.runs
        return json.loads((run / "run.json").read_text())

    def metrics(self, name: str) -> list[float]:
        """The values of a metric of the only run, by step."""
        (run,) = self.runs
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [row[name] for row in rows if name in row]

    @property
    def weights(self) -> list[torch.Tensor]:
        saved = torch.load(self.directory / "model.pt")
        states = saved.values() if isinstance(next(iter(saved.values())), dict) else [saved]
        return [tensor for state in states for tensor in state.values()]


def start(directory: Path, *words: object, **variables: str) -> "subprocess.Popen[str]":
    """Start a command in a new directory."""
    directory.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",
        "TOKENIZERS_PARALLELISM": "false",
    } | variables
    return subprocess.Popen(
        [*map(str, words)], cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: "subprocess.Popen[str]", directory: Path) -> Done:
    """Wait for the end of a command."""
    out, err = process.communicate()
    return Done(process.returncode, out, err, directory)


def execute(directory: Path, *words: object, **variables: str) -> Done:
    """Run a command in a new directory to its end."""
    return end(start(directory, *words, **variables), directory)


def both(tmp_path: Path, *words: object, plainly: tuple[object, ...] = (sys.executable,)) -> tuple[Done, Done]:
    """Run a script plainly and under `hookline run`, side by side."""
    places = tmp_path / "plain", tmp_path / "watched"
    processes = [start(places[0], *plainly, *words), start(places[1], *HOOKLINE, *words)]
    plain, watched = (end(process, place) for process, place in zip(processes, places, strict=True))
    return plain, watched


def python(tmp_path: Path, code: str, *options: object, script: str = "script.py", **variables: str) -> Done:
    """Run code as a script under `hookline run`."""
    (tmp_path / script).write_text(code)
    return execute(tmp_path / "here", *HOOKLINE, *options, tmp_path / script, **variables)


# ---- published scripts -----------------------------------------------------------------------------------------------

SOAK = [pytest.mark.soak]
STEPS_AND_BATCHES = [
    pytest.param("mnist", 50, 50),
    pytest.param("word_language_model", 40, 40),
    pytest.param("dcgan", 60, 90),
    pytest.param("nanogpt", 30, 120),
    pytest.param("scaled", 19, 20),
    pytest.param("lbfgs", 5, 5),
    pytest.param("compiled", 50, 50),
    pytest.param("no_trainer", 30, 60),
    pytest.param("lightning_module", 20, 40, marks=SOAK),
    pytest.param("run_clm", 24, 48, marks=SOAK),
]


@pytest.mark.parametrize(("name", "steps", "batches"), STEPS_AND_BATCHES)
def test_a_script_prints_and_trains_the_same(name: str, steps: int, batches: int, tmp_path: Path) -> None:
    """Output, exit code and weights are those of plain Python, and the record has every step with its loss."""
    plain, watched = both(tmp_path, SCRIPTS / f"{name}.py")
    assert plain.code == 0, plain.err
    assert (watched.code, watched.err) == (plain.code, plain.err)
    assert TIMINGS.sub("", watched.out) == TIMINGS.sub("", plain.out)
    assert all(map(torch.equal, plain.weights, watched.weights))
    counters = watched.record["counters"]
    assert (watched.record["outcome"], counters["step"], counters["batches"]) == ("completed", steps, batches)
    assert len(watched.metrics("train/loss")) == len(watched.metrics("train/lr")) == steps
    assert (watched.runs[0] / "report.html").is_file()
    if name in CHECKS:
        CHECKS[name](watched)


def check_mnist(done: Done) -> None:
    """The loss of a step is the one that the script prints."""
    losses, printed = done.metrics("train/loss"), re.findall(r"\tLoss: (\S+)", done.out)
    assert [losses[step] for step in (0, 10, 20, 25, 35, 45)] == pytest.approx(list(map(float, printed)), abs=1e-5)


def check_dcgan(done: Done) -> None:
    """Both models are in one run by their names; each optimizer has its own steps, losses and gradients."""
    losses, printed = done.metrics("train/loss"), re.findall(r"\d+\.\d+", done.out)
    steps = [step + part for step in (0, 20, 40) for part in (0, 1)]
    assert [losses[step] for step in steps] == pytest.approx(list(map(float, printed)), abs=1e-3)
    layers = (done.runs[0] / "layers.jsonl").read_text()
    assert "netD.main.0.weight" in layers and "netG.main.0.weight" in layers
    assert "never arrive" not in (done.runs[0] / "events.jsonl").read_text()
    assert done.record["optimizers"] == ["Adam", "Adam"]


def check_scaled(done: Done) -> None:
    """Losses are not scaled, and the step that the scaler skips is counted."""
    finite = [float(line.split()[1]) for line in done.out.splitlines() if "inf" not in line]
    assert done.metrics("train/loss") == pytest.approx(finite)
    assert done.record["counters"]["skipped_steps"] == 1


CHECKS = {"mnist": check_mnist, "dcgan": check_dcgan, "scaled": check_scaled}


def test_only_rank_0_of_torchrun_records(tmp_path: Path) -> None:
    """The launcher and the other ranks leave nothing; the weights are those of the run without."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
    plain = execute(tmp_path / "plain", sys.executable, *torchrun, "29611", SCRIPTS / "ddp.py")
    words = (*HOOKLINE, sys.executable, *torchrun, "29612", SCRIPTS / "ddp.py")
    watched = execute(tmp_path / "watched", *words)
    assert watched.out == plain.out, watched.err + plain.err
    aborted = "terminate called"  # gloo's threads may abort a process that has ended, with and without Hookline
    assert watched.code == 0 or aborted in watched.err
    assert all(map(torch.equal, plain.weights, watched.weights))
    assert watched.record["counters"]["step"] == 25


# ---- endings ---------------------------------------------------------------------------------------------------------

ENDINGS = {
    "normal": (0, "completed", None),
    "exception": (1, "failed", "RuntimeError: grad can be implicitly created only for scalar outputs"),
    "exit3": (3, "interrupted", "SystemExit: 3"),
    "bye": (1, "interrupted", "SystemExit: bye"),
    "_exit": (4, None, None),  # nothing runs after it: the record was killed
    "SIGTERM": (-signal.SIGTERM, "interrupted", "SIGTERM"),
    "SIGINT": (-signal.SIGINT, "interrupted", "KeyboardInterrupt"),
    "in closure": (1, "failed", "KeyError: 'closure'"),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_script_ends_as_it_does(how: str, tmp_path: Path) -> None:
    """Output, traceback, exit code and signal are those of plain Python, and the record says how it ended."""
    plain, watched = both(tmp_path, SCRIPTS / "endings.py", how)
    assert (watched.code, watched.out, watched.err) == (plain.code, plain.out, plain.err)
    code, outcome, reason = ENDINGS[how]
    assert (watched.code, watched.record.get("outcome")) == (code, outcome)
    assert reason is None or reason in watched.record["reason"]


def test_wrong_arguments_of_a_script_are_the_scripts(tmp_path: Path) -> None:
    """Its usage is printed, and there is no run."""
    plain, watched = both(tmp_path, SCRIPTS / "endings.py", "--hooks", "x")
    assert (watched.code, watched.out, watched.err) == (plain.code, plain.out, plain.err)
    assert watched.code == 2 and watched.runs == []


# ---- processes that do not train -------------------------------------------------------------------------------------


def test_a_process_without_torch_gets_nothing(tmp_path: Path) -> None:
    """Neither torch nor Hookline is imported, `find_spec` is no import, and the path is that of plain Python."""
    code = (
        "import sys, importlib.util\n"
        "print(importlib.util.find_spec('torch') is not None, importlib.util.find_spec('torch').loader)\n"
        "print(sorted(name for name in sys.modules if 'hookline' in name or name == 'torch'), sys.path, sys.argv)\n"
    )
    (tmp_path / "script.py").write_text(code)
    plain, watched = both(tmp_path, tmp_path / "script.py")
    assert re.sub(r"0x\w+", "", watched.out) == re.sub(r"0x\w+", "", plain.out)
    assert (watched.err, watched.runs) == ("", [])


def test_a_process_that_imports_torch_keeps_its_import_system(tmp_path: Path) -> None:
    """After the import of torch, finders and loaders are as without Hookline, and nothing is said."""
    code = "import sys, torch\nprint(sys.meta_path, type(torch.__loader__), vars(torch.__loader__))\n"
    (tmp_path / "script.py").write_text(code)
    plain, watched = both(tmp_path, tmp_path / "script.py")
    assert re.sub(r"0x\w+", "", watched.out) == re.sub(r"0x\w+", "", plain.out)
    assert (watched.err, watched.runs) == ("", [])


def test_the_sitecustomize_that_was_there_runs(tmp_path: Path) -> None:
    """Also if it fails: Python says so as without Hookline."""
    for index, body in enumerate(("print('other')", "raise ValueError('x')", "import missing_module")):
        (tmp_path / "sitecustomize.py").write_text(body)
        words = (sys.executable, "-c", "import sys; print(sys.modules.get('sitecustomize'))")
        both_paths = f"{SITE}{os.pathsep}{tmp_path}"
        plain = execute(tmp_path / f"plain{index}", *words, PYTHONPATH=str(tmp_path))
        watched = execute(tmp_path / f"watched{index}", *words, PYTHONPATH=both_paths, **Options().variables())
        assert (watched.code, watched.out, watched.err) == (plain.code, plain.out, plain.err)


def test_an_import_of_torch_that_fails_has_its_own_traceback(tmp_path: Path) -> None:
    """No line of it is of Hookline."""
    (tmp_path / "torch.py").write_text("def load():\n    raise ImportError('no library')\nload()\n")
    (tmp_path / "script.py").write_text("import torch\n")
    words, path = (sys.executable, tmp_path / "script.py"), str(tmp_path)
    plain = execute(tmp_path / "plain", *words, PYTHONPATH=path)
    watched = execute(tmp_path / "watched", *words, PYTHONPATH=f"{SITE}{os.pathsep}{path}", **Options().variables())
    assert (watched.code, watched.out, watched.err) == (plain.code, plain.out, plain.err) and "no library" in plain.err


def test_a_python_without_hookline_is_told_once(tmp_path: Path) -> None:
    """Not in the processes that it starts, too; the script runs."""
    (tmp_path / "hookline.py").write_text("raise ImportError('No module named hookline')\n")
    (tmp_path / "torch.py").write_text("")
    code = "import subprocess, sys, torch; print('ran'); subprocess.run([sys.executable, '-c', 'import torch'])"
    path = f"{SITE}{os.pathsep}{tmp_path}"
    done = execute(tmp_path / "here", sys.executable, "-c", code, PYTHONPATH=path, **Options().variables())
    line = f"hookline: nothing is recorded by {sys.executable}: No module named hookline\n"
    assert (done.code, done.out, done.err) == (0, "ran\n", line)


@pytest.mark.parametrize("option", ["-I", "-uS", "-E"])
def test_a_python_that_reads_no_path_is_refused(option: str, tmp_path: Path) -> None:
    """Nothing would be recorded, without a word."""
    done = execute(tmp_path / "here", *HOOKLINE, sys.executable, "-u", option, "-c", "print('began')", "-I")
    assert (done.code, done.out) == (2, "") and option in done.err
    done = execute(tmp_path / "there", *HOOKLINE, sys.executable, "-c", "print('began')", option)
    assert (done.code, done.out, done.err) == (0, "began\n", "")


def test_a_warning_that_was_shown_is_not_shown_again(tmp_path: Path) -> None:
    """Python forgets which warnings it has shown when a filter changes; what begins a run changes filters."""
    code = TRAINING.replace("        inputs =", "        warnings.warn('a word')\n        inputs =")
    (tmp_path / "script.py").write_text(f"import warnings\n{code}\ntrain()\ntrain()\n")
    plain, watched = both(tmp_path, tmp_path / "script.py")
    assert (watched.err, watched.out) == (plain.err, plain.out) and plain.err.count("a word") == 2


def test_a_command_of_hookline_records_its_run_itself(tmp_path: Path) -> None:
    """It is not watched as well, wherever the script starts it."""
    config = tmp_path / "small.yaml"
    config.write_text(config_with("lr_monitor"))
    done = execute(tmp_path / "here", *HOOKLINE, sys.executable, "-m", "hookline", "train", config)
    assert (done.code, done.err) == (0, "")
    assert done.record["outcome"] == "completed"


def test_a_script_without_an_optimizer_is_told_why(tmp_path: Path) -> None:
    """One line, at its end."""
    code = "import torch\nw = torch.ones(3, requires_grad=True)\nfor _ in range(3): w.sum().backward()\nprint('done')\n"
    done = python(tmp_path, code)
    assert (done.code, done.out, done.runs) == (0, "done\n", [])
    assert done.err == "hookline: nothing was recorded: no optimizer of torch.optim has made a step\n"


def test_parameters_of_no_module_are_told(tmp_path: Path) -> None:
    """An optimizer of tensors alone has no model."""
    code = (
        "import torch\nw = torch.ones(3, requires_grad=True)\noptimizer = torch.optim.SGD([w], lr=0.1)\n"
        "for _ in range(3): w.sum().backward(); optimizer.step()\n"
    )
    done = python(tmp_path, code)
    why = "no torch.nn.Module has the parameters of the optimizer (SGD)"
    assert (done.code, done.err, done.runs) == (0, f"hookline: nothing was recorded: {why}\n", [])


# ---- hooks -----------------------------------------------------------------------------------------------------------

TRAINING = """
import torch
from torch import nn
def train(steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs = torch.randn(16, 4)
        model.train()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(inputs * 100)
    print(model[0].weight.sum().item())
"""


def test_hooks_that_change_training_need_a_permission(tmp_path: Path) -> None:
    """Without --allow-changes the script trains as it does, and one line names the hook; with it, the hook acts."""
    (tmp_path / "hooks.yaml").write_text("hooks:\n  update: [{name: clip_norm, max_norm: 0.001}]\n")
    code = TRAINING + "train()\n"
    options = ("--hooks", tmp_path / "hooks.yaml")
    refused = python(tmp_path, code, *options)
    (tmp_path / "here").rename(tmp_path / "refused")
    plain = execute(tmp_path / "plain", sys.executable, tmp_path / "script.py")
    assert (refused.code, refused.out, (tmp_path / "refused" / "runs").exists()) == (0, plain.out, False)
    assert re.fullmatch(
        r"hookline: nothing is recorded: .*'clip_norm' changes training.*--allow-changes\n", refused.err
    )
    allowed = python(tmp_path, code, "--allow-changes", *options)
    assert allowed.out != plain.out and allowed.err == ""
    assert max(allowed.metrics("train/grad_norm")) > 0.001


def test_a_wrong_config_of_hooks_is_refused_before_the_script(tmp_path: Path) -> None:
    """The script does not begin."""
    (tmp_path / "hooks.yaml").write_text("hooks:\n  lifecycle: [{name: gradient_moniter}]\n")
    done = python(tmp_path, "print('began')\n", "--hooks", tmp_path / "hooks.yaml")
    assert (done.code, done.out) == (2, "")
    assert "gradient_monitor" in done.err


def test_hooks_see_training_only(tmp_path: Path) -> None:
    """What a model in eval mode computes is no training; modules are imported from where the command was typed."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text(
        "from hookline import ForwardHook, register_hook\n"
        "@register_hook('seen')\n"
        "class Seen(ForwardHook):\n"
        "    modules = '0'\n"
        "    def on_forward(self, phase, step, inputs, trainer):\n"
        "        trainer.log(f'{phase}/size', inputs[0].abs().max())\n"
    )
    (tmp_path / "hooks.yaml").write_text("hooks:\n  forward: [seen]\n")
    (tmp_path / "script.py").write_text(TRAINING + "train()\n")
    environment = {**os.environ, "PYTHONPATH": ""}
    words = [*HOOKLINE, "--import", "mine", "--hooks", str(tmp_path / "hooks.yaml"), str(tmp_path / "script.py")]
    subprocess.run(words, cwd=tmp_path / "here", env=environment, check=True, capture_output=True)
    done = Done(0, "", "", tmp_path / "here")
    assert len(done.metrics("train/size")) == 7 and max(done.metrics("train/size")) < 10
    assert min(done.metrics("validation/size")) > 50


def test_a_failing_hook_does_not_end_the_script(tmp_path: Path) -> None:
    """Not even one whose policy is to end the run: the record ends there, which one line says."""
    (tmp_path / "mine.py").write_text(
        "from hookline import TrainingHook\n"
        "class Fails(TrainingHook):\n"
        "    on_error = 'raise'\n"
        "    def on_step_end(self, step):\n"
        "        if step == 3: raise ValueError('on purpose')\n"
    )
    (tmp_path / "hooks.yaml").write_text("hooks:\n  hook_classes: [mine.Fails]\n")
    options = ("--allow", "mine", "--hooks", tmp_path / "hooks.yaml")
    done = python(tmp_path, TRAINING + "train()\n", *options, PYTHONPATH=str(tmp_path))
    plain = execute(tmp_path / "plain", sys.executable, tmp_path / "script.py")
    assert (done.code, done.out) == (plain.code, plain.out)
    assert done.err == "hookline: the record ends here: on purpose\n"
    assert done.record["outcome"] == "failed"


def test_trainings_in_sequence_are_runs_of_their_own(tmp_path: Path) -> None:
    """Each with its own model and outcome."""
    done = python(tmp_path, TRAINING + "train(8)\ntrain(5)\n")
    records = [json.loads((run / "run.json").read_text()) for run in done.runs]
    ends = [(record["counters"]["step"], record["outcome"]) for record in records]
    assert ends == [(8, "completed"), (5, "completed")]


def test_a_forked_process_does_nothing(tmp_path: Path) -> None:
    """It trains with the model and optimizer of its parent; the parent's record is its own."""
    code = TRAINING.replace("    print(", "        if step == 3 and os.fork() == 0: print('child')\n    print(")
    done = python(tmp_path, f"import os, time\n{code}\ntrain()\n")
    assert (done.code, done.err) == (0, "")
    assert done.record["counters"]["step"] == len(done.metrics("train/loss")) == 8


def test_forward_hooks_that_end_when_something_is_compiled_are_named_once(tmp_path: Path) -> None:
    """The record says so; what the script writes to files and pipes stays the script's."""
    (tmp_path / "hooks.yaml").write_text("hooks:\n  forward: [{name: activation_stats, every: 2}]\n")
    compiles = "        if step == 4: torch.compile(lambda x: x + 1, backend='eager')(inputs)\n"
    code = TRAINING.replace("        model.eval()\n", compiles + "        model.eval()\n") + "train(12)\n"
    done = python(tmp_path, code, "--hooks", tmp_path / "hooks.yaml")
    events = map(json.loads, (done.runs[0] / "events.jsonl").read_text().splitlines())
    (told,) = [event for event in events if event["kind"] == "hook_passed_over"]
    assert (done.code, done.err, told["hook"]) == (0, "", "activation_stats")
    assert told["message"] == "sees no modules from now on, because the script has compiled something"


def test_hooks_in_a_compiled_model_compile_it_once_more(tmp_path: Path) -> None:
    """Not once for each module: none is on the wrapper, and those inside break no graph."""
    (tmp_path / "hooks.yaml").write_text("hooks:\n  forward: [{name: activation_stats, every: 10}]\n")
    words = ("--hooks", tmp_path / "hooks.yaml", SCRIPTS / "compiled.py")
    done = execute(tmp_path / "here", *HOOKLINE, *words)
    (graphs,) = re.findall(r"graphs: (\d+)", done.out)
    assert (done.code, done.err) == (0, "") and int(graphs) <= 2
    assert (done.runs[0] / "layers.jsonl").stat().st_size > 0
