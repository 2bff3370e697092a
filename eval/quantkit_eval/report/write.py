"""Write the reports of a run: rendered first, then each file complete or not at all."""

from collections.abc import Callable
from pathlib import Path

from quantkit_eval.records import write_atomically
from quantkit_eval.report.html import render_html
from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.junit import render_junit
from quantkit_eval.report.markdown import render_markdown


def write_report(run: ReportInput, html: Path | None, junit: Path | None, markdown: Path | None) -> list[Path]:
    """Write the reports that have a path; make their folders.

    Args:
        run: what ``load_report_input`` read.
        html: one self-contained page; None writes none.
        junit: JUnit XML; None writes none.
        markdown: summary for a pull request; None writes none.

    Returns:
        The written files, in the order html, junit, markdown.

    Raises:
        OSError: a file cannot be written. Nothing half-written is left; files written before it stay.
    """
    shown = run.made_visible()
    wanted: tuple[tuple[Path | None, Callable[[ReportInput], str]], ...] = (
        (html, render_html),
        (junit, render_junit),
        (markdown, render_markdown),
    )
    rendered = [(path, render(shown)) for path, render in wanted if path is not None]
    for path, content in rendered:
        write_atomically(path, content)
    return [path for path, _ in rendered]
