"""SVG elements as escaped text, and scales that turn values into pixels.

Colours come from the page's style sheet through class names, so that one drawing serves light, dark and paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

CHARACTER_WIDTH = 6.4  # pixels of an average character at the 12 px that the style sheet sets for labels


def element(name: str, *children: str | Markup, **attributes: str | float | None) -> Markup:
    """One element. Attribute names take ``_`` for ``-`` and a trailing ``_`` for reserved words; None is left out."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _attribute(value))
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, inside)


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def drawing(key: str, width: float, height: float, title: str, description: str, parts: Sequence[Markup]) -> Markup:
    """A picture with a name and a description for those who hear the page.

    Args:
        key: unique in the page; the ids of title and description are made from it.
        width: pixels.
        height: pixels.
        title: what the picture is.
        description: what it shows, with the numbers that matter.
        parts: elements in drawing order.
    """
    names = Markup("").join(
        [element("title", title, id=f"{key}-title"), element("desc", description, id=f"{key}-desc")]
    )
    return element(
        "svg",
        names,
        *parts,
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        viewBox=f"0 0 {_attribute(width)} {_attribute(height)}",
        width=width,
        height=height,
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def box(x: float, y: float, width: float, height: float, class_: str, *children: Markup) -> Markup:
    """A rectangle; a width or height below zero is drawn as zero. ``children`` may hold a ``<title>``."""
    return element("rect", *children, x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=class_)


def label(x: float, y: float, text: str, class_: str = "label", anchor: str | None = None) -> Markup:
    """Text whose baseline is at y; ``anchor`` is start (the default), middle or end."""
    return element("text", text, x=x, y=y, class_=class_, text_anchor=anchor)


def text_width(text: str) -> float:
    """About how many pixels a label takes."""
    return CHARACTER_WIDTH * len(text)


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels, linear or logarithmic (then both values are above zero). Values outside end at the edge.

    Attributes:
        low: value at ``start``.
        high: value at ``stop``; above ``low``.
        start: pixel of ``low``.
        stop: pixel of ``high``; may be below ``start`` for an axis that grows upwards.
        log: True for a logarithmic scale.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.stop - self.start)

    def ticks(self, count: int) -> list[float]:
        """Round values inside the scale: powers of ten if it is logarithmic, else about ``count`` of them."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            step = max(1, math.ceil((last - first + 1) / max(count, 1)))
            return [10.0**exponent for exponent in range(first, last + 1, step)]
        width = round_step((self.high - self.low) / max(count, 1))
        first, last = math.ceil(self.low / width - 1e-9), math.floor(self.high / width + 1e-9)
        return [index * width for index in range(first, last + 1)]


def round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is at least ``rough`` (above zero)."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
