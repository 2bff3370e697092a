"""CPU body of rms_norm: as few calls of torch as it takes, since for few tokens the calls are what takes the time."""

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """As `reference.rms_norm`; arguments that do not fit are refused by torch, or not at all.

    Precision: float32, rounded once; the sum of squares in another order.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    out = wide * norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
    out = out.mul_(weight + offset if offset else weight).to(x.dtype)
    return out if residual is None else (out, total)
