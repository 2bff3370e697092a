"""CPU body of rms_norm: as few calls of torch as it takes, since for few tokens the calls are what takes the time."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """As `reference.rms_norm`; arguments that do not fit are refused by torch, or not at all.

    Precision: float32, rounded once; the sum of squares in another order.
    """
    total = x if residual is None else x + residual
    scale = (weight + offset if offset else weight).float()
    out = F.rms_norm(total.float(), scale.shape, scale, eps).to(x.dtype)
    return out if residual is None else (out, total)
