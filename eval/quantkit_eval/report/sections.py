"""The parts of a report as plain rows of text, in the order in which they are read."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from quantkit_eval.record_types import Gate, Histogram, Metric, Result
from quantkit_eval.report import layers as layer_plots
from quantkit_eval.report import plots
from quantkit_eval.report.forest import gate_forest
from quantkit_eval.report.gates import (
    OUTCOME_WORDS,
    change,
    counted,
    is_difference,
    level,
    metric_words,
    needed,
    requirement,
    title,
    value_unit,
)
from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.quantities import MISSING, TIMES, duration, number, percent, probability, size, unit_named

WIDE, NARROW = 1030, 330  # drawings for a desk and for a telephone
LAYER_ROWS = 100  # layers in the table; the worst ones if there are more


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing in two widths, with the words above it."""

    title: str
    caption: str
    wide: Markup
    narrow: Markup


@dataclass(frozen=True, slots=True)
class LayerSection:
    """The layers' plot, those with something to report, and the table."""

    plot: Plot | None
    special: list[tuple[str, str]]
    table: list[dict[str, str]]
    table_words: str


def gate_rows(run: ReportInput) -> list[dict[str, Any]]:
    """A row for each gate, failed ones first."""
    order = {"fail": 0, "inconclusive": 1, "pass": 2}
    gates = sorted(run.verdict["gates"], key=lambda gate: order[gate["verdict"]])
    return [_gate_row(gate, f"gate-{index}") for index, gate in enumerate(gates, start=1)]


def _gate_row(gate: Gate, key: str) -> dict[str, Any]:
    return {
        "code": gate["name"],
        "breakable_code": Markup("<wbr>").join(re.split(r"(?<=[._])", gate["name"])),
        "title": title(gate["suite"]),
        "asked": f"{metric_words(gate['metric'])}, {requirement(gate)}",
        "baseline": level(gate, "baseline"),
        "candidate": level(gate, "candidate"),
        "change": change(gate),
        "forest": gate_forest(gate, key),
        "interval": interval_line(gate),
        "test": test_line(gate),
        "outcome": gate["verdict"],
        "outcome_word": OUTCOME_WORDS[gate["verdict"]],
        "needed": needed(gate),
        "reason": gate["reason"],
    }


def interval_line(gate: Gate) -> str:
    """Both ends of the interval and its confidence, which is two-sided."""
    if gate["interval"] is None:
        return MISSING
    confidence = f", two-sided {_rounded(gate['confidence'])}%" if gate["confidence"] else ""
    return value_unit(gate).interval(gate["interval"], of_difference=is_difference(gate)) + confidence


def _rounded(confidence: float) -> str:
    return number(round(100 * confidence, 1))


def confidence_line(run: ReportInput) -> str:
    """How the two-sided intervals and the one-sided confidence of the sentences go together."""
    alpha = run.verdict["alpha"]
    words = (
        f"Intervals are two-sided. At {_rounded(1 - 2 * alpha)}% each end alone errs in {_rounded(alpha)}% of cases, "
        f"and only the end towards the limit decides: hence {_rounded(1 - alpha)}% where a sentence speaks of one end."
    )
    levels = {gate["confidence"] for gate in run.verdict["gates"] if gate["kind"] == "ratio" and gate["confidence"]}
    if levels - {1 - 2 * alpha}:
        words += " An interval of speed runs from one measured pair to another, so its level is what the pairs give."
    return words


def unjudged_confidence(run: ReportInput) -> str:
    """The level of the intervals that ``unjudged_rows`` shows, if they share one."""
    levels = {
        metric["confidence"]
        for result in (run.baseline, run.candidate)
        for record in result["suites"].values()
        for metric in record["metrics"].values()
        if metric["interval"] and metric["confidence"]
    }
    return f", {_rounded(levels.pop())}%" if len(levels) == 1 else ""


def test_parts(gate: Gate) -> list[str]:
    """The test, its p-value, n, and how many items changed sides: what a reviewer asks for."""
    parts = gate["test"].split("; ")
    if gate["p_value"] is not None:
        holm = f" (Holm {probability(gate['p_holm'])})" if gate["p_holm"] is not None else ""
        parts.append(f"p {probability(gate['p_value'])}{holm}")
    parts.append(f"n {number(gate['n'])} {counted(gate)}")
    if gate["discordant"] is not None:
        parts.append(f"{gate['discordant']['regressed']} regressed, {gate['discordant']['improved']} improved")
    return parts


def test_line(gate: Gate) -> str:
    """``test_parts`` as one line."""
    return " · ".join(test_parts(gate))


def unjudged_rows(run: ReportInput) -> list[dict[str, str]]:
    """What was measured but not judged, with the intervals that the results give."""
    rows = []
    for entry in run.verdict["unjudged"]:
        unit = unit_named(entry["unit"])
        found = [_metric(result, entry["suite"], entry["metric"]) for result in (run.baseline, run.candidate)]
        texts = []
        for side, metric in zip((entry["baseline"], entry["candidate"]), found, strict=True):
            interval = metric["interval"] if metric and side is not None else None
            texts.append(unit.value(side) + (f" ({unit.interval(interval)})" if interval else ""))
        rows.append(
            {
                "words": f"{title(entry['suite'])}: {metric_words(entry['metric'])}",
                "code": f"{entry['suite']}.{entry['metric']}",
                "baseline": texts[0],
                "candidate": texts[1],
                "n": number(found[1]["n"]) if found[1] else MISSING,
            }
        )
    return rows


def _metric(result: Result, suite: str, name: str) -> Metric | None:
    record = result["suites"].get(suite)
    return record["metrics"].get(name) if record else None


def histogram_plots(run: ReportInput) -> list[Plot]:
    """Every distribution that the candidate's suites recorded."""
    found: list[Plot] = []
    for suite, record in run.candidate["suites"].items():
        for name, histogram in record["histograms"].items():
            if sum(histogram["counts"]):
                found.append(_histogram(run, suite, name, histogram, f"histogram-{len(found) + 1}"))
    return found


def _histogram(run: ReportInput, suite: str, name: str, histogram: Histogram, key: str) -> Plot:
    metrics = run.candidate["suites"][suite]["metrics"]
    stem = name.removesuffix("_nats").removesuffix("_mean")
    markers = []
    for metric, record in metrics.items():
        if metric.startswith(stem) and record["value"] is not None and record["unit"] == histogram["unit"]:
            markers.append((_marker_name(metric, stem), record["value"]))
    for gate in run.verdict["gates"]:
        if gate["kind"] == "upper_bound" and gate["suite"] == suite and gate["metric"].startswith(stem):
            markers.append((f"limit of the {_marker_name(gate['metric'], stem)}", gate["limit"]))
    markers = [(word, value) for word, value in markers if histogram["edges"][0] <= value <= histogram["edges"][-1]]
    markers.sort(key=lambda marker: marker[1])  # the leftmost label is the highest, so that no line crosses a label
    words = "KL divergence to the original" if stem == "kl" else name.replace("_", " ")
    counted = "tokens" if suite == "nll" else "items"
    caption = f"Share of {number(sum(histogram['counts']))} {counted} in suite {suite}, candidate."
    if stem == "kl":
        far = _share_above(histogram, 1.0)
        caption += f" {percent(far)} lie above 1 nat." if far is not None else ""
    drawn = [plots.histogram_plot(words, histogram, markers, f"{key}-{width}", width) for width in (WIDE, NARROW)]
    return Plot(words[:1].upper() + words[1:], caption, *drawn)


def _share_above(histogram: Histogram, value: float) -> float | None:
    """The share of counts above an edge; None if ``value`` is no edge."""
    edges, counts = histogram["edges"], histogram["counts"]
    index = next((index for index, edge in enumerate(edges) if abs(edge - value) < 1e-6 * abs(value)), None)
    return None if index is None else sum(counts[index:]) / sum(counts)


def _marker_name(metric: str, stem: str) -> str:
    word = metric.removeprefix(stem).removesuffix("_nats").strip("_")
    return {"p999": "p99.9", "": "value"}.get(word, word.replace("_", " "))


def throughput_plot(run: ReportInput) -> Plot | None:
    """Speed of both models by batch size."""
    if run.throughput is None:
        return None
    batches = run.throughput["batches"]
    limits = {
        gate["metric"]: (gate["limit"], gate["verdict"])
        for gate in run.verdict["gates"]
        if gate["kind"] == "ratio" and gate["metric"] in batches
    }
    levels = [batch["ratio"]["confidence"] for batch in batches.values()]
    with_interval = (
        f"with its two-sided {_rounded(min(filter(None, levels)))}% interval" if all(levels) else "as measured"
    )
    caption = (
        f"Measured in turns ({run.throughput['settings']['order']}). Bars are medians, the ticks single runs. "
        f"The ratio is the median over paired rounds, so not quite that of the bars; it is shown {with_interval}, and "
        f"above {TIMES}1 it is faster."
    )
    drawn = [plots.throughput_plot(batches, limits, f"throughput-{width}", width) for width in (WIDE, NARROW)]
    return Plot("Decoding speed by batch size", caption, *drawn)


def layer_section(run: ReportInput) -> LayerSection | None:
    """What quantkit.json records about each layer."""
    layers = (run.checkpoint or {}).get("layers") or []
    if not layers:
        return None
    errors, missing = layer_plots.layer_errors(layers)
    plot = None
    if any(error.depth is not None for error in errors):
        drawn = [layer_plots.layers_plot(errors, f"layers-{width}", width) for width in (WIDE, NARROW)]
        caption = (
            "How far each layer's output is from what the original weights give on the calibration data (0 is equal)."
        )
        if missing:
            caption += f" {number(missing)} layers were not measured."
        plot = Plot("Relative output error by depth", caption, *drawn)
    worst = sorted(layers, key=lambda layer: -(layer.get("relative_output_error") or 0.0))[:LAYER_ROWS]
    words = f"All {number(len(layers))} layers, largest error first"
    if len(layers) > LAYER_ROWS:
        words = f"The {LAYER_ROWS} layers with the largest error, of {number(len(layers))} (all are in quantkit.json)"
    return LayerSection(plot, _special(layers), [_layer_row(layer) for layer in worst], words)


def _special(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Layers with fallbacks, dead columns, or a damping that is not the usual one."""
    usual = Counter(layer.get("damp_fraction") for layer in layers).most_common(1)[0][0]
    rows = []
    for layer in layers:
        what = [str(fallback) for fallback in layer.get("fallbacks") or []]
        if layer.get("dead_columns"):
            what.append(f"{number(layer['dead_columns'])} input columns never active")
        if layer.get("damp_fraction") != usual:
            what.append(f"damping {number(layer.get('damp_fraction'))} instead of {number(usual)}")
        if what:
            rows.append((layer["name"], "; ".join(what)))
    return rows


def _layer_row(layer: Mapping[str, Any]) -> dict[str, str]:
    return {
        "name": layer["name"],
        "scheme": str(layer.get("scheme") or MISSING),
        "algorithm": str(layer.get("algorithm") or MISSING),
        "error": number(layer.get("relative_output_error")),
        "damping": number(layer.get("damp_fraction")),
        "tokens": number(layer.get("input_tokens")),
        "before": size(layer.get("bytes_before")),
        "after": size(layer.get("bytes_after")),
        "seconds": duration(layer.get("seconds")),
    }


def absences(run: ReportInput) -> list[str]:
    """What this report cannot show, and why."""
    lines = []
    if run.throughput is None:
        lines.append("Throughput was not measured in this run.")
    if run.checkpoint is None:
        lines.append("The candidate has no quantkit.json, so this report has no recipe and no layers.")
    if not run.verdict["baseline"]:
        lines.append("The baseline did not describe itself.")
    return lines
