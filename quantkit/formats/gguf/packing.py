"""Codes and scales to the bytes of a block, for each type of GGUF.

Source: the layouts of ggml-common.h; the gguf package decodes what is written here in the tests.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.formats.gguf.block_types import BlockType
from quantkit.formats.gguf.grid import Grid


def pack(levels: Tensor, grid: Grid, block_type: BlockType) -> Tensor:
    """The bytes of a tensor's rows.

    Args:
        levels: [R, K] float32, each a level of the type.
        grid: scales of the same rows.
        block_type: K is a multiple of its block.

    Returns:
        [R, K / block * block_bytes] uint8.
    """
    rows = levels.shape[0]
    q = block_type.levels.codes(levels).reshape(-1, block_type.block)
    blocks = _PACKERS[block_type.name](q, grid)
    assert blocks.shape[1] == block_type.block_bytes
    return blocks.reshape(rows, -1)


def _half(value: Tensor | None) -> Tensor:
    """[n, 2] the bytes of one float16 a block."""
    assert value is not None
    return value.reshape(-1, 1).to(torch.float16).view(torch.uint8)


def _negative(value: Tensor | None) -> Tensor:
    assert value is not None
    return -value


def _stored(value: Tensor | None, per_block: int, offset: int = 0) -> Tensor:
    """[n, per_block] uint8 of the integers that sub-blocks store."""
    assert value is not None
    return (value.reshape(-1, per_block).to(torch.int16) + offset).to(torch.uint8)


def _nibbles(q: Tensor, chunk: int) -> Tensor:
    """[n, block / 2]: in every chunk the first half in the low nibbles, the second in the high ones."""
    halves = (q & 15).unflatten(1, (-1, 2, chunk // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _bits(flags: Tensor) -> Tensor:
    """[..., b, 8] zeros and ones to [..., b] bytes, lowest bit first."""
    return (flags << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _quarters(q: Tensor) -> Tensor:
    """[n, 64] two bits of 256 codes: in each half of 128, byte l holds codes l, l+32, l+64, l+96."""
    parts = (q & 3).unflatten(1, (2, 4, 32))
    return (parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6).flatten(1)


def _pack_q4_0(q: Tensor, grid: Grid) -> Tensor:
    return torch.cat([_half(grid.d), _nibbles(q, 32)], 1)


def _pack_q4_1(q: Tensor, grid: Grid) -> Tensor:
    return torch.cat([_half(grid.d), _half(_negative(grid.dmin)), _nibbles(q, 32)], 1)


def _pack_q5_0(q: Tensor, grid: Grid) -> Tensor:
    return torch.cat([_half(grid.d), _bits((q >> 4).unflatten(1, (4, 8))), _nibbles(q, 32)], 1)


def _pack_q5_1(q: Tensor, grid: Grid) -> Tensor:
    high = _bits((q >> 4).unflatten(1, (4, 8)))
    return torch.cat([_half(grid.d), _half(_negative(grid.dmin)), high, _nibbles(q, 32)], 1)


def _pack_q8_0(q: Tensor, grid: Grid) -> Tensor:
    signed = (q.to(torch.int16) - 127).to(torch.int8)
    return torch.cat([_half(grid.d), signed.view(torch.uint8)], 1)


def _pack_q2_k(q: Tensor, grid: Grid) -> Tensor:
    scales = _stored(grid.s, 16) | _stored(grid.m, 16) << 4
    return torch.cat([scales, _quarters(q), _half(grid.d), _half(grid.dmin)], 1)


def _pack_q3_k(q: Tensor, grid: Grid) -> Tensor:
    mask = _bits((q >> 2).unflatten(1, (8, 32)).transpose(1, 2))
    s = _stored(grid.s, 16, 32)
    low = s[:, :8] & 15 | (s[:, 8:] & 15) << 4
    top = (s >> 4).unflatten(1, (4, 4))
    high = top[:, 0] | top[:, 1] << 2 | top[:, 2] << 4 | top[:, 3] << 6
    return torch.cat([mask, _quarters(q), low, high, _half(grid.d)], 1)


def _six_bit_pairs(grid: Grid) -> Tensor:
    """[n, 12] eight scales and eight minima of six bits each."""
    s, m = _stored(grid.s, 8), _stored(grid.m, 8)
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    return torch.cat([first, second, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)


def _pack_q4_k(q: Tensor, grid: Grid) -> Tensor:
    return torch.cat([_half(grid.d), _half(grid.dmin), _six_bit_pairs(grid), _nibbles(q, 64)], 1)


def _pack_q5_k(q: Tensor, grid: Grid) -> Tensor:
    high = _bits((q >> 4).unflatten(1, (8, 32)).transpose(1, 2))
    return torch.cat([_half(grid.d), _half(grid.dmin), _six_bit_pairs(grid), high, _nibbles(q, 64)], 1)


def _pack_q6_k(q: Tensor, grid: Grid) -> Tensor:
    halves = (q & 15).unflatten(1, (2, 2, 64))
    low = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    assert grid.s is not None
    scales = grid.s.reshape(-1, 16).to(torch.int8).view(torch.uint8)
    return torch.cat([low, _quarters(q >> 4), scales, _half(grid.d)], 1)


def _pack_iq4_xs(q: Tensor, grid: Grid) -> Tensor:
    s = _stored(grid.s, 8, 32)
    pairs = (s & 15).unflatten(1, (4, 2))
    top = (s >> 4).unflatten(1, (2, 4))
    high = top[..., 0] | top[..., 1] << 2 | top[..., 2] << 4 | top[..., 3] << 6
    return torch.cat([_half(grid.d), high, pairs[..., 0] | pairs[..., 1] << 4, _nibbles(q, 32)], 1)


_PACKERS: dict[str, Callable[[Tensor, Grid], Tensor]] = {
    "Q4_0": _pack_q4_0,
    "Q4_1": _pack_q4_1,
    "Q5_0": _pack_q5_0,
    "Q5_1": _pack_q5_1,
    "Q8_0": _pack_q8_0,
    "Q2_K": _pack_q2_k,
    "Q3_K": _pack_q3_k,
    "Q4_K": _pack_q4_k,
    "Q5_K": _pack_q5_k,
    "Q6_K": _pack_q6_k,
    "IQ4_NL": _pack_q4_0,
    "IQ4_XS": _pack_iq4_xs,
}
