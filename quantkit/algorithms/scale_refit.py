"""The scales that fit given codes best, all groups of a row together, in closed form."""

import torch
from torch import Tensor

from quantkit.primitives import QuantizedWeight

RIDGE = 1e-3  # pull towards the present scales, as a fraction of the system's mean diagonal
_PIECE_ROWS = 512


def refit_scales(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> QuantizedWeight:
    """Least squares for the scales of each row while codes and zero points stay.

        A s = b,  A[g, h] = c_g H[g, h] c_h^T,  b[g] = c_g (w H)_g^T,  c = codes - zero point

    with a ridge towards the present scales, because groups whose codes are small hardly bear on the error. Each scale
    is rounded to its storage dtype afterwards: whoever keeps the result evaluates it as it is stored.

    Args:
        weight: [N, K] float32 that was quantized.
        quantized: its codes, scales and zero points.
        hessian: [K, K] float32.

    Returns:
        The same codes with new scales; a scale that would vanish keeps its old value.

    Source: arXiv:2602.02126, section 3 (there cyclic over the groups; here one small linear system a row).
    """
    old = quantized.scale.double()
    new = torch.empty_like(old)
    rows, groups = old.shape
    zero_point = quantized.zero_point
    for start in range(0, rows, _PIECE_ROWS):
        part = slice(start, min(start + _PIECE_ROWS, rows))
        offset = None if zero_point is None else zero_point[part]
        ones = torch.ones(old[part].shape, device=old.device)
        centered = QuantizedWeight(quantized.codes[part], ones, quantized.scheme, offset).dequantize()  # codes - zero
        grouped = centered.reshape(len(ones), groups, -1)
        size = grouped.shape[-1]
        system = torch.stack(
            [
                ((grouped[:, g] @ hessian[g * size : (g + 1) * size]) * centered).reshape(grouped.shape).sum(-1)
                for g in range(groups)
            ],
            dim=1,
        ).double()
        right = ((weight[part] @ hessian) * centered).reshape(grouped.shape).sum(-1).double()
        ridge = (RIDGE * system.diagonal(dim1=1, dim2=2).mean(-1, keepdim=True)).clamp(min=1e-30)
        system += torch.diag_embed(ridge.expand(-1, groups))
        new[part] = torch.linalg.solve(system, right + ridge * old[part])
    rounded = new.to(quantized.scale.dtype)
    usable = torch.isfinite(rounded) & (rounded != 0)
    scale = torch.where(usable, rounded, quantized.scale)
    return QuantizedWeight(quantized.codes, scale, quantized.scheme, zero_point)
