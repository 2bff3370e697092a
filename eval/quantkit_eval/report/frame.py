"""What a drawing on two axes stands in: lines of values, their texts, and the names of the axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit_eval.report import svg

NAMES = 38  # pixels below the horizontal axis; a drawing ends 6 below them
TICK = 4


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        name: with its unit.
        text: how a value is written.
    """

    name: str
    text: Callable[[float], str]


def frame(
    across: svg.Scale,
    up: svg.Scale,
    x: Axis,
    y: Axis,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    *,
    has_columns: bool = True,
) -> list[Markup]:
    """Elements in drawing order.

    Args:
        across: horizontal scale, from the left edge to the right one.
        up: vertical scale, from the bottom to the top.
        x: horizontal axis.
        y: vertical axis.
        x_ticks: values that get a text.
        y_ticks: values that get a text and a line.
        has_columns: draw lines upwards from ``x_ticks``, not only short marks.
    """
    left, right, bottom = across.start, across.stop, up.start
    parts = []
    for value in y_ticks:
        parts.append(svg.line(left, up(value), right, up(value), "grid"))
        parts.append(svg.label(left - 6, up(value) + 4, y.text(value), anchor="end"))
    for value in x_ticks:
        end, kind = (up.stop, "grid") if has_columns else (bottom + TICK, "axis")
        parts.append(svg.line(across(value), end, across(value), bottom, kind))
        parts.append(svg.label(across(value), bottom + 16, x.text(value), anchor="middle"))
    parts.append(svg.line(left, bottom, right, bottom, "axis"))
    parts.append(svg.label(right, bottom + NAMES, x.name, anchor="end"))
    parts.append(svg.label(0, bottom + NAMES, y.name))
    return parts
