"""deterministic: the same logits to the last bit alone, in any batch, and with and without cache hits."""

from typing import Any

import pytest
import torch

from quantkit.serve import Engine, EngineConfig, SamplingParams

SETTINGS: dict[str, Any] = {"max_model_len": 256, "kv_block_size": 16, "deterministic": True}


class Recorded(Engine):
    """An engine that keeps the logits of every token that it gives."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.logits: dict[str, list[Any]] = {}

    def _compute(self, planned: Any) -> Any:
        logits, sampled = super()._compute(planned)
        for row, request in zip(logits, sampled, strict=True):
            self.logits.setdefault(request.request_id, []).append(row.clone())
        return logits, sampled

    def run(self, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple[list[int], torch.Tensor]]:
        """Tokens and logits of each."""
        self.logits.clear()
        names = [self.add_request(prompt, params) for prompt, params in requests]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while self.has_unfinished:
            for output in self.step():
                tokens[output.request_id] += output.token_ids
        return [(tokens[name], torch.stack(self.logits[name])) for name in names]


@pytest.mark.parametrize(
    ("family", "dtype", "kv_cache_dtype"),
    [("llama", "bfloat16", "auto"), ("llama", "bfloat16", "int8"), ("gemma3", "float32", "auto")],
)
def test_to_the_last_bit(family: str, dtype: str, kv_cache_dtype: str, tiny_models: Any, random_prompt: Any) -> None:
    folder = tiny_models(family)
    config = {**SETTINGS, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True)
    prompt = random_prompt(75, 1)
    alone = Recorded(folder, EngineConfig(**config, max_num_seqs=4, max_num_batched_tokens=36))  # chunks of 32
    ((tokens, logits),) = alone.run([(prompt, params)])
    batched = Recorded(folder, EngineConfig(**config, max_num_seqs=4, max_num_batched_tokens=36))
    others = [
        (prompt[:40] + random_prompt(10 + seed, seed), SamplingParams(seed=seed, max_tokens=20, ignore_eos=True))
        for seed in range(5)
    ]
    for requests in ([*others[:2], (prompt, params), *others[2:]], [(prompt, params), *others]):  # a miss, then hits
        results = batched.run(requests)
        found = results[[request[0] for request in requests].index(prompt)]
        assert found[0] == tokens
        assert torch.equal(found[1], logits)
    assert batched.metrics.prefix_cache_hits >= 32 * 5


def test_through_preemption_and_next_to_continuations(tiny_models: Any, random_prompt: Any) -> None:
    """Computed anew, swapped, forked: tokens stay those of the request alone."""
    folder = tiny_models("llama")
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=40, ignore_eos=True)
    prompt = random_prompt(50, 1)
    roomy = Engine(folder, EngineConfig(**SETTINGS, dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=36))
    (wanted,) = roomy.generate([prompt], params)
    block_bytes = roomy.describe()["engine"]["kv_cache_bytes"] // roomy.pool.num_blocks
    for swap_space in (0, 1_000_000):
        config = EngineConfig(
            **SETTINGS, dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=36,
            kv_cache_bytes=9 * block_bytes, swap_space=swap_space,
        )  # fmt: skip
        engine = Engine(folder, config)
        other = SamplingParams(n=2, seed=3, max_tokens=30, ignore_eos=True)
        *_, found = engine.generate([random_prompt(20, 2), random_prompt(33, 3), prompt], [other, other, params])
        assert engine.metrics.preemptions > 0
        assert (engine.metrics.swaps > 0) == (swap_space > 0)
        assert found.token_ids == wanted.token_ids


def test_without_it_the_last_bits_may_differ_but_hardly_more(make_engine: Any, random_prompt: Any) -> None:
    """What `deterministic` buys: otherwise a hit is computed in another cut."""
    engine = make_engine("llama")
    prompt = random_prompt(60, 1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    miss, hit = engine.generate([prompt], params)[0], engine.generate([prompt], params)[0]
    assert hit.num_cached_tokens == 48
    assert miss.logprobs is not None
    assert hit.logprobs is not None
    for token, (logprob, _) in miss.logprobs[0].items():
        assert hit.logprobs[0][token][0] == pytest.approx(logprob, abs=1e-4)
