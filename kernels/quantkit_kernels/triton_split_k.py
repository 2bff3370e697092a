"""The second half of split-K: partial products are added in a fixed order, so that a result never depends on timing.

A product of few rows has too few tiles to fill a GPU. Its columns are then cut into runs, each program multiplies one
run into its own part of a workspace, and this kernel adds the parts: no atomic additions.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import Launch, signature_of

BLOCK = 256


@triton.jit
def _add_splits_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    row_scale_ptr,
    column_scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    stride_split,
    stride_row_scale,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    part = parts_ptr + m * N + n
    total = tl.load(part, mask=mask, other=0)
    for _ in tl.static_range(1, SPLITS):
        part += stride_split
        total += tl.load(part, mask=mask, other=0)
    out = total.to(tl.float32)
    if row_scale_ptr is not None:
        out *= tl.load(row_scale_ptr + m * stride_row_scale)
    if column_scale_ptr is not None:
        out *= tl.load(column_scale_ptr + n, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * N + n, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_splits(
    parts: Tensor,
    out: Tensor,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Write the sum of partial products, scaled, into ``out``.

        out[m, n] = (sum over s of parts[s, m, n]) * row_scale[m] * column_scale[n] + bias[n]

    Args:
        parts: [S, M, N] float32 or int32, contiguous.
        out: [M, N] floating, contiguous.
        row_scale: [M], or [1] for all rows, float32; None for 1.
        column_scale: [N] floating; None for 1.
        bias: [N] floating; None for 0.
    """
    splits, rows, columns = parts.shape
    _add_splits_kernel[(triton.cdiv(columns, BLOCK), rows)](
        parts,
        row_scale,
        column_scale,
        bias,
        out,
        columns,
        rows * columns,
        0 if row_scale is None or row_scale.numel() == 1 else 1,
        SPLITS=splits,
        BLOCK=BLOCK,
        num_warps=2,
    )


def _launch(label: str, splits: int, rows: int, columns: int, *, is_int8: bool) -> Launch:
    constexprs: dict[str, object] = {"SPLITS": splits, "BLOCK": BLOCK, "bias_ptr": None}
    types = {"parts_ptr": "*i32" if is_int8 else "*fp32", "out_ptr": "*bf16"}
    if is_int8:
        types |= {"row_scale_ptr": "*fp32", "column_scale_ptr": "*bf16"}
    else:
        constexprs |= {"row_scale_ptr": None, "column_scale_ptr": None}
    signature = signature_of(_add_splits_kernel, types, constexprs)
    return Launch(
        op="add_splits",
        label=label,
        kernel=_add_splits_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=2,
        num_stages=3,
        bytes=rows * columns * (4 * splits + 2),
        flops=rows * columns * splits,
        flop_dtype="fp32",
        divisible_by_16=tuple(n for n in signature if signature[n].startswith("*") or n in ("N", "stride_split")),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("llama-3.1-8b o_proj, M=1, 4 splits", 4, 1, 4096, is_int8=False),
    _launch("llama-3.1-8b o_proj, M=16, 4 splits, int8", 4, 16, 4096, is_int8=True),
)
