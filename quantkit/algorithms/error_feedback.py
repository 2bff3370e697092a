"""The core of GPTQ: round column by column and let the columns that are still open make up for each error."""

import torch
from torch import Tensor

from quantkit.errors import QuantizationError
from quantkit.scheme import QuantScheme
from quantkit_kernels import gptq_columns
from quantkit_kernels.dispatch import triton_blocker
from quantkit_kernels.reference import MAX_BLOCK_SIZE

MAX_DAMP_FRACTION = 1.0
_INVERTED = 512  # columns of an inverse that are solved at a time
_STRIP = 16  # columns that are updated one by one; the rest of a block is updated once a strip


def factor_inverse(hessian: Tensor, order: Tensor, damp_fraction: float) -> tuple[Tensor, float]:
    """Upper Cholesky factor U of the damped inverse, inverse(H + damp * mean(diag H) * I) = U^T U, in solving order.

    Beside the Hessian two matrices of its size are in memory at a time: for an input of 6,000 columns each is 288 MB.

    Args:
        hessian: [K, K] float64, symmetric, positive semi-definite up to rounding; not modified.
        order: [K] the column that is solved first, second, ...
        damp_fraction: first damping; multiplied by ten while the factorization fails, up to 1.

    Returns:
        U [K, K] float32, rows and columns in solving order, and the damping fraction that was used.

    Raises:
        QuantizationError: not even damping 1 makes the matrix positive definite (it holds NaN or is no second moment).
    """
    mean = float(hessian.diagonal().mean())
    last_first = order.flip(0)
    tried = damp_fraction
    while tried <= MAX_DAMP_FRACTION:
        damped = hessian[last_first][:, last_first]
        damped.diagonal().add_(tried * mean)
        # Reversed, the lower factor L of the matrix gives the upper factor of the inverse without forming the inverse:
        # J H J = L L^T  =>  inverse(H) = (J inverse(L) J)^T (J inverse(L) J), and J inverse(L) J is upper triangular.
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not failed and torch.isfinite(lower.diagonal()).all():
            return _reversed_inverse(lower), tried
        tried = min(tried * 10, MAX_DAMP_FRACTION) if tried < MAX_DAMP_FRACTION else torch.inf
    raise QuantizationError(
        f"the Hessian cannot be factored, even with damp_fraction {MAX_DAMP_FRACTION:g}",
        fix="Calibrate with more varied text",
    )


def _reversed_inverse(lower: Tensor) -> Tensor:
    """J inverse(L) J, [K, K] float32 upper triangular, of a lower triangular L in float64; by column blocks."""
    columns = len(lower)
    result = torch.zeros(columns, columns, device=lower.device)
    for start in range(0, columns, _INVERTED):
        open_columns, size = columns - start, min(_INVERTED, columns - start)
        identity = torch.eye(open_columns, size, dtype=lower.dtype, device=lower.device)
        part = torch.linalg.solve_triangular(lower[start:, start:], identity, upper=False)
        result[:open_columns, open_columns - size : open_columns] = part.flip(0, 1)
    return result


def solve_columns(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    factor: Tensor,
    order: Tensor,
    scheme: QuantScheme,
    block_size: int = 128,
) -> Tensor:
    """Algorithm 1 of the paper on columns in a given order, with scales that are fixed beforehand.

    On a GPU a kernel solves the columns of a block (`quantkit_kernels.gptq_columns`). Its sums are added in another
    order, which may move a code that lies half-way between two.

    Args:
        weight: [N, K] float32.
        scale: [N, G] in storage dtype.
        zero_point: [N, G] int8, or None.
        factor: [K, K] float32 upper factor of the inverse Hessian, rows and columns in solving order.
        order: [K] the column that is solved first, second, ...
        scheme: range of the codes.
        block_size: columns between two updates of the rest.

    Returns:
        [N, K] int8 codes, columns in their own places.

    Source: arXiv:2210.17323, Algorithm 1.
    """
    w = weight.T[order].contiguous()  # [K, N]: a column of the paper is a row here, contiguous in memory
    groups = order // (len(order) // scale.shape[1])
    solve = _solve_strips if triton_blocker(weight.device) is not None else _solve_blocks
    zeros = None if zero_point is None else zero_point.T.contiguous()
    codes = solve(w, scale.T.contiguous(), zeros, groups, factor, scheme, block_size)
    result = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    result[:, order] = codes.T
    return result


def _solve_blocks(
    w: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    groups: Tensor,
    factor: Tensor,
    scheme: QuantScheme,
    block_size: int,
) -> Tensor:
    """[K, N] int8 codes of columns [K, N] in solving order; scale and zero_point are [G, N]. A kernel a block."""
    size = min(block_size, MAX_BLOCK_SIZE)
    codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    for start in range(0, len(w), size):
        block = slice(start, min(start + size, len(w)))
        codes[block], errors = gptq_columns(
            w[block], scale, groups[block], factor[block, block], scheme.code_min, scheme.code_max, zero_point
        )
        w[block.stop :].addmm_(factor[block, block.stop :].T, errors, alpha=-1.0)
    return codes


def _solve_strips(
    w: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    groups: Tensor,
    factor: Tensor,
    scheme: QuantScheme,
    block_size: int,
) -> Tensor:
    """The same column by column, as a CPU does it fastest."""
    columns, group = w.shape[0], groups.tolist()
    scales = scale.float()
    low, high = float(scheme.code_min), float(scheme.code_max)
    offsets = None if zero_point is None else zero_point.float()
    codes = torch.empty_like(w)
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        errors = torch.empty(stop - start, w.shape[1])
        pivots = factor[start:stop, start:stop].diagonal().tolist()
        for first in range(start, stop, _STRIP):
            last = min(first + _STRIP, stop)
            for i in range(first, last):
                column, step = w[i], scales[group[i]]
                q = torch.div(column, step, out=codes[i]).round_()
                if offsets is None:
                    q.clamp_(low, high)
                else:
                    offset = offsets[group[i]]
                    q.add_(offset).clamp_(low, high).sub_(offset)
                error = torch.addcmul(column, q, step, value=-1.0, out=errors[i - start]).div_(pivots[i - start])
                if i + 1 < last:
                    w[i + 1 : last].addr_(factor[i, i + 1 : last], error, alpha=-1.0)
            strip = errors[first - start : last - start]
            w[last:stop].addmm_(factor[first:last, last:stop].T, strip, alpha=-1.0)
        w[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1.0)  # lazy update of the columns still open
    if offsets is not None:
        codes += offsets[groups]
    return codes.to(torch.int8)
