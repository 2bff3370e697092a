"""Triton body of rms_norm: one program per few rows, each row read once."""

from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.reference import check_rms_norm
from quantkit_kernels.weight_limits import MAX_ROW_COLUMNS

TILE = 2048  # numbers of short rows that a program handles together


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    eps,
    offset,
    stride_x,
    stride_residual,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < num_rows) & (column < COLUMNS)
    total = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * stride_residual + column, mask=mask, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + row * COLUMNS + column, total, mask=mask)
    wide = total.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1, keep_dims=True) / COLUMNS
    weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    out = wide * tl.rsqrt(mean + eps) * (weight + offset)
    tl.store(out_ptr + row * COLUMNS + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def configuration(columns: int) -> tuple[int, int, int]:
    """(rows of a program, columns of its tile, warps)."""
    block_columns = triton.next_power_of_2(columns)
    block_rows = max(1, TILE // block_columns)
    return block_rows, block_columns, min(16, max(4, block_columns // 1024))


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: None = None, offset: float = 0.0) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments and result as `quantkit_kernels.reference.rms_norm`.

    Precision: float32, rounded once; sums in another order than the reference.
    Needs: unit stride along K, K up to 32768; any stride along T.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_rms_norm(x, weight, residual)
    num_rows, columns = x.shape
    if columns > MAX_ROW_COLUMNS:
        raise ValueError(f"x has {columns} columns, allowed is up to {MAX_ROW_COLUMNS}")
    out = torch.empty((num_rows, columns), dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    if out.numel():
        block_rows, block_columns, num_warps = configuration(columns)
        with torch.cuda.device(x.device) if x.is_cuda else torch.device("cpu"):
            _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
                x,
                residual,
                weight,
                out,
                total,
                num_rows,
                float(eps),
                float(offset),
                x.stride(0),
                0 if residual is None else residual.stride(0),
                COLUMNS=columns,
                BLOCK_ROWS=block_rows,
                BLOCK_COLUMNS=block_columns,
                num_warps=num_warps,
            )
    return out if total is None else (out, total)


def _launch(label: str, rows: int, columns: int, *, has_residual: bool) -> Launch:
    block_rows, block_columns, num_warps = configuration(columns)
    constexprs: dict[str, object] = {
        "COLUMNS": columns, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns
    }  # fmt: skip
    types = dict.fromkeys(("x_ptr", "out_ptr"), "*bf16")
    types |= {"weight_ptr": "*fp32", "eps": "fp32", "offset": "fp32"}  # as the engine keeps it
    if has_residual:
        types |= dict.fromkeys(("residual_ptr", "total_ptr"), "*bf16")
    else:
        constexprs |= dict.fromkeys(("residual_ptr", "total_ptr"))
    signature = signature_of(_rms_norm_kernel, types, constexprs)
    return Launch(
        op="rms_norm",
        label=label,
        kernel=_rms_norm_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        num_stages=3,
        bytes=2 * rows * columns * (4 if has_residual else 2) + 4 * columns,
        flops=4 * rows * columns,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=tuple(n for n in signature if n.startswith("stride") or signature[n].startswith("*")),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("llama-3.1-8b, 2048 tokens, with residual", 2048, 4096, has_residual=True),
    _launch("llama-3.1-8b, 16 tokens", 16, 4096, has_residual=False),
    _launch("qwen3-8b, 32 query heads of 512 tokens", 32 * 512, 128, has_residual=False),
)
