"""What is not finite stays so through every kernel that takes a maximum: the engine must see a broken weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is for Linux")

from quantkit_kernels import cpu_int8, cpu_native, reference, triton_quantize
from quantkit_kernels.cpu_int8 import CpuW8A8
from quantkit_kernels.native_library import native_blocker
from quantkit_kernels.triton_merge_splits import merge_splits
from quantkit_kernels.triton_paged_attention import paged_attention
from quantkit_kernels.triton_store_kv_cache import store_kv_cache

NAN, INF = float("nan"), float("inf")
needs_native = pytest.mark.skipif(native_blocker() is not None, reason=str(native_blocker()))
BODIES = ["reference", "triton", pytest.param("native", marks=needs_native)]
STORES: dict[str, Callable[..., None]] = {
    "reference": reference.store_kv_cache, "triton": store_kv_cache, "native": cpu_native.store_kv_cache,
}  # fmt: skip
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
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("column", [0, 5, 8, 15, 23])  # of vectors of 8 the first, the last, and between
def test_a_head_with_a_nan_has_no_scale_in_the_cache(column: int, dtype: torch.dtype, body: str) -> None:
    key = torch.randn(3, 2, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    key[1, 0, column] = NAN
    caches = [torch.zeros(1, 8, 2, 24, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(1, 8, 2) for _ in range(2)]
    STORES[body](key, key, *caches, torch.arange(3), *scales)
    for scale in scales:
        assert scale[0, :3].isnan().tolist() == [[False, False], [True, False], [False, False]]


@pytest.mark.parametrize("body", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_head_with_infinity_reads_back_as_nan(value: float, body: str) -> None:
    """Its scale is infinite and its codes are 0. An infinite number could be a key of no weight, which nobody sees."""
    key = torch.ones(1, 1, 16)
    key[0, 0, 9] = value
    caches = [torch.zeros(1, 8, 1, 16, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(1, 8, 1) for _ in range(2)]
    STORES[body](key, key, *caches, torch.arange(1), *scales)
    assert (caches[0][0, 0].float() * scales[0][0, 0]).isnan().all()


@pytest.mark.parametrize("body", BODIES)
def test_codes_of_the_smallest_numbers_do_not_wrap_round(body: str) -> None:
    """190 times the smallest float32: its 127th part is rounded down to that number, so that the ratio is 190."""
    key = torch.tensor([190.0, -190.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).mul(2.0**-149).view(1, 1, 8)
    assert float(key[0, 0, 2]) > 0
    caches = [torch.zeros(1, 8, 1, 8, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(1, 8, 1) for _ in range(2)]
    STORES[body](key, key, *caches, torch.arange(1), *scales)
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
    native = [] if native_blocker() is not None else [cpu_native.paged_attention]
    for body in (reference.paged_attention, paged_attention, *native):
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


def attend(body: Callable[..., Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """Of a query of ones over all keys, [K, 8] each, of one head."""
    caches = (rows.view(-1, 8, 1, 8) for rows in (keys, values))
    tables, count = torch.arange(len(keys) // 8).int()[None], torch.tensor([len(keys)]).int()
    return body(torch.ones(1, 1, 8), *caches, tables, torch.tensor([0, 1]).int(), count, scale=1.0, max_query_len=1,
                max_context_len=len(keys))[0, 0]  # fmt: skip


@needs_native
@pytest.mark.parametrize("count", [32, 64, 256, 320])  # a tile of the compiled body, two, a part of the keys, more
@pytest.mark.parametrize("first", [True, False])
def test_keys_of_score_minus_infinity_have_no_weight(first: bool, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(count + 32, 8, generator=generator) for _ in range(2))
    hidden = slice(0, count) if first else slice(32, count + 32)
    keys[hidden, 3] = -INF
    wanted = attend(reference.paged_attention, keys, values)
    assert wanted.isfinite().all()
    torch.testing.assert_close(attend(cpu_native.paged_attention, keys, values), wanted)
    values[hidden, 2] = 3e38  # times the least normal number it would be 4
    torch.testing.assert_close(attend(cpu_native.paged_attention, keys, values), wanted)


@needs_native
@pytest.mark.parametrize("score", [-INF, INF, NAN])
@pytest.mark.parametrize("count", [1, 8, 320])
def test_scores_without_a_number_are_nan(count: int, score: float) -> None:
    """As the reference has it: all scores -infinity, one infinity or one NaN, behind keys of -infinity."""
    keys, values = torch.full((count // 8 * 8 + 8, 8), -INF), torch.ones(count // 8 * 8 + 8, 8)
    keys[-1] = score
    for body in (reference.paged_attention, cpu_native.paged_attention):
        assert attend(body, keys, values).isnan().all()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_any_size(dtype: torch.dtype) -> None:
    gates = [-INF, -3e38, -1e38, -1e30, -300.0, -100.0, -89.0, -87.0, -20.0, -0.0, 0.0, 87.0, 89.0, 1e38, INF, NAN]
    x = torch.tensor([gates + [1.0] * len(gates)]).to(dtype)
    found, wanted = cpu_native.silu_mul(x), reference.silu_mul(x)
    # e^88.4 and more are infinite: a product of less than 1e-36 is 0
    torch.testing.assert_close(
        found, wanted, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-36, equal_nan=True
    )
    is_number = ~wanted.isnan()
    assert torch.equal(found[is_number].signbit(), wanted[is_number].signbit())


@pytest.mark.parametrize("has_int8_matmul", [False, True])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_a_row_with_a_nan_has_no_product(
    input_scale: float | None, has_int8_matmul: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_int8, "has_int8_matmul", lambda: has_int8_matmul)
    codes, scale = torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 1)
    static = None if input_scale is None else torch.tensor([input_scale])
    x = torch.ones(17, 64)
    x[3, 40] = NAN
    found = CpuW8A8(codes, scale, torch.float32, static)(x)
    torch.testing.assert_close(found, reference.w8a8_gemm(x, codes, scale, static), equal_nan=True)
    assert found.isnan().all(1).nonzero().flatten().tolist() == [3]
