"""GPTQ: round column by column and let the columns that are still open make up for each error."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms import Solution
from quantkit.algorithms.scale_search import search_scales
from quantkit.calibration.statistics import InputStatistics
from quantkit.errors import QuantizationError
from quantkit.primitives import QuantizedWeight
from quantkit.scheme import QuantScheme

NEEDS_CALIBRATION = True
MAX_DAMP_FRACTION = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of GPTQ.

    Attributes:
        damp_fraction: added to the Hessian's diagonal, as a fraction of its mean; in (0, 1]. Raised tenfold, and
            recorded, while the Hessian cannot be factored.
        block_size: columns whose errors are passed on to the rest in one matrix product.
    """

    damp_fraction: float = 0.01
    block_size: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.damp_fraction <= MAX_DAMP_FRACTION:
            raise TypeError(f"damp_fraction={self.damp_fraction} is outside (0, {MAX_DAMP_FRACTION}]")
        if self.block_size < 1:
            raise TypeError(f"block_size={self.block_size} is not positive")


def gptq(
    weight: Tensor,
    statistics: InputStatistics | None,
    scheme: QuantScheme,
    options: Options,
    scale_dtype: torch.dtype,
) -> Solution:
    """Quantize so that the layer's output on the calibration tokens changes least.

    Scales are searched on the original weights and stay fixed; columns are visited by descending activation ("static"
    act-order), so groups keep their place and the file needs no g_idx.

    Args:
        weight: [N, K] float32; not modified.
        statistics: inputs of the layer, at least one token.
        scheme: symmetric scheme; its group size divides K.
        options: damping and block size.
        scale_dtype: dtype in which the scales are stored; they are rounded to it before the first column is.

    Returns:
        Codes, scales and the damping that was used.

    Raises:
        QuantizationError: no tokens, or the Hessian cannot be factored at any damping.

    Source: arXiv:2210.17323, Algorithm 1. Deviations: columns in static act-order, scales from a weighted search
    instead of the group's extremes, factorization in float64.
    """
    if statistics is None or statistics.num_tokens == 0:
        raise QuantizationError("GPTQ needs calibration tokens and saw none", fix="Add calibration sources")
    hessian = statistics.hessian()
    diagonal = hessian.diagonal().clone()
    dead = diagonal <= 0
    if dead.any():  # before the scales are searched: a column that is never active must not widen its group's scale
        weight = weight.masked_fill(dead, 0.0)
        hessian[dead, dead] = diagonal[~dead].mean() if (~dead).any() else 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)
    factor, damp_fraction = factor_inverse(hessian[order][:, order], options.damp_fraction)
    scale = search_scales(weight, diagonal.float(), scheme, scale_dtype)
    column_scale = scale.float().repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
    codes = torch.empty(weight.shape, dtype=torch.int8)
    codes[:, order] = solve_columns(weight[:, order], column_scale[:, order], factor, scheme, options.block_size)
    escalated = damp_fraction > options.damp_fraction
    fallbacks = (f"damp_fraction raised from {options.damp_fraction:g} to {damp_fraction:g}",) if escalated else ()
    return Solution(QuantizedWeight(codes, scale, scheme), damp_fraction, int(dead.sum()), fallbacks)


def factor_inverse(hessian: Tensor, damp_fraction: float) -> tuple[Tensor, float]:
    """Upper Cholesky factor U of the damped inverse, inverse(H + damp * mean(diag H) * I) = U^T U.

    Args:
        hessian: [K, K] float64, symmetric, positive semi-definite up to rounding.
        damp_fraction: first damping; multiplied by ten while the factorization fails, up to 1.

    Returns:
        U [K, K] float32, and the damping fraction that was used.

    Raises:
        QuantizationError: not even damping 1 makes the matrix positive definite (it holds NaN or is no second moment).
    """
    size = hessian.shape[0]
    mean = float(hessian.diagonal().mean())
    tried = damp_fraction
    while tried <= MAX_DAMP_FRACTION:
        damped = hessian + tried * mean * torch.eye(size, dtype=hessian.dtype)
        # Reversed, the lower factor L of the matrix gives the upper factor of the inverse without forming the inverse:
        # J H J = L L^T  =>  inverse(H) = (J inverse(L) J)^T (J inverse(L) J), and J inverse(L) J is upper triangular.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed and torch.isfinite(lower).all():
            inverse = torch.linalg.solve_triangular(lower, torch.eye(size, dtype=hessian.dtype), upper=False)
            return inverse.flip(0, 1).float().contiguous(), tried
        tried = min(tried * 10, MAX_DAMP_FRACTION) if tried < MAX_DAMP_FRACTION else torch.inf
    raise QuantizationError(
        f"the Hessian cannot be factored, even with damp_fraction {MAX_DAMP_FRACTION:g}",
        fix="Calibrate with more varied text",
    )


def solve_columns(weight: Tensor, column_scale: Tensor, factor: Tensor, scheme: QuantScheme, block_size: int) -> Tensor:
    """Algorithm 1 of the paper on columns in the order given.

    Args:
        weight: [N, K] float32 in solving order.
        column_scale: [N, K] float32 scale of every element, in the same order.
        factor: [K, K] float32 upper factor of the inverse Hessian.
        scheme: range of the codes.
        block_size: columns between two updates of the rest.

    Returns:
        [N, K] int8 codes in solving order.
    """
    w = weight.T.contiguous()  # [K, N]: a column of the paper is a row here, contiguous in memory
    s = column_scale.T.contiguous()
    codes = torch.empty_like(w)
    columns = w.shape[0]
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        block, errors = w[start:stop], torch.empty(stop - start, w.shape[1])
        u = factor[start:stop, start:stop]
        pivots = u.diagonal().tolist()
        for i, pivot in enumerate(pivots):
            column, step = block[i], s[start + i]
            q = torch.div(column, step, out=codes[start + i]).round_().clamp_(scheme.code_min, scheme.code_max)
            error = torch.addcmul(column, q, step, value=-1.0, out=errors[i]).div_(pivot)
            block[i + 1 :].addr_(u[i, i + 1 :], error, alpha=-1.0)
        w[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1.0)  # lazy update of the columns still open
    return codes.T.to(torch.int8).contiguous()
