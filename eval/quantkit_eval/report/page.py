"""A page of drawings and tables that needs nothing else: what the report of a run is not, but looks like."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from markupsafe import Markup

from quantkit_eval.report.plain_page import environment
from quantkit_eval.report.sections import Plot


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first cell in a row names the row; the columns from ``numbers_from`` on are numbers."""

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers_from: int = 1


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of a page: words, then drawings, then tables."""

    anchor: str
    title: str
    lines: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A whole page.

    Attributes:
        title: what it is.
        headline: what it says, in one sentence.
        created: of the record, as it writes it.
        when: the same for people.
        facts: (name, value, detail) of what matters most.
        sections: in the order in which they are read.
        source: the record that every number comes from.
    """

    title: str
    headline: str
    created: str
    when: str
    source: str
    facts: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[PageSection] = field(default_factory=tuple)


def render_page(page: Page) -> str:
    """The page as HTML. The same page gives the same text."""
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    template = environment().get_template("page.html.j2")
    return template.render(page=page, style=Markup(style), style_hash=f"sha256-{digest}")


@cache
def _style() -> str:
    return files("quantkit_eval.report").joinpath("templates", "report.css").read_text(encoding="utf-8").strip()
