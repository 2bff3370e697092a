"""Compiled CPU bodies of what a decode step does between its products; native/rows.cpp and native/attention.cpp.

A call takes as long as the arithmetic of a few tokens, so arguments are looked at only as far as memory is safe.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_rotary import side_by_side
from quantkit_kernels.native_library import native_library
from quantkit_kernels.reference.attention import MAX_HEAD_DIM

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # as in native/vectors.h
FLOATING = {dtype: number for dtype, number in TYPES.items() if dtype != torch.int8}
BODY = "cpu native"
NOT_CONTIGUOUS = "key_scale or value_scale is not contiguous, allowed is a contiguous tensor"
PART = 256  # as in native/attention.cpp


class _Stored(Structure):
    _fields_ = (
        ("source", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64), ("columns", c_int64),
        ("cache", c_void_p), ("block_stride", c_int64), ("slot_stride", c_int64), ("cache_head_stride", c_int64),
        ("scale", c_void_p),
    )  # fmt: skip


class CacheStructure(Structure):
    """Keys or values as native/bodies.h has them."""

    _fields_ = (
        ("numbers", c_void_p), ("block_stride", c_int64), ("slot_stride", c_int64), ("head_stride", c_int64),
        ("columns", c_int64), ("scale", c_void_p),
    )  # fmt: skip


class _Attention(Structure):
    _fields_ = (
        ("type", c_int), ("query", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64),
        ("key", CacheStructure), ("value", CacheStructure), ("tables", c_void_p), ("table_stride", c_int64),
        ("starts", c_void_p), ("lengths", c_void_p),
        ("sequences", c_int64), ("tokens", c_int64), ("blocks", c_int64),
        ("heads", c_int64), ("kv_heads", c_int64), ("block_size", c_int64), ("max_length", c_int64),
        ("scale", c_float), ("softcap", c_float), ("window", c_int64), ("parts", c_int64),
        ("out", c_void_p), ("partial", c_void_p),
    )  # fmt: skip


@cache
def _library() -> Any:
    library = native_library()
    pointer, whole, number = c_void_p, c_int64, c_int
    arguments: dict[str, list[Any]] = {
        "rms_norm": [number, pointer, whole, pointer, whole, pointer, pointer, pointer, whole, whole, c_float, number],
        "silu_mul": [number, pointer, whole, pointer, whole, whole, number],
        "rotary_embedding": [number, pointer, whole, whole, pointer, pointer, whole, whole, whole, number, number],
        "store_kv_cache": [
            number, number, POINTER(_Stored), POINTER(_Stored), pointer, whole, whole, whole, whole, number,
        ],
        "paged_attention": [number, POINTER(_Attention), number],
    }  # fmt: skip
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = c_int if name in ("store_kv_cache", "paged_attention") else None
    return library


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """As `reference.rms_norm`. Precision: float32, rounded once; the sum of squares in another order."""
    if x.dtype not in FLOATING or x.stride(1) != 1 or weight.shape != x.shape[1:]:
        reference.check_rms_norm(x, weight, residual)
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape or residual.stride(1) != 1):
        reference.check_rms_norm(x, weight, residual)
    rows, columns = x.shape
    factor = (weight + offset if offset else weight).float().contiguous()
    out = torch.empty(rows, columns, dtype=x.dtype)
    total = None if residual is None else torch.empty(rows, columns, dtype=x.dtype)
    _library().rms_norm(
        FLOATING[x.dtype], x.data_ptr(), x.stride(0), _pointer(residual), 0 if residual is None else residual.stride(0),
        factor.data_ptr(), _pointer(total), out.data_ptr(), rows, columns, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out if total is None else (out, total)


def silu_mul(x: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    if x.dtype not in FLOATING or x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % 2:
        reference.check_gated(x)
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns, dtype=x.dtype)
    _library().silu_mul(
        FLOATING[x.dtype], x.data_ptr(), x.stride(0), out.data_ptr(), rows, columns, torch.get_num_threads()
    )
    return out


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """As `reference.rotary_embedding`; heads that lie side by side are turned in one call."""
    tokens, half = cos.shape
    heads_fit = q.dtype == k.dtype and q.shape[::2] == k.shape[::2] and q.stride(2) == k.stride(2) == 1
    if (
        q.dtype not in FLOATING
        or not heads_fit
        or cos.shape != sin.shape
        or q.shape[0] != tokens
        or 2 * half > q.shape[2]
    ):
        reference.check_rotary_embedding(q, k, cos, sin)
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    for heads in side_by_side(q, k):
        _library().rotary_embedding(
            FLOATING[q.dtype], heads.data_ptr(), heads.stride(0), heads.stride(1), cos.data_ptr(), sin.data_ptr(),
            tokens, heads.shape[1], half, interleaved, torch.get_num_threads(),
        )  # fmt: skip


def store_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """As `reference.store_kv_cache`; nothing is written if a slot is outside the cache."""
    if not (
        key.dim() == value.dim() == 3 and key_cache.dim() == value_cache.dim() == 4
        and is_cache(key_cache, key_scale) and is_cache(value_cache, value_scale)
        and key.dtype in FLOATING and key.dtype == value.dtype and key_cache.dtype == value_cache.dtype
        and key_cache.dtype in (key.dtype, torch.int8)
        and key.shape[:2] == value.shape[:2] and key_cache.shape[:2] == value_cache.shape[:2]
        and key.shape[1:] == key_cache.shape[2:] and value.shape[1:] == value_cache.shape[2:]
        and key.stride(2) == value.stride(2) == 1 and value.is_cpu and slot_mapping.is_cpu
        and slot_mapping.dtype == torch.int64 and slot_mapping.shape == key.shape[:1]
    ):  # fmt: skip
        reference.check_store_kv_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
        raise ValueError(NOT_CONTIGUOUS)
    parts = [
        _Stored(
            part.data_ptr(), part.stride(0), part.stride(1), part.shape[2],
            cache_.data_ptr(), cache_.stride(0), cache_.stride(1), cache_.stride(2), _pointer(scale),
        )
        for part, cache_, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale))
    ]  # fmt: skip
    slots = slot_mapping.contiguous()
    is_written = _library().store_kv_cache(
        TYPES[key.dtype], TYPES[key_cache.dtype], byref(parts[0]), byref(parts[1]), slots.data_ptr(), slots.shape[0],
        key.shape[1], *key_cache.shape[:2], torch.get_num_threads(),
    )  # fmt: skip
    if not is_written:
        raise IndexError(f"slot_mapping holds {int(slots.min())} to {int(slots.max())}, "
                         f"allowed is -1 to {key_cache.shape[0] * key_cache.shape[1] - 1}")  # fmt: skip


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    max_query_len: int,
    max_context_len: int,
    num_splits: int | None = None,
) -> Tensor:
    """As `reference.paged_attention`, for blocks of any size; ``num_splits`` is not read.

    A query's result depends on nothing but its own keys: neither on the batch nor on the number of threads.

    Precision: float32, rounded once.
    """
    if not (
        query.dim() == 3 and key_cache.dim() == value_cache.dim() == 4 and query.stride(2) == 1
        and is_cache(key_cache, key_scale) and is_cache(value_cache, value_scale)
        and query.dtype in FLOATING and key_cache.dtype == value_cache.dtype
        and (query.dtype == torch.float32 or key_cache.dtype in (query.dtype, torch.int8))
        and key_cache.shape[3] == query.shape[2] and key_cache.shape[:3] == value_cache.shape[:3]
        and query.shape[1] % key_cache.shape[2] == query.shape[2] % 8 == value_cache.shape[3] % 8 == 0
        and 0 < query.shape[2] <= MAX_HEAD_DIM >= value_cache.shape[3] > 0
        and all(lengths.is_cpu and lengths.dtype == torch.int32 and lengths.stride(-1) == 1
                for lengths in (block_tables, cu_seqlens, context_lens))
        and context_lens.shape[0] + 1 == cu_seqlens.shape[0] and block_tables.dim() == 2
        and block_tables.shape[0] == context_lens.shape[0]
        and all(number is None or number > 0 for number in (sliding_window, softcap, num_splits))
        and max_query_len >= 0 <= max_context_len <= block_tables.shape[1] * key_cache.shape[1]
    ):  # fmt: skip
        reference.check_paged_attention(
            query, key_cache, value_cache, block_tables, cu_seqlens, context_lens,
            sliding_window=sliding_window, softcap=softcap, key_scale=key_scale, value_scale=value_scale,
            max_query_len=max_query_len, max_context_len=max_context_len, num_splits=num_splits,
        )  # fmt: skip
        raise ValueError(NOT_CONTIGUOUS)
    tokens, heads, _ = query.shape
    value_dim = value_cache.shape[3]
    parts = -(-max_context_len // PART)
    out = torch.empty(tokens, heads, value_dim, dtype=query.dtype)
    partial = torch.empty(tokens, heads, parts, value_dim + 2) if parts > 1 else None
    step = _Attention(
        FLOATING[query.dtype], query.data_ptr(), query.stride(0), query.stride(1),
        cache_structure(key_cache, key_scale), cache_structure(value_cache, value_scale),
        block_tables.data_ptr(), block_tables.stride(0), cu_seqlens.data_ptr(), context_lens.data_ptr(),
        context_lens.shape[0], tokens, key_cache.shape[0], heads, key_cache.shape[2], key_cache.shape[1],
        max_context_len, scale, softcap or 0.0, sliding_window or 0, max(1, parts), out.data_ptr(), _pointer(partial),
    )  # fmt: skip
    if not _library().paged_attention(TYPES[key_cache.dtype], byref(step), torch.get_num_threads()):
        raise ValueError(f"cu_seqlens must rise from 0 to {tokens}, context_lens be 0 to {max_context_len}, and "
                         f"block_tables name blocks below {key_cache.shape[0]}")  # fmt: skip
    return out


def is_cache(cache: Tensor, scale: Tensor | None) -> bool:
    """Whether a cache can be read: numbers without scales, or codes with scales."""
    if cache.stride(3) != 1 or not cache.is_cpu or (scale is None) == (cache.dtype == torch.int8):
        return False
    return cache.dtype in FLOATING or (
        scale is not None and scale.is_cpu and scale.dtype == torch.float32
        and scale.shape == cache.shape[:3] and scale.is_contiguous()
    )  # fmt: skip


def cache_structure(numbers: Tensor, scale: Tensor | None) -> CacheStructure:
    """Of a cache and the scales of its codes."""
    return CacheStructure(numbers.data_ptr(), *numbers.stride()[:3], numbers.shape[3], _pointer(scale))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
