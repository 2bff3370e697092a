"""Triton body of store_kv_cache: one program per new token and head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.reference import check_store_kv_cache

MAX_HEAD_DIM = 1024


@triton.jit
def _store_kv_cache_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
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
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    kv_block = slot // kv_block_size
    offset = slot % kv_block_size
    d = tl.arange(0, BLOCK_D)

    mask_k = d < tl.where(slot >= 0, HEAD_DIM_K, 0)  # -1 is padding
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + d, mask=mask_k)
    key_row = kv_block * stride_key_cache_block + offset * stride_key_cache_slot + head * stride_key_cache_head
    tl.store(key_cache_ptr + key_row + d, key, mask=mask_k)

    mask_v = d < tl.where(slot >= 0, HEAD_DIM_V, 0)
    value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + d, mask=mask_v)
    value_row = kv_block * stride_value_cache_block + offset * stride_value_cache_slot + head * stride_value_cache_head
    tl.store(value_cache_ptr + value_row + d, value, mask=mask_v)


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Launch the Triton kernel; arguments and effect as `quantkit_kernels.reference.store_kv_cache`.

    Precision: a copy, exact.
    Needs: unit stride along head_dim and in slot_mapping; head_dim up to 1024; any other strides. Runs on CUDA
        devices, and on the CPU in Triton's interpreter.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    check_store_kv_cache(key, value, key_cache, value_cache, slot_mapping)
    head_dim = max(key.shape[-1], value.shape[-1])
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}, allowed is up to {MAX_HEAD_DIM}")
    if slot_mapping.numel() and slot_mapping.stride(0) != 1:
        raise ValueError(f"slot_mapping has the stride {slot_mapping.stride(0)}, allowed is 1")
    num_tokens, num_heads = key.shape[:2]
    if num_tokens == 0 or num_heads == 0:
        return
    device = torch.cuda.device(key.device) if key.is_cuda else torch.device("cpu")
    with device:
        _store_kv_cache_kernel[(num_tokens, num_heads)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            key_cache.shape[1],
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            HEAD_DIM_K=key.shape[-1],
            HEAD_DIM_V=value.shape[-1],
            BLOCK_D=triton.next_power_of_2(head_dim),
        )
