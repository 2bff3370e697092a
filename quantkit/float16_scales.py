"""Scales that float16 holds, for formats that store them so: bfloat16 and float32 hold smaller and larger ones."""

import torch
from torch import Tensor

from quantkit.errors import QuantizationError
from quantkit.primitives import QuantizedWeight, quantize

_STEP = 2.0**-24  # of the smallest numbers of float16; up to 128 steps bfloat16 holds each of them


def fits(scale: Tensor) -> Tensor:
    """Where a scale is the same number in float16."""
    return scale.to(torch.float16).float() == scale.float()


def fit_scales(weight: Tensor, solved: QuantizedWeight) -> tuple[QuantizedWeight, int]:
    """The same weights with scales that float16 holds bit for bit.

    A group whose scale is too small for that has weights of at most 2^-17 times its largest code. It is rounded to
    nearest with the next larger scale that float16 holds, so that nothing is clipped.

    Args:
        weight: [N, K] float32 that was quantized.
        solved: its codes, scales and zero points.

    Returns:
        The weight, and in how many groups it was rounded again.

    Raises:
        QuantizationError: a scale has become infinite. One that only the format cannot hold is left to its writer.
    """
    scale = solved.scale
    if not bool(torch.isfinite(scale).all()):
        largest = float(weight.abs().max())
        raise QuantizationError(
            f"a scale overflows float16, in which gptq and awq store scales (the largest weight is {largest:.4g})",
            fix="Write compressed-tensors, which keeps the model's own type, or leave this layer as it is",
        )
    small = ~fits(scale) & (scale.abs() < 1)
    if not bool(small.any()):
        return solved, 0
    wide = scale.float()
    larger = wide.sign() * (wide.abs() / _STEP).ceil() * _STEP
    scale = torch.where(small, larger, wide).to(scale.dtype)
    scheme, zero_point = solved.scheme, solved.zero_point
    if zero_point is not None:
        low = weight.reshape(*scale.shape, -1).amin(-1).clamp(max=0)
        moved = (scheme.code_min - low / scale.float()).round().clamp(scheme.code_min, scheme.code_max)
        zero_point = torch.where(small, moved.to(torch.int8), zero_point)
    rounded = quantize(weight, scale, scheme, zero_point).reshape(*scale.shape, -1)
    codes = torch.where(small.unsqueeze(-1), rounded, solved.codes.reshape(rounded.shape)).reshape(solved.codes.shape)
    return QuantizedWeight(codes, scale, scheme, zero_point), int(small.sum())
