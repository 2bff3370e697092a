"""Logs of several kinds are read, and replayed through the real scheduler with times that can be computed by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.capacity import replay
from quantkit.capacity.devices import Device
from quantkit.capacity.fit import Demand, fit
from quantkit.capacity.kv_footprint import KV_DTYPES, VLLM, sequence_bytes
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.replay import replay_trace
from quantkit.capacity.roofline import SpeedModel
from quantkit.capacity.simulation import ServerSettings, batch_rate, settings_for
from quantkit.capacity.trace import TracedRequest, possible_hit_rate, read_trace
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME
from quantkit.errors import UsageError

KV = KV_DTYPES["16-bit"]
# every step takes a second whatever it computes
CLOCKWORK = Device("clockwork", 80e9, 1e30, {"16-bit": 1e40}, "made up", {}, 1.0, 0.0)


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short curve is enough here."""
    monkeypatch.setattr(replay, "CURVE_TOKENS", 3000)


@pytest.fixture
def clockwork(real_facts: Callable[..., ModelFacts]) -> SpeedModel:
    return SpeedModel(real_facts("qwen2.5-0.5b"), SCHEME_BY_NAME["16-bit"], CLOCKWORK, KV, VLLM)


def write(folder: Path, *records: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_plain_records_are_sorted_and_counted_from_the_first(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"arrival": 12.5, "prompt_tokens": 7, "output_tokens": 3},
        "",
        {"arrival": 10, "prompt_tokens": 5, "output_tokens": 2},
    )
    assert read_trace(path) == [TracedRequest(0.0, 5, 2), TracedRequest(2.5, 7, 3)]


def test_a_log_of_an_openai_server(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are helpful. " * 30}

    def logged(created: int, question: str) -> dict[str, Any]:
        return {
            "request": {"messages": [system, {"role": "user", "content": question}]},
            "response": {"created": created, "usage": {"prompt_tokens": 140, "completion_tokens": 20}},
        }

    first, second = read_trace(write(tmp_path, logged(1700000000, "Why?"), logged(1700000003, "How?")))
    assert (second.arrival, second.prompt_tokens, second.output_tokens) == (3.0, 140, 20)
    assert first.prefix[:3] == second.prefix[:3]
    assert possible_hit_rate([first, second]) == pytest.approx(32 * len(first.prefix) / 280, abs=0.12)


def test_a_mooncake_trace_and_iso_times(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [1, 9, 3]},
    ]
    first, second = read_trace(write(tmp_path, *lines))
    assert second.arrival == 1.5
    assert possible_hit_rate([first, second]) == pytest.approx(512 / 2200)  # the same id behind another one is no hit
    iso = {"time": "2026-01-02T03:04:05+00:00", "prompt_tokens": 1, "output_tokens": 1}
    assert read_trace(write(tmp_path, iso)) == [TracedRequest(0.0, 1, 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1: not JSON"),
        ("[1]", ":1: not a JSON object"),
        ({"prompt_tokens": 5}, ":1: none of output_tokens"),
        ({"prompt_tokens": 0, "output_tokens": 1}, ":1: prompt_tokens=0 is not a whole number from 1 to 10000000"),
        ({"prompt_tokens": 1, "output_tokens": 1, "time": "yesterday"}, ":1: time='yesterday' is no time"),
        ({"prompt_tokens": 1, "output_tokens": 1, "time": math.nan}, ":1: time=nan is no time"),
        (
            {"input_length": 1, "output_length": 1, "hash_ids": [], "timestamp": math.inf},
            ":1: timestamp=inf is no number",
        ),
        ("", "has no request"),
    ],
)
def test_a_broken_log_is_one_line(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read_trace(write(tmp_path, line))


def test_half_a_log_with_times_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"arrival": 0, "prompt_tokens": 1, "output_tokens": 1},
        {"prompt_tokens": 1, "output_tokens": 1},
    )
    with pytest.raises(UsageError, match=r"1 of 2 requests of .* have no arrival time"):
        read_trace(path)


def test_times_are_those_of_the_steps(clockwork: SpeedModel) -> None:
    """One request: its prompt of 100 in chunks of 40 takes 3 steps, the next tokens one each."""
    settings = ServerSettings(100, 16, 8, 40, 1000)
    report = replay_trace(clockwork, settings, [TracedRequest(0.0, 100, 5)])
    assert report.replay.ttft == (3.0, 3.0)
    assert report.replay.itl == (1.0, 1.0)
    assert report.replay.seconds == 7.0
    assert (report.replay.finished, report.replay.preemptions, report.replay.refused) == (1, 0, 0)


def test_an_idle_server_waits_for_the_next_arrival(clockwork: SpeedModel) -> None:
    requests = [TracedRequest(0.0, 10, 2), TracedRequest(50.0, 10, 2)]
    report = replay_trace(clockwork, ServerSettings(100, 16, 8, 40, 1000), requests)
    assert report.replay.seconds == 52.0
    assert report.replay.ttft == (1.0, 1.0)
    assert report.offered_rate == pytest.approx(2 / 50)


def test_more_requests_than_may_run_wait(clockwork: SpeedModel) -> None:
    requests = [TracedRequest(0.0, 10, 10)] * 4
    report = replay_trace(clockwork, ServerSettings(100, 16, 2, 100, 1000), requests)
    assert report.replay.busiest == 2
    assert report.replay.ttft == (1.0, 11.0)
    # two requests of ten steps each at a time
    assert report.saturation_rate == pytest.approx(2 / 10, rel=0.15)


def test_a_small_cache_preempts_and_a_larger_one_does_not(clockwork: SpeedModel) -> None:
    requests = [TracedRequest(0.0, 30, 60)] * 4
    small = replay_trace(clockwork, ServerSettings(13, 16, 4, 512, 1000), requests).replay
    large = replay_trace(clockwork, ServerSettings(100, 16, 4, 512, 1000), requests).replay
    assert small.preemptions > 0 == large.preemptions
    assert small.finished == large.finished == 4
    assert small.seconds > large.seconds


def test_prompts_that_begin_alike_hit_the_engines_prefix_cache(clockwork: SpeedModel) -> None:
    """Of 80 tokens 64 are shared, in 4 blocks of 16: nine of ten requests find them."""
    requests = [TracedRequest(10.0 * i, 80, 5, (11, 22), 32) for i in range(10)]
    report = replay_trace(clockwork, ServerSettings(200, 16, 8, 512, 1000), requests)
    assert report.replay.hit_rate == report.possible_hit_rate == pytest.approx(0.9 * 64 / 80)
    without = ServerSettings(200, 16, 8, 512, 1000, enable_prefix_caching=False)
    assert replay_trace(clockwork, without, requests).replay.hit_rate == 0
    small = ServerSettings(7, 16, 8, 512, 1000)  # room for one request: another text takes the blocks of the first
    others = [TracedRequest(10.0 * i, 80, 5, (i, i + 1), 32) if i % 2 else requests[i] for i in range(10)]
    assert replay_trace(clockwork, small, others).replay.hit_rate == 0


def test_requests_that_never_fit_are_counted_or_refused_as_a_whole(clockwork: SpeedModel) -> None:
    settings = ServerSettings(5, 16, 4, 512, 1000)
    mixed = replay_trace(clockwork, settings, [TracedRequest(0.0, 10, 5), TracedRequest(0.0, 100, 5)])
    assert (mixed.replay.finished, mixed.replay.refused) == (1, 1)
    with pytest.raises(UsageError, match="none of the 1 requests fits into 4 cache blocks"):
        replay_trace(clockwork, settings, [TracedRequest(0.0, 100, 5)])


def test_waiting_grows_beyond_the_saturation_load(clockwork: SpeedModel) -> None:
    requests = [TracedRequest(float(i), 20, 20) for i in range(40)]
    report = replay_trace(clockwork, ServerSettings(200, 16, 4, 512, 1000), requests)
    assert report.saturation_rate == pytest.approx(4 / 20, rel=0.15)
    waits = [replay.ttft[1] for _, replay in report.curve]
    assert waits[-1] > 5 * waits[0]
    assert [rate / report.saturation_rate for rate, _ in report.curve] == pytest.approx([0.5, 0.7, 0.85, 1.0, 1.2])


def test_a_log_without_times_gets_random_ones_and_says_so(clockwork: SpeedModel) -> None:
    settings = ServerSettings(200, 16, 4, 512, 1000)
    requests = [TracedRequest(None, 20, 20)] * 20
    first, second = (replay_trace(clockwork, settings, requests) for _ in range(2))
    assert first == second
    assert first.offered_rate is None
    assert any("no arrival times" in note for note in first.notes)


def test_a_batch_is_predicted_as_the_bench_measures_it(clockwork: SpeedModel) -> None:
    rate = batch_rate(clockwork, ServerSettings(200, 16, 16, 512, 1000), 16, 10, 20)
    assert rate == pytest.approx(16 * 20 / 20)


def test_settings_follow_from_a_fit(real_facts: Callable[..., ModelFacts]) -> None:
    facts, demand = real_facts("llama-3-8b"), Demand(concurrency=32)
    device = Device("d", 40e9, 1e12, {"16-bit": 1e14}, "made up")
    found = fit(facts, SCHEME_BY_NAME["16-bit"], device, KV, VLLM, demand)
    settings = settings_for(facts, found, KV, VLLM, demand, 4096)
    assert settings.num_blocks == int(found.kv_bytes // (sequence_bytes(facts, 4096, KV) / 256))
    assert (settings.kv_block_size, settings.max_num_seqs, settings.max_model_len) == (16, 32, 4096)
