"""paged_attention: queries of several sequences over keys and values that lie in blocks."""

import itertools

import torch
from torch import Tensor

from quantkit_kernels.reference.arguments import FLOATING, check_argument

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8  # rows of heads are read 128 bits at a time
BLOCK_SIZES = (8, 16, 32, 64, 128)


def is_head_dim(size: int) -> bool:
    """Whether the kernels of attention take heads of so many numbers."""
    return size % HEAD_DIM_STEP == 0 and HEAD_DIM_STEP <= size <= MAX_HEAD_DIM


def _check_cache(name: str, cache: Tensor, scale: Tensor | None, query: Tensor, shape: tuple[int | str, ...]) -> None:
    dtypes = (*(FLOATING if query.dtype == torch.float32 else (query.dtype,)), torch.int8)
    check_argument(f"{name}_cache", cache, dtypes, shape, query.device)
    if not is_head_dim(cache.shape[3]):
        raise ValueError(
            f"{name}_cache has head_dim={cache.shape[3]}, "
            f"allowed is a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}"
        )
    if (scale is not None) != (cache.dtype == torch.int8):
        has = "is None" if scale is None else "is given"
        raise ValueError(f"{name}_scale {has} and {name}_cache {cache.dtype}, allowed is a scale for torch.int8 only")
    if scale is not None:
        check_argument(f"{name}_scale", scale, (torch.float32,), tuple(cache.shape[:3]), query.device)


def check_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    *,
    sliding_window: int | None,
    softcap: float | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    max_query_len: int,
    max_context_len: int,
    num_splits: int | None,
) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `paged_attention` fit together."""
    check_argument("query", query, FLOATING, ("T", "H", "D"))
    _check_cache("key", key_cache, key_scale, query, ("blocks", "block_size", "H_kv", query.shape[2]))
    _check_cache("value", value_cache, value_scale, query, (*key_cache.shape[:3], "D_v"))
    if key_cache.dtype != value_cache.dtype:
        raise ValueError(f"key_cache is {key_cache.dtype}, allowed is what value_cache is: {value_cache.dtype}")
    if key_cache.shape[1] not in BLOCK_SIZES:
        raise ValueError(f"block_size={key_cache.shape[1]}, allowed is one of {', '.join(map(str, BLOCK_SIZES))}")
    if not key_cache.shape[2] or query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"query has {query.shape[1]} heads, allowed is a multiple of the {key_cache.shape[2]} of keys")
    check_argument("context_lens", context_lens, (torch.int32,), ("S",), query.device)
    check_argument("cu_seqlens", cu_seqlens, (torch.int32,), (len(context_lens) + 1,), query.device)
    check_argument("block_tables", block_tables, (torch.int32,), (len(context_lens), "B"), query.device)
    room = block_tables.shape[1] * key_cache.shape[1]
    if max_query_len < 0 or not 0 <= max_context_len <= room:
        raise ValueError(f"max_query_len={max_query_len} and max_context_len={max_context_len}, allowed is 0 or more, "
                         f"and 0 to {room}, the room of block_tables")  # fmt: skip
    for name, number in (("sliding_window", sliding_window), ("softcap", softcap), ("num_splits", num_splits)):
        if number is not None and number <= 0:
            raise ValueError(f"{name}={number}, allowed is None or a number above 0")


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
    """Causal attention of the last tokens of each sequence over all its tokens.

        place of query i of a sequence = context_len - its queries + i;  it sees the keys at places 0 .. its own
        score = query . key * scale;  softcap * tanh(score / softcap) with a softcap;  out = softmax(scores) . values

    Args:
        query: [T, H, D], unit stride along D, float32, bfloat16 or float16; D a multiple of 8 up to 256.
        key_cache: [blocks, block_size, H_kv, D] of the type of query, or int8, or for float32 queries (not in Triton)
            any floating type; H_kv divides H, and query head h reads head h // (H / H_kv). block_size is a power of
            two from 8 to 128.
        value_cache: [blocks, block_size, H_kv, D_v], type of key_cache; D_v a multiple of 8 up to 256.
        block_tables: [S, B] int32: where the blocks of a sequence lie; entries behind its last block are not read.
        cu_seqlens: [S + 1] int32: sequence s has the queries cu_seqlens[s] to cu_seqlens[s + 1]; the first number is
            0, the last T.
        context_lens: [S] int32: tokens of each sequence in the cache, those of its queries included.
        scale: factor of the scores.
        sliding_window: places that a query sees, its own included; None is all before it.
        softcap: largest magnitude of a score; None is none.
        key_scale: [blocks, block_size, H_kv] float32 for int8 caches: factor of each key; None for others.
        value_scale: the same for values.
        max_query_len: no sequence has more queries.
        max_context_len: no sequence has more tokens.
        num_splits: parts that a kernel may cut the keys into; None leaves it to the kernel. Not read here.

    Returns:
        [T, H, D_v] in the type of query; zeros for a query that sees no key (context_len 0 fills up a batch).

    Precision: float32 here. A kernel multiplies in the type of query, sums in float32, rounds weights to that type.

    Raises:
        ValueError: shapes, types, strides, devices or numbers that do not fit, lengths over the given maxima (a kernel
            on a device does not look at lengths).
    """
    check_paged_attention(
        query, key_cache, value_cache, block_tables, cu_seqlens, context_lens,
        sliding_window=sliding_window, softcap=softcap, key_scale=key_scale, value_scale=value_scale,
        max_query_len=max_query_len, max_context_len=max_context_len, num_splits=num_splits,
    )  # fmt: skip
    starts, lengths = cu_seqlens.tolist(), context_lens.tolist()
    _check_lengths(starts, lengths, len(query), max_query_len, max_context_len)
    output = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    groups = query.shape[1] // key_cache.shape[2]
    for start, stop, num_keys, table in zip(starts[:-1], starts[1:], lengths, block_tables, strict=True):
        if start == stop or num_keys == 0:
            continue
        keys = _gather(key_cache, key_scale, table, num_keys).repeat_interleave(groups, dim=1)
        values = _gather(value_cache, value_scale, table, num_keys).repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        places = torch.arange(num_keys, device=query.device)
        distance = (num_keys - (stop - start) + torch.arange(stop - start, device=query.device)).unsqueeze(1) - places
        is_hidden = (distance < 0) | (distance >= (num_keys if sliding_window is None else sliding_window))
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        weights = weights.masked_fill(is_hidden, 0.0)  # a query that sees nothing gets zeros
        output[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output


def _check_lengths(
    starts: list[int], lengths: list[int], num_tokens: int, max_query_len: int, max_context_len: int
) -> None:
    if starts[0] != 0 or starts[-1] != num_tokens:
        raise ValueError(f"cu_seqlens runs from {starts[0]} to {starts[-1]}, allowed is 0 to {num_tokens}, all queries")
    counts = [stop - start for start, stop in itertools.pairwise(starts)]
    for name, found, most in (("cu_seqlens", counts, max_query_len), ("context_lens", lengths, max_context_len)):
        wrong = [number for number in found if not 0 <= number <= most]
        if wrong:
            raise ValueError(f"{name} holds a length of {wrong[0]}, allowed is 0 to {most}, the maximum given")


def _gather(cache: Tensor, scale: Tensor | None, table: Tensor, num_keys: int) -> Tensor:
    """[num_keys, H_kv, D] float32 of one sequence."""
    blocks = table[: -(-num_keys // cache.shape[1])].long()
    rows = cache[blocks].flatten(0, 1)[:num_keys].float()
    return rows if scale is None else rows * scale[blocks].flatten(0, 1)[:num_keys].unsqueeze(-1)
