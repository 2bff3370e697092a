"""How far each quantized layer's output is from the original's, drawn over depth."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from markupsafe import Markup

from quantkit_eval.report import svg
from quantkit_eval.report.quantities import number

ROW, GAP = 44, 20  # height of a module kind's strip, and the space above it for its name
_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative output error of the layers of one kind in one decoder block (several are the experts of a mixture).

    Attributes:
        depth: index of the decoder block; None for a layer outside the blocks.
        kind: the layer's name without its indices: ``self_attn.q_proj``.
        worst: largest of their errors.
        average: mean of their errors.
        count: how many layers.
        name: of the worst one.
    """

    depth: int | None
    kind: str
    worst: float
    average: float
    count: int
    name: str


def layer_errors(layers: Sequence[Mapping[str, Any]]) -> tuple[list[LayerError], int]:
    """Gather the errors of quantkit.json's layers by depth and kind, in the order of the model.

    Returns:
        The errors, and how many layers had none (they were not measured).
    """
    gathered: dict[tuple[int | None, str], list[tuple[float, str]]] = defaultdict(list)
    missing = 0
    for layer in layers:
        error = layer.get("relative_output_error")
        if error is None:
            missing += 1
            continue
        gathered[_place(layer["name"])].append((error, layer["name"]))
    found = []
    for (depth, kind), entries in gathered.items():
        worst, name = max(entries)
        found.append(LayerError(depth, kind, worst, mean(error for error, _ in entries), len(entries), name))
    return found, missing


def _place(name: str) -> tuple[int | None, str]:
    match = _INDEX.search(name)
    if match is None:
        return None, name
    return int(match.group(1)), _INDEX.sub("", name[match.end() :]).lstrip(".")


def layers_plot(errors: Sequence[LayerError], key: str, width: int) -> Markup:
    """Bars over depth, one strip for each kind of module, all on one scale; the worst of each strip is labelled.

    Args:
        errors: not empty; entries without a depth are left out (a table names them).
        key: unique in the page.
        width: pixels.
    """
    inside = [error for error in errors if error.depth is not None]
    kinds = list(dict.fromkeys(error.kind for error in inside))
    depths = 1 + max(error.depth or 0 for error in inside)
    top = max(error.worst for error in inside) or 1.0
    left, right = 2, width - 2
    step = (right - left) / depths
    parts = []
    for row, kind in enumerate(kinds):
        floor = (row + 1) * (ROW + GAP)
        strip = [error for error in inside if error.kind == kind]
        parts += _strip(kind, strip, svg.Scale(0, top, floor, floor - ROW + 6), left, step, right)
    bottom = len(kinds) * (ROW + GAP)
    parts += _depth_axis(depths, bottom, left, step)
    worst = max(inside, key=lambda error: error.worst)
    description = (
        f"{len(kinds)} kinds of module over {depths} decoder blocks. Largest: {number(worst.worst)} in {worst.name}. "
        f"Mean: {number(mean(error.average for error in inside))}."
    )
    return svg.drawing(key, width, bottom + 36, "Relative output error of each layer", description, parts)


def _strip(
    kind: str, errors: Sequence[LayerError], scale: svg.Scale, left: float, step: float, right: float
) -> list[Markup]:
    floor = scale.start
    parts = [svg.line(left, floor, right, floor, "axis"), svg.label(left, floor - ROW, kind, "label strong")]
    peak = max(errors, key=lambda error: error.worst)
    for error in errors:
        x, y = left + (error.depth or 0) * step, scale(error.worst)
        several = f" (worst of {error.count}, mean {number(error.average)})" if error.count > 1 else ""
        title = svg.element("title", f"{error.name}: {number(error.worst)}{several}")
        tone = "bar peak" if error is peak else "bar"
        parts.append(svg.box(x + 0.1 * step, y, 0.8 * step, max(floor - y, 0.75), tone, title))
    x = left + ((peak.depth or 0) + 0.5) * step
    text = f"largest {number(peak.worst)} in block {peak.depth}"
    parts.append(svg.label(right, floor - ROW, text, "label", "end"))
    parts.append(svg.line(x, floor, x, floor + 3, "axis"))
    return parts


def _depth_axis(depths: int, floor: float, left: float, step: float) -> list[Markup]:
    every = max(1, int(svg.round_step(28 / step))) if step < 28 else 1
    parts = [
        svg.label(left + (depth + 0.5) * step, floor + 15, str(depth), "label", "middle")
        for depth in range(0, depths, every)
    ]
    parts.append(svg.label(left, floor + 31, "decoder block, first to last", "label"))
    return parts
