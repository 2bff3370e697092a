"""Quantize and dequantize: pure functions of tensors, no module and no file."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.scheme import QuantScheme


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight as it will be stored; the codes are never quantized a second time.

    Attributes:
        codes: [N, K] int8, signed codes in [scheme.code_min, scheme.code_max].
        scale: [N, G], in the dtype in which it is stored. May be negative; never zero.
        scheme: the scheme; group_size is K / G, or -1 when G is 1 per row.
    """

    codes: Tensor
    scale: Tensor
    scheme: QuantScheme

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] weights that a reader of the checkpoint sees, computed in float32."""
        return dequantize(self.codes, self.scale).to(dtype)


def absmax_scale(weight: Tensor, scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
    """Symmetric scale per group from the largest magnitude, as compressed-tensors' minmax observer has it.

        scale = max|w| / ((code_max - code_min) / 2)

    Args:
        weight: [N, K] float.
        scheme: symmetric; its group size divides K.
        dtype: storage dtype; the scale is rounded to it.

    Returns:
        [N, G] in ``dtype``; 1 where a group is all zeros, so that its codes are 0.

    Source: compressed-tensors, quantization/utils/helpers.py (calculate_qparams).
    """
    groups = weight.reshape(weight.shape[0], scheme.num_groups(weight.shape[1]), -1)
    absmax = groups.abs().amax(dim=-1)
    scale = (absmax / ((scheme.code_max - scheme.code_min) / 2)).to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize(weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    """Round each weight to the nearest code of its group's grid; ties to even, as torch.round does.

    Args:
        weight: [N, K] float.
        scale: [N, G] in storage dtype, not zero; G divides K.
        scheme: gives the range of the codes.

    Returns:
        [N, K] int8 signed codes.
    """
    groups = weight.float().reshape(*scale.shape, -1)
    codes = torch.round(groups / scale.float().unsqueeze(-1)).clamp_(scheme.code_min, scheme.code_max)
    return codes.to(torch.int8).reshape(weight.shape)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """[N, K] float32 weights: codes * scale of their group."""
    groups = codes.float().reshape(*scale.shape, -1)
    return (groups * scale.float().unsqueeze(-1)).reshape(codes.shape)
