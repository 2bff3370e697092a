"""What is not finite stays so through every kernel that takes a maximum: the engine must see a broken weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is for Linux")

from quantkit_kernels import reference, triton_quantize
from quantkit_kernels.triton_merge_splits import merge_splits
from quantkit_kernels.triton_paged_attention import paged_attention
from quantkit_kernels.triton_store_kv_cache import store_kv_cache

NAN, INF = float("nan"), float("inf")
Quantize = Callable[[Any, Tensor], tuple[Tensor, ...]]
QUANTIZE: dict[str, Quantize] = {
    "quantize_per_token": lambda package, x: package.quantize_per_token(x),
    "rms_norm_quantize": lambda package, x: package.rms_norm_quantize(x, torch.ones(x.shape[1]), 1e-5),
    "silu_mul_quantize": lambda package, x: package.silu_mul_quantize(x),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", QUANTIZE)
def test_a_row_with_a_nan_has_no_scale(operation: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 3] = NAN
    x[2] = NAN
    for package in (reference, triton_quantize):
        scale = QUANTIZE[operation](package, x)[1]
        assert scale.isnan().flatten().tolist() == [False, True, True, False]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("body", ["reference", "triton"])
def test_a_head_with_a_nan_has_no_scale_in_the_cache(body: str) -> None:
    store = reference.store_kv_cache if body == "reference" else store_kv_cache
    key = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    key[1, 0, 5] = NAN
    caches = [torch.zeros(1, 8, 2, 16, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(1, 8, 2) for _ in range(2)]
    store(key, key, *caches, torch.arange(3), *scales)
    for scale in scales:
        assert scale[0, :3].isnan().tolist() == [[False, False], [True, False], [False, False]]


@pytest.mark.parametrize("body", ["reference", "triton"])
def test_codes_of_the_smallest_numbers_do_not_wrap_round(body: str) -> None:
    """190 times the smallest float32: its 127th part is rounded down to that number, so that the ratio is 190."""
    store = reference.store_kv_cache if body == "reference" else store_kv_cache
    key = torch.tensor([190.0, -190.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).mul(2.0**-149).view(1, 1, 8)
    assert float(key[0, 0, 2]) > 0
    caches = [torch.zeros(1, 8, 1, 8, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(1, 8, 1) for _ in range(2)]
    store(key, key, *caches, torch.arange(1), *scales)
    assert caches[0][0, 0, 0, :4].tolist() == [127, -128, 1, 0]


@pytest.mark.parametrize("place", [0, 40, 69], ids=["first part", "second part", "last part"])
@pytest.mark.filterwarnings("ignore:.*(invalid value|NaN).*:RuntimeWarning")
def test_a_key_that_is_nan_reaches_the_output(place: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 16, generator=generator)
    keys, values = (torch.randn(9, 8, 2, 16, generator=generator) for _ in range(2))
    keys[place // 8, place % 8, 0] = NAN
    arguments = (query, keys, values, torch.arange(9, dtype=torch.int32)[None], torch.tensor([0, 1]).int(),
                 torch.tensor([70], dtype=torch.int32))  # fmt: skip
    options: dict[str, Any] = {"scale": 0.25, "max_query_len": 1, "max_context_len": 70, "num_splits": 3}
    for body in (reference.paged_attention, paged_attention):
        out = body(*arguments, **options)
        assert out[0, 0].isnan().all()
        assert out[0, 1].isfinite().all()


def test_a_query_that_is_nan_is_not_one_that_sees_nothing() -> None:
    """Every part of it is NaN; where every part is empty the output is zeros, whatever lies in the workspace."""
    parts = torch.full((3, 1, 3, 16), NAN)
    lse = torch.tensor([[NAN, NAN, NAN], [-INF, -INF, -INF], [-INF, 1.0, -INF]]).view(3, 1, 3)
    parts[2, 0, 1] = 2.0
    out = torch.empty(3, 1, 16)
    merge_splits(parts, lse, out)
    assert out[0].isnan().all()
    assert torch.equal(out[1], torch.zeros(1, 16))
    assert torch.equal(out[2], torch.full((1, 16), 2.0))
