"""Compiled CPU bodies of what a decode step does between its products; native/rows.cpp and native/attention.cpp.

A call takes as long as the arithmetic of a few tokens, and the checks of the references longer. So each body asks first
whether all is well, in the order of what is cheap; only for a no the references' checks are made, to say what is wrong.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_rotary import side_by_side
from quantkit_kernels.native_arguments import check_dense, check_readable, is_readable, pointer
from quantkit_kernels.native_library import native_library
from quantkit_kernels.reference.attention import MAX_HEAD_DIM

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # as in native/vectors.h
FLOATING = {dtype: number for dtype, number in TYPES.items() if dtype != torch.int8}
BODY = "cpu native"
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
    address, whole, number = c_void_p, c_int64, c_int
    arguments: dict[str, list[Any]] = {
        "rms_norm": [number, address, whole, address, whole, address, address, address, whole, whole, c_float, number],
        "silu_mul": [number, address, whole, address, whole, whole, number],
        "rotary_embedding": [number, address, whole, whole, address, address, whole, whole, whole, number, number],
        "store_kv_cache": [
            number, number, POINTER(_Stored), POINTER(_Stored), address, whole, whole, whole, whole, number,
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
    is_well = (
        x.dim() == 2 and x.dtype in FLOATING and weight.dtype in FLOATING and weight.shape == x.shape[1:]
        and is_readable(x) and is_readable(weight)
    )  # fmt: skip
    if residual is not None:
        is_well = is_well and residual.dtype == x.dtype and residual.shape == x.shape and is_readable(residual)
    if not is_well:
        reference.check_rms_norm(x, weight, residual)
        check_readable(x=x, weight=weight, residual=residual)
    rows, columns = x.shape
    factor = (weight + offset if offset else weight).float().contiguous()
    out = torch.empty(rows, columns, dtype=x.dtype)
    total = None if residual is None else torch.empty(rows, columns, dtype=x.dtype)
    _library().rms_norm(
        FLOATING[x.dtype], x.data_ptr(), x.stride(0), pointer(residual), 0 if residual is None else residual.stride(0),
        factor.data_ptr(), pointer(total), out.data_ptr(), rows, columns, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out if total is None else (out, total)


def silu_mul(x: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    if x.dtype not in FLOATING or x.dim() != 2 or x.shape[1] % 2 or not is_readable(x):
        reference.check_gated(x)
        check_readable(x=x)
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns, dtype=x.dtype)
    _library().silu_mul(
        FLOATING[x.dtype], x.data_ptr(), x.stride(0), out.data_ptr(), rows, columns, torch.get_num_threads()
    )
    return out


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """As `reference.rotary_embedding`; heads that lie side by side are turned in one call."""
    if not (
        q.dim() == k.dim() == 3 and cos.dim() == 2 and q.dtype in FLOATING and k.dtype == q.dtype
        and cos.dtype in FLOATING and sin.dtype == cos.dtype and cos.shape == sin.shape
        and q.shape[0] == k.shape[0] == cos.shape[0] and q.shape[2] == k.shape[2] >= 2 * cos.shape[1] > 0
        and is_readable(q) and is_readable(k) and is_readable(cos) and is_readable(sin)
    ):  # fmt: skip
        reference.check_rotary_embedding(q, k, cos, sin)
        check_readable(q=q, k=k, cos=cos, sin=sin)
    tokens, half = cos.shape
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
        and is_readable(key) and is_readable(value) and slot_mapping.is_cpu
        and slot_mapping.dtype == torch.int64 and slot_mapping.shape == key.shape[:1]
    ):  # fmt: skip
        reference.check_store_kv_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
        check_readable(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
        _check_scales(key_cache, key_scale, value_scale)
    parts = [
        _Stored(
            part.data_ptr(), part.stride(0), part.stride(1), part.shape[2],
            cache_.data_ptr(), cache_.stride(0), cache_.stride(1), cache_.stride(2), pointer(scale),
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
        query.dim() == 3 and key_cache.dim() == value_cache.dim() == 4 and is_readable(query)
        and is_cache(key_cache, key_scale) and is_cache(value_cache, value_scale)
        and query.dtype in FLOATING and key_cache.dtype == value_cache.dtype
        and (query.dtype == torch.float32 or key_cache.dtype in (query.dtype, torch.int8))
        and key_cache.shape[3] == query.shape[2] and key_cache.shape[:3] == value_cache.shape[:3]
        and key_cache.shape[2] > 0 == query.shape[1] % key_cache.shape[2]
        and query.shape[2] % 8 == value_cache.shape[3] % 8 == 0
        and 0 < query.shape[2] <= MAX_HEAD_DIM >= value_cache.shape[3] > 0
        and all(is_readable(lengths) and lengths.dtype == torch.int32
                for lengths in (block_tables, cu_seqlens, context_lens))
        and context_lens.dim() == cu_seqlens.dim() == 1
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
        check_readable(query=query, key_cache=key_cache, value_cache=value_cache)
        _check_scales(key_cache, key_scale, value_scale)
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
        max_context_len, scale, softcap or 0.0, sliding_window or 0, max(1, parts), out.data_ptr(), pointer(partial),
    )  # fmt: skip
    if not _library().paged_attention(TYPES[key_cache.dtype], byref(step), torch.get_num_threads()):
        raise ValueError(f"cu_seqlens must rise from 0 to {tokens}, context_lens be 0 to {max_context_len}, and "
                         f"block_tables name blocks below {key_cache.shape[0]}")  # fmt: skip
    return out


def _check_scales(key_cache: Tensor, key_scale: Tensor | None, value_scale: Tensor | None) -> None:
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            check_dense(name, scale, torch.float32, key_cache.shape[:3])


def is_cache(cache: Tensor, scale: Tensor | None) -> bool:
    """Whether a cache can be read: numbers without scales, or codes with scales."""
    if not is_readable(cache) or (scale is None) == (cache.dtype == torch.int8):
        return False
    return cache.dtype in FLOATING or (
        scale is not None and scale.is_cpu and scale.dtype == torch.float32
        and scale.shape == cache.shape[:3] and scale.is_contiguous()
    )  # fmt: skip


def cache_structure(numbers: Tensor, scale: Tensor | None) -> CacheStructure:
    """Of a cache and the scales of its codes."""
    return CacheStructure(numbers.data_ptr(), *numbers.stride()[:3], numbers.shape[3], pointer(scale))
