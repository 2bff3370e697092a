"""Quantize and dequantize: pure functions of tensors, no module and no file."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.scheme import InputScheme, QuantScheme


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight as it will be stored; the codes are never quantized a second time.

    Attributes:
        codes: [N, K] int8, signed codes in [scheme.code_min, scheme.code_max].
        scale: [N, G], in the dtype in which it is stored. May be negative; never zero.
        scheme: the scheme; group_size is K / G, or -1 when G is 1 per row.
        zero_point: [N, G] int8, the code that means zero, in the range of the codes; None if the scheme is symmetric.
    """

    codes: Tensor
    scale: Tensor
    scheme: QuantScheme
    zero_point: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.scheme.symmetric == (self.zero_point is None), "a zero point belongs to an asymmetric scheme"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] weights that a reader of the checkpoint sees, computed in float32."""
        return dequantize(self.codes, self.scale, self.zero_point).to(dtype)

    def split(self, rows: Sequence[int]) -> list["QuantizedWeight"]:
        """The parts of a weight that several layers were stacked into; ``rows`` are their heights."""
        zero_points = [None] * len(rows) if self.zero_point is None else self.zero_point.split(list(rows))
        parts = zip(self.codes.split(list(rows)), self.scale.split(list(rows)), zero_points, strict=True)
        return [QuantizedWeight(codes, scale, self.scheme, zero_point) for codes, scale, zero_point in parts]


def choose_qparams(weight: Tensor, scheme: QuantScheme, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point per group from its extremes, as compressed-tensors' minmax observer has them.

        symmetric:   scale = max|w| / ((code_max - code_min) / 2)
        asymmetric:  scale = (max(w, 0) - min(w, 0)) / (code_max - code_min),  zero_point = code_min - min(w, 0) / scale

    Args:
        weight: [N, K] float.
        scheme: its group size divides K.
        dtype: storage dtype; the scale is rounded to it before the zero point is computed.

    Returns:
        scale [N, G] in ``dtype``, 1 where a group is all zeros so that its codes mean zero, and zero_point [N, G] int8
        or None if the scheme is symmetric.

    Source: compressed-tensors, quantization/utils/helpers.py (calculate_qparams).
    """
    groups = weight.reshape(weight.shape[0], scheme.num_groups(weight.shape[1]), -1)
    num_steps = scheme.code_max - scheme.code_min
    if scheme.symmetric:
        scale = (groups.abs().amax(dim=-1) / (num_steps / 2)).to(dtype)
        return torch.where(scale == 0, torch.ones_like(scale), scale), None
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    scale = ((high - low) / num_steps).to(dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero_point = (scheme.code_min - low / scale.float()).round().clamp(scheme.code_min, scheme.code_max)
    return scale, zero_point.to(torch.int8)


def quantize(weight: Tensor, scale: Tensor, scheme: QuantScheme, zero_point: Tensor | None = None) -> Tensor:
    """Round each weight to the nearest code of its group's grid; ties to even, as torch.round does.

    Args:
        weight: [N, K] float.
        scale: [N, G] in storage dtype, not zero; G divides K.
        scheme: gives the range of the codes.
        zero_point: [N, G] int8, or None.

    Returns:
        [N, K] int8 signed codes.
    """
    groups = weight.float().reshape(*scale.shape, -1)
    codes = torch.round(groups / scale.float().unsqueeze(-1))
    if zero_point is not None:
        codes += zero_point.unsqueeze(-1)
    return codes.clamp_(scheme.code_min, scheme.code_max).to(torch.int8).reshape(weight.shape)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """[N, K] float32 weights: (codes - zero_point) * scale of their group."""
    groups = codes.float().reshape(*scale.shape, -1)
    if zero_point is not None:
        groups = groups - zero_point.unsqueeze(-1)
    return (groups * scale.float().unsqueeze(-1)).reshape(codes.shape)


def fake_quantize_input(x: Tensor, scheme: InputScheme, scale: Tensor | None = None) -> Tensor:
    """What a layer sees of its input when it is quantized: rounded to 8-bit codes and multiplied back.

        dynamic: scale = max|x| / 127.5 of the token;  code = round(x / scale) in [-128, 127]
        static:  scale as given

    Args:
        x: [..., K] float.
        scheme: of the inputs.
        scale: [] or [1], of a static scheme; None for a dynamic one.

    Returns:
        Like ``x``. A token of zeros stays zeros.

    Source: compressed-tensors, quantization/lifecycle/forward.py. The kernels of vLLM and of quantkit_kernels divide by
    127 instead: their dynamic steps are 0.4 % wider. What calibration and verify see is this one (docs/FORMATS.md).
    """
    assert scheme.dynamic == (scale is None), "a static scheme comes with its scale, a dynamic one without"
    wide = x.float()
    if scale is None:
        scale = wide.abs().amax(dim=-1, keepdim=True) / 127.5
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    scale = scale.float()
    return ((wide / scale).round_().clamp_(-128, 127) * scale).to(x.dtype)
