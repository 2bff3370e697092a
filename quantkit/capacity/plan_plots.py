"""The plots of a capacity plan: lines on logarithmic axes, and bars."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit_eval.report import svg
from quantkit_eval.report.frame import Axis, frame

WIDTH, HEIGHT = 820, 340
LEFT, BOTTOM, TOP = 74, HEIGHT - 44, 30
NUM_COLOURS = 6


@dataclass(frozen=True, slots=True)
class Series:
    """A line.

    Attributes:
        name: in the legend.
        points: (x, y), both above zero, x ascending.
    """

    name: str
    points: tuple[tuple[float, float], ...]


def line_plot(
    key: str, title: str, series: Sequence[Series], x: Axis, y: Axis, markers: Sequence[tuple[str, float]] = ()
) -> Markup:
    """Lines on two logarithmic axes.

    Args:
        key: unique in the page.
        title: what the picture is.
        series: lines, at least one with two points.
        x: horizontal axis.
        y: vertical axis.
        markers: values of x to point out, each with its name.
    """
    drawn = [line for line in series if len(line.points) > 1]
    if not drawn:
        return svg.drawing(key, WIDTH, 40, title, "nothing to draw", [svg.label(0, 20, "nothing to draw")])
    xs = [point[0] for line in drawn for point in line.points]
    ys = [point[1] for line in drawn for point in line.points]
    across = svg.Scale(min(xs), max(max(xs), min(xs) * 1.01), LEFT, WIDTH - 12, log=True)
    up = svg.Scale(min(ys) / 1.2, max(ys) * 1.2, BOTTOM, TOP, log=True)
    parts = frame(across, up, x, y, _log_ticks(across), _log_ticks(up))
    for index, (name, value) in enumerate(markers):
        if across.low < value < across.high:
            at = across(value)
            parts.append(svg.line(at, TOP, at, BOTTOM, "marker"))
            text = f"{name}: {x.text(value)}"
            is_right = at + svg.text_width(text) + 12 > WIDTH
            anchor = "end" if is_right else None
            parts.append(svg.label(at + (-4 if is_right else 4), BOTTOM - 8 - 15 * index, text, anchor=anchor))
    legend = float(LEFT)
    for index, line in enumerate(drawn):
        colour = f"series s{index % NUM_COLOURS}"
        path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in line.points)
        parts.append(svg.element("polyline", svg.element("title", line.name), points=path, class_=colour))
        parts += [svg.line(legend, 12, legend + 16, 12, colour), svg.label(legend + 20, 16, line.name)]
        legend += 34 + svg.text_width(line.name)
    said = "; ".join(f"{line.name}: {y.text(line.points[0][1])} to {y.text(line.points[-1][1])}" for line in drawn)
    return svg.drawing(key, WIDTH, HEIGHT, title, f"{said}. {_said(markers, x)}", parts)


def _said(markers: Sequence[tuple[str, float]], x: Axis) -> str:
    return "; ".join(f"{name} at {x.text(value)}" for name, value in markers)


def _log_ticks(scale: svg.Scale) -> list[float]:
    """Powers of ten; of two where fewer than two of those lie inside."""
    ticks = scale.ticks(6)
    if len(ticks) >= 2:
        return ticks
    value, found = 1.0, []
    while value > scale.low:
        value /= 2
    while value <= scale.high:
        if value >= scale.low:
            found.append(value)
        value *= 2
    return found[:: max(1, len(found) // 8)]


def bar_plot(key: str, title: str, bars: Sequence[tuple[str, float, str]]) -> Markup:
    """Horizontal bars.

    Args:
        key: unique in the page.
        title: what the picture is.
        bars: name, value and its text.
    """
    left, row = 150, 22
    scale = svg.Scale(0.0, max((value for _, value, _ in bars), default=1.0) or 1.0, left, WIDTH - 110)
    parts = []
    for index, (name, value, text) in enumerate(bars):
        top = row * index + 4
        parts.append(svg.label(left - 8, top + 12, name, anchor="end"))
        parts.append(svg.box(left, top, scale(value) - left, row - 7, "bar"))
        parts.append(svg.label(scale(value) + 6, top + 12, text))
    said = "; ".join(f"{name} {text}" for name, _, text in bars)
    return svg.drawing(key, WIDTH, row * len(bars) + 8, title, said, parts)
