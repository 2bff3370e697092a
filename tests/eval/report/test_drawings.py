"""Drawings: well-formed, described, inside their frame, and where the numbers say."""

# ruff: noqa: RUF001 (the report writes real minus and multiplication signs)

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit_eval.report import ReportInput, layers, plots, sections, svg
from quantkit_eval.report.forest import HEIGHT, WIDTH, gate_forest

finite = st.floats(-1e6, 1e6)


def parse(drawing: str) -> ET.Element:
    root = ET.fromstring(drawing)
    names = (root.attrib["aria-labelledby"]).split()
    assert root.attrib["role"] == "img"
    assert [child.attrib["id"] for child in root[:2]] == names
    assert [child.tag for child in root[:2]] == ["title", "desc"]
    assert all((child.text or "").strip() for child in root[:2])
    return root


def test_elements_are_escaped() -> None:
    made = svg.element("text", '</text><script>"', data_x='"<&', class_="a", x=1.23456, y=-0.0)
    parsed = ET.fromstring(made)
    assert parsed.text == '</text><script>"'
    assert parsed.attrib == {"data-x": '"<&', "class": "a", "x": "1.23", "y": "-0"}


@given(finite, st.floats(1e-6, 1e6), finite)
def test_linear_scale_and_ticks(low: float, span: float, value: float) -> None:
    scale = svg.Scale(low, low + span, 10, 110)
    assert scale(low) == pytest.approx(10)
    assert scale(low + span) == pytest.approx(110)
    assert 10 <= scale(value) <= 110
    ticks = scale.ticks(4)
    assert len(ticks) <= 6
    slack = 1e-6 * max(span, abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)


def test_logarithmic_scale_and_ticks() -> None:
    scale = svg.Scale(1e-6, 10, 0, 70, log=True)
    assert [round(scale(10.0**power)) for power in (-6, -3, 1)] == [0, 30, 70]
    assert scale.ticks(10) == pytest.approx([10.0**power for power in range(-6, 2)])
    assert len(scale.ticks(3)) <= 4
    assert scale(0.0) == 0, "values below the axis end at its edge"


@pytest.mark.parametrize("kind", ["fail", "pass", "inconclusive", "aa"])
def test_forest_shows_interval_value_and_limit(kind: str, make_run: Callable[[str], ReportInput]) -> None:
    for gate in make_run(kind).verdict["gates"]:
        root = parse(gate_forest(gate, "gate-1"))
        estimate = [line for line in root.iter("line") if line.attrib["class"].startswith("estimate")]
        bar = next(line for line in estimate if line.attrib["y1"] == line.attrib["y2"])
        (diamond,) = root.iter("polygon")
        (limit,) = (line for line in root.iter("line") if line.attrib["class"] == "limit")
        (shaded,) = root.iter("rect")
        x = float(diamond.attrib["points"].split()[1].split(",")[0])
        low, high, edge = (float(value) for value in (bar.attrib["x1"], bar.attrib["x2"], limit.attrib["x1"]))
        assert low <= x <= high
        assert 0 < low <= high < WIDTH
        allowed_above = gate["kind"] != "upper_bound"
        assert (gate["verdict"] == "pass") == (low >= edge if allowed_above else high <= edge)
        if gate["verdict"] == "fail":
            assert high < edge if allowed_above else low > edge
        start, width = float(shaded.attrib["x"]), float(shaded.attrib["width"])
        assert (start + width if allowed_above else start) == pytest.approx(edge, abs=0.02)
        assert bar.attrib["class"] == f"estimate {gate['verdict']}"
        assert gate["verdict"].capitalize() in (root[1].text or "")


def test_forest_without_a_measurement(make_record: Callable[..., Any]) -> None:
    missing = {"baseline": None, "candidate": None, "difference": None, "value": None, "interval": None}
    gate = make_record("gates.extract", confidence=None, n=0, verdict="inconclusive", **missing)
    root = parse(gate_forest(gate, "gate-1"))
    assert "not measured" in "".join(root.itertext())
    assert not list(root.iter("polygon"))


@given(finite, st.floats(0, 1e6), st.floats(0.001, 1e6), st.sampled_from(["non_inferiority", "upper_bound", "ratio"]))
def test_forest_stays_inside_its_frame(value: float, half: float, limit: float, kind: str) -> None:
    gate: Any = {"name": "a.b", "suite": "a", "metric": "b", "kind": kind, "value": value, "limit": limit}
    gate |= {"interval": [value - half, value + half], "confidence": 0.9, "unit": "nats_per_token", "verdict": "fail"}
    for direction in ("higher_is_better", "lower_is_better"):
        for number in re.findall(
            r' (?:x|x1|x2|cx|y|y1|y2)="([^"]+)"', gate_forest(gate | {"direction": direction}, "g")
        ):
            assert 0 <= float(number) <= max(WIDTH, HEIGHT)


@pytest.mark.parametrize("width", [sections.WIDE, sections.NARROW])
def test_histogram_bars_are_the_shares(width: int, make_run: Callable[[str], ReportInput]) -> None:
    histogram = make_run("fail").candidate["suites"]["nll"]["histograms"]["kl_nats"]
    root = parse(plots.histogram_plot("KL", histogram, [("limit of the mean", 0.1), ("mean", 0.412)], "h", width))
    bars = [rect for rect in root.iter("rect") if rect.attrib["class"] == "bar"]
    counts = [count for count in histogram["counts"] if count]
    assert len(bars) >= len(counts)
    heights = [float(bar.attrib["height"]) for bar in bars if float(bar.attrib["height"]) > 0]
    assert [height / sum(heights) for height in heights] == pytest.approx([c / sum(counts) for c in counts], abs=2e-3)
    widths = {round(float(bar.attrib["width"]), 1) for bar in bars}
    assert max(widths) - min(widths) < 0.2, "equal factors must be equally wide on a logarithmic axis"
    assert "mean 0.412" in "".join(root.itertext())


@pytest.mark.parametrize(
    ("edges", "counts"),
    [([0.0, 1.0], [5]), ([0.0, 1e-6, 1e-3, 1.0, 10.0], [3, 0, 2, 1]), ([-1.0, 0.0, 1.0], [1, 1]), ([1.0, 2.0], [0])],
)
def test_histogram_of_any_bins(edges: list[float], counts: list[int]) -> None:
    made = plots.histogram_plot("x", {"edges": edges, "counts": counts, "unit": "nats"}, [], "h", 330)
    root = parse(made)
    assert not re.search(r"nan|inf\b", made)
    shares = [title.text for rect in root.iter("rect") for title in rect.iter("title")]
    assert len(shares) >= sum(count > 0 for count in counts)


@pytest.mark.parametrize("width", [sections.WIDE, sections.NARROW])
def test_throughput_shows_both_models_and_the_ratio(width: int, make_run: Callable[[str], ReportInput]) -> None:
    throughput = make_run("fail").throughput
    assert throughput is not None
    root = parse(plots.throughput_plot(throughput["batches"], {"decode_batch_16": (0.9, "fail")}, "t", width))
    lengths = {
        side: [float(r.attrib["width"]) for r in root.iter("rect") if r.attrib["class"] == f"side {side}"][1:]
        for side in ("baseline", "candidate")
    }
    assert [a < b for a, b in zip(lengths["baseline"], lengths["candidate"], strict=True)] == [True, True, False, False]
    text = "".join(root.itertext())
    for batch in throughput["batches"].values():
        assert f"batch {batch['batch_size']}" in text
        assert f"×{batch['ratio']['value']:.2f}" in text
    assert len([line for line in root.iter("line") if line.attrib["class"] == "limit"]) == 1
    height = float(root.attrib["height"])
    assert all(0 <= float(t.attrib["y"]) <= height and 0 <= float(t.attrib["x"]) <= width for t in root.iter("text"))


def test_runs_are_visible_beyond_the_bar_and_the_label_follows_the_last_of_them() -> None:
    rates = [100.0, 101.0, 99.0, 100.0, 300.0]
    ratio = {"value": 1.0, "interval": None, "confidence": None, "method": ""}
    batch = {"batch_size": 16, "baseline_tok_per_s": rates, "candidate_tok_per_s": rates, "ratio": ratio}
    root = parse(plots.throughput_plot({"decode_batch_16": batch}, {}, "t", sections.WIDE))  # type: ignore[dict-item]
    lines = [line.attrib for line in root.iter("line") if line.attrib["class"] == "run"]
    furthest = max(float(line["x2"]) for line in lines)
    assert any(float(line["x2"]) - float(line["x1"]) > 100 for line in lines), "a line joins the runs with the bar"
    (label, _) = (text for text in root.iter("text") if "tok/s" in (text.text or ""))
    assert 0 < float(label.attrib["x"]) - furthest < 10
    css = Path(plots.__file__).with_name("templates").joinpath("report.css").read_text()
    assert ".run { stroke: var(--text);" in css, "a tick in the card's colour cannot be seen on the card"


def test_layers_are_gathered_by_depth_and_kind() -> None:
    names = ["model.layers.0.mlp.experts.3.up_proj", "model.layers.0.mlp.experts.4.up_proj", "model.layers.11.q_proj"]
    records: list[dict[str, Any]] = [
        {"name": name, "relative_output_error": 0.1 * index} for index, name in enumerate(names, start=1)
    ]
    records += [{"name": "lm_head", "relative_output_error": 0.5}, {"name": "model.layers.1.q_proj"}]
    found, missing = layers.layer_errors(records)
    assert missing == 1
    assert [(error.depth, error.kind, error.count) for error in found] == [
        (0, "mlp.experts.up_proj", 2),
        (11, "q_proj", 1),
        (None, "lm_head", 1),
    ]
    assert found[0].worst == pytest.approx(0.2)
    assert found[0].average == pytest.approx(0.15)
    assert found[0].name == names[1]


@pytest.mark.parametrize("width", [sections.WIDE, sections.NARROW])
def test_layer_bars_are_the_errors(width: int, make_run: Callable[[str], ReportInput]) -> None:
    checkpoint = make_run("fail").checkpoint
    assert checkpoint is not None
    root = parse(layers.layers_plot(layers.layer_errors(checkpoint["layers"])[0], "l", width))
    bars = {(bar.findtext("title") or "").partition(":")[0]: bar for bar in root.iter("rect")}
    records = {layer["name"]: layer["relative_output_error"] for layer in checkpoint["layers"]}
    assert bars.keys() == records.keys()
    highest = max(records.values())
    for name, error in records.items():
        assert float(bars[name].attrib["height"]) == pytest.approx((layers.ROW - 6) * error / highest, abs=0.05)
    assert sum("peak" in bar.attrib["class"] for bar in bars.values()) == 7
    assert all(math.isfinite(float(bar.attrib["x"])) for bar in bars.values())
