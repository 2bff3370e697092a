"""Elements that lie 2**31 and more behind the first one: addresses are not calculated in 32 bits.

The memory is asked for and hardly touched, so that it takes a few pages.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is for Linux")

from quantkit_kernels import triton_activation, triton_calibration, triton_norm, triton_quantize, triton_sampling
from quantkit_kernels.reference import pack_int4
from quantkit_kernels.triton_paged_attention import paged_attention
from quantkit_kernels.triton_rotary import rotary_embedding
from quantkit_kernels.triton_store_kv_cache import store_kv_cache
from quantkit_kernels.triton_w4a16 import TritonW4A16
from quantkit_kernels.triton_w8a16 import TritonW8A16

FAR = 2**31


def reserved(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written."""
    try:
        return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)
    except MemoryError:
        pytest.skip(f"needs {count * dtype.itemsize / 1e9:.1f} GB of address space")


@pytest.mark.parametrize("layout", ["blocks", "heads"])
def test_a_cache_of_more_elements_than_32_bits_count(layout: str) -> None:
    """The last block begins behind 2**31 codes; or heads are so far apart that the third one does."""
    heads, dim, size = 3, 16, 8
    if layout == "blocks":
        blocks = FAR // (heads * dim * size) + 3
        caches = [reserved(blocks * size * heads * dim, torch.int8).view(blocks, size, heads, dim) for _ in range(2)]
        used = [blocks - 2, blocks - 1]
    else:
        blocks = 4
        shape, strides = (blocks, size, heads, dim), (size * dim, dim, FAR // 2, 1)
        caches = [reserved(FAR + blocks * size * dim, torch.int8).as_strided(shape, strides) for _ in range(2)]
        used = [3, 1]
    scales = [reserved(blocks * size * heads, torch.float32).view(blocks, size, heads) for _ in range(2)]
    small = [torch.zeros(2, size, heads, dim, dtype=torch.int8) for _ in range(2)]
    small_scales = [torch.zeros(2, size, heads) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(11, heads, dim, generator=generator) for _ in range(3))
    place = torch.arange(11)
    slots = torch.tensor(used)[place // size] * size + place % size
    found = []
    for own, own_scales, own_slots, table in ((caches, scales, slots, used), (small, small_scales, place, [0, 1])):
        store_kv_cache(key, value, *own, own_slots, *own_scales)
        found.append(
            paged_attention(
                query[:1],
                *own,
                torch.tensor([table], dtype=torch.int32),
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([11], dtype=torch.int32),
                scale=0.25,
                key_scale=own_scales[0],
                value_scale=own_scales[1],
                max_query_len=1,
                max_context_len=11,
            )
        )
    assert torch.equal(*found)
    assert int(small[0].abs().max()) == 127


def _turned(x: Tensor) -> Tensor:
    heads = x.unsqueeze(1)
    rotary_embedding(heads, heads[:, :0], torch.full((3, 32), 0.6), torch.full((3, 32), 0.8))
    return x.clone()


def _summed(x: Tensor) -> Tensor:
    total = torch.zeros(64, 64)
    triton_calibration.hessian_accumulate(x, total)
    return total


def _masked(x: Tensor) -> Tensor:
    triton_sampling.apply_token_bitmask(x, torch.tensor([[5, -7]] * 3, dtype=torch.int32))
    return x.clone()


def _sampled(x: Tensor) -> Tensor:
    ones = torch.ones(3)
    return triton_sampling.sample_tokens(x, ones, ones.int() * 9, ones, 0 * ones, 0.7 * ones.double())


CODES = (torch.arange(32 * 64) % 15 - 7).to(torch.int8).view(32, 64)
ROWS: dict[str, Callable[[Tensor], Any]] = {
    "rms_norm": lambda x: triton_norm.rms_norm(x, torch.ones(64), 1e-5),
    "silu_mul": triton_activation.silu_mul,
    "quantize_per_token": lambda x: triton_quantize.quantize_per_token(x)[0],
    "rotary_embedding": _turned,
    "hessian_accumulate": _summed,
    "apply_token_bitmask": _masked,
    "sample_tokens": _sampled,
    "w4a16_gemm": TritonW4A16(pack_int4(CODES), torch.ones(32, 2), 32, torch.bfloat16),
    "w8a16_gemm": TritonW8A16(CODES, torch.ones(32, 2), 32, torch.bfloat16),
}


@pytest.mark.parametrize("operation", ROWS)
def test_rows_that_are_far_apart(operation: str) -> None:
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    far = reserved(FAR + 64, torch.bfloat16).as_strided((3, 64), (FAR // 2, 1))
    far.copy_(rows)
    assert torch.equal(ROWS[operation](far), ROWS[operation](rows))
