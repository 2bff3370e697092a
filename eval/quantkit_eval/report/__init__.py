"""Reports from the records of a run: one HTML file for people, JUnit XML for CI, Markdown for a pull request."""

from quantkit_eval.report.inputs import ReportInput, load_report_input
from quantkit_eval.report.write import write_report

__all__ = ["ReportInput", "load_report_input", "write_report"]
