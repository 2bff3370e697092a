"""Activations to 8 bits, one scale a token; alone and behind the operation that makes them."""

from typing import overload

import torch
from torch import Tensor

from quantkit_kernels.reference.activation import silu_mul
from quantkit_kernels.reference.arguments import FLOATING, check_argument
from quantkit_kernels.reference.matmul import quantize_input
from quantkit_kernels.reference.norm import rms_norm


def check_quantize_per_token(x: Tensor, input_scale: Tensor | None = None) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `quantize_per_token` fit together."""
    check_argument("x", x, FLOATING, ("T", "K"))
    if input_scale is not None:
        check_argument("input_scale", input_scale, FLOATING, (1,), x.device)


def quantize_per_token(x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """8-bit codes of rows, and their scales; see `quantize_input`.

    Args:
        x: [T, K], unit stride along K, float32, bfloat16 or float16.
        input_scale: [1], of static inputs; None to find one per token.

    Returns:
        Codes [T, K] int8 and scale, [T, 1] or [1] float32.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_quantize_per_token(x, input_scale)
    codes, scale = quantize_input(x, input_scale)
    return codes.to(torch.int8), scale


@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]: ...


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`quantize_per_token` of `rms_norm`, whose result is rounded to the type of x in between.

    Returns:
        Codes [T, K] int8, scale [T, 1] float32; with a residual also the sum, which is the residual of the next layer.
    """
    if residual is None:
        return quantize_per_token(rms_norm(x, weight, eps, offset=offset))
    out, total = rms_norm(x, weight, eps, residual=residual, offset=offset)
    return *quantize_per_token(out), total


def silu_mul_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_per_token` of `silu_mul`, whose result is rounded to the type of x in between.

    Args:
        x: [T, 2F], as for `silu_mul`.

    Returns:
        Codes [T, F] int8 and scale [T, 1] float32.
    """
    return quantize_per_token(silu_mul(x))
