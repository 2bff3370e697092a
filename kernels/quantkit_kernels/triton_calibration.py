"""Triton bodies of hessian_accumulate and gptq_columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.reference import check_gptq_columns, check_hessian_accumulate

HESSIAN_TILE = 128
HESSIAN_TOKENS = {2: 64, 4: 16}  # tokens of a step, by the bytes of a number
HESSIAN_WARPS = 8
HESSIAN_STAGES = 3
GPTQ_ROWS = 32  # rows of the weight, each solved alone, that a program handles together
GPTQ_WARPS = 4


@triton.jit
def _hessian_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    mask_ptr,
    total_ptr,
    T,
    K,
    stride_x,
    stride_total,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tile_i = tl.program_id(0)
    tile_j = tl.program_id(1)
    if tile_j < tile_i:
        return
    i = tile_i * TILE + tl.arange(0, TILE)
    j = tile_j * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, T, TOKENS):
        t = first + tl.arange(0, TOKENS)
        counts = t < T
        if mask_ptr is not None:
            counts = counts & (tl.load(mask_ptr + t, mask=counts, other=0) != 0)
        rows = x_ptr + t.to(tl.int64) * stride_x
        left = tl.load(rows[None, :] + i[:, None], mask=counts[None, :] & (i[:, None] < K), other=0.0)
        right = tl.load(rows[:, None] + j[None, :], mask=counts[:, None] & (j[None, :] < K), other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    place = total_ptr + i.to(tl.int64)[:, None] * stride_total + j[None, :]
    upper = (i[:, None] <= j[None, :]) & (j[None, :] < K)
    tl.store(place, tl.load(place, mask=upper, other=0.0) + acc, mask=upper)


@triton.jit
def _gptq_columns_kernel(  # type: ignore[no-untyped-def]
    columns_ptr,
    scale_ptr,
    zero_ptr,
    group_ptr,
    factor_ptr,
    codes_ptr,
    errors_ptr,
    C,
    N,
    code_min,
    code_max,
    stride_columns,
    stride_scale,
    stride_factor,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    in_rows = n < N
    mask = (c[:, None] < C) & in_rows[None, :]
    w = tl.load(columns_ptr + c[:, None] * stride_columns + n[None, :], mask=mask, other=0.0)
    for i in range(C):
        group = tl.load(group_ptr + i)
        factor = tl.load(factor_ptr + i * stride_factor + c, mask=(c > i) & (c < C), other=0.0)
        pivot = tl.load(factor_ptr + i * stride_factor + i)
        step = tl.load(scale_ptr + group * stride_scale + n, mask=in_rows, other=1.0).to(tl.float32)
        zero = tl.zeros((BLOCK_N,), tl.float32)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + group * stride_scale + n, mask=in_rows, other=0).to(tl.float32)
        column = tl.sum(tl.where(c[:, None] == i, w, 0.0), axis=0)
        ratio = tl.minimum(tl.maximum(tl.div_rn(column, step), -1048576.0), 1048576.0)
        rounded = (ratio + 12582912.0) - 12582912.0  # 1.5 * 2**23: to nearest, ties to even
        code = tl.minimum(tl.maximum(rounded + zero, code_min), code_max)
        error = tl.div_rn(column - (code - zero) * step, tl.zeros((BLOCK_N,), tl.float32) + pivot)
        tl.store(codes_ptr + i * N + n, code.to(tl.int8), mask=in_rows)
        tl.store(errors_ptr + i * N + n, error, mask=in_rows)
        w -= factor[:, None] * error[None, :]


def hessian_accumulate(x: Tensor, total: Tensor, token_mask: Tensor | None = None) -> None:
    """Launch the Triton kernel; arguments and effect as `quantkit_kernels.reference.hessian_accumulate`.

    Precision: products exact for 16-bit inputs, float32 products for float32; sums in float32 in a fixed order.
    Needs: unit strides along K; any stride along T.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_hessian_accumulate(x, total, token_mask)
    tokens, columns = x.shape
    tiles = triton.cdiv(columns, HESSIAN_TILE)
    if tokens == 0 or tiles == 0:
        return
    with torch.cuda.device(x.device) if x.is_cuda else torch.device("cpu"):
        _hessian_kernel[(tiles, tiles)](
            *(x, None if token_mask is None else token_mask.view(torch.int8), total),
            *(tokens, columns, x.stride(0), total.stride(0)),
            TILE=HESSIAN_TILE,
            TOKENS=HESSIAN_TOKENS[x.element_size()],
            num_warps=HESSIAN_WARPS,
            num_stages=HESSIAN_STAGES,
        )


def gptq_columns(
    columns: Tensor,
    scale: Tensor,
    group: Tensor,
    factor: Tensor,
    code_min: int,
    code_max: int,
    zero_point: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments and result as `quantkit_kernels.reference.gptq_columns`.

    Precision: float32; a fused multiplication and addition may differ in the last bit, and move a code that lies
        half-way between two by one.
    Needs: unit strides along N and along a row of the factor.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_gptq_columns(columns, scale, group, factor, zero_point)
    if zero_point is not None and zero_point.stride() != scale.stride():
        zero_point = torch.empty_strided(scale.shape, scale.stride(), dtype=torch.int8, device=scale.device).copy_(
            zero_point
        )
    size, out_features = columns.shape
    codes = torch.empty(size, out_features, dtype=torch.int8, device=columns.device)
    errors = torch.empty(size, out_features, dtype=torch.float32, device=columns.device)
    if out_features:
        with torch.cuda.device(columns.device) if columns.is_cuda else torch.device("cpu"):
            _gptq_columns_kernel[(triton.cdiv(out_features, GPTQ_ROWS),)](
                *(columns, scale, zero_point, group, factor, codes, errors),
                *(size, out_features, float(code_min), float(code_max)),
                *(columns.stride(0), scale.stride(0), factor.stride(0)),
                BLOCK_C=max(16, triton.next_power_of_2(size)),
                BLOCK_N=GPTQ_ROWS,
                num_warps=GPTQ_WARPS,
            )
    return codes, errors


def _launch_hessian(label: str, tokens: int, columns: int) -> Launch:
    constexprs: dict[str, object] = {"mask_ptr": None, "TILE": HESSIAN_TILE, "TOKENS": HESSIAN_TOKENS[2]}
    signature = signature_of(_hessian_kernel, {"x_ptr": "*bf16", "total_ptr": "*fp32"}, constexprs)
    return Launch(
        op="hessian_accumulate",
        label=label,
        kernel=_hessian_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=HESSIAN_WARPS,
        num_stages=HESSIAN_STAGES,
        bytes=2 * tokens * columns + 4 * columns * columns,
        flops=tokens * columns * (columns + 1),
        flop_dtype="bf16",
        needs=("mma", "128-bit loads"),
        divisible_by_16=("x_ptr", "total_ptr", "K", "stride_x", "stride_total"),
    )


def _launch_gptq(label: str, size: int, out_features: int) -> Launch:
    constexprs: dict[str, object] = {"zero_ptr": None, "BLOCK_C": size, "BLOCK_N": GPTQ_ROWS}
    types = dict.fromkeys(("columns_ptr", "factor_ptr", "errors_ptr"), "*fp32") | {
        "scale_ptr": "*bf16", "group_ptr": "*i64", "codes_ptr": "*i8", "code_min": "fp32", "code_max": "fp32"
    }  # fmt: skip
    signature = signature_of(_gptq_columns_kernel, types, constexprs)
    return Launch(
        op="gptq_columns",
        label=label,
        kernel=_gptq_columns_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=GPTQ_WARPS,
        num_stages=3,
        bytes=size * out_features * (4 + 1 + 4) + 4 * size * size + 2 * out_features,
        flops=size * size * out_features,
        flop_dtype="fp32",
        divisible_by_16=tuple(
            n for n in signature if signature[n].startswith("*") or n == "N" or n.startswith("stride")
        ),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch_hessian("llama-3.1-8b o_proj, 2048 tokens", 2048, 4096),
    _launch_gptq("llama-3.1-8b o_proj, a block of 128 columns", 128, 4096),
)
