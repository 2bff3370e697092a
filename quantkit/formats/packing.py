"""Codes of 2 to 8 bits in 32-bit words, lowest bits first; what the packed formats have in common."""

import math

import torch
from torch import Tensor

WORD_BITS = 32


def num_words(columns: int, num_bits: int) -> int:
    """32-bit words for a row of ``columns`` codes."""
    return math.ceil(columns * num_bits / WORD_BITS)


def pack_int32(codes: Tensor, num_bits: int) -> Tensor:
    """Pack signed codes into words along the last dimension, lowest bits first and without gaps.

    Args:
        codes: [N, K] int8 in [-2**(num_bits-1), 2**(num_bits-1) - 1].
        num_bits: 1 to 8.

    Returns:
        [N, ceil(K*num_bits/32)] int32 of the codes + 2**(num_bits-1); the unused bits of a row's last word are 0.
    """
    if num_bits in (4, 8) and codes.shape[1] % (WORD_BITS // num_bits) == 0:
        unsigned = (codes.to(torch.int16) + (1 << (num_bits - 1))).to(torch.uint8)
        if num_bits == 4:
            unsigned = unsigned[:, ::2] | (unsigned[:, 1::2] << 4)
        return unsigned.flatten().view(torch.int32).view(codes.shape[0], -1)  # little-endian, as torch's machines are
    rows, columns = codes.shape
    wide = codes.to(torch.int64) + (1 << (num_bits - 1))
    wide = torch.nn.functional.pad(wide, (0, -columns % WORD_BITS)).reshape(rows, -1, WORD_BITS)
    words = torch.zeros(rows, wide.shape[1], num_bits, dtype=torch.int64, device=codes.device)
    for i in range(WORD_BITS):  # 32 codes fill exactly num_bits words
        word, shift = divmod(i * num_bits, WORD_BITS)
        words[..., word] |= wide[..., i] << shift
        if shift + num_bits > WORD_BITS:
            words[..., word + 1] |= wide[..., i] >> (WORD_BITS - shift)
    words = (words & 0xFFFFFFFF).reshape(rows, -1)[:, : num_words(columns, num_bits)]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_int32(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """Signed codes from words; the opposite of `pack_int32`.

    Args:
        words: [N, ceil(columns*num_bits/32)] int32.
        num_bits: 1 to 8.
        columns: codes in a row.

    Returns:
        [N, columns] int8.
    """
    rows = words.shape[0]
    if num_bits in (4, 8):
        unsigned = words.flatten().view(torch.uint8).view(rows, -1)
        if num_bits == 4:
            unsigned = torch.stack([unsigned & 15, unsigned >> 4], dim=-1).flatten(1)
        return (unsigned.to(torch.int16) - (1 << (num_bits - 1))).to(torch.int8)[:, :columns].contiguous()
    wide = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, -words.shape[1] % num_bits))
    wide = wide.reshape(rows, -1, num_bits)
    codes = torch.empty(rows, wide.shape[1], WORD_BITS, dtype=torch.int8, device=words.device)
    mask, offset = (1 << num_bits) - 1, 1 << (num_bits - 1)
    for i in range(WORD_BITS):
        word, shift = divmod(i * num_bits, WORD_BITS)
        value = wide[..., word] >> shift
        if shift + num_bits > WORD_BITS:
            value = value | (wide[..., word + 1] << (WORD_BITS - shift))
        codes[..., i] = ((value & mask) - offset).to(torch.int8)
    return codes.reshape(rows, -1)[:, :columns].contiguous()
