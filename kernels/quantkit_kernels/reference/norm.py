"""rms_norm: rows of root mean square 1, times a weight; alone or behind the addition of a residual."""

from typing import overload

import torch
from torch import Tensor

from quantkit_kernels.reference.arguments import FLOATING, check_argument


def check_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `rms_norm` fit together."""
    check_argument("x", x, FLOATING, ("T", "K"))
    check_argument("weight", weight, FLOATING, (x.shape[1],), x.device)
    if residual is not None:
        check_argument("residual", residual, (x.dtype,), tuple(x.shape), x.device)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: None = None, offset: float = 0.0) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Divide each row by its root mean square and multiply by the weight, in float32, rounded once.

        sum = x, or x + residual rounded to the type of x;  out = sum / sqrt(mean(sum^2) + eps) * (offset + weight)

    Args:
        x: [T, K], unit stride along K, float32, bfloat16 or float16.
        weight: [K] of any of these types.
        eps: added to the mean.
        residual: like x; None for none.
        offset: 1 where weights are stored less one (Gemma).

    Returns:
        out, [T, K] in the type of x; with a residual also the sum, which is the residual of the next layer.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.

    Source: arXiv:1910.07467, equation 4.
    """
    check_rms_norm(x, weight, residual)
    total = x if residual is None else x + residual
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    out = (wide * (offset + weight.float())).to(x.dtype)
    return out if residual is None else (out, total)
