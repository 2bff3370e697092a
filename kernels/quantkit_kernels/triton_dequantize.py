"""Triton bodies of dequantize: codes -> a dense weight, for products of many rows, which a dense kernel does faster."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.w4a16_layout import BLOCK_COLUMNS

BLOCK_N = 64
INT8_BLOCK_K = 256
INT8_BLOCK_N = 16
NUM_WARPS = 4


@triton.jit
def _dequantize_words_kernel(  # type: ignore[no-untyped-def]
    words_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, 32)
    words = tl.load(words_ptr + (block * N + n[:, None]) * 32 + j[None, :], mask=n[:, None] < N, other=0)
    for i in tl.static_range(4):
        column = block * 128 + 32 * i
        mask = n < tl.where(column < K, N, 0)
        group = column // GROUP_SIZE
        scale = tl.load(scale_ptr + group * N + n, mask=mask, other=0.0).to(tl.float32)
        code = ((words.to(tl.int32) >> (4 * i)) & 15).to(tl.float32) - 8.0
        if zero_ptr is not None:
            code -= tl.load(zero_ptr + group * N + n, mask=mask, other=0).to(tl.float32)[:, None]
        out = out_ptr + n[:, None] * K + column + j[None, :]
        tl.store(out, (code * scale[:, None]).to(out_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _dequantize_int8_kernel(  # type: ignore[no-untyped-def]
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    groups,
    group_size,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    mask = (n < N) & (k < K)
    code = tl.load(codes_ptr + n * K + k, mask=mask, other=0).to(tl.float32)
    place = n * groups + k // group_size
    if zero_ptr is not None:
        code -= tl.load(zero_ptr + place, mask=mask, other=0).to(tl.float32)
    scale = tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + n * K + k, (code * scale).to(out_ptr.dtype.element_ty), mask=mask)


def dequantize_words(
    words: Tensor, scale: Tensor, zero_point: Tensor | None, in_features: int, dtype: torch.dtype
) -> Tensor:
    """[N, K] weights from the layout of `w4a16_layout`: (code - zero point) * scale, in float32, rounded once.

    Args:
        words: [ceil(K / 128), N, 32] int16.
        scale: [G, N] floating.
        zero_point: [G, N] int8 or None.
        in_features: K.
        dtype: of the result.
    """
    out_features = words.shape[1]
    out = torch.empty(out_features, in_features, dtype=dtype, device=words.device)
    _dequantize_words_kernel[(words.shape[0], triton.cdiv(out_features, BLOCK_N))](
        words,
        scale,
        zero_point,
        out,
        out_features,
        in_features,
        GROUP_SIZE=in_features // scale.shape[0],
        BLOCK_N=BLOCK_N,
        num_warps=NUM_WARPS,
    )
    return out


def dequantize_int8(codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, K] weights from 8-bit codes as they are stored, otherwise as `dequantize_words`.

    Args:
        codes: [N, K] int8, contiguous.
        scale: [N, G] floating, contiguous.
        zero_point: [N, G] int8, contiguous, or None.
        dtype: of the result.
    """
    out_features, in_features = codes.shape
    out = torch.empty(out_features, in_features, dtype=dtype, device=codes.device)
    _dequantize_int8_kernel[(triton.cdiv(in_features, INT8_BLOCK_K), triton.cdiv(out_features, INT8_BLOCK_N))](
        codes,
        scale,
        zero_point,
        out,
        out_features,
        in_features,
        scale.shape[1],
        in_features // scale.shape[1],
        BLOCK_N=INT8_BLOCK_N,
        BLOCK_K=INT8_BLOCK_K,
        num_warps=NUM_WARPS,
    )
    return out


def _launch_words(label: str, out_features: int, in_features: int, group_size: int) -> Launch:
    constexprs: dict[str, object] = {"zero_ptr": None, "GROUP_SIZE": group_size, "BLOCK_N": BLOCK_N}
    types = {"words_ptr": "*i16", "scale_ptr": "*bf16", "out_ptr": "*bf16"}
    weights = out_features * in_features
    return Launch(
        op="dequantize",
        label=label,
        kernel=_dequantize_words_kernel,
        signature=signature_of(_dequantize_words_kernel, types, constexprs),
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        num_stages=3,
        bytes=weights // 2 + 2 * weights // group_size + 2 * weights,
        flops=2 * weights,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=(*types, "N", "K"),
    )


def _launch_int8(label: str, out_features: int, in_features: int) -> Launch:
    constexprs: dict[str, object] = {"zero_ptr": None, "BLOCK_N": INT8_BLOCK_N, "BLOCK_K": INT8_BLOCK_K}
    types = {"codes_ptr": "*i8", "scale_ptr": "*bf16", "out_ptr": "*bf16"}
    weights = out_features * in_features
    return Launch(
        op="dequantize",
        label=label,
        kernel=_dequantize_int8_kernel,
        signature=signature_of(_dequantize_int8_kernel, types, constexprs),
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        num_stages=3,
        bytes=3 * weights + 2 * out_features,
        flops=2 * weights,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=(*types, "N", "K", "group_size"),
    )


assert BLOCK_COLUMNS == 128  # written as a number in the kernel, like 32, the columns of a strip
LAUNCHES: tuple[Launch, ...] = (
    _launch_words("llama-3.1-8b down_proj, 4 bits, group 128", 4096, 14336, 128),
    _launch_int8("llama-3.1-8b down_proj, 8 bits", 4096, 14336),
)
