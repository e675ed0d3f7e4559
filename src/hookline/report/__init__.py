"""The report of a run or of several: one HTML file that opens from disk and loads nothing."""

REPORT = "report.html"
"""The name of its file in a run's directory."""
