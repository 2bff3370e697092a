"""The pages of a load and of a comparison, and the load in the report of a run; in Chromium without a network too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.errors import IncomparableResults
from quantkit_eval.records import utc_now, validate, write_load
from quantkit_eval.report import ReportInput, load_report_input, write_report
from quantkit_eval.report.comparison_page import render_comparison
from quantkit_eval.report.load_page import crossover_lines, render_load

CHROMIUM = Path("/usr/bin/chromium")
LONG = "w" * 300


def make_load(*models: dict[str, Any]) -> Any:
    """Ratios that fall from 2 to a half as batches grow, of every candidate."""
    latency = {"p50": 10.0, "p90": 12.0, "p99": 30.0, "n": 40}
    points = []
    for context in (128, 1024):
        for batch, value in ((1, 2.0), (8, 1.2), (64, 0.5)):
            runs = [
                {"tok_per_s": [100.0 * (value if index else 1.0)] * 5, "ttft_ms": latency, "itl_ms": latency}
                for index in range(len(models))
            ]
            ratio = {"value": value, "interval": [value * 0.9, value * 1.1], "confidence": 0.9375, "method": "m"}
            point = {"loop": "closed", "context": context, "batch": batch, "qps": None, "runs": runs}
            points.append(point | {"ratios": [ratio] * (len(models) - 1)})
        points.append(points[-1] | {"loop": "open", "batch": None, "qps": 0.5, "ratios": []})
    settings = {"new_tokens": 32, "repeats": 5, "requests": 16, "seed": 0, "order": "in turns", "prompts": "random"}
    memory = {"weight_bytes": 10**9, "kv_bytes_per_token": 4096.0, "device_bytes": None}
    crossing = {"estimate": 12.0, "proven": 64, "fastest": 0}
    return {
        "schema_version": 1,
        "created": utc_now(),
        "settings": settings | {"memory_share": 0.9},
        "machine": {"cpu": LONG},
        "models": [{"model": model, "engine": {"name": "quantkit"}} for model in models],
        "memory": [memory | {"concurrency": {"128": 7, "1024": None}}] * len(models),
        "points": points,
        "crossovers": [
            {"candidate": index, "context": context} | crossing
            for context in (128, 1024)
            for index in range(1, len(models))
        ],
    }


def make_comparison() -> Any:
    base = {"folder": f"/records/{LONG}", "name": "m", "scheme": None, "checkpoint_hash": "a" * 64}
    base |= {"weight_bytes": 4 * 10**8, "scores": {"extract": 0.9, "schema": None}, "quality": 0.9}
    base |= {"kl_mean_nats": None, "speed_ratio": None, "on_front": True, "verdict": None, "reason": None, "gates": {}}
    rows = []
    for number, outcome in enumerate(("pass", "fail", "inconclusive")):
        row = base | {"scheme": "W4A16", "folder": f"/records/{number}", "weight_bytes": (number + 1) * 10**8}
        row |= {
            "quality": 0.8 + 0.03 * number,
            "kl_mean_nats": 0.01,
            "speed_ratio": 1.0 + number,
            "on_front": number != 1,
        }
        rows.append(row | {"verdict": outcome, "reason": f"reason {number} <b>", "gates": {"extract.exact": outcome}})
    record = {"schema_version": 1, "created": utc_now(), "exit_code": 3, "suites": ["extract", "schema"]}
    return record | {"baseline": base, "candidates": rows}


def test_a_comparison_says_who_passed_and_who_is_on_the_front() -> None:
    comparison = make_comparison()
    validate(comparison, "comparison", "here")
    page = render_comparison(comparison)
    assert page == render_comparison(comparison)
    assert "3 candidates: 1 pass, 1 fail, 1 undecided." in page
    assert page.count("<figure>") == 2  # quality over size, and over speed, which is known of all
    assert "W4A16, 2: Inconclusive. reason 2 &lt;b&gt;" in page
    comparison["candidates"][0]["speed_ratio"] = None
    assert render_comparison(comparison).count("<figure>") == 1
    for row in (comparison["baseline"], *comparison["candidates"]):
        row["weight_bytes"] = row["quality"] = None
    assert render_comparison(comparison).count("<figure>") == 0


def test_a_load_beside_a_verdict_is_in_the_report(
    tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Callable[[ReportInput, Path], Path]
) -> None:
    folder = save_records(make_run("fail"), tmp_path)
    run = load_report_input(folder)
    load = make_load(run.baseline["model"], run.candidate["model"])
    write_load(folder / "load.json", load)
    write_report(load_report_input(folder), tmp_path / "r.html", None, None)
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Ratio of speed, prompts of 1,024 tokens" in page
    for line in crossover_lines(load):
        assert line in page
    assert "no faster than" in crossover_lines(load)[0]
    write_load(folder / "load.json", make_load(run.candidate["model"], run.baseline["model"]))
    with pytest.raises(IncomparableResults, match="the load is of other models"):
        load_report_input(folder)


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium at {CHROMIUM} (apt-get install chromium)")
def test_pages_open_offline_and_fit(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    load = make_load({"name": "m", "scheme": None}, {"name": LONG, "scheme": "W4A16"}, {"name": "m", "scheme": "W8A8"})
    validate(json.loads(json.dumps(load)), "load", "here")
    texts = {"load": render_load(load), "comparison": render_comparison(make_comparison())}
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for name, text in texts.items():
            path = tmp_path / f"{name}.html"
            path.write_text(text, encoding="utf-8")
            assert len(text.encode()) < 2_000_000
            page = browser.new_context(offline=True).new_page()
            complaints: list[str] = []
            page.on("console", lambda message, found=complaints: found.append(message.text))
            page.on("pageerror", lambda error, found=complaints: found.append(str(error)))
            page.goto(path.as_uri())
            for width in (1280, 390):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            assert complaints == []
        browser.close()
