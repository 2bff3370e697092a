"""A second decoder of GPTQ and AWQ, for `verify`; it shares no code with the formats that write them.

Their own readers need a GPU and packages of their own, so this stands in for them. It goes bit by bit: every word is
spread into its 32 bits, and every code is gathered from its own bits by its place, as the formats are documented.

Source: AutoGPTQ and GPTQModel (unpacking in the linear layers), AutoAWQ (utils/packing_utils.py).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column of the eight in a word that each nibble holds, lowest first


def decode_steps(
    read: Callable[[str], Tensor], layer: str, config: Mapping[str, Any], num_bits: int
) -> tuple[Tensor, Tensor]:
    """Code minus zero point of every weight, and the scale of every weight.

    Args:
        read: gives a tensor on disk by name.
        layer: its name there.
        config: ``quantization_config`` of config.json.
        num_bits: of the layer's codes.

    Returns:
        [N, K] int16 and [N, K] float32.
    """
    qweight, qzeros, scales = (read(f"{layer}.{name}") for name in ("qweight", "qzeros", "scales"))
    if config["quant_method"] == "awq":
        codes, zeros = (_awq_codes(words) for words in (qweight, qzeros))
    else:
        codes = _codes_along_rows(qweight, num_bits)
        zeros = _codes_along_rows(qzeros.t().contiguous(), num_bits).T
        if config.get("checkpoint_format", config.get("format", "gptq")) == "gptq":
            zeros = zeros + 1
    group_of_column = np.arange(codes.shape[0]) // (codes.shape[0] // zeros.shape[0])
    steps = codes.astype(np.int16) - zeros.astype(np.int16)[group_of_column]
    scale = scales.float().numpy()[group_of_column]
    return torch.from_numpy(np.ascontiguousarray(steps.T)), torch.from_numpy(np.ascontiguousarray(scale.T))


def _bits(words: Tensor) -> "np.ndarray[Any, Any]":
    """[R, C, 32] bits of [R, C] words, the lowest first."""
    data = np.ascontiguousarray(words.numpy()).astype("<i4")
    return np.unpackbits(data.view(np.uint8).reshape(*data.shape, 4), axis=-1, bitorder="little")


def _codes_along_rows(words: Tensor, num_bits: int) -> "np.ndarray[Any, Any]":
    """[R * 32 / num_bits, C] codes of [R, C] words that are packed along their first dimension."""
    bits = _bits(words).reshape(words.shape[0], words.shape[1], 32 // num_bits, num_bits)
    codes = (bits.astype(np.int16) << np.arange(num_bits, dtype=np.int16)).sum(-1, dtype=np.int16)
    return codes.transpose(0, 2, 1).reshape(-1, words.shape[1])


def _awq_codes(words: Tensor) -> "np.ndarray[Any, Any]":
    """[R, 8 * C] codes of [R, C] words."""
    bits = _bits(words).reshape(words.shape[0], words.shape[1], 8, 4)
    nibbles = (bits.astype(np.int16) << np.arange(4, dtype=np.int16)).sum(-1, dtype=np.int16)
    codes = np.empty((words.shape[0], words.shape[1] * 8), dtype=np.int16)
    for nibble, column in enumerate(AWQ_COLUMNS):
        codes[:, column::8] = nibbles[:, :, nibble]
    return codes
