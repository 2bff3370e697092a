"""Rows that leave a norm or a gate as 8-bit codes, where the product behind it would round them to codes anyway."""

from typing import NamedTuple

from torch import Tensor

from quantkit_kernels import rms_norm, rms_norm_quantize, silu_mul_quantize


class CodedRows(NamedTuple):
    """Rows as `quantkit_kernels.quantize_per_token` gives them.

    Attributes:
        codes: [T, K] int8.
        scale: [T, 1] float32.
    """

    codes: Tensor
    scale: Tensor


Rows = Tensor | CodedRows  # what a product takes


def norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, *, coded: bool) -> tuple[Rows, Tensor]:
    """A norm behind the addition of a residual.

    Args:
        x: [T, K].
        weight: [K].
        eps: of the norm.
        residual: [T, K]; None in front of the first layer.
        coded: give codes.

    Returns:
        Its rows, and what was normed, which is the residual of the next layer; both [T, K].
    """
    if residual is None:
        return CodedRows(*rms_norm_quantize(x, weight, eps)) if coded else rms_norm(x, weight, eps), x
    if not coded:
        return rms_norm(x, weight, eps, residual=residual)
    codes, scale, total = rms_norm_quantize(x, weight, eps, residual=residual)
    return CodedRows(codes, scale), total


def silu_mul_coded(x: Tensor) -> CodedRows:
    """Codes of `quantkit_kernels.silu_mul`, [T, F] from [T, 2F]."""
    return CodedRows(*silu_mul_quantize(x))
