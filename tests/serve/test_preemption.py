"""What becomes of a preempted request: copied to the host or computed anew, by cost, with the same tokens."""

from typing import Any

import pytest
import torch

from quantkit.errors import EngineError
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.block_mover import BlockMover
from quantkit.serve.kv_cache import KVCache, KVShape
from quantkit.serve.preemption import FLOPS_PER_BYTE, PreemptionCost


def test_the_cost_of_both_ways_is_as_written() -> None:
    cost = PreemptionCost(block_bytes=1000, weight_bytes=50_000, num_parameters=25_000, max_num_batched_tokens=100)
    assert cost.swap(3) == 4 * 3 * 1000
    assert cost.recompute(1) == 50_000  # one pass over the weights
    assert cost.recompute(101) == 2 * 25_000 * 101 / FLOPS_PER_BYTE  # the arithmetic takes longer
    slow = PreemptionCost(block_bytes=1000, weight_bytes=50_000, num_parameters=25_000, max_num_batched_tokens=10)
    assert slow.recompute(101) == 11 * 50_000
    assert slow.recompute(0) == 0


def test_blocks_come_back_from_the_host_as_they_were() -> None:
    shapes = [KVShape(2, 8, 4), KVShape(1, 8, 8)]
    for is_int8 in (False, True):
        cache, host = (KVCache(shapes, count, 4, torch.float32, is_int8=is_int8) for count in (9, 5))
        for tensor in cache._tensors():
            tensor.copy_(torch.randint(-99, 99, tensor.shape).to(tensor.dtype))
        wanted = [tensor.clone() for tensor in cache._tensors()]
        mover = BlockMover(cache, host)
        first, second = mover.swap_out([3, 7]), mover.swap_out([1])
        assert (len({*first, *second}), mover.num_free_host_blocks) == (3, 2)
        cache.erase([1, 3, 7])
        mover.swap_in(first, [8, 3])
        for tensor, want in zip(cache._tensors(), wanted, strict=True):
            assert torch.equal(tensor[[8, 3]], want[[3, 7]])
            assert not tensor[1].any()
        mover.drop(second)
        assert mover.num_free_host_blocks == 5


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("host_blocks", [0, 3, 200])
def test_preempted_requests_get_the_tokens_of_an_undisturbed_run(
    host_blocks: int, kv_cache_dtype: str, make_engine: Any, random_prompt: Any
) -> None:
    """With no room on the host, with room for a few blocks, and with plenty."""
    roomy = make_engine("llama", kv_cache_dtype=kv_cache_dtype)
    block_bytes = roomy._cache.nbytes // roomy._cache.num_blocks
    tight = make_engine(
        "llama", kv_cache_dtype=kv_cache_dtype, kv_cache_bytes=8 * block_bytes, swap_space=host_blocks * block_bytes,
        max_num_batched_tokens=32, enable_prefix_caching=False,
    )  # fmt: skip
    prompts = [random_prompt(10 + 3 * seed, seed) for seed in range(6)]
    params = [SamplingParams(temperature=1.1, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(6)]
    wanted = [completion.token_ids for completion in roomy.generate(prompts, params)]
    before = tight.metrics.preemptions, tight.metrics.swaps, tight.metrics.computed_tokens
    if kv_cache_dtype == "auto":
        assert [completion.token_ids for completion in tight.generate(prompts, params)] == wanted
    else:  # codes are read by what is computed anew, so that another cut gives other last bits
        assert [len(completion.token_ids) for completion in tight.generate(prompts, params)] == [30] * 6
    metrics = tight.metrics
    assert metrics.preemptions > before[0]
    assert (metrics.swaps > before[1]) == (host_blocks > 0)
    undisturbed = sum(map(len, prompts)) + 6 * 29
    if host_blocks == 200:
        assert metrics.swaps - before[1] == metrics.preemptions - before[0]
        assert metrics.computed_tokens - before[2] == undisturbed  # nothing was computed twice
    else:
        assert metrics.computed_tokens - before[2] > undisturbed
    assert metrics.swap_usage == 0


def test_an_abort_gives_host_blocks_back(make_engine: Any, random_prompt: Any) -> None:
    engine = make_engine("llama", num_blocks=6, swap_space=1_000_000)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    names = [engine.add_request(random_prompt(30, seed), params) for seed in range(3)]
    while not any(request.swapped_blocks for request in engine.unfinished):
        engine.step()
    assert engine.metrics.swap_usage > 0
    for name in names:
        engine.abort(name)
    engine.check_all_free()


def test_a_swap_space_without_room_for_a_block_is_refused(tiny_llama_folder: Any) -> None:
    with pytest.raises(EngineError, match="swap_space=100 does not hold one cache block of 8192 bytes"):
        Engine(tiny_llama_folder, EngineConfig(max_model_len=64, kv_block_size=16, swap_space=100))
