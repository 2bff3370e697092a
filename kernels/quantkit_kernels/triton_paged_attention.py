"""Triton body of paged_attention: one kernel for chunks of prompts and for single tokens.

A program does a tile of query rows of one sequence and one head of keys. The query heads that share keys are folded
into the rows (row = query * heads of the group + head), so that a key is loaded once for all of them. Sequences of few
queries are also cut along their keys, into parts of a fixed size, which `triton_merge_splits` puts together: the sums
of a sequence do not depend on the batch that it is in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import CAPABILITIES, Launch, signature_of
from quantkit_kernels.paged_attention_plan import configuration, has_small_tiles, kernel_constants, split_plan
from quantkit_kernels.reference import check_paged_attention
from quantkit_kernels.triton_merge_splits import merge_splits

ALIGNMENT = 8  # numbers; strides are multiples, so that rows are read 128 bits at a time
AMPERE, NEWER = (80,), (90, 100)  # compute capabilities
LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _find_sequence(cu_seqlens_ptr, query_block, num_seqs, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence of a tile, where sequence s has the tiles from cu_seqlens[s] // BLOCK_Q + s on."""
    low = query_block * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_left = tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle > query_block
        high = tl.where(is_left, middle, high)
        low = tl.where(is_left, low, middle)
    return low


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,
    acc,
    row_max,
    row_sum,
    row_place,
    first,
    last,
    context_len,
    score_factor,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_table_ptr,
    STRIDES: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys first .. last - 1; without MASKED every row sees all of them."""
    d = tl.arange(0, BLOCK_D)[None, :]
    dv = tl.arange(0, BLOCK_DV)[None, :]
    for start in range(first, last, TILE):
        place = start + tl.arange(0, TILE)
        is_key = place < context_len  # what lies behind may be anything, NaN too
        if MASKED:
            block = tl.load(block_table_ptr + place // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        else:
            block = tl.load(block_table_ptr + place // BLOCK_SIZE).to(tl.int64)
        slot = place % BLOCK_SIZE
        key_rows = (block * STRIDES[0] + slot * STRIDES[1])[:, None]
        value_rows = (block * STRIDES[2] + slot * STRIDES[3])[:, None]
        key = tl.load(key_ptr + key_rows + d, mask=(is_key[:, None] & (d < D)) if MASKED else (d < D), other=0)
        value = tl.load(
            value_ptr + value_rows + dv, mask=(is_key[:, None] & (dv < D_V)) if MASKED else (dv < D_V), other=0
        )
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="tf32x3") * score_factor
        if key_scale_ptr is not None:
            scales = block * STRIDES[4] + slot * STRIDES[5]
            score *= tl.load(key_scale_ptr + scales, mask=is_key, other=0.0)[None, :]
        if SOFTCAP > 0:  # score_factor holds 2 * log2(e) / SOFTCAP then; tanh as one exponential, which may overflow
            score = SOFTCAP * _LOG2_E - (2 * SOFTCAP * _LOG2_E) / (tl.exp2(score) + 1.0)
        if MASKED:
            is_visible = place[None, :] <= row_place[:, None]
            if WINDOW > 0:
                is_visible &= place[None, :] > row_place[:, None] - WINDOW
            score = tl.where(is_visible, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, axis=1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weight, axis=1)
        if value_scale_ptr is not None:
            scales = block * STRIDES[4] + slot * STRIDES[5]
            weight *= tl.load(value_scale_ptr + scales, mask=is_key, other=0.0)[None, :]
        acc = tl.dot(
            weight.to(query.dtype), value.to(query.dtype), acc * shrink[:, None], input_precision="tf32x3"
        )  # fmt: skip
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_tables_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    out_ptr,  # or, if SPLIT, [T, H, splits, D_V] float32
    lse_ptr,  # if SPLIT, [T, H, splits] float32, base 2
    score_factor,
    num_seqs,
    split_keys,
    stride_query_token,  # in units of 8 numbers
    stride_query_head,  # likewise
    stride_table,
    STRIDES: tl.constexpr,  # of a block and a slot of keys, of values, of scales
    HEAD_STRIDES: tl.constexpr,  # of a head of keys, of values
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
    FOLDED: tl.constexpr,  # every sequence is one tile
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if FOLDED:
        sequence = tl.program_id(0)
        first_query = 0
        query_start = tl.load(cu_seqlens_ptr + sequence)
    else:
        query_block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a sequence have most keys
        sequence = _find_sequence(cu_seqlens_ptr, query_block, num_seqs, BLOCK_Q)
        query_start = tl.load(cu_seqlens_ptr + sequence)
        first_query = (query_block - query_start // BLOCK_Q - sequence) * BLOCK_Q
    query_len = tl.load(cu_seqlens_ptr + sequence + 1) - query_start
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + sequence)

    m = tl.arange(0, BLOCK_M)
    q = first_query + m // GROUP
    is_row = (m < BLOCK_Q * GROUP) & (q < query_len)
    token = (query_start + q).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    out_row = token * NUM_HEADS + head
    if SPLIT:
        out_row = out_row * tl.num_programs(2) + split

    # Keys in whole tiles: `begin` to `window_end` are masked by the window, to `full_end` seen by all, to `end` causal.
    first_place = context_len - query_len + first_query
    last_place = tl.minimum(first_place + BLOCK_Q, context_len) - 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_place - WINDOW + 1, 0) // TILE * TILE
    begin += split * split_keys
    end = tl.minimum(last_place + 1, begin + split_keys)
    if SPLIT:  # noqa: SIM102
        if begin >= end:
            tl.store(lse_ptr + out_row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            return
    window_end = begin
    if WINDOW > 0:
        window_end = tl.minimum(tl.cdiv(tl.maximum(last_place - WINDOW + 1, begin), TILE) * TILE, end)
    full_end = tl.minimum(tl.maximum((first_place + 1) // TILE * TILE, window_end), end)

    d = tl.arange(0, BLOCK_D)[None, :]
    query_row = ((token * stride_query_token + head * stride_query_head) * 8)[:, None]
    query = tl.load(query_ptr + query_row + d, mask=is_row[:, None] & (d < D), other=0.0)
    row_place = context_len - query_len + q
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * HEAD_STRIDES[0]
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * HEAD_STRIDES[1]
    if key_scale_ptr is not None:
        key_scale_ptr += kv_head
        value_scale_ptr += kv_head
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW > 0:
        acc, row_max, row_sum = _attend(
            query, acc, row_max, row_sum, row_place, begin, window_end, context_len, score_factor,
            key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr,
            STRIDES, D, D_V, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_D, BLOCK_DV, TILE, True,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        query, acc, row_max, row_sum, row_place, window_end, full_end, context_len, score_factor,
        key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr,
        STRIDES, D, D_V, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_D, BLOCK_DV, TILE, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        query, acc, row_max, row_sum, row_place, full_end, end, context_len, score_factor,
        key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr,
        STRIDES, D, D_V, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_D, BLOCK_DV, TILE, True,
    )  # fmt: skip

    total = tl.where(row_sum == 0, 1.0, row_sum)  # a row that sees no key gets zeros
    out = acc / total[:, None]
    dv = tl.arange(0, BLOCK_DV)[None, :]
    mask = is_row[:, None] & (dv < D_V)
    tl.store(out_ptr + out_row[:, None] * D_V + dv, out.to(out_ptr.dtype.element_ty), mask=mask)
    if SPLIT:
        tl.store(lse_ptr + out_row, row_max + tl.log2(total), mask=is_row)


def _check_layout(query: Tensor, caches: tuple[Tensor, Tensor], small: dict[str, Tensor | None]) -> None:
    """Raise ValueError, with the allowed values, unless the kernel can read 128 bits at a time, of one type."""
    if caches[0].dtype not in (query.dtype, torch.int8):
        raise ValueError(f"key_cache is {caches[0].dtype}, allowed here is {query.dtype} or torch.int8")
    for name, tensor in (("query", query), ("key_cache", caches[0]), ("value_cache", caches[1])):
        strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1]
        if any(stride % ALIGNMENT for stride in strides):
            raise ValueError(f"{name} has the strides {tensor.stride()}, allowed are multiples of {ALIGNMENT}")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} begins at {tensor.data_ptr():#x}, allowed is a multiple of 16")
    for name, scale in small.items():
        if scale is not None and not scale.is_contiguous():
            raise ValueError(f"{name} has the strides {scale.stride()}, allowed is a contiguous tensor")


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
    """Launch the Triton kernels; arguments and result as `quantkit_kernels.reference.paged_attention`.

    Precision: products in the type of query (float32 as three of tf32), sums in float32; softmax weights are rounded
        to the type of query. The bits of a sequence depend on nothing but itself, as long as max_query_len chooses the
        same tiles and num_splits is None.
    Needs: strides that are multiples of 8 and data that begins at a multiple of 16 bytes; contiguous scales.

    Raises:
        ValueError: shapes, types, strides, devices or numbers that do not fit.
    """
    check_paged_attention(
        query, key_cache, value_cache, block_tables, cu_seqlens, context_lens,
        sliding_window=sliding_window, softcap=softcap, key_scale=key_scale, value_scale=value_scale,
        max_query_len=max_query_len, max_context_len=max_context_len, num_splits=num_splits,
    )  # fmt: skip
    _check_layout(query, (key_cache, value_cache), {"key_scale": key_scale, "value_scale": value_scale})
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = value_cache.shape[2:]
    out = torch.empty((num_tokens, num_heads, value_dim), dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    group = num_heads // num_kv_heads
    chosen = configuration(
        max_query_len, group, max(head_dim, value_dim), query.element_size(),
        is_int8=key_scale is not None, ampere=has_small_tiles(query.device),
    )  # fmt: skip
    splits, split_keys = split_plan(max_query_len, max_context_len, group, sliding_window, chosen.tile, num_splits)
    constants = kernel_constants(
        num_heads, key_cache, value_cache, sliding_window, softcap, max_query_len, chosen
    )  # fmt: skip
    num_seqs = len(context_lens)
    tiles = num_seqs if constants["FOLDED"] else num_tokens // (chosen.block_m // group) + num_seqs
    target, lse = out, None
    if splits > 1:
        target = torch.empty((num_tokens, num_heads, splits, value_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty((num_tokens, num_heads, splits), dtype=torch.float32, device=query.device)
    with torch.cuda.device(query.device) if query.is_cuda else torch.device("cpu"):
        _paged_attention_kernel[(tiles, num_kv_heads, splits)](
            query, key_cache, value_cache, key_scale, value_scale, block_tables, cu_seqlens, context_lens, target, lse,
            scale * LOG2_E if softcap is None else 2 * scale * LOG2_E / softcap,
            num_seqs, split_keys, query.stride(0) // ALIGNMENT, query.stride(1) // ALIGNMENT, block_tables.stride(0),
            **constants, SPLIT=splits > 1, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip
    if lse is not None:
        merge_splits(target, lse, out)
    return out


def _launch(
    label: str, model: tuple[int, int, int], sequences: int, query_len: int, context_len: int,
    *, window: int | None = None, softcap: float | None = None, cache: str = "bf16",
    capabilities: tuple[int, ...] = CAPABILITIES,
) -> Launch:  # fmt: skip
    """``model`` is (heads, heads of keys, head_dim); the bytes are those of the keys and values, each once."""
    num_heads, num_kv_heads, head_dim = model
    caches = torch.empty((1 << 20, 16, num_kv_heads, head_dim), device="meta")
    chosen = configuration(
        query_len, num_heads // num_kv_heads, head_dim, 2, is_int8=cache == "i8", ampere=capabilities == AMPERE
    )  # fmt: skip
    splits, _ = split_plan(query_len, context_len, num_heads // num_kv_heads, window, chosen.tile, None)
    constexprs = kernel_constants(num_heads, caches, caches, window, softcap, query_len, chosen)
    constexprs["SPLIT"] = splits > 1
    types = {
        "query_ptr": "*bf16", "block_tables_ptr": "*i32", "cu_seqlens_ptr": "*i32", "context_lens_ptr": "*i32",
        "key_cache_ptr": f"*{cache}", "value_cache_ptr": f"*{cache}", "score_factor": "fp32",
        "out_ptr": "*fp32" if splits > 1 else "*bf16",
    }  # fmt: skip
    if cache == "i8":
        types |= dict.fromkeys(("key_scale_ptr", "value_scale_ptr"), "*fp32")
    else:
        constexprs |= dict.fromkeys(("key_scale_ptr", "value_scale_ptr"))
    if splits > 1:
        types["lse_ptr"] = "*fp32"
    else:
        constexprs["lse_ptr"] = None
    signature = signature_of(_paged_attention_kernel, types, constexprs)
    seen = min(context_len, context_len if window is None else window + query_len)
    pairs = query_len * (seen - (query_len - 1) / 2) if window is None else query_len * min(context_len, window)
    key_bytes = head_dim * 2 if cache == "bf16" else head_dim + 4
    return Launch(
        op="paged_attention",
        label=label,
        kernel=_paged_attention_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        bytes=sequences * (2 * seen * num_kv_heads * key_bytes + 4 * query_len * num_heads * head_dim),
        flops=int(4 * sequences * num_heads * head_dim * pairs),
        flop_dtype="bf16",
        needs=("mma", "128-bit loads"),
        divisible_by_16=(*(name for name in signature if signature[name].startswith("*")), "split_keys"),
        capabilities=capabilities,
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("llama-3.1-8b decode, 32 sequences of 4096", (32, 8, 128), 32, 1, 4096),
    _launch("llama-3.1-8b decode, 32 sequences of 4096, int8", (32, 8, 128), 32, 1, 4096, cache="i8"),
    _launch("smollm2-135m decode, 32 sequences of 400", (9, 3, 64), 32, 1, 400),
    _launch("gemma-2-9b decode, 8 sequences of 8192, window 4096", (16, 8, 256), 8, 1, 8192, window=4096, softcap=50.0),
    _launch("gemma-2-9b prefill, 4096 tokens, window 1024", (16, 8, 256), 1, 4096, 4096, window=1024, softcap=50.0),
    *(
        _launch(f"{label}{name}", model, 1, query_len, context_len, cache=cache, capabilities=capabilities)
        for label, model, query_len, context_len, cache in (
            ("llama-3.1-8b prefill, 4096 tokens", (32, 8, 128), 4096, 4096, "bf16"),
            ("llama-3.1-8b prefill, 512 tokens behind 8192, int8", (32, 8, 128), 512, 8704, "i8"),
            ("phi-3-mini prefill, 4096 tokens, heads of 96", (32, 32, 96), 4096, 4096, "bf16"),
        )
        for capabilities, name in ((AMPERE, ", tiles for Ampere"), (NEWER, ""))
    ),
)
