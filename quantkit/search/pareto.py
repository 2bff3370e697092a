"""Which candidates nothing else beats in size and quality, and a picture of all."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from quantkit_eval.report import svg
from quantkit_eval.report.quantities import number, size

WIDTH, HEIGHT = 820, 360
LEFT, BOTTOM, TOP, RIGHT = 70, HEIGHT - 44, 20, WIDTH - 20


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
    """Set ``on_front`` of every row: it was measured, and none is as small and as good, and better in one."""
    places = [_place(row) for row in rows]
    known = [place for place in places if place is not None]
    for row, place in zip(rows, places, strict=True):
        row["on_front"] = place is not None and not any(_beats(other, place) for other in known)


def _place(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """(bytes, quality), both better if less; None if one was not measured."""
    value = quality(row)
    return None if value is None or "weight_bytes" not in row else (float(row["weight_bytes"]), value)


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def pareto_plot(rows: Sequence[Mapping[str, Any]], limit: float | None) -> Markup:
    """Bytes against quality, a mark a candidate that was measured.

    Args:
        rows: the trials of search.json.
        limit: of the divergence, if there is one.
    """
    shown = [(row, *place) for row in rows if (place := _place(row)) is not None]
    title = "Size and distance of the candidates"
    if not shown:
        said = "nothing was measured"
        return svg.drawing("pareto", WIDTH, 40, title, said, [svg.label(0, 20, said)])
    is_kl = "kl_mean_nats" in shown[0][0]["scores"]
    limits = [limit] if limit and is_kl else []
    sizes, values = [at for _, at, _ in shown], [value for _, _, value in shown] + limits
    room = (max(sizes) - min(sizes)) * 0.08 or max(sizes) * 0.05
    across = svg.Scale(min(sizes) - room, max(sizes) + room, LEFT, RIGHT)
    up = svg.Scale(min(0.0, *values), max(values) * 1.1 if max(values) > 0 else 1.0, BOTTOM, TOP)
    parts = _axes(across, up, "up: nats a token" if is_kl else "up: points lost")
    for value in limits:
        parts.append(svg.line(LEFT, up(value), RIGHT, up(value), "limit"))
        parts.append(svg.label(RIGHT, up(value) - 5, "limit", anchor="end"))
    front = sorted((across(at), up(value)) for row, at, value in shown if row["on_front"])
    parts.append(svg.element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in front), class_="front"))
    for row, at, value in shown:
        parts += _mark(row, across(at), up(value))
    said = "; ".join(f"{row['name']} {size(at)} {number(value)}" for row, at, value in shown)
    return svg.drawing("pareto", WIDTH, HEIGHT, title, said, parts)


def _axes(across: svg.Scale, up: svg.Scale, upwards: str) -> list[Markup]:
    parts = []
    for tick in up.ticks(5):
        parts.append(svg.line(LEFT, up(tick), RIGHT, up(tick), "grid"))
        parts.append(svg.label(LEFT - 6, up(tick) + 4, number(tick), anchor="end"))
    for tick in across.ticks(6):
        parts.append(svg.line(across(tick), BOTTOM, across(tick), BOTTOM + 4, "axis"))
        parts.append(svg.label(across(tick), BOTTOM + 18, size(tick), anchor="middle"))
    parts.append(svg.line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis"))
    parts.append(svg.label(0, HEIGHT - 6, upwards))
    parts.append(svg.label(RIGHT, HEIGHT - 6, "bytes of weights; filled: nothing is smaller and better", anchor="end"))
    return parts


def _mark(row: Mapping[str, Any], x: float, y: float) -> list[Markup]:
    verdict = row.get("certified", {}).get("verdict", row["status"])
    told = svg.element("title", f"{row['name']}: {size(row['weight_bytes'])}, {number(quality(row))}, {verdict}")
    tone = f"point {'on-front ' if row['on_front'] else ''}{verdict}"
    return [svg.element("circle", told, cx=x, cy=y, r=6, class_=tone), svg.label(x + 9, y - 6, row["name"])]
