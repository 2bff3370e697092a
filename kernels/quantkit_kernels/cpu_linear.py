"""CPU body of linear for bfloat16 where the CPU has no bfloat16 matrix instructions: a float32 product in pieces.

There torch multiplies bfloat16 matrices in a plain loop, several times slower than float32. The weight stays bfloat16
in memory and is widened a piece at a time, small enough to stay in the caches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# For one or two rows aten's bfloat16 dot products are as fast; `python -m quantkit_kernels.crossover` measures it.
MIN_WIDENED_ROWS = 3
PIECE_ELEMENTS = 1 << 18


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `reference.linear`, for bfloat16 on the CPU; few rows go to aten.

    Precision: float32 products and sums, rounded once; for few rows as aten does it.
    """
    if x.numel() < MIN_WIDENED_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).float()
    out_features, in_features = weight.shape
    step = max(1, PIECE_ELEMENTS // in_features)
    if step >= out_features:
        product = (rows @ weight.float().t()).to(x.dtype)
    else:
        product = torch.empty(rows.shape[0], out_features, dtype=x.dtype)
        for start in range(0, out_features, step):
            product[:, start : start + step] = rows @ weight[start : start + step].float().t()
    if bias is not None:
        product += bias
    return product.view(*x.shape[:-1], out_features)
