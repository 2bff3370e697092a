"""The 8-bit cache: codes and scales as defined, and hardly another distribution than with the full one."""

from typing import Any

import pytest
import torch

from quantkit.serve import SamplingParams
from quantkit.serve.kv_cache import KVCache, KVShape, kv_block_bytes

SHAPES = (KVShape(2, 8, 4), KVShape(1, 16, 16))


def filled(dtype: torch.dtype) -> tuple[KVCache, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache with random keys and values of layer 0 in scattered slots."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(SHAPES, 6, 4, dtype, is_int8=True)
    key, value = (torch.randn(7, 2, width, generator=generator).to(dtype) for width in (8, 4))
    key[0] *= 1000  # a scale for each token
    key[1, 1] *= 1e-4  # and head
    value[2] = 0
    slots = torch.tensor([4, 5, 6, 7, 20, 21, 9])
    cache.store(0, key, value, slots)
    return cache, key, value, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_and_head_is_rounded_to_127_steps_of_its_largest(dtype: torch.dtype) -> None:
    cache, key, value, _ = filled(dtype)
    keys, values = cache.gather(0, torch.tensor([1, 5, 2]), 1)
    assert (keys.dtype, keys.shape, values.shape) == (dtype, (1, 2, 12, 8), (1, 2, 12, 4))
    places = [0, 1, 2, 3, 4, 5, 9]
    for found, stored in ((keys, key), (values, value)):
        error = (found[0][:, places].transpose(0, 1).float() - stored.float()).abs()
        step = stored.float().abs().amax(-1, keepdim=True) / 127
        assert (error <= step * 0.5001 + stored.float().abs() * torch.finfo(dtype).eps).all()
    assert not keys[0][:, [6, 7, 8, 10, 11]].any()  # never written


def test_neighbouring_slots_are_the_same_without_blocks() -> None:
    cache, *_ = filled(torch.float32)
    gathered, viewed = cache.gather(0, torch.tensor([1, 2]), 1), cache.view(0, 4, 8)
    for one, other in zip(gathered, viewed, strict=True):
        assert torch.equal(one, other)
    tail = cache.view(0, 6, 3)
    assert torch.equal(tail[0], gathered[0][:, :, 2:5])


def test_two_sequences_are_gathered_together() -> None:
    cache, *_ = filled(torch.float32)
    keys, values = cache.gather(0, torch.tensor([1, 5, 2, 0]), 2)
    for row, blocks in enumerate(([1, 5], [2, 0])):
        alone = cache.gather(0, torch.tensor(blocks), 1)
        assert torch.equal(keys[row], alone[0][0])
        assert torch.equal(values[row], alone[1][0])


def test_its_size_is_codes_and_scales() -> None:
    assert kv_block_bytes(SHAPES, 4, torch.bfloat16, is_int8=True) == 4 * ((24 + 2 * 2 * 4) + (32 + 2 * 1 * 4))
    assert kv_block_bytes(SHAPES, 4, torch.bfloat16) == 4 * (24 + 32) * 2
    cache, *_ = filled(torch.bfloat16)
    assert cache.nbytes == 6 * kv_block_bytes(SHAPES, 4, torch.bfloat16, is_int8=True)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_distribution_stays(family: str, make_engine: Any, random_prompt: Any) -> None:
    """KL of the next token along a text that both caches hold; every step reads the cache."""
    full, codes = make_engine(family), make_engine(family, kv_cache_dtype="int8")
    token_ids = random_prompt(60, 1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    kls = []
    for engine in (full, codes):
        engine.generate([token_ids], params)
    for length in range(33, 60, 3):  # a hit on blocks of 16 that the first run left
        entries = []
        for engine in (full, codes):
            (completion,) = engine.generate([token_ids[:length]], params)
            assert completion.num_cached_tokens == (length - 1) // 16 * 16
            assert completion.logprobs is not None
            entries.append({token: logprob for token, (logprob, _) in completion.logprobs[0].items()})
        shared = torch.tensor([[entry[token] for token in entries[0].keys() & entries[1].keys()] for entry in entries])
        assert shared.shape[1] >= 15
        kls.append(float((shared[0].exp() * (shared[0] - shared[1])).sum().abs()))
    assert 0 < sum(kls) / len(kls) < 0.01
