"""An interval drawn against its limit, as a row of a forest plot."""

from markupsafe import Markup

from quantkit_eval.record_types import Gate
from quantkit_eval.report import svg
from quantkit_eval.report.gates import (
    OUTCOME_WORDS,
    allowed_side,
    boundary,
    is_difference,
    limit_words,
    no_change,
    value_unit,
)
from quantkit_eval.report.quantities import number

WIDTH, HEIGHT = 270, 64
_LEFT, _RIGHT = 14, WIDTH - 14
_TOP, _BOTTOM = 17, 45  # of the area that the interval is drawn in
_MIDDLE = (_TOP + _BOTTOM) / 2
_CAP = 5  # half height of the interval's ends


def gate_forest(gate: Gate, key: str) -> Markup:
    """Draw a gate: the forbidden side shaded, the limit, the line of no change, the interval and the value.

    Args:
        gate: of verdict.json.
        key: unique in the page.
    """
    scale = _scale(gate)
    parts = [*_ground(gate, scale), *_axis(gate, scale), *_estimate(gate, scale)]
    return svg.drawing(key, WIDTH, HEIGHT, f"{gate['name']}: interval against the limit", _describe(gate), parts)


def _write(gate: Gate, value: float | None) -> str:
    unit = value_unit(gate)
    return unit.difference(value) if is_difference(gate) else unit.value(value)


def _describe(gate: Gate) -> str:
    interval = value_unit(gate).interval(gate["interval"], of_difference=is_difference(gate))
    confidence = f" ({number(100 * gate['confidence'])}% confidence)" if gate["confidence"] else ""
    return (
        f"Value {_write(gate, gate['value'])}, interval {interval}{confidence}. Allowed is {allowed_side(gate)} "
        f"{_write(gate, boundary(gate))}. {OUTCOME_WORDS[gate['verdict']]}."
    )


def _scale(gate: Gate) -> svg.Scale:
    """A range that holds the interval, the value, the limit and no change, with room at both ends."""
    values = [boundary(gate), no_change(gate), *(gate["interval"] or ())]
    if gate["value"] is not None:
        values.append(gate["value"])
    low, high = min(values), max(values)
    room = 0.09 * (high - low) or 0.1 * abs(high) or 1.0
    return svg.Scale(low - room, high + room, _LEFT, _RIGHT)


def _ground(gate: Gate, scale: svg.Scale) -> list[Markup]:
    limit = scale(boundary(gate))
    start, stop = (_LEFT, limit) if allowed_side(gate) == "above" else (limit, _RIGHT)
    text = limit_words(gate)
    half = svg.text_width(text) / 2
    anchor_at = min(max(limit, _LEFT + half), _RIGHT - half)
    neutral = scale(no_change(gate))
    return [
        svg.box(start, _TOP, stop - start, _BOTTOM - _TOP, "forbidden"),
        svg.line(neutral, _TOP, neutral, _BOTTOM, "no-change"),
        svg.line(limit, _TOP - 3, limit, _BOTTOM, "limit"),
        svg.label(anchor_at, _TOP - 6, text, "label limit-label", "middle"),
    ]


def _axis(gate: Gate, scale: svg.Scale) -> list[Markup]:
    parts = [svg.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis")]
    taken = -1.0
    for tick in scale.ticks(4):
        text = value_unit(gate).tick(tick)
        half = svg.text_width(text) / 2
        x = scale(tick)
        parts.append(svg.line(x, _BOTTOM, x, _BOTTOM + 3, "axis"))
        if x - half < max(taken + 6, 0) or x + half > WIDTH:
            continue
        parts.append(svg.label(x, _BOTTOM + 15, text, "label", "middle"))
        taken = x + half
    return parts


def _estimate(gate: Gate, scale: svg.Scale) -> list[Markup]:
    parts = []
    tone = f"estimate {gate['verdict']}"
    if gate["interval"] is not None:
        low, high = scale(gate["interval"][0]), scale(gate["interval"][1])
        parts.append(svg.line(low, _MIDDLE, high, _MIDDLE, tone))
        parts += [svg.line(x, _MIDDLE - _CAP, x, _MIDDLE + _CAP, tone) for x in (low, high)]
    if gate["value"] is not None:
        x, reach = scale(gate["value"]), 5.5
        diamond = (
            f"{x - reach:.2f},{_MIDDLE} {x:.2f},{_MIDDLE - reach} {x + reach:.2f},{_MIDDLE} {x:.2f},{_MIDDLE + reach}"
        )
        parts.append(svg.element("polygon", points=diamond, class_=tone))
    else:
        parts.append(svg.label(WIDTH / 2, _MIDDLE + 4, "not measured", "label", "middle"))
    return parts
