"""What calibration does for every layer: second moments of inputs, and the column loop of GPTQ."""

import torch
from torch import Tensor

from quantkit_kernels.reference.arguments import FLOATING, check_argument

MAX_BLOCK_SIZE = 128  # columns that GPTQ solves one by one before it updates the rest


def check_hessian_accumulate(x: Tensor, total: Tensor, token_mask: Tensor | None = None) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `hessian_accumulate` fit together."""
    check_argument("x", x, FLOATING, ("T", "K"))
    check_argument("total", total, (torch.float32,), (x.shape[1], x.shape[1]), x.device)
    if token_mask is not None:
        check_argument("token_mask", token_mask, (torch.bool,), (x.shape[0],), x.device)


def hessian_accumulate(x: Tensor, total: Tensor, token_mask: Tensor | None = None) -> None:
    """Add the second moment of a layer's inputs, in place; on and above the diagonal.

        total[i, j] += sum over t of x[t, i] * x[t, j]    for i <= j, of the tokens that count

    Args:
        x: [T, K], unit stride along K, float32, bfloat16 or float16.
        total: [K, K] float32; below the diagonal it may hold the same sums or what it held before.
        token_mask: [T] bool, False where a token is padding and may be anything, NaN too; None counts all.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_hessian_accumulate(x, total, token_mask)
    rows = (x if token_mask is None else x[token_mask]).float()
    total.add_((rows.T @ rows).triu())


def check_gptq_columns(
    columns: Tensor, scale: Tensor, group: Tensor, factor: Tensor, zero_point: Tensor | None = None
) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `gptq_columns` fit together."""
    check_argument("columns", columns, (torch.float32,), ("C", "N"))
    size, out_features = columns.shape
    if not 0 < size <= MAX_BLOCK_SIZE:
        raise ValueError(f"columns are {size}, allowed are 1 to {MAX_BLOCK_SIZE}")
    check_argument("scale", scale, FLOATING, ("G", out_features), columns.device)
    check_argument("group", group, (torch.int64,), (size,), columns.device)
    check_argument("factor", factor, (torch.float32,), (size, size), columns.device)
    if zero_point is not None:
        check_argument("zero_point", zero_point, (torch.int8,), tuple(scale.shape), columns.device)


def gptq_columns(
    columns: Tensor,
    scale: Tensor,
    group: Tensor,
    factor: Tensor,
    code_min: int,
    code_max: int,
    zero_point: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round the columns of one block one after the other; those that are still open make up for each error.

        q[i] = clamp(round(w[i] / scale) + zero, code_min, code_max) - zero
        e[i] = (w[i] - q[i] * scale) / factor[i, i];   w[j] -= factor[i, j] * e[i]    for j > i

    Args:
        columns: [C, N] float32, up to 128 columns of a weight, in solving order, each a row here; not modified.
        scale: [G, N] floating, of the groups of the whole weight.
        group: [C] int64, the group of each column.
        factor: [C, C] float32, this block of the upper factor of the inverse Hessian.
        code_min: least code.
        code_max: largest code.
        zero_point: [G, N] int8, the code that means zero; None for 0.

    Returns:
        Codes q + zero, [C, N] int8, and errors e, [C, N] float32, with which the caller updates the other blocks:
        ``rest -= factor_of_the_rest.T @ errors``.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.

    Source: arXiv:2210.17323, Algorithm 1, the inner loop.
    """
    check_gptq_columns(columns, scale, group, factor, zero_point)
    w = columns.clone()
    codes, errors = torch.empty_like(w), torch.empty_like(w)
    for i, g in enumerate(group.tolist()):
        step = scale[g].float()
        zero = torch.zeros_like(step) if zero_point is None else zero_point[g].float()
        codes[i] = (w[i] / step).round_().add_(zero).clamp_(code_min, code_max)
        errors[i] = torch.addcmul(w[i], codes[i] - zero, step, value=-1.0) / factor[i, i]
        w[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1.0)
    return codes.to(torch.int8), errors
