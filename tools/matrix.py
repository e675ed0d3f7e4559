"""Run tests with other versions of Python, torch and the libraries; `make matrix` calls it.

    python tools/matrix.py                           every row of ROWS
    python tools/matrix.py python-3.12 hosts-lowest  these rows; the others keep the outcomes they have

Each row gets an environment of its own in build/matrix, which is removed after its tests. Versions that a row does not
name are those of constraints.txt. Outcomes go to tools/matrix.json, from which `make docs` makes a table of
docs/help/compatibility.md. A row whose Python or packages cannot be had is "not tried", with the reason; if another
machine has tried it, it keeps that outcome.

pip's own settings say where packages come from. Without an NVIDIA GPU, the builds of torch for CPUs save gigabytes:

    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make matrix
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = ROOT / "tools" / "matrix.json"
FOLDER = ROOT / "build" / "matrix"

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NEEDED = PROJECT["project"]["dependencies"]
OPTIONAL = [text for texts in PROJECT["project"]["optional-dependencies"].values() for text in texts]
DEV = PROJECT["dependency-groups"]["dev"]
HOSTS = ("accelerate", "lightning", "pytorch-ignite", "torchmetrics", "transformers")
TRACKERS = ("mlflow-skinny", "tensorboard", "wandb")  # which the tests of hosts use

TOOLS = ("hypothesis", "pyte", "pytest", "pytest-timeout", "requests")
CORE_TESTS = (
    "tests/core", "tests/config", "tests/checkpoints", "tests/test_build.py", "tests/test_console.py",
    "tests/test_parameters.py",
)  # fmt: skip
EXTRAS_TESTS = (
    "tests/hooks/trackers", "tests/cli/test_export.py", "tests/cli/test_plot.py",
    "tests/cli/test_main.py::test_bash_completes",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What is installed on which Python, and which tests run there."""

    name: str
    tests: tuple[str, ...] = CORE_TESTS
    python: str = "3.11"
    requirements: tuple[str, ...] = ()


def name_of(requirement: str) -> str:
    """Return the library that a requirement is for."""
    return re.split("[<>=]", requirement)[0]


def lowest(requirements: list[str], *but: str) -> tuple[str, ...]:
    """Return the requirements with each lower bound as the version, and those without a bound as they are."""
    return tuple(text.replace(">=", "==") for text in requirements if name_of(text) not in but)


ROWS = (
    Row("python-3.12", python="3.12"),
    Row("python-3.13", python="3.13"),
    Row(
        "torch-lowest",
        (
            *CORE_TESTS,
            "tests/gradients",
            "tests/activations/test_capture.py",
            "tests/activations/test_forward_hooks.py",
        ),
        requirements=lowest(NEEDED[:1]),
    ),
    Row("dependencies-lowest", requirements=lowest(NEEDED, "torch")),
    Row(
        "hosts-lowest",
        ("tests/hosts", "tests/ranks/test_accelerate.py"),
        requirements=(*lowest([text for text in DEV if name_of(text) in HOSTS]), *TRACKERS),
    ),
    Row("extras-lowest", EXTRAS_TESTS, requirements=lowest(OPTIONAL, "accelerate")),
)


def main(names: list[str]) -> int:
    """Run the rows with these names, or all; return the exit code."""
    if unknown := set(names) - {row.name for row in ROWS}:
        sys.exit(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in ROWS)}")
    failed = False
    for row in ROWS:
        if not names or row.name in names:
            print(f"--- {row.name}", flush=True)
            result = outcome(row)
            print(f"--- {row.name}: {result['outcome']}", flush=True)
            failed |= "failed" in result["outcome"]
            outcomes = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}
            if row.name not in outcomes or "not tried" not in result["outcome"]:
                outcomes[row.name] = result
            in_order = {row.name: outcomes[row.name] for row in ROWS if row.name in outcomes}
            OUTCOMES.write_text(json.dumps(in_order, indent=2) + "\n", encoding="utf-8")
    return int(failed)


def outcome(row: Row) -> dict[str, Any]:
    """Run one row; return what was installed and what came of it."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {"date": today, "python": row.python, "versions": {}, "tests": row.tests, "outcome": ""}
    interpreter = find_python(row.python)
    if interpreter is None:
        return {**result, "outcome": f"not tried: no Python {row.python} on the machine"}
    environment = FOLDER / row.name
    try:
        if subprocess.run([interpreter, "-m", "venv", "--clear", environment]).returncode != 0:
            return {**result, "outcome": f"not tried: {interpreter} -m venv fails"}
        python = environment / "bin" / "python"
        if problem := install(row, python):
            return {**result, "outcome": f"not tried: {problem}"}
        result |= versions(row, python)
        return {**result, "outcome": run_tests(row, python)}
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def find_python(version: str) -> str | None:
    """Return the command of a Python version, from the PATH or from pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for command in (f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))):
        # pyenv puts commands on the PATH that only say that the version is not active.
        if shutil.which(command) and subprocess.run([command, "-V"], capture_output=True).returncode == 0:
            return command
    return None


def install(row: Row, python: Path) -> str:
    """Install Hookline, the test tools and the row's requirements; return pip's reason if that is impossible."""
    named = {name_of(text).lower() for text in row.requirements if "==" in text}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = FOLDER / f"{row.name}.txt"
    constraints.write_text("\n".join(line for line in lines if name_of(line).lower() not in named), encoding="utf-8")
    command = [python, "-m", "pip", "install", "--quiet", "-c", constraints, "-e", ROOT, *TOOLS, *row.requirements]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return ""
    print(done.stderr, file=sys.stderr)
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return errors[-1] if errors else "pip failed"


def versions(row: Row, python: Path) -> dict[str, Any]:
    """Return the versions in a row's environment: Python's, torch's, and those of what the row names."""
    names = ["torch", *(name_of(text) for text in row.requirements if name_of(text) != "torch")]
    code = (
        "import importlib.metadata, json, platform, sys, torch\n"
        "installed = {name: importlib.metadata.version(name) for name in sys.argv[1:]} | {'torch': torch.__version__}\n"
        "print(json.dumps({'python': platform.python_version(), 'versions': installed}))"
    )
    done = subprocess.run([python, "-c", code, *names], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def run_tests(row: Row, python: Path) -> str:
    """Run a row's tests; return how many passed, failed and were skipped."""
    report = FOLDER / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    # Warnings are errors in the tests, but what old versions use of newer ones is not our concern.
    options = ("-q", "-W", "default::DeprecationWarning", "-p", "no:cacheprovider", f"--junit-xml={report}")
    subprocess.run([python, "-m", "pytest", *options, *row.tests], cwd=ROOT)
    if not report.exists():
        return "failed: pytest did not start"
    counts = {
        key: int(value) for key, value in ElementTree.parse(report).getroot()[0].attrib.items() if value.isdigit()
    }
    failed, skipped = counts["failures"] + counts["errors"], counts["skipped"]
    parts = {"passed": counts["tests"] - failed - skipped, "failed": failed, "skipped": skipped}
    return ", ".join(f"{count:,} {word}" for word, count in parts.items() if count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
