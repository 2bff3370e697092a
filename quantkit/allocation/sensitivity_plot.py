"""The sensitivities of a model as a picture: a bar a unit, with its standard error."""

from collections.abc import Mapping
from typing import Any

from quantkit_eval.report import svg
from quantkit_eval.report.quantities import number, percent

WIDTH, ROW, TOP, ROOM = 900, 20, 34, 150  # pixels
STYLE = (
    "svg{background:#fff}.label{font:12px system-ui,sans-serif;fill:#1a1a1a}"
    ".bar{fill:#1f6fb4}.error{stroke:#1a1a1a;stroke-width:1}"
)


def draw_sensitivity(document: Mapping[str, Any]) -> str:
    """A file of its own.

    Args:
        document: of ``sensitivity_table``.

    Returns:
        SVG: for each unit, in the order of the table, the KL of its smallest candidate.
    """
    rows = [(unit["unit"], unit["candidates"][0]) for unit in document["units"]]
    left = max(svg.text_width(name) for name, _ in rows) + 12
    most = max(entry["kl"] + entry["standard_error"] for _, entry in rows)
    scale = svg.Scale(0.0, most or 1.0, left, WIDTH - ROOM)
    caption = f"{document['model']}: KL in nats a token, each unit alone in its smallest scheme"
    parts = [svg.element("style", STYLE), svg.label(left, 16, caption)]
    for index, (name, entry) in enumerate(rows):
        top = TOP + ROW * index
        parts.append(svg.label(left - 8, top + 12, name, anchor="end"))
        parts.append(svg.box(left, top, scale(entry["kl"]) - left, ROW - 6, "bar"))
        ends = [scale(entry["kl"] + sign * entry["standard_error"]) for sign in (-1, 1)]
        parts.append(svg.line(ends[0], top + 7, ends[1], top + 7, "error"))
        text = f"{number(entry['kl'])} ({percent(entry['share'])}) {entry['scheme']}"
        parts.append(svg.label(ends[1] + 6, top + 12, text))
    said = "; ".join(f"{name} {number(entry['kl'])}" for name, entry in rows)
    drawn = svg.drawing("sensitivity", WIDTH, TOP + ROW * len(rows) + 8, "Sensitivity of the units", said, parts)
    return str(drawn).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + "\n"
