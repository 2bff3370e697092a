"""Triton bodies of quantize_per_token, rms_norm_quantize and silu_mul_quantize: one program a row, each row read once.

What is fused is rounded where the single operations would round, so that fusing changes no code but by the order of a
sum.
"""

from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.eight_bits import codes_of, scale_of
from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.reference import check_gated, check_quantize_per_token, check_rms_norm
from quantkit_kernels.weight_limits import MAX_ROW_COLUMNS


@triton.jit
def _store_codes(codes_ptr, scale_ptr, row, column, mask, wide, COLUMNS):  # type: ignore[no-untyped-def]
    """Find the scale of a row of float32, and write it and the codes."""
    scale = scale_of(wide, 0)
    tl.store(scale_ptr + row, scale)
    _store_scaled(codes_ptr, scale, row, column, mask, wide, COLUMNS)


@triton.jit
def _store_scaled(codes_ptr, scale, row, column, mask, wide, COLUMNS):  # type: ignore[no-untyped-def]
    """Write the codes of a row."""
    tl.store(codes_ptr + row * COLUMNS + column, codes_of(wide, tl.zeros_like(wide) + scale), mask=mask)


@triton.jit
def _quantize_per_token_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    input_scale_ptr,
    codes_ptr,
    scale_ptr,
    stride_x,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < COLUMNS
    wide = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if input_scale_ptr is None:
        _store_codes(codes_ptr, scale_ptr, row, column, mask, wide, COLUMNS)
    else:
        _store_scaled(codes_ptr, tl.load(input_scale_ptr).to(tl.float32), row, column, mask, wide, COLUMNS)


@triton.jit
def _rms_norm_quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    codes_ptr,
    scale_ptr,
    total_ptr,
    eps,
    offset,
    stride_x,
    stride_residual,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < COLUMNS
    total = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * stride_residual + column, mask=mask, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + row * COLUMNS + column, total, mask=mask)
    wide = total.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / COLUMNS
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = wide * tl.rsqrt(mean + eps) * (weight + offset)
    _store_codes(codes_ptr, scale_ptr, row, column, mask, out.to(total.dtype).to(tl.float32), COLUMNS)


@triton.jit
def _silu_mul_quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scale_ptr,
    stride_x,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < COLUMNS
    gate = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * stride_x + COLUMNS + column, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    out = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    _store_codes(codes_ptr, scale_ptr, row, column, mask, out.to(gate.dtype).to(tl.float32), COLUMNS)


def configuration(columns: int) -> tuple[int, int]:
    """(columns of a program, warps).

    Raises:
        ValueError: the row does not fit into the registers of a program.
    """
    if columns > MAX_ROW_COLUMNS:
        raise ValueError(f"x has {columns} columns, allowed is up to {MAX_ROW_COLUMNS}")
    block = triton.next_power_of_2(columns)
    return block, min(16, max(1, block // 1024))


def _outputs(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape[0], columns, dtype=torch.int8, device=x.device)
    return codes, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


def quantize_per_token(x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments and result as `quantkit_kernels.reference.quantize_per_token`.

    Precision: the same codes and scales.
    Needs: unit stride along K, K up to 32768; any stride along T.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_quantize_per_token(x, input_scale)
    rows, columns = x.shape
    block, num_warps = configuration(columns)
    codes, scale = _outputs(x, columns)
    if codes.numel():
        with torch.cuda.device(x.device) if x.is_cuda else torch.device("cpu"):
            _quantize_per_token_kernel[(rows,)](
                x, input_scale, codes, scale, x.stride(0), COLUMNS=columns, BLOCK=block, num_warps=num_warps
            )  # fmt: skip
    return codes, scale if input_scale is None else input_scale.float()


@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]: ...


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Launch the Triton kernel; arguments and result as `quantkit_kernels.reference.rms_norm_quantize`.

    Precision: float32; the sum of squares in another order than the reference, which may move a code by one.
    Needs: unit stride along K, K up to 32768; any stride along T.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_rms_norm(x, weight, residual)
    rows, columns = x.shape
    block, num_warps = configuration(columns)
    codes, scale = _outputs(x, columns)
    total = None if residual is None else torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if codes.numel():
        with torch.cuda.device(x.device) if x.is_cuda else torch.device("cpu"):
            _rms_norm_quantize_kernel[(rows,)](
                *(x, residual, weight, codes, scale, total),
                *(float(eps), float(offset)),
                x.stride(0),
                0 if residual is None else residual.stride(0),
                COLUMNS=columns,
                BLOCK=block,
                num_warps=num_warps,
            )
    return (codes, scale) if total is None else (codes, scale, total)


def silu_mul_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments and result as `quantkit_kernels.reference.silu_mul_quantize`.

    Precision: float32; an exponential that differs in the last bit may move a code by one.
    Needs: unit stride along 2F, F up to 32768; any stride along T.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_gated(x)
    rows, columns = x.shape[0], x.shape[1] // 2
    block, num_warps = configuration(columns)
    codes, scale = _outputs(x, columns)
    if codes.numel():
        with torch.cuda.device(x.device) if x.is_cuda else torch.device("cpu"):
            _silu_mul_quantize_kernel[(rows,)](
                x, codes, scale, x.stride(0), COLUMNS=columns, BLOCK=block, num_warps=num_warps
            )  # fmt: skip
    return codes, scale


_TYPES = {"codes_ptr": "*i8", "scale_ptr": "*fp32", "weight_ptr": "*fp32", "eps": "fp32", "offset": "fp32"}
_TYPES |= dict.fromkeys(("x_ptr", "residual_ptr", "total_ptr"), "*bf16")


def _launch(op: str, label: str, kernel: triton.JITFunction, rows: int, columns: int, moved: int) -> Launch:
    """``moved`` are the bytes of a token and column, codes included."""
    block, num_warps = configuration(columns)
    constexprs: dict[str, object] = {"COLUMNS": columns, "BLOCK": block}
    if op == "quantize_per_token":
        constexprs["input_scale_ptr"] = None
    signature = signature_of(kernel, _TYPES, constexprs)
    return Launch(
        op=op,
        label=f"{label}, {rows} tokens",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        num_stages=3,
        bytes=rows * columns * moved + 4 * rows,
        flops=8 * rows * columns,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=tuple(n for n in signature if signature[n].startswith("*") or n.startswith("stride")),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("quantize_per_token", "llama-3.1-8b o_proj", _quantize_per_token_kernel, 2048, 4096, 3),
    _launch("rms_norm_quantize", "llama-3.1-8b, with residual", _rms_norm_quantize_kernel, 2048, 4096, 7),
    _launch("silu_mul_quantize", "llama-3.1-8b down_proj", _silu_mul_quantize_kernel, 2048, 14336, 5),
)
