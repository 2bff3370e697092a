"""The scale (and zero point) of each group that loses least, weighted by what its columns carry."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.scheme import QuantScheme

_PIECE_BYTES = 1 << 20  # rows are searched in pieces whose temporaries stay in the cache of a core
NUM_STEPS = 8  # clips that are tried, evenly spaced from SHRINK_MIN to none at all
SHRINK_MIN = {4: 0.6, 8: 0.9}  # by bits: the harshest clip as a fraction of the group's range


def search_qparams(
    weight: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Choose per group the scale, and the zero point, with the least weighted rounding error.

        error(s, z) = sum_k m_k (w_k - s * c_k)^2  with c_k = clamp(round(w_k / t) + z) - z for trial scales t

    For given codes the best scale is known in closed form, s = sum(m c w) / sum(m c^2), and lowers the error by
    sum(m c w)^2 / sum(m c^2): the trial with the largest such gain wins. Signed codes reach one step further down than
    up (-8..7 at 4 bits), so a symmetric scheme tries scales of both signs; an asymmetric one tries the zero point that
    covers the group's range and the two beside it.

    Args:
        weight: [N, K] float32.
        importance: [K] float32, >= 0: the weight m of each column, such as the mean square of its inputs.
        scheme: its group size divides K.
        scale_dtype: storage dtype; the scale is rounded to it.

    Returns:
        scale [N, G] in ``scale_dtype``, never zero, negative only if the scheme is symmetric; zero_point [N, G] int8,
        or None for a symmetric scheme.

    Source: the weighted search of llama.cpp's make_qx_quants (ggml-quants.c); here both signs are tried everywhere.
    """
    rows, columns = weight.shape
    groups = scheme.num_groups(columns)
    measure = importance.float().reshape(groups, -1)
    # A group that no token activates is judged by the plain error, so that its scale still means something.
    measure = torch.where(measure.sum(-1, keepdim=True) > 0, measure, torch.ones_like(measure))
    scale = torch.empty(rows, groups, dtype=scale_dtype, device=weight.device)
    zero_point = None if scheme.symmetric else torch.empty_like(scale, dtype=torch.int8)
    step = max(1, _PIECE_BYTES // (columns * 4))
    for start in range(0, rows, step):
        piece = weight[start : start + step].reshape(-1, groups, columns // groups)
        best_scale, best_zero = _search_rows(piece, measure, scheme)
        rounded = best_scale.to(scale_dtype)
        scale[start : start + step] = torch.where(rounded == 0, torch.ones_like(rounded), rounded)
        if zero_point is not None:
            zero_point[start : start + step] = best_zero.to(torch.int8)
    return scale, zero_point


def _search_rows(w: Tensor, measure: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Best scale (1 for a group of zeros) and zero point, both [R, G], of [R, G, g] weights."""
    weighted = w * measure
    best_gain = torch.zeros(w.shape[:2], device=w.device)
    best_scale = torch.ones_like(best_gain)
    best_zero = torch.zeros_like(best_gain)
    for inverse, zero in _trials(w, scheme):
        codes = (w * inverse.unsqueeze(-1)).round_()
        if zero is None:
            codes.clamp_(scheme.code_min, scheme.code_max)
        else:
            offset = zero.unsqueeze(-1)
            codes = torch.minimum(torch.maximum(codes, scheme.code_min - offset), scheme.code_max - offset)
        product = (codes * weighted).sum(-1)
        energy = codes.square_().mul_(measure).sum(-1)
        gain = (product * product / energy).nan_to_num_(0.0, 0.0, 0.0)
        better = (gain > best_gain) & (product * inverse > 0)
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, product / energy, best_scale)
        if zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _trials(w: Tensor, scheme: QuantScheme) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inverse of the trial scale and zero point, each [R, G]; the inverse is 0 for a group of zeros."""
    high, low = w.amax(-1), w.amin(-1)
    shrink_min = SHRINK_MIN.get(scheme.num_bits, 0.6)
    fractions = [shrink_min + (1 - shrink_min) * (step + 1) / NUM_STEPS for step in range(NUM_STEPS)]
    if scheme.symmetric:
        for sign in (1.0, -1.0):
            top, bottom = (high, -low) if sign > 0 else (-low, high)
            cover = torch.maximum(top / scheme.code_max, bottom / -scheme.code_min)  # nothing is clipped
            for fraction in fractions:
                yield (sign / (fraction * cover)).nan_to_num_(0.0, 0.0, 0.0), None
        return
    high, low = high.clamp(min=0), low.clamp(max=0)
    cover = (high - low) / (scheme.code_max - scheme.code_min)
    middle = (scheme.code_min - low / cover).nan_to_num_(0.0, 0.0, 0.0).round_()
    for fraction in fractions:
        inverse = (1 / (fraction * cover)).nan_to_num_(0.0, 0.0, 0.0)
        for offset in (-1, 0, 1):
            yield inverse, (middle + offset).clamp_(scheme.code_min, scheme.code_max)
