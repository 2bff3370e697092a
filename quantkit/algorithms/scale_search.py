"""The scale of each group that loses least, weighted by how strongly its columns are activated."""

import torch
from torch import Tensor

from quantkit.scheme import QuantScheme

_PIECE_BYTES = 1 << 20  # rows are searched in pieces whose temporaries stay in the cache of a core


def search_scales(
    weight: Tensor,
    column_weight: Tensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    *,
    shrink_min: float = 0.6,
    num_steps: int = 8,
) -> Tensor:
    """Choose per group the scale that minimises the weighted rounding error over a grid of scales of both signs.

        error(s) = sum_k c_k (w_k - s * q_k)^2   with codes q_k = clamp(round(w_k / t)) for trial scales t of both signs

    For given codes the best scale is known in closed form, s = sum(c w q) / sum(c q^2), and the error is then smaller
    by sum(c w q)^2 / sum(c q^2): the trial with the largest such gain wins. The codes reach one step further down than
    up (-8..7 at 4 bits), so the sign of the scale decides which tail of the group may use the longer side.

    Args:
        weight: [N, K] float32.
        column_weight: [K] float32, >= 0: mean square of each input column (the diagonal of the Hessian).
        scheme: symmetric scheme; its group size divides K.
        scale_dtype: storage dtype; the scale is rounded to it.
        shrink_min: smallest trial as a fraction of the scale at which nothing is clipped.
        num_steps: trials per sign, evenly spaced between shrink_min and 1.

    Returns:
        [N, G] scales in ``scale_dtype``; never zero, possibly negative.

    Source: the weighted search of llama.cpp's make_qx_quants (ggml-quants.c); here both signs are tried everywhere.
    """
    rows, columns = weight.shape
    groups = scheme.num_groups(columns)
    importance = column_weight.float().reshape(groups, -1)
    # A group that no token activates is judged by the plain error, so that its scale still means something.
    importance = torch.where(importance.sum(-1, keepdim=True) > 0, importance, torch.ones_like(importance))
    best = torch.empty(rows, groups, dtype=scale_dtype)
    step = max(1, _PIECE_BYTES // (columns * 4))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        piece = weight[start:stop].reshape(stop - start, groups, -1)
        scale = _search_rows(piece, importance, scheme, shrink_min, num_steps).to(scale_dtype)
        best[start:stop] = torch.where(scale == 0, torch.ones_like(scale), scale)
    return best


def _search_rows(w: Tensor, importance: Tensor, scheme: QuantScheme, shrink_min: float, num_steps: int) -> Tensor:
    """[R, G] best scales of [R, G, group_size] weights; 1 for a group of zeros."""
    high, low = w.amax(-1), w.amin(-1)
    weighted = w * importance
    best_gain = torch.zeros(high.shape)
    best_scale = torch.ones(high.shape)
    for sign in (1.0, -1.0):
        top, bottom = (high, -low) if sign > 0 else (-low, high)
        cover = torch.maximum(top / scheme.code_max, bottom / -scheme.code_min)  # no weight of the group is clipped
        for step in range(num_steps):
            fraction = shrink_min + (1 - shrink_min) * (step + 1) / num_steps
            inverse = (sign / (fraction * cover)).nan_to_num_(0.0, 0.0, 0.0)  # a group of zeros: every code is 0
            codes = (w * inverse.unsqueeze(-1)).round_().clamp_(scheme.code_min, scheme.code_max)
            product = (codes * weighted).sum(-1)
            energy = codes.square_().mul_(importance).sum(-1)
            gain = (product * product / energy).nan_to_num_(0.0, 0.0, 0.0)
            better = gain > best_gain
            best_gain = torch.where(better, gain, best_gain)
            best_scale = torch.where(better, product / energy, best_scale)
    return best_scale
