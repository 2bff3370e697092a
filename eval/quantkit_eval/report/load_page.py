"""A load as a page, and its drawings for the report of a run: rates and their ratios as batches grow, latencies."""

from collections.abc import Sequence
from pathlib import PurePath
from statistics import median
from typing import Any

from quantkit_eval.record_types import Crossover, Load, LoadPoint
from quantkit_eval.report.curves import Axis, Dot, Series, chart
from quantkit_eval.report.page import Page, PageSection, Table, render_page
from quantkit_eval.report.provenance import flatten
from quantkit_eval.report.quantities import MISSING, RATIO, TIMES, instant, number, ratio, size
from quantkit_eval.report.sections import NARROW, WIDE, Plot


def render_load(load: Load) -> str:
    """The page of load.json. The same record gives the same page."""
    names = model_names(load)
    about = [("machine", load["machine"]), ("settings", load["settings"])]
    about += [(names[index], party["engine"]) for index, party in enumerate(load["models"])]
    sections = [
        PageSection("closed", "As batches grow", crossover_lines(load), load_plots(load)),
        PageSection("points", "Every point", (_POINTS,), (), (_point_table(load),)),
        PageSection("memory", "Memory", (_memory_line(load),), (), (_memory_table(load),)),
        PageSection(
            "provenance",
            "Provenance",
            tables=[Table("Machine, settings and engines", ("What", "Value"), _facts(about), numbers_from=2)],
        ),
    ]
    page = Page(
        title="load",
        headline=headline(load),
        created=load["created"],
        when=instant(load["created"]),
        source="load.json",
        sections=sections,
    )
    return render_page(page)


_POINTS = (
    "TTFT is the time from a request's arrival to its first token, ITL the time between two tokens of an answer, both "
    "in milliseconds over all requests of all runs. The ratio is of tokens a second, candidate over baseline, in turns."
)


def _facts(about: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    return [(f"{name}: {words}", text) for name, record in about for words, text in flatten(record)]


def model_names(load: Load) -> list[str]:
    """The scheme of each model, or what it is called; numbered where two are alike."""
    names = [
        str(party["model"].get("scheme") or PurePath(str(party["model"].get("name"))).name) for party in load["models"]
    ]
    return [name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names)]


def headline(load: Load) -> str:
    """Where candidates fall behind, in a sentence: at the longest prompts."""
    names = model_names(load)
    if not load["crossovers"]:
        return f"{', '.join(names[1:])} beside {names[0]}."
    context = max(crossover["context"] for crossover in load["crossovers"])
    words = [_short(crossover, names) for crossover in load["crossovers"] if crossover["context"] == context]
    return f"With prompts of {number(context)} tokens, {'; '.join(words)}."


def _short(crossover: Crossover, names: Sequence[str]) -> str:
    who = names[crossover["candidate"]]
    if crossover["estimate"] is None:
        return f"{who} stays faster than {names[0]}"
    return f"{who} is no faster than {names[0]} from about {number(crossover['estimate'], 2)} requests at once"


def crossover_lines(load: Load) -> list[str]:
    """A line for each candidate and length of prompts."""
    names = model_names(load)
    lines = []
    for crossover in load["crossovers"]:
        line = f"Prompts of {number(crossover['context'])} tokens: {_short(crossover, names)}"
        if crossover["estimate"] is not None:
            proven = crossover["proven"]
            line += f" (proven at {proven})" if proven else " (within the noise)"
        lines.append(f"{line}. At the largest batch {names[crossover['fastest']]} is the fastest.")
    return lines


def load_plots(load: Load) -> list[Plot]:
    """For each length of prompts: the candidates' ratios and all rates, as batches grow; and latencies of arrivals."""
    found = []
    for context in sorted({point["context"] for point in load["points"]}):
        closed = [point for point in load["points"] if point["context"] == context and point["loop"] == "closed"]
        opened = [point for point in load["points"] if point["context"] == context and point["loop"] == "open"]
        if closed:
            closed.sort(key=lambda point: point["batch"] or 0)
            found += [_ratio_plot(load, closed, context), _rate_plot(load, closed, context)]
        if opened:
            opened.sort(key=lambda point: point["qps"] or 0)
            found.append(_latency_plot(load, opened, context))
    return found


def _ratio_plot(load: Load, points: Sequence[LoadPoint], context: int) -> Plot:
    names = model_names(load)
    series = []
    for candidate in range(1, len(names)):
        dots = [
            Dot(float(point["batch"] or 0), one["value"], one["interval"])
            for point in points
            for one in [point["ratios"][candidate - 1]]
        ]
        series.append(Series(names[candidate], dots, tone=candidate))
    said = [f"{one.name}: " + ", ".join(f"{ratio(dot.y)} at {number(dot.x)}" for dot in one.dots) for one in series]
    caption = f"Tokens a second over {names[0]}'s; above the dashed line ({TIMES}1) a candidate is faster."
    return _plot(
        f"Ratio of speed, prompts of {number(context)} tokens",
        caption,
        said,
        series,
        Axis("requests at once", log=True, ticks=[float(point["batch"] or 0) for point in points]),
        Axis("ratio"),
        f"ratio-{context}",
        rule=1.0,
    )


def _rate_plot(load: Load, points: Sequence[LoadPoint], context: int) -> Plot:
    names = model_names(load)
    series = []
    for index, name in enumerate(names):
        dots = []
        for point in points:
            rates = point["runs"][index]["tok_per_s"]
            dots.append(Dot(float(point["batch"] or 0), median(rates), (min(rates), max(rates))))
        series.append(Series(name, dots, tone=index))
    said = [f"{one.name}: " + ", ".join(f"{number(dot.y)} at {number(dot.x)}" for dot in one.dots) for one in series]
    return _plot(
        f"Speed, prompts of {number(context)} tokens",
        "All new tokens over the time until the last answer: medians, with the slowest and the fastest run.",
        said,
        series,
        Axis("requests at once", log=True, ticks=[float(point["batch"] or 0) for point in points]),
        Axis("tokens a second", from_zero=True),
        f"rate-{context}",
    )


def _latency_plot(load: Load, points: Sequence[LoadPoint], context: int) -> Plot:
    series = []
    for index, name in enumerate(model_names(load)):
        dots = [Dot(float(point["qps"] or 0), point["runs"][index]["ttft_ms"]["p90"]) for point in points]
        series.append(Series(name, dots, tone=index))
    said = [f"{one.name}: " + ", ".join(f"{number(dot.y)} ms at {number(dot.x)}" for dot in one.dots) for one in series]
    return _plot(
        f"Time to the first token, prompts of {number(context)} tokens",
        "Requests arrive at random at a mean rate, whether the model keeps up or not; nine of ten waited no longer.",
        said,
        series,
        Axis("requests a second", log=True, ticks=[float(point["qps"] or 0) for point in points]),
        Axis("milliseconds", from_zero=True),
        f"latency-{context}",
    )


def _plot(
    title: str,
    caption: str,
    said: Sequence[str],
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    key: str,
    rule: float | None = None,
) -> Plot:
    drawn = [
        chart(title, ". ".join(said) + ".", series, x, y, f"{key}-{width}", width, rule) for width in (WIDE, NARROW)
    ]
    return Plot(title, caption, *drawn)


def _point_table(load: Load) -> Table:
    names = model_names(load)
    rows = []
    for point in load["points"]:
        at = f"{number(point['batch'])} at once" if point["batch"] else f"{number(point['qps'])} a second"
        for index, runs in enumerate(point["runs"]):
            one = point["ratios"][index - 1] if index and point["ratios"] else None
            rows.append(
                (
                    f"{number(point['context'])} tokens, {at}",
                    names[index],
                    number(median(runs["tok_per_s"])),
                    *(number(runs["ttft_ms"][name]) for name in ("p50", "p99")),
                    *(number(runs["itl_ms"][name]) for name in ("p50", "p99")),
                    ratio(one["value"]) if one else "",
                    RATIO.interval(one["interval"]) if one and one["interval"] else "",
                )
            )
    header = ("Load", "Model", "tok/s", "TTFT", "p99", "ITL", "p99", "Ratio", "Interval")
    return Table("Every point of every model", header, rows, numbers_from=2)


def _memory_line(load: Load) -> str:
    share = load["settings"]["memory_share"]
    return (
        f"How many requests fit: cache for a prompt and {load['settings']['new_tokens']} new tokens each, beside the "
        f"weights, in {number(100 * share)}% of the device's memory. This is arithmetic, not a measurement."
    )


def _memory_table(load: Load) -> Table:
    contexts = list(load["memory"][0]["concurrency"])
    rows = [
        (
            name,
            size(own["weight_bytes"]),
            size(own["kv_bytes_per_token"]),
            size(own["device_bytes"]) if own["device_bytes"] else MISSING,
            *(number(own["concurrency"][context]) for context in contexts),
        )
        for name, own in zip(model_names(load), load["memory"], strict=True)
    ]
    fits = [f"Fit at {number(int(context))}" for context in contexts]
    return Table("Memory of each model", ("Model", "Weights", "Cache a token", "Device", *fits), rows)
