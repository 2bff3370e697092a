"""Which candidates nothing else beats in size, quality and planned speed, and pictures of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from quantkit_eval.report import svg
from quantkit_eval.report.frame import Axis, frame
from quantkit_eval.report.quantities import number, size

WIDTH, HEIGHT = 820, 360
LEFT, BOTTOM, TOP, RIGHT = 70, HEIGHT - 44, 20, WIDTH - 20

Row = Mapping[str, Any]  # a trial of search.json


@dataclass(frozen=True, slots=True)
class Measure:
    """What lies across a picture.

    Attributes:
        key: of the row, and of the picture.
        title: of the picture.
        sign: 1 if less is better, -1 if more is.
        axis: its name, and how a value is written.
    """

    key: str
    title: str
    sign: int
    axis: Axis


def _rate(value: float) -> str:
    return f"{value:,.0f}"


SIZE = Measure(
    "weight_bytes",
    "Size and distance of the candidates",
    1,
    Axis("bytes of weights; filled: nothing is smaller, better and as fast", size),
)
SPEED = Measure(
    "planned_tokens_per_s",
    "Planned speed and distance of the candidates",
    -1,
    Axis("planned tokens a second; filled: nothing is smaller, better and as fast", _rate),
)


def quality(row: Mapping[str, Any]) -> float | None:
    """The selection score of a candidate as one number, less being better; None if it has none.

    Its divergence in nats a token where that was measured; else the mean drop of its suites in points.
    """
    scores = row["scores"]
    if "kl_mean_nats" in scores:
        return float(scores["kl_mean_nats"]["candidate"])
    drops = [100 * (score["baseline"] - score["candidate"]) for score in scores.values()]
    return sum(drops) / len(drops) if drops else None


def mark_front(rows: Sequence[dict[str, Any]]) -> None:
    """Set ``on_front`` of every row: it was measured, and none is as small, as good and as fast, and better in one.

    Where the speed of one of two was not planned, size and quality decide between them.
    """
    places = [_place(row) for row in rows]
    known = [place for place in places if place is not None]
    for row, place in zip(rows, places, strict=True):
        row["on_front"] = place is not None and not any(_beats(other, place) for other in known)


def _place(row: Row) -> tuple[float | None, ...] | None:
    """(bytes, quality, tokens a second with a minus), all better if less; None if it was not measured."""
    value, speed = quality(row), row.get(SPEED.key)
    if value is None or SIZE.key not in row:
        return None
    return float(row[SIZE.key]), value, None if speed is None else -float(speed)


def _beats(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def pareto_plot(rows: Sequence[Row], limit: float | None, measure: Measure = SIZE) -> Markup:
    """A measure against quality, a mark a candidate that was measured, and the front of these two.

    Args:
        rows: the trials of search.json.
        limit: of the divergence, if there is one.
        measure: what lies across.
    """
    shown = [
        (row, float(row[measure.key]), value)
        for row in rows
        if (value := quality(row)) is not None and row.get(measure.key) is not None
    ]
    if not shown:
        said = "nothing was measured" if measure is SIZE else "no speed was planned"
        return svg.drawing(f"pareto-{measure.key}", WIDTH, 40, measure.title, said, [svg.label(0, 20, said)])
    is_kl = "kl_mean_nats" in shown[0][0]["scores"]
    limits = [limit] if limit and is_kl else []
    places, values = [at for _, at, _ in shown], [value for _, _, value in shown] + limits
    room = (max(places) - min(places)) * 0.08 or max(places) * 0.05
    across = svg.Scale(min(places) - room, max(places) + room, LEFT, RIGHT)
    up = svg.Scale(min(0.0, *values), max(values) * 1.1 if max(values) > 0 else 1.0, BOTTOM, TOP)
    y = Axis("up: nats a token" if is_kl else "up: points lost", number)
    parts = frame(across, up, measure.axis, y, across.ticks(6), up.ticks(5), has_columns=False)
    for value in limits:
        parts.append(svg.line(LEFT, up(value), RIGHT, up(value), "limit"))
        parts.append(svg.label(RIGHT, up(value) - 5, "limit", anchor="end"))
    two = [(measure.sign * at, value) for _, at, value in shown]
    front = sorted((at, value) for at, value in two if not any(_beats(other, (at, value)) for other in two))
    line = " ".join(f"{across(measure.sign * at):.1f},{up(value):.1f}" for at, value in front)
    parts.append(svg.element("polyline", points=line, class_="front"))
    for row, at, value in shown:
        parts += _mark(row, across(at), up(value), measure.axis.text(at))
    said = "; ".join(f"{row['name']} {measure.axis.text(at)} {number(value)}" for row, at, value in shown)
    return svg.drawing(f"pareto-{measure.key}", WIDTH, HEIGHT, measure.title, said, parts)


def _mark(row: Row, x: float, y: float, text: str) -> list[Markup]:
    verdict = row.get("certified", {}).get("verdict", row["status"])
    told = svg.element("title", f"{row['name']}: {text}, {number(quality(row))}, {verdict}")
    tone = f"point {'on-front ' if row['on_front'] else ''}{verdict}"
    return [svg.element("circle", told, cx=x, cy=y, r=6, class_=tone), svg.label(x + 9, y - 6, row["name"])]
