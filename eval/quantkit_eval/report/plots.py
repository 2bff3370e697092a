"""Distributions and throughput as drawings."""

from collections.abc import Mapping, Sequence
from statistics import median

from markupsafe import Markup

from quantkit_eval.record_types import Histogram, Outcome, ThroughputBatch
from quantkit_eval.report import svg
from quantkit_eval.report.quantities import RATIO, number, percent, ratio

_HISTOGRAM_HEIGHT = 230
_LOG_SPAN = 50  # a range of values wider than this factor is drawn on a logarithmic axis
_BATCH_HEIGHT = 62


def histogram_plot(
    name: str, histogram: Histogram, markers: Sequence[tuple[str, float]], key: str, width: int
) -> Markup:
    """A distribution as bars, on a logarithmic axis where its values span several powers of ten.

    Args:
        name: what is distributed.
        histogram: of result.json; a first edge at or below zero is an underflow bin.
        markers: values to point out, each with its name.
        key: unique in the page.
        width: pixels.
    """
    edges, counts = _filled(histogram)
    total = sum(counts)
    log = edges[1] > 0 and edges[-1] / edges[1] > _LOG_SPAN
    underflow = log and edges[0] <= 0
    if underflow:
        edges[0] = edges[1] / 2  # everything below the second edge, drawn one octave wide
    left, right, top, bottom = 40, width - 8, 24 + 15 * len(markers), _HISTOGRAM_HEIGHT - 40
    across = svg.Scale(edges[0], edges[-1], left, right, log)
    shares = [count / total if total else 0.0 for count in counts]
    up = svg.Scale(0.0, max(shares) * 1.05 or 1.0, bottom, top)
    parts = [part for tick in up.ticks(3) for part in _grid(up(tick), percent(tick), left, right)]
    for low, high, share, count in zip(edges, edges[1:], shares, counts, strict=False):
        title = svg.element("title", f"{number(low)} to {number(high)}: {number(count)} ({percent(share)})")
        x = across(low)
        parts.append(svg.box(x + 0.5, up(share), across(high) - x - 1, bottom - up(share), "bar", title))
    parts += _value_axis(across, bottom, width, histogram["unit"], underflow)
    parts += _markers(markers, across, top, bottom, right)
    said = "; ".join(f"{marker} {number(value)}" for marker, value in markers)
    description = f"{number(total)} values from {number(edges[0])} to {number(edges[-1])}. {said}"
    return svg.drawing(key, width, _HISTOGRAM_HEIGHT, f"Distribution of {name}", description, parts)


def _filled(histogram: Histogram) -> tuple[list[float], list[int]]:
    """The bins without the empty ones at both ends."""
    filled = [index for index, count in enumerate(histogram["counts"]) if count] or [0]
    first, last = filled[0], filled[-1] + 1
    return [float(edge) for edge in histogram["edges"][first : last + 1]], histogram["counts"][first:last]


def _grid(y: float, text: str, left: float, right: float) -> list[Markup]:
    return [svg.line(left, y, right, y, "grid"), svg.label(left - 5, y + 4, text, "label", "end")]


def _value_axis(across: svg.Scale, bottom: float, width: int, unit: str, underflow: bool) -> list[Markup]:
    parts = [svg.line(across.start, bottom, across.stop, bottom, "axis")]
    for tick in across.ticks(max(2, width // 90)):
        x = across(tick)
        text = number(tick)
        parts.append(svg.line(x, bottom, x, bottom + 3, "axis"))
        if across.start + 4 < x < across.stop - svg.text_width(text) / 2:
            parts.append(svg.label(x, bottom + 15, text, "label", "middle"))
    scale = f"{unit.replace('_', ' ')}{', logarithmic' if across.log else ''}"
    below = "; first bar: everything smaller" if underflow else ""
    parts.append(svg.label(across.start, bottom + 32, scale + below, "label"))
    return parts


def _markers(
    markers: Sequence[tuple[str, float]], across: svg.Scale, top: float, bottom: float, right: float
) -> list[Markup]:
    lines, labels = [], []
    for index, (name, value) in enumerate(markers):
        x, y = across(value), 12 + 15 * index
        text = f"{name} {number(value)}"
        tone = "limit" if name.startswith("limit") else "marker"
        lines.append(svg.line(x, y - 8, x, bottom, tone))
        flip = x + svg.text_width(text) + 6 > right
        labels.append(svg.label(x + (-5 if flip else 5), y, text, f"label halo {tone}-label", "end" if flip else None))
    return lines + labels


def throughput_plot(
    batches: Mapping[str, ThroughputBatch], limits: Mapping[str, tuple[float, Outcome]], key: str, width: int
) -> Markup:
    """For each batch: both models' tokens a second (bar: median, ticks: single runs) and the ratio with its interval.

    Args:
        batches: of throughput.json.
        limits: smallest ratio that a gate allows and the gate's verdict, by batch name.
        key: unique in the page.
        width: pixels; narrow drawings put the ratio under the bars.
    """
    order = sorted(batches.items(), key=lambda item: item[1]["batch_size"])
    top = max(max(*batch["baseline_tok_per_s"], *batch["candidate_tok_per_s"]) for _, batch in order)
    wide = width >= 560
    row = _BATCH_HEIGHT if wide else 2 * _BATCH_HEIGHT - 10
    rates = svg.Scale(0, top, 2, 0.5 * width if wide else width - 76)
    span = [1.0, *(limit for limit, _ in limits.values())]
    for _, batch in order:
        span += [batch["ratio"]["value"], *(batch["ratio"]["interval"] or ())]
    room = 0.08 * (max(span) - min(span)) or 0.1
    factors = svg.Scale(min(span) - room, max(span) + room, 0.64 * width if wide else 12, width - 12)
    parts, said = _legend(factors.start if wide else None, bool(limits)), []
    for index, (name, batch) in enumerate(order):
        y = index * row + 44
        parts += _rates(batch, rates, y)
        parts += _factor(batch, limits.get(name), factors, y if wide else y + _BATCH_HEIGHT - 8)
        interval = f" ({RATIO.interval(batch['ratio']['interval'])})" if batch["ratio"]["interval"] else ""
        said.append(f"Batch {batch['batch_size']}: {ratio(batch['ratio']['value'])}{interval}")
    height = len(order) * row + 50
    for tick in factors.ticks(4):
        parts.append(svg.label(factors(tick), height - 6, ratio(tick), "label", "middle"))
    title = "Decoding speed of baseline and candidate by batch size"
    return svg.drawing(key, width, height, title, ". ".join(said) + ".", parts)


def _legend(ratios_from: float | None, limited: bool) -> list[Markup]:
    """Which bar is whose, and what the right half shows."""
    parts = []
    x = 2.0
    for side in ("baseline", "candidate"):
        parts += [svg.box(x, 2, 11, 11, f"side {side}"), svg.label(x + 16, 12, side)]
        x += 34 + svg.text_width(side)
    if ratios_from:
        parts.append(svg.label(x, 12, "tokens a second"))
        shaded = "; shaded: below the gate's limit" if limited else ""
        parts.append(svg.label(ratios_from, 12, f"candidate over baseline{shaded}"))
    return parts


def _rates(batch: ThroughputBatch, scale: svg.Scale, y: float) -> list[Markup]:
    parts = [svg.label(0, y, f"batch {number(batch['batch_size'])}", "label strong")]
    rows = (("baseline", batch["baseline_tok_per_s"]), ("candidate", batch["candidate_tok_per_s"]))
    for index, (side, rates) in enumerate(rows):
        top, middle = y + 6 + 18 * index, median(rates)
        title = svg.element("title", f"{side}: {', '.join(number(rate) for rate in rates)} tok/s")
        parts.append(svg.box(scale.start, top, scale(middle) - scale.start, 14, f"side {side}", title))
        parts.append(svg.line(scale(min(rates)), top + 7, scale(max(rates)), top + 7, "run"))
        parts += [svg.line(scale(rate), top + 3, scale(rate), top + 11, "run") for rate in rates]
        parts.append(svg.label(scale(max(rates)) + 6, top + 11, f"{number(middle)} tok/s", "label"))
    return parts


def _factor(batch: ThroughputBatch, limited: tuple[float, Outcome] | None, scale: svg.Scale, y: float) -> list[Markup]:
    top, bottom, middle = y + 5, y + 39, y + 22
    ends = [scale(end) for end in batch["ratio"]["interval"] or ()]
    value = scale(batch["ratio"]["value"])
    parts = []
    tone = "estimate"
    if limited is not None:
        limit, verdict = limited
        tone = f"estimate {verdict}"
        parts.append(svg.box(scale.start, top, scale(limit) - scale.start, bottom - top, "forbidden"))
        parts.append(svg.line(scale(limit), top, scale(limit), bottom, "limit"))
    parts += [
        svg.line(scale(1.0), top, scale(1.0), bottom, "no-change"),
        *([svg.line(ends[0], middle, ends[1], middle, tone)] if ends else []),
        *(svg.line(x, middle - 5, x, middle + 5, tone) for x in ends),
        svg.element("circle", cx=value, cy=middle, r=4.5, class_=tone),
        svg.line(scale.start, bottom, scale.stop, bottom, "axis"),
    ]
    anchor = min(max(value, scale.start + 22), scale.stop - 22)
    parts.append(svg.label(anchor, y - 1, ratio(batch["ratio"]["value"]), "label strong", "middle"))
    return parts
