"""The end of a run: its verdict, report.html, and the line that is printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hookline._console import logger, print_line, printable
from hookline._fs import relative_to_here
from hookline._text import counted, duration_text
from hookline.core.base import hook_attribute
from hookline.errors import error_text
from hookline.ranks import on_ranks
from hookline.record.outcome import Outcome
from hookline.record.redaction import redact_text
from hookline.record.strict_json import field_values
from hookline.runs.verdict import Verdict

if TYPE_CHECKING:
    from hookline.run.run import Run
    from hookline.runs.summary import RunSummary


@contextmanager
def _only_warns() -> Iterator[None]:
    """Make a failure inside the block a warning: no report is worth a run."""
    try:
        yield
    except Exception as error:
        logger.warning("the report was not written: %s", error_text(error))


def judge_run(run: Run) -> tuple[RunSummary | None, Mapping[str, Any] | None]:
    """Read the record of a run as far as it is written, and judge it."""
    path = None if run.record.is_tentative else run.record.path
    if not run.writes_report or path is None or run.ranks.rank:
        return None, None
    from hookline.runs.alerts import find_alerts
    from hookline.runs.find import RunFiles
    from hookline.runs.summary import RunSummary
    from hookline.runs.verdict import judge

    with _only_warns():
        files = RunFiles(path)
        files.run = run.record.run  # run.json does not have the outcome yet
        summary = RunSummary.read(files, media=True)
        return summary, field_values(judge(find_alerts(summary)))
    return None, None


def report_run(run: Run, summary: RunSummary) -> None:
    """Write report.html, and print where it is."""
    from hookline.report import REPORT
    from hookline.report.page import write_report

    with _only_warns():
        path = summary.files.path / REPORT
        write_report(path, [summary])
        if run.prints:
            print_line(f"report: {relative_to_here(path)}")


def closing_line(run: Run, outcome: Outcome, reason: str | None) -> str:
    """Return the text to print after the run: outcome, duration, and everything that went wrong.

    If the run ended without an exception or a signal but is not healthy, a line before it says why.
    """
    count = run.counters()
    verdict = run.record.run.get("verdict") if outcome.is_clean else None
    named: str = outcome
    if outcome is Outcome.NON_FINITE:
        named = "non-finite weights"
        if reason and reason.startswith("stopped"):  # a hook that explains NaN has kept them out of the weights
            named = "stopped at a non-finite loss or gradient"
            reason = reason.partition(":")[0] if verdict and verdict["reason"] else reason  # the verdict has the rest
    # The text of an exception may quote a secret, and control characters.
    why = f" ({redact_text(reason.removeprefix('stopped '))})" if reason else ""
    health = f", {verdict['health']}" if verdict and outcome is not Outcome.NON_FINITE else ""
    words = [f"{named}{why}{health}: {counted(count['step'], 'step')} in {duration_text(count['seconds'])}"]
    for key, noun in (
        ("hook_failures", "hook failure"),
        ("non_finite_losses", "non-finite loss"),
        ("skipped_steps", "skipped step"),
        ("failed_saves", "failed save"),
    ):
        if count[key]:
            words.append(counted(count[key], noun))
    saved = run.last_saved_step
    if saved is not None and saved < count["step"]:
        hints = [hook_attribute(entry.hook, "unsaved_hint") for entry in run.hooks.entries() if entry.enabled]
        hint = next(filter(None, hints), "") if outcome.is_clean else ""
        remedy = f"; {hint}" if hint else ""
        unsaved = counted(count["step"] - saved, "step")
        words.append(f"{unsaved} after the last checkpoint (step {saved}{remedy})")
    disabled = [hook.name for hook in run.hooks.list_hooks() if not hook.enabled and hook.failures]
    if disabled:
        words.append(f"disabled: {', '.join(disabled)}")
    for name, ranks in run.run_status.failed_on_ranks.items():
        words.append(f"{name} failed on {on_ranks(ranks)}")
    if run.change_audit.summary:
        words.append(run.change_audit.summary)
    line = ", ".join(words)
    return printable(f"{redact_text(str(Verdict(**verdict)))}\n{line}" if verdict and verdict["reason"] else line)
