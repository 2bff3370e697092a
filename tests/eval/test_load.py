"""Loads of models that take exactly as long as a test says: what is measured, who takes turns, where curves cross."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from quantkit_eval.crossovers import find_crossovers
from quantkit_eval.errors import ModelOutputError, OptionError, RecordError
from quantkit_eval.load import LoadSettings, measure_load
from quantkit_eval.records import read_load, write_load
from quantkit_eval.report.load_page import render_load


class Clock:
    """Moves when a model computes or somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.seconds += seconds


class Served:
    """A step takes ``base + each * requests`` seconds and gives every running request a token."""

    vocab_size = 50

    def __init__(self, name: str, clock: Clock, base: float, each: float, log: list[str] | None = None) -> None:
        self.name, self.clock, self.base, self.each = name, clock, base, each
        self.log: list[str] = [] if log is None else log
        self.running: dict[str, int] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.lost = 0

    def describe(self) -> dict[str, Any]:
        model = {"name": f"some/{self.name}", "scheme": self.name, "weight_bytes": 1000}
        return {"model": model, "engine": {"name": "served"}, "template_hash": "t"}

    def submit(self, request_id: str, prompt: Sequence[int], new_tokens: int) -> None:
        if not self.running:
            self.log.append(self.name)
        self.running[request_id] = new_tokens - self.lost
        self.prompts.append(tuple(prompt))

    def step(self) -> list[tuple[str, bool]]:
        self.clock.seconds += self.base + self.each * len(self.running)
        news = []
        for request_id in list(self.running):
            self.running[request_id] -= 1
            is_last = not self.running[request_id]
            news.append((request_id, is_last))
            if is_last:
                del self.running[request_id]
        return news

    def memory(self) -> tuple[int, float, int | None]:
        return 1000, 2.0, 10_000


def measure(settings: LoadSettings, *timings: tuple[float, float]) -> tuple[Any, list[Served], list[str]]:
    clock, log = Clock(), []
    models = [Served("ABC"[index], clock, *timing, log) for index, timing in enumerate(timings)]
    return measure_load(models, settings, clock=clock, sleep=clock.sleep), models, log


def test_rates_latencies_and_turns_of_the_closed_loop() -> None:
    """A batch of n takes base + n each a step; the first token takes a step, and so does each next one."""
    settings = LoadSettings(batches=(1, 4), contexts=(3,), new_tokens=5, repeats=2)
    load, models, log = measure(settings, (0.010, 0.0), (0.004, 0.002))
    assert log == ["A", "B"] + ["A", "B"] * 2 * 2
    first, second = load["points"]
    assert (first["batch"], second["batch"], first["context"], first["loop"]) == (1, 4, 3, "closed")
    assert first["runs"][0]["tok_per_s"] == pytest.approx([100.0, 100.0])
    assert second["runs"][1]["tok_per_s"] == pytest.approx([4 / 0.012] * 2)
    assert second["runs"][1]["ttft_ms"] == pytest.approx({"p50": 12.0, "p90": 12.0, "p99": 12.0, "n": 8})
    assert second["runs"][1]["itl_ms"] == pytest.approx({"p50": 12.0, "p90": 12.0, "p99": 12.0, "n": 32})
    assert [first["ratios"][0]["value"], second["ratios"][0]["value"]] == pytest.approx([10 / 6, 10 / 12])
    assert load["memory"][0]["concurrency"] == {"3": int((0.9 * 10_000 - 1000) // (2.0 * 8))}
    for model in models:
        assert len(set(model.prompts)) == len(model.prompts)  # no prefix cache has anything of them
    assert models[0].prompts == models[1].prompts


def test_where_the_candidate_falls_behind() -> None:
    """0.004 + 0.002 n = 0.010 at n = 3, and a third model wins at the largest batch."""
    settings = LoadSettings(batches=(1, 2, 4, 8), contexts=(3,), new_tokens=4, repeats=5)
    load, _, _ = measure(settings, (0.010, 0.0), (0.004, 0.002), (0.008, 0.0001))
    behind, ahead = load["crossovers"]
    assert (behind["candidate"], behind["context"], behind["proven"]) == (1, 3, 4)
    assert 2 < behind["estimate"] < 4
    assert (ahead["candidate"], ahead["estimate"], ahead["proven"], ahead["fastest"]) == (2, None, None, 2)


def test_the_open_loop_gives_all_models_the_same_arrivals() -> None:
    """Far below saturation nobody waits: a request alone takes a step for a token. Beyond it the queue grows."""
    settings = LoadSettings(batches=(), contexts=(3,), qps=(0.5, 400.0), requests=40, new_tokens=4, repeats=1)
    load, models, _ = measure(settings, (0.010, 0.0), (0.010, 0.0))
    slow, fast = load["points"]
    assert (slow["loop"], slow["qps"], slow["batch"], slow["ratios"]) == ("open", 0.5, None, [])
    for name in ("ttft_ms", "itl_ms"):
        assert slow["runs"][0][name] == pytest.approx(slow["runs"][1][name])
    assert slow["runs"][0]["ttft_ms"]["p50"] == pytest.approx(10.0)
    wall = 40 * 4 / slow["runs"][0]["tok_per_s"][0]
    assert 39 / 0.5 * 0.6 < wall < 39 / 0.5 * 1.6  # a sum of 39 exponential gaps: 3 standard deviations and more
    assert fast["runs"][0]["ttft_ms"]["p50"] > 10.0
    assert load["crossovers"] == []
    assert models[0].prompts == models[1].prompts
    again, _, _ = measure(settings, (0.010, 0.0), (0.010, 0.0))
    assert again["points"] == load["points"]


def test_arrivals_are_poisson() -> None:
    points = LoadSettings(batches=(), contexts=(1,), qps=(5.0,), requests=4000).points()
    instants = points[0].arrivals([0])
    gaps = [later - sooner for sooner, later in pairwise(instants)]
    assert instants[0] == 0
    assert mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert mean(gap**2 for gap in gaps) == pytest.approx(2 * 0.2**2, rel=0.15)  # of an exponential distribution


def test_the_record_fits_its_schema_and_makes_a_page(tmp_path: Path) -> None:
    settings = LoadSettings(batches=(1, 8), contexts=(3, 9), qps=(1.0,), requests=4, new_tokens=3, repeats=5)
    load, _, _ = measure(settings, (0.010, 0.0), (0.004, 0.002))
    write_load(tmp_path / "load.json", load)
    assert read_load(tmp_path / "load.json") == load
    page = render_load(load)
    assert page == render_load(load)
    assert "With prompts of 9 tokens, B is no faster than A from about" in page
    assert page.count("<figure>") == 2 * (2 + 1)
    assert "Time to the first token, prompts of 9 tokens" in page
    (tmp_path / "load.json").write_text("{}")
    with pytest.raises(RecordError, match="is a required property"):
        read_load(tmp_path / "load.json")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"new_tokens": 1}, "new_tokens=1 at least 2"),
        ({"batches": (2, 2)}, "names one twice"),
        ({"contexts": ()}, "leave nothing to run"),
        ({"batches": ()}, "leave nothing to run"),
        ({"qps": (0.0,)}, "leave nothing to run"),
        ({"batches": (0,)}, "must be at least 1"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        LoadSettings(**settings)


def test_a_model_that_loses_tokens_is_refused() -> None:
    clock = Clock()
    models = [Served("A", clock, 0.01, 0), Served("B", clock, 0.01, 0)]
    models[1].lost = 1
    with pytest.raises(ModelOutputError, match="asked were 1 times 2 tokens, the model gave 1"):
        measure_load(models, LoadSettings(contexts=(1,)), clock=clock, sleep=clock.sleep)
    with pytest.raises(OptionError, match="at least one candidate"):
        measure_load(models[:1], LoadSettings(), clock=clock, sleep=clock.sleep)


def test_a_candidate_that_begins_behind_crosses_at_the_smallest_batch() -> None:
    ratio = {"value": 0.5, "interval": None, "confidence": None, "method": "m"}
    runs = [{"tok_per_s": [2.0]}, {"tok_per_s": [1.0]}]
    points: Any = [{"loop": "closed", "context": 8, "batch": 2, "qps": None, "runs": runs, "ratios": [ratio]}]
    assert find_crossovers(points, 2) == [{"candidate": 1, "context": 8, "estimate": 2.0, "proven": None, "fastest": 0}]
