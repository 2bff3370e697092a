"""What the engine counts agrees with what it gave out, whatever happened to the requests."""

import json
from typing import Any

import pytest

from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.metrics import EngineMetrics, Histogram


def test_a_histogram_counts_by_upper_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.num_observations, histogram.total) == (5, 14.0)


def test_counters_are_the_sums_over_all_requests(
    tiny_llama_folder: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are preempted, one is aborted while it waits, one while it runs, one fails."""
    engine = Engine(tiny_llama_folder, EngineConfig(max_model_len=128, kv_block_size=16, kv_cache_bytes=70_000))
    assert engine.metrics.to_dict() == EngineMetrics().to_dict()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [random_prompt(10 + seed, seed) for seed in range(5)]
    names = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = [output for _ in range(3) for output in engine.step()]
    waiting = engine.add_request(random_prompt(30, 9), params)
    outputs += engine.abort(waiting) + engine.abort(names[1])
    metrics = engine.metrics
    assert metrics.num_running + metrics.num_waiting == 4
    assert 0 < metrics.kv_cache_usage <= 1
    while engine.has_unfinished:
        outputs += engine.step()

    def broken(batch: Any) -> None:
        raise RuntimeError("no memory left")

    engine.add_request(random_prompt(7, 10), params)
    monkeypatch.setattr(engine._runner, "forward", broken)
    outputs += engine.step()
    metrics = engine.metrics
    assert metrics.requests == {"stop": 0, "length": 4, "abort": 2, "error": 1}
    assert metrics.prompt_tokens == sum(map(len, prompts)) + 30 + 7
    assert metrics.generation_tokens == sum(len(output.token_ids) for output in outputs)
    assert metrics.preemptions > 0
    assert metrics.computed_tokens > sum(map(len, prompts)) + metrics.generation_tokens - 5
    assert metrics.ttft.num_observations == 5
    assert metrics.itl.num_observations == metrics.generation_tokens - 5
    assert metrics.e2e.num_observations == 4
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_cache_usage) == (0, 0, 0.0)
    json.dumps(metrics.to_dict())
