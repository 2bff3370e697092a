"""How the Triton body of paged_attention is launched: tiles, warps, parts; from shapes alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels.tiling import generation

SPLIT_KEYS = 512  # keys of one part
MAX_FOLDED_ROWS = 64  # sequences of at most so many query rows are one tile, and are cut along their keys


@dataclass(frozen=True, slots=True)
class Configuration:
    """Rows and keys of a tile, warps of a program, stages of its pipeline."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def power_of_two(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def is_folded(max_query_len: int, group: int) -> bool:
    """Whether every sequence is a single tile of query rows (decoding)."""
    return max_query_len * group <= MAX_FOLDED_ROWS


def has_small_tiles(device: torch.device) -> bool:
    """Whether a GPU gets the tiles of `tiling.generation` 80."""
    return device.type == "cuda" and generation(device) < 90


def configuration(
    max_query_len: int, group: int, head_dim: int, query_bytes: int, *, is_int8: bool, ampere: bool
) -> Configuration:
    """The configuration for a call; ``group`` query heads share a head of keys, ``head_dim`` is the larger one.

    Tiles are as large as registers allow without spilling; `compile_report` shows that they do. Where a block's place
    must be read before its keys, a stage of the pipeline goes to each, so that 5 stages keep two tiles of keys coming.
    """
    least = power_of_two(group)  # a tile holds at least one query
    if query_bytes == 4:
        rows = max_query_len * group if is_folded(max_query_len, group) else group
        rows = max(16, power_of_two(rows))
        return Configuration(rows, 32, 4, 2) if head_dim <= 128 else Configuration(rows, 16, 8, 2)
    if is_folded(max_query_len, group):
        rows = max(16, power_of_two(max_query_len * group))
        return Configuration(rows, 64 if head_dim <= 128 and not is_int8 else 32, 4, 5)
    if head_dim <= 128:
        return Configuration(max(128, least), 32 if ampere else 64, 8, 5)
    return Configuration(max(64, least), 32, 8, 3)


def split_plan(
    max_query_len: int, max_context_len: int, group: int, sliding_window: int | None, tile: int, num_splits: int | None
) -> tuple[int, int]:
    """(parts, keys of a part): parts of a fixed size for folded sequences, one part for others, or as asked."""
    most = max(1, max_context_len)
    if sliding_window is not None:
        most = min(most, sliding_window + max_query_len + tile)
    if num_splits is not None:
        keys = -(-most // (num_splits * tile)) * tile
    elif is_folded(max_query_len, group):
        keys = SPLIT_KEYS
    else:
        keys = -(-most // tile) * tile
    return -(-most // keys), keys


def kernel_constants(
    num_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    sliding_window: int | None,
    softcap: float | None,
    max_query_len: int,
    chosen: Configuration,
) -> dict[str, object]:
    """What is compiled into the kernel, SPLIT excepted; of the caches only shapes and strides are read."""
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    group = num_heads // num_kv_heads
    return {
        "STRIDES": (*key_cache.stride()[:2], *value_cache.stride()[:2], block_size * num_kv_heads, num_kv_heads),
        "HEAD_STRIDES": (key_cache.stride(2), value_cache.stride(2)),
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "D": head_dim,
        "D_V": value_cache.shape[3],
        "BLOCK_SIZE": block_size,
        "WINDOW": sliding_window or 0,
        "SOFTCAP": softcap or 0.0,
        "FOLDED": is_folded(max_query_len, group),
        "BLOCK_M": chosen.block_m,
        "BLOCK_D": max(16, power_of_two(head_dim)),
        "BLOCK_DV": max(16, power_of_two(value_cache.shape[3])),
        "TILE": chosen.tile,
    }
