"""store_kv_cache: the reference against a loop, the Triton kernel too, codes of 8 bits, the checks."""

import importlib
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit_kernels import cpu_native, reference
from quantkit_kernels import store_kv_cache as public_store_kv_cache
from quantkit_kernels.dispatch import TRITON_MODULES, choose
from quantkit_kernels.native_library import native_blocker

Store = Callable[..., None]


def interpreted() -> Store:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels.triton_store_kv_cache import store_kv_cache

    return store_kv_cache


def native() -> Store:
    if native_blocker() is not None:
        pytest.skip(str(native_blocker()))
    return cpu_native.store_kv_cache


def store_of(body: str) -> Store:
    return {"reference": lambda: reference.store_kv_cache, "triton": interpreted, "native": native}[body]()


def make_case(
    tokens: int, heads: int, head_dim: int, value_dim: int, kv_block_size: int, dtype: torch.dtype, *, is_joint: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random tokens (as the transposed views that attention gets), caches full of NaN, slots with padding."""
    generator = torch.Generator().manual_seed(tokens * 1000 + head_dim)
    key = torch.randn(heads, tokens, head_dim, generator=generator).to(dtype).transpose(0, 1)
    value = torch.randn(heads, tokens, value_dim, generator=generator).to(dtype).transpose(0, 1)
    blocks = tokens // kv_block_size + 3
    if is_joint:  # keys and values of a slot side by side in one buffer: the caches are strided views
        buffer = torch.full((blocks, kv_block_size, heads * (head_dim + value_dim)), float("nan"), dtype=dtype)
        key_cache = buffer[..., : heads * head_dim].unflatten(-1, (heads, head_dim))
        value_cache = buffer[..., heads * head_dim :].unflatten(-1, (heads, value_dim))
    else:
        key_cache = torch.full((blocks, kv_block_size, heads, head_dim), float("nan"), dtype=dtype)
        value_cache = torch.full((blocks, kv_block_size, heads, value_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(blocks * kv_block_size, generator=generator)[:tokens]
    slots[1::3] = -1
    return key, value, key_cache, value_cache, slots


def expected(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot != -1:
            block, offset = divmod(slot, key_cache.shape[1])
            key_cache[block, offset] = key[token]
            value_cache[block, offset] = value[token]
    return key_cache, value_cache


@pytest.mark.parametrize("body", ["reference", "triton", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "value_dim", "kv_block_size"),
    [(1, 1, 16, 16, 16), (7, 3, 64, 64, 5), (13, 2, 80, 48, 16), (3, 5, 1, 3, 1)],
)
def test_tokens_land_in_their_slots_and_nothing_else_changes(
    body: str, dtype: torch.dtype, is_joint: bool, tokens: int, heads: int, head_dim: int, value_dim: int,
    kv_block_size: int,
) -> None:  # fmt: skip
    store = store_of(body)
    case = make_case(tokens, heads, head_dim, value_dim, kv_block_size, dtype, is_joint=is_joint)
    wanted = expected(*case)
    store(*case)
    for cache, want in zip(case[2:4], wanted, strict=True):
        assert torch.equal(cache.isnan(), want.isnan())  # a copy: exact, and untouched slots are still NaN
        assert torch.equal(cache.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("body", ["reference", "triton", "native"])
def test_no_token_and_only_padding_are_legal(body: str) -> None:
    store = store_of(body)
    key, value, key_cache, value_cache, slots = make_case(4, 2, 16, 16, 8, torch.float32, is_joint=False)
    store(key[:0], value[:0], key_cache, value_cache, slots[:0])
    store(key, value, key_cache, value_cache, torch.full_like(slots, -1))
    assert key_cache.isnan().all()
    assert value_cache.isnan().all()


def quantized(row: Tensor) -> tuple[Tensor, float]:
    """Codes and scale of one token and head, as the formula says, in float32."""
    scale = float(row.float().abs().max() / 127) or 1.0
    return torch.round(row.float() / torch.tensor(scale)), scale


@pytest.mark.parametrize("body", ["reference", "triton", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "value_dim", "kv_block_size"), [(1, 1, 16, 16, 16), (7, 3, 64, 24, 8)]
)
def test_codes_have_a_scale_of_their_own_for_each_token_and_head(
    body: str, dtype: torch.dtype, tokens: int, heads: int, head_dim: int, value_dim: int, kv_block_size: int
) -> None:
    store = store_of(body)
    key, value, *caches, slots = make_case(tokens, heads, head_dim, value_dim, kv_block_size, dtype, is_joint=False)
    key[0, 0] = 0  # zeros have the scale 1
    codes = [torch.full_like(cache, 99, dtype=torch.int8) for cache in caches]
    scales = [torch.full(cache.shape[:3], float("nan")) for cache in caches]
    store(key, value, *codes, slots, *scales)
    for tensor, code, scale in zip((key, value), codes, scales, strict=True):
        written = 0
        for token, slot in enumerate(slots.tolist()):
            for head in range(heads if slot != -1 else 0):
                place = (*divmod(slot, kv_block_size), head)
                wanted, wanted_scale = quantized(tensor[token, head])
                assert torch.equal(code[place].float(), wanted)
                assert float(scale[place]) == wanted_scale
                written += 1
        assert int((~scale.isnan()).sum()) == written
        assert int((code == 99).all(-1).sum()) == scale.numel() - written


@pytest.mark.parametrize("body", ["reference", "native"])
def test_a_slot_outside_the_cache_is_an_error_on_the_cpu(body: str) -> None:
    key, value, key_cache, value_cache, slots = make_case(4, 2, 16, 16, 8, torch.float32, is_joint=False)
    slots[0] = key_cache.shape[0] * 8
    with pytest.raises(IndexError):
        store_of(body)(key, value, key_cache, value_cache, slots)


def change(index: int, function: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], None]:
    def apply(case: list[Tensor]) -> None:
        case[index] = function(case[index])

    return apply


@pytest.mark.parametrize("body", ["reference", "triton", "native", "public"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(0, lambda t: t.unsqueeze(0)), r"key has 4 dimensions, allowed is 3"),
        (change(2, lambda t: t[0]), r"key_cache has 3 dimensions, allowed is 4"),
        (change(3, lambda t: t[..., :8]), r"value_cache ends in \[2, 8\], allowed is what value has: \[2, 16\]"),
        (change(0, lambda t: t.double()), r"key is torch.float64 .* one of torch.float32, torch.bfloat16"),
        (change(2, lambda t: t.bfloat16()), r"key is torch.float32 and key_cache torch.bfloat16, allowed is the same"),
        (change(2, lambda t: t.transpose(1, 3).contiguous().transpose(1, 3)), r"along head_dim, allowed is 1"),
        (change(1, lambda t: t[:3]), r"may differ in head_dim only"),
        (change(2, lambda t: t.to(torch.int8)), r"key_scale is None and key_cache torch.int8, allowed is a scale for"),
        (change(4, lambda t: t.int()), r"slot_mapping is torch.int32 \[4\], allowed is torch.int64 \[4\]"),
        (change(4, lambda t: t[:2]), r"slot_mapping is torch.int64 \[2\], allowed is torch.int64 \[4\]"),
        (change(4, lambda t: t.to("meta")), r"allowed is one device"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_allowed_values(
    body: str, spoil: Callable[[list[Tensor]], None], message: str
) -> None:
    bodies: dict[str, Store] = {"reference": reference.store_kv_cache, "public": public_store_kv_cache}
    store = bodies.get(body) or store_of(body)
    case = list(make_case(4, 2, 16, 16, 8, torch.float32, is_joint=False))
    spoil(case)
    with pytest.raises(ValueError, match=message):
        store(*case)


def test_the_launcher_refuses_what_the_kernel_cannot_read() -> None:
    store = interpreted()
    key, value, key_cache, value_cache, slots = make_case(4, 2, 16, 16, 8, torch.float32, is_joint=False)
    with pytest.raises(ValueError, match="slot_mapping has the stride 2, allowed is 1"):
        store(key, value, key_cache, value_cache, slots.repeat_interleave(2)[::2])
    scale = torch.zeros(key_cache.shape[0], 2 * 8, 2)[:, ::2]
    codes = key_cache.to(torch.int8), value_cache.to(torch.int8)
    with pytest.raises(ValueError, match=r"key_scale has the strides \(32, 4, 1\), allowed is a contiguous tensor"):
        store(key, value, *codes, slots, scale, scale)
    wide = torch.zeros(1, 1, 2048)
    with pytest.raises(ValueError, match="head_dim=2048, allowed is up to 1024"):
        store(wide, wide, wide.unsqueeze(0), wide.unsqueeze(0), slots[:1])


@pytest.mark.parametrize("operation", TRITON_MODULES)
def test_every_triton_body_has_the_signature_of_its_reference(operation: str) -> None:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    module = importlib.import_module(f"quantkit_kernels.{TRITON_MODULES[operation]}")
    assert inspect.signature(getattr(module, operation)) == inspect.signature(getattr(reference, operation))


def test_the_choice_says_why() -> None:
    choice = choose("store_kv_cache", torch.device("cpu"))
    if native_blocker() is None:
        assert str(choice) == "store_kv_cache: cpu native (tensors are on cpu, compiled for AVX2)"
    else:
        assert str(choice) == f"store_kv_cache: reference (tensors are on cpu; {native_blocker()})"
