"""What a run does, event by event, is what tests/golden_traces has: a refactoring changes none of it."""

import difflib
from pathlib import Path

import pytest
from traced_runs import SCENARIOS, trace

GOLDEN = Path(__file__).resolve().parents[1] / "golden_traces"


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.hooks_fail(raises=ValueError)
def test_a_run_does_what_it_did(name: str) -> None:
    """Events with their arguments, the record, checkpoints, printed lines and weights are the same."""
    expected, seen = (GOLDEN / f"{name}.txt").read_text(), trace(name)
    lines = difflib.unified_diff(expected.splitlines(), seen.splitlines(), "golden", "now", lineterm="", n=2)
    difference = "\n".join(lines)
    if difference:
        pytest.fail(f"{name}:\n{difference}", pytrace=False)


def test_every_golden_trace_has_a_scenario() -> None:
    """A scenario that is renamed or removed leaves no file behind."""
    assert {path.stem for path in GOLDEN.iterdir()} == set(SCENARIOS)
