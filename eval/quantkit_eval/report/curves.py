"""Curves and points on two axes as drawings: speed over load, quality over size."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit_eval.report import svg
from quantkit_eval.report.quantities import number

NUM_TONES = 6  # colours of the style sheet; shapes repeat later than colours, so that two series differ in one of them
SHAPES = ("circle", "square", "diamond", "triangle")
_HEIGHT = 260
_SIZE = 4.5  # pixels from the middle of a mark to its edge


@dataclass(frozen=True, slots=True)
class Dot:
    """A measured place; ``interval`` of y, if it is known; ``label`` stands beside it; ``hint`` shows on touch."""

    x: float
    y: float
    interval: Sequence[float] | None = None
    label: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Dots of one name; with a line through them, or each for itself."""

    name: str
    dots: Sequence[Dot]
    is_line: bool = True
    tone: int = 0  # number of its colour and shape


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows: its words, whether it is logarithmic, and the values that have a label (None: round ones)."""

    words: str
    log: bool = False
    ticks: Sequence[float] | None = None
    from_zero: bool = False


def chart(
    title: str,
    description: str,
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    key: str,
    width: int,
    rule: float | None = None,
) -> Markup:
    """Series on two axes, with a legend where there are several.

    Args:
        title: what the picture is.
        description: what it shows, with the numbers that matter.
        series: at least one dot in all.
        x_axis: across.
        y_axis: upwards.
        key: unique in the page.
        width: pixels.
        rule: a value of y at which a line goes across, such as 1 where a ratio means no change.
    """
    legend = _legend(series, width) if len(series) > 1 else []
    top = 14 + 18 * len(legend)
    across = _scale([dot.x for one in series for dot in one.dots], x_axis, 52, width - 14)
    heights = [y for one in series for dot in one.dots for y in (dot.y, *(dot.interval or ()))]
    upwards = _scale([*heights, *([] if rule is None else [rule])], y_axis, top + _HEIGHT - 44, top)
    parts = [part for row in legend for part in row]
    parts += _axes(across, upwards, x_axis, y_axis, width)
    if rule is not None:
        parts.append(svg.line(across.start, upwards(rule), across.stop, upwards(rule), "no-change"))
    for one in series:
        parts += _draw(one, across, upwards, width)
    return svg.drawing(key, width, top + _HEIGHT, title, description, parts)


def _scale(values: Sequence[float], axis: Axis, start: float, stop: float) -> svg.Scale:
    """With a little room beyond the values."""
    low, high = min(values), max(values)
    if axis.log:
        room = (high / low) ** 0.04 if high > low else 1.5
        return svg.Scale(low / room, high * room, start, stop, log=True)
    low = min(low, 0.0) if axis.from_zero else low
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return svg.Scale(low if axis.from_zero else low - room, high + room, start, stop)


def _axes(across: svg.Scale, upwards: svg.Scale, x_axis: Axis, y_axis: Axis, width: int) -> list[Markup]:
    bottom = upwards.start
    parts = []
    for tick in y_axis.ticks or upwards.ticks(4):
        parts.append(svg.line(across.start, upwards(tick), across.stop, upwards(tick), "grid"))
        parts.append(svg.label(across.start - 5, upwards(tick) + 4, number(tick), "label", "end"))
    parts.append(svg.line(across.start, bottom, across.stop, bottom, "axis"))
    free = across.start - 20
    for tick in x_axis.ticks or across.ticks(max(2, width // 110)):
        x, text = across(tick), number(tick)
        parts.append(svg.line(x, bottom, x, bottom + 3, "axis"))
        if x - svg.text_width(text) / 2 > free:
            parts.append(svg.label(x, bottom + 15, text, "label", "middle"))
            free = x + svg.text_width(text) / 2 + 6
    parts.append(svg.label(across.start, bottom + 33, f"{x_axis.words}; upwards: {y_axis.words}", "label"))
    return parts


def _legend(series: Sequence[Series], width: int) -> list[list[Markup]]:
    """Rows of names, each with its mark."""
    rows: list[list[Markup]] = [[]]
    x = 6.0
    for one in series:
        wide = 24 + svg.text_width(one.name)
        if x > 6 and x + wide > width:
            rows.append([])
            x = 6.0
        y = 10 + 18 * (len(rows) - 1)
        rows[-1] += [_mark(one.tone, x, y), svg.label(x + 10, y + 4, one.name)]
        x += wide
    return rows


def _draw(series: Series, across: svg.Scale, upwards: svg.Scale, width: int) -> list[Markup]:
    tone = f"tone-{series.tone % NUM_TONES}"
    places = [(across(dot.x), upwards(dot.y)) for dot in series.dots]
    parts = []
    if series.is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(svg.element("polyline", points=path, class_=f"curve {tone}"))
    for dot, (x, y) in zip(series.dots, places, strict=True):
        if dot.interval:
            parts.append(svg.line(x, upwards(dot.interval[0]), x, upwards(dot.interval[1]), f"curve {tone}"))
        parts.append(_mark(series.tone, x, y, dot.hint or f"{series.name}: {number(dot.y)} at {number(dot.x)}"))
        if dot.label:
            is_right = x + 10 + svg.text_width(dot.label) > width
            parts.append(
                svg.label(x + (-9 if is_right else 9), y - 7, dot.label, "label halo", "end" if is_right else None)
            )
    return parts


def _mark(tone: int, x: float, y: float, hint: str = "") -> Markup:
    """The shape of a series; with words that show on touch."""
    class_ = f"mark tone-{tone % NUM_TONES}"
    inside = [svg.element("title", hint)] if hint else []
    shape = SHAPES[tone % len(SHAPES)]
    if shape == "circle":
        return svg.element("circle", *inside, cx=x, cy=y, r=_SIZE, class_=class_)
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
    }[shape]
    points = " ".join(f"{x + _SIZE * a:.1f},{y + _SIZE * b:.1f}" for a, b in corners)
    return svg.element("polygon", *inside, points=points, class_=class_)
