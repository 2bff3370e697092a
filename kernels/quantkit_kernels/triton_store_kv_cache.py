"""Triton body of store_kv_cache: one program per new token and a few heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.eight_bits import codes_of, scale_of
from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.reference import check_store_kv_cache

MAX_HEAD_DIM = 1024
TILE = 1024  # numbers that a program copies at a time, 8 a thread


@triton.jit
def _store_rows(  # type: ignore[no-untyped-def]
    new_ptr,
    cache_ptr,
    scale_ptr,
    new_row,
    cache_row,
    scale_row,
    is_stored,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = is_stored[:, None] & (d < HEAD_DIM)
    new = tl.load(new_ptr + new_row[:, None] + d, mask=mask, other=0.0)
    if scale_ptr is not None:
        wide = new.to(tl.float32)
        scale = scale_of(wide, 1)
        tl.store(scale_ptr + scale_row, scale, mask=is_stored)
        new = codes_of(wide, tl.broadcast_to(scale[:, None], wide.shape))
    tl.store(cache_ptr + cache_row[:, None] + d, new, mask=mask)


@triton.jit
def _store_kv_cache_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slot_mapping_ptr,
    num_heads,
    kv_block_size,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    slot = tl.load(slot_mapping_ptr + token)
    is_stored = head < tl.where(slot >= 0, num_heads, 0)  # -1 is padding
    kv_block = slot // kv_block_size
    offset = slot % kv_block_size
    scale_row = slot * num_heads + head

    key_row = token * stride_key_token + head * stride_key_head
    cache_row = kv_block * stride_key_cache_block + offset * stride_key_cache_slot + head * stride_key_cache_head
    _store_rows(
        key_ptr, key_cache_ptr, key_scale_ptr, key_row, cache_row, scale_row, is_stored, HEAD_DIM_K, BLOCK_D
    )  # fmt: skip
    value_row = token * stride_value_token + head * stride_value_head
    cache_row = kv_block * stride_value_cache_block + offset * stride_value_cache_slot + head * stride_value_cache_head
    _store_rows(
        value_ptr, value_cache_ptr, value_scale_ptr, value_row, cache_row, scale_row, is_stored, HEAD_DIM_V, BLOCK_D
    )  # fmt: skip


def tile_of(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """(heads, numbers of a head, warps) of a program; powers of two."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(max(1, TILE // block_d), triton.next_power_of_2(num_heads))
    return block_h, block_d, max(1, block_h * block_d // 256)


def store_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Launch the Triton kernel; arguments and effect as `quantkit_kernels.reference.store_kv_cache`.

    Precision: a copy, exact; with int8 caches the codes and scales of the reference, exact.
    Needs: unit stride along head_dim and in slot_mapping; head_dim up to 1024; contiguous scales; any other strides.
        Runs on CUDA devices, and on the CPU in Triton's interpreter.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    check_store_kv_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    head_dim = max(key.shape[-1], value.shape[-1])
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}, allowed is up to {MAX_HEAD_DIM}")
    if slot_mapping.numel() and slot_mapping.stride(0) != 1:
        raise ValueError(f"slot_mapping has the stride {slot_mapping.stride(0)}, allowed is 1")
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None and not scale.is_contiguous():
            raise ValueError(f"{name} has the strides {scale.stride()}, allowed is a contiguous tensor")
    num_tokens, num_heads = key.shape[:2]
    if num_tokens == 0 or num_heads == 0:
        return
    block_h, block_d, num_warps = tile_of(num_heads, head_dim)
    device = torch.cuda.device(key.device) if key.is_cuda else torch.device("cpu")
    with device:
        _store_kv_cache_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
            key,
            value,
            key_cache,
            value_cache,
            key_scale,
            value_scale,
            slot_mapping,
            num_heads,
            key_cache.shape[1],
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            HEAD_DIM_K=key.shape[-1],
            HEAD_DIM_V=value.shape[-1],
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=num_warps,
        )


def _launch(label: str, tokens: int, num_heads: int, head_dim: int, *, is_int8: bool) -> Launch:
    block_h, block_d, num_warps = tile_of(num_heads, head_dim)
    constexprs: dict[str, object] = {
        "HEAD_DIM_K": head_dim, "HEAD_DIM_V": head_dim, "BLOCK_H": block_h, "BLOCK_D": block_d
    }  # fmt: skip
    types = dict.fromkeys(("key_ptr", "value_ptr"), "*bf16") | {"slot_mapping_ptr": "*i64"}
    types |= dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), "*i8" if is_int8 else "*bf16")
    if is_int8:
        types |= dict.fromkeys(("key_scale_ptr", "value_scale_ptr"), "*fp32")
    else:
        constexprs |= dict.fromkeys(("key_scale_ptr", "value_scale_ptr"))
    signature = signature_of(_store_kv_cache_kernel, types, constexprs)
    numbers = 2 * tokens * num_heads * head_dim
    return Launch(
        op="store_kv_cache",
        label=label,
        kernel=_store_kv_cache_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        num_stages=3,
        bytes=numbers * 3 + 8 * tokens * num_heads if is_int8 else numbers * 4,
        flops=0,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=tuple(n for n in signature if n.startswith("stride") or signature[n].startswith("*")),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("llama-3.1-8b, 2048 tokens, bf16", 2048, 8, 128, is_int8=False),
    _launch("llama-3.1-8b, 2048 tokens, int8", 2048, 8, 128, is_int8=True),
    _launch("smollm2-135m, 32 tokens, bf16", 32, 3, 64, is_int8=False),
)
