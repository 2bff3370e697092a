"""Turns, tokens and ratios, with a clock that the test winds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.errors import ModelOutputError, OptionError
from quantkit_eval.protocol import Generation, GenerationRequest
from quantkit_eval.records import read_throughput, write_throughput
from quantkit_eval.throughput import measure_throughput


class Clock:
    """Stands still unless a model works."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def timed_model(fake_model: Callable[..., Any]) -> Callable[..., Any]:
    class TimedModel(fake_model):  # type: ignore[misc,valid-type]
        """Takes so many seconds a token, and writes its name into the log of each run."""

        def __init__(self, name: str, clock: Clock, seconds: float, log: list[str], short: int = 0) -> None:
            super().__init__(name=name)
            self.clock, self.seconds, self.log, self.short = clock, seconds, log, short
            self.prompts: list[str] = []

        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            self.log.append(f"{self.name}{len(requests)}")
            assert all(request.ignore_eos and request.temperature == 0 for request in requests)
            self.prompts += [request.messages[0]["content"] for request in requests]
            self.clock.seconds += self.seconds * sum(request.max_tokens for request in requests) * (1 + len(self.log))
            return [Generation(r.id, "", (0,) * (r.max_tokens - self.short), "length", "0" * 64, 1) for r in requests]

    return TimedModel


def test_models_take_turns_and_the_drift_cancels(tmp_path: Path, timed_model: Callable[..., Any]) -> None:
    """Each run is slower than the one before it; the pairs still show the ratio."""
    clock, log, seen = Clock(), [], []
    a, b = timed_model("A", clock, 0.01, log), timed_model("B", clock, 0.005, log)
    throughput = measure_throughput(
        a, b, (1, 3), new_tokens=8, repeats=5, clock=clock, progress=lambda *event: seen.append(event)
    )
    assert log == ["A1", "B1"] * 6 + ["A3", "B3"] * 6
    assert seen[:2] == [("decode_batch_1", 1, 5), ("decode_batch_1", 2, 5)]
    first = throughput["batches"]["decode_batch_1"]
    assert first["baseline_tok_per_s"][0] == pytest.approx(1 / (0.01 * 4))
    assert first["candidate_tok_per_s"][0] == pytest.approx(1 / (0.005 * 5))
    assert 1.5 < first["ratio"]["value"] < 2.0
    assert first["ratio"]["confidence"] == pytest.approx(0.9375)
    assert throughput["batches"]["decode_batch_3"]["batch_size"] == 3
    settings = {"new_tokens": 8, "repeats": 5, "warmup_runs": 1, "order": "A B A B"}
    assert throughput["settings"] == settings | {"prompts": "no two alike but for the template"}
    for model in (a, b):
        assert len(model.prompts) == len(set(model.prompts)) == 6 * (1 + 3)  # nothing that a prefix cache could have
    assert a.prompts == b.prompts
    write_throughput(tmp_path / "throughput.json", throughput)
    assert read_throughput(tmp_path / "throughput.json") == throughput


def test_a_single_pair_gives_no_interval(tmp_path: Path, timed_model: Callable[..., Any]) -> None:
    clock = Clock()
    a, b = timed_model("A", clock, 0.01, []), timed_model("B", clock, 0.005, [])
    throughput = measure_throughput(a, b, (1,), new_tokens=8, repeats=1, clock=clock)
    ratio = throughput["batches"]["decode_batch_1"]["ratio"]
    assert ratio["value"] > 1
    assert ratio["interval"] is ratio["confidence"] is None
    write_throughput(tmp_path / "throughput.json", throughput)


def test_too_few_tokens_are_an_error(timed_model: Callable[..., Any]) -> None:
    clock, log = Clock(), []
    a, b = timed_model("A", clock, 0.01, log), timed_model("B", clock, 0.01, log, short=1)
    with pytest.raises(ModelOutputError, match=r"asked were 1 times 8 tokens with ignore_eos, the model gave \[7\]"):
        measure_throughput(a, b, (1,), new_tokens=8, clock=clock)


def test_a_clock_that_stands_still_is_an_error(timed_model: Callable[..., Any]) -> None:
    clock = Clock()
    model = timed_model("A", clock, 0.0, [])
    with pytest.raises(ModelOutputError, match=r"took 0\.0 s"):
        measure_throughput(model, model, (1,), clock=clock)


@pytest.mark.parametrize(
    "settings",
    [{"batch_sizes": ()}, {"batch_sizes": (0,)}, {"batch_sizes": (2, 2)}, {"repeats": 0}, {"warmup_runs": -1}],
)
def test_wrong_settings_are_named(fake_model: Callable[..., Any], settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(settings))):
        measure_throughput(fake_model(), fake_model(), **settings)
