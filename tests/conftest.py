"""What every test gets: one torch thread, an empty directory, its own registered names, and hooks that may not fail.

Under most policies a run continues when a hook fails, so that an assertion inside a hook would show nothing. Therefore
a test fails if a hook failed in it and the run continued, unless it expects this error of a hook with
`@pytest.mark.hooks_fail(raises=ValueError)`.

What torch.compile makes is cached in a folder of this run of the tests, which its processes share and which is removed
at the end. torch's own is shared by all runs of a user, so that one run could use or damage what another one made.

A test says which requirements it shows with `@pytest.mark.req("000-15", "000-22")`. At the end of a run of the
whole suite the outcomes are written to conformance.json in the project's root, per requirement: how many tests
passed, failed and were skipped, and each test's first sentence. A run of some of the tests leaves the file alone.

Property tests try the same examples every time, so that a change is refused for what it did and for nothing else;
`make properties` tries new ones.
"""

import json
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from hookline.core import plugins
from hookline.core.failures import FailureHandler

ROOT = Path(__file__).resolve().parent.parent
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
MOST_IDS_PER_TEST = 4
ID_CHARACTERS = 60
OUTCOMES = ("passed", "failed", "skipped")
SOAK_SECONDS = 3600
NAME_TABLES = [table for table in vars(plugins).values() if isinstance(table, plugins.PluginTable)]
WITHOUT_SOAK = "not soak"  # as pyproject.toml has it: soak tests show nothing that others don't
PICKING = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise")  # options that leave tests out

# A busy machine generates examples slowly, which says nothing about the code.
NO_CLOCK = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=NO_CLOCK)
hypothesis.settings.register_profile("new", derandomize=False, deadline=None, suppress_health_check=NO_CLOCK)
hypothesis.settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def known_ids() -> set[str]:
    """Return the ids of tests/requirements.tsv, whose lines are: id, tab, text."""
    lines = (ROOT / "tests" / "requirements.tsv").read_text(encoding="utf-8").splitlines()
    return {line.split("\t", 1)[0] for line in lines if line.strip()}


def marked_ids(item: pytest.Item) -> list[str]:
    """Return every id in the item's req markers, including those of its class and module."""
    return [str(requirement) for marker in item.iter_markers("req") for requirement in marker.args]


def complaint(ids: list[str], known: set[str]) -> str | None:
    """Describe what is wrong with a test's requirement ids; return None if they are right."""
    if len(ids) > MOST_IDS_PER_TEST:
        return f"names {len(ids)} requirements; a test can show {MOST_IDS_PER_TEST} at most, so split it"
    unknown = [requirement for requirement in ids if requirement not in known]
    if unknown:
        return f"names {', '.join(unknown)}, which tests/requirements.tsv does not have"
    return None


def first_sentence(item: pytest.Item) -> str:
    """Return the first sentence of the test's docstring, on one line."""
    docstring = getattr(getattr(item, "obj", None), "__doc__", None) or ""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "." if paragraph else ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn wrong requirement ids into a collection error, which reads the same under xdist."""
    report = yield
    tests = [node for node in report.result if isinstance(node, pytest.Item)]
    known = known_ids() if tests else set()
    problems = [(test.nodeid, complaint(marked_ids(test), known)) for test in tests]
    wrong = [f"{nodeid}: @pytest.mark.req {problem}" for nodeid, problem in problems if problem]
    if wrong:
        report.outcome, report.longrepr, report.result = "failed", "\n".join(wrong), []
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Store ids and sentence in user_properties, which are sent with the report from an xdist worker."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(SOAK_SECONDS))
        ids = marked_ids(item)
        if ids:
            item.user_properties.extend(("req", requirement) for requirement in ids)
            item.user_properties.append(("sentence", first_sentence(item)))


def is_plain(value: object) -> bool:
    """Return True if a value is text, a number, None, or a collection of these that keeps its order."""
    if isinstance(value, dict):
        return is_plain([*value.keys(), *value.values()])
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, str | int | float | None)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name flags, dtypes, errors and plain collections in a test's id; pytest would write True or a number."""
    if isinstance(val, bool):
        return argname if val else f"not {argname}"
    if isinstance(val, torch.dtype | BaseException):
        return str(val).removeprefix("torch.") or type(val).__name__
    if not isinstance(val, dict | list | tuple) or not is_plain(val):
        return None
    parts = [f"{key}={value}" for key, value in val.items()] if isinstance(val, dict) else map(str, val)
    # Escaped, because xdist cannot send half a surrogate pair and a terminal should not obey control characters.
    text = " ".join(parts)[:ID_CHARACTERS].encode("unicode_escape").decode("ascii")
    return text or f"no {argname}"


class Conformance:
    """Counts the outcomes of the marked tests and writes them down when the session ends."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.outcome_of: dict[str, str] = {}
        self.properties_of: dict[str, list[tuple[str, object]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the worst outcome of setup, call and teardown; a test whose call never ran was skipped."""
        if report.when == "call" or report.outcome != "passed":
            worse = self.outcome_of.get(report.nodeid) == "failed"
            self.outcome_of[report.nodeid] = "failed" if worse else report.outcome
        self.properties_of[report.nodeid] = list(report.user_properties)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write conformance.json if all tests were run; sorted, so that two runs can be compared line by line."""
        if session.shouldfail or session.shouldstop or not is_whole_suite(session.config):
            return
        text = json.dumps(self.by_requirement(), indent=1, sort_keys=True, ensure_ascii=False)
        (ROOT / "conformance.json").write_text(text + "\n", encoding="utf-8")

    def by_requirement(self) -> dict[str, dict[str, object]]:
        """Return the counts and the tests of each requirement that a test names."""
        rows: dict[str, dict[str, object]] = {}
        for nodeid, outcome in sorted(self.outcome_of.items()):
            properties = self.properties_of[nodeid]
            sentence = next((str(value) for key, value in properties if key == "sentence"), "")
            for requirement in sorted({str(value) for key, value in properties if key == "req"}):
                add_outcome(rows, requirement, outcome, {"test": nodeid, "sentence": sentence})
        return rows


def is_whole_suite(config: pytest.Config) -> bool:
    """Return True if neither a path nor an option selected some of the tests."""
    paths = {(config.invocation_params.dir / str(path)).resolve() for path in config.args}
    picked = any(getattr(config.option, option, None) for option in PICKING)
    return paths <= {ROOT, ROOT / "tests"} and config.option.markexpr == WITHOUT_SOAK and not picked


def add_outcome(rows: dict[str, dict[str, object]], requirement: str, outcome: str, test: dict[str, str]) -> None:
    """Count one test's outcome for one requirement."""
    row = rows.setdefault(requirement, {**dict.fromkeys(OUTCOMES, 0), "tests": []})
    count, tests = row[outcome], row["tests"]
    assert isinstance(count, int) and isinstance(tests, list)
    row[outcome] = count + 1
    tests.append(test)


def pytest_configure(config: pytest.Config) -> None:
    """Collect the reports, except in an xdist worker: there the controller gets them all."""
    if hasattr(config, "workerinput"):  # with the controller's environment, and therefore its cache
        return
    before = os.environ.get(COMPILE_CACHE)
    os.environ[COMPILE_CACHE] = cache = tempfile.mkdtemp(prefix="hookline-tests-inductor-")

    def remove_cache() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        del os.environ[COMPILE_CACHE]
        if before is not None:
            os.environ[COMPILE_CACHE] = before

    config.add_cleanup(remove_cache)
    if not config.option.collectonly:
        config.pluginmanager.register(Conformance(), "hookline-conformance")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Keep torch to one thread: the tests' tensors are small and the machine is shared."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its own empty directory, so that none writes runs/ into the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove after each test the hooks, models and other components that it registers."""
    for table in NAME_TABLES:
        monkeypatch.setattr(table, "_added", dict(table._added))


@pytest.fixture(autouse=True)
def no_hook_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a hook of any thread raised what no `hooks_fail` marker names, and the run continued.

    A failure that ends the run needs no fixture: the test gets the exception.
    """
    expected = tuple(marker.kwargs["raises"] for marker in request.node.iter_markers("hooks_fail"))
    apply_policy, failures = FailureHandler.apply_policy, []

    def apply_and_note(
        handler: FailureHandler, entry: Any, hook: str, where: str, error: Exception, *rest: Any
    ) -> Exception | None:
        to_raise = apply_policy(handler, entry, hook, where, error, *rest)
        if to_raise is None and not isinstance(error, expected):
            # As text, because the traceback would keep the tensors of its frames alive.
            failures.append(f"hook {hook!r} failed in {where}:\n{''.join(traceback.format_exception(error))}")
        return to_raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FailureHandler, "apply_policy", apply_and_note)
        yield
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
