"""Triton body of w8a8_gemm: 8-bit inputs times 8-bit weights on the integer tensor cores; sums are exact.

The scales of token and weight row, and the bias, are applied to the sums in the same kernel, or, for few tokens, where
the runs of columns are added (`triton_split_k`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.launches import CAPABILITIES, Launch, signature_of
from quantkit_kernels.tiling import Tiling, choose_splits, generation, rows_of
from quantkit_kernels.triton_quantize import quantize_per_token
from quantkit_kernels.triton_split_k import add_splits

BLOCK_K = 128
MAX_SUMMED_COLUMNS = 2**17 - 1  # so many products of -128 and -128 are a sum below 2**31
GROUP_M = 8  # tiles of tokens that are worked on side by side, so that they share weights in the cache


@triton.jit
def _w8a8_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    steps,
    steps_per_split,
    stride_row_scale,
    stride_split,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    first = split * steps_per_split
    x_tile = x_ptr + m.to(tl.int64)[None, :] * K + k[:, None]
    codes_tile = codes_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for step in range(first, tl.minimum(first + steps_per_split, steps)):
        column = step * BLOCK_K
        codes = tl.load(codes_tile + column, mask=(n[:, None] < N) & (column + k[None, :] < K), other=0)
        x = tl.load(x_tile + column, mask=(m[None, :] < M) & (column + k[:, None] < K), other=0)
        acc = tl.dot(codes, x, acc)
    mask = (m[None, :] < M) & (n[:, None] < N)
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    if IS_SPLIT:
        tl.store(out + split.to(tl.int64) * stride_split, acc, mask=mask)
    else:
        row_scale = tl.load(row_scale_ptr + m * stride_row_scale, mask=m < M, other=0.0)
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        product = acc.to(tl.float32) * row_scale[None, :] * scale[:, None]
        if bias_ptr is not None:
            product += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out, product.to(out_ptr.dtype.element_ty), mask=mask)


def tiling_of(m: int, n: int, k: int, capability: int) -> Tiling:
    """How ``m`` rows are multiplied by a weight of ``n`` rows and ``k`` columns, on a GPU of `tiling.generation`.

    The sums are whole numbers, so that a tile of another size gives the same product.
    """
    widest = 256 if capability >= 90 else 128  # before that, sums and factors share the registers
    block_m = min(widest, max(16, triton.next_power_of_2(m)))
    block_n, num_warps = (64, 4) if block_m <= 32 else (128, 8)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    return Tiling(block_m, block_n, choose_splits(tiles, triton.cdiv(k, BLOCK_K)), num_warps, 3)


def multiply_codes(
    x_codes: Tensor,
    x_scale: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[M, N] product of rows that are quantized already, e.g. by the norm in front of the layer.

    Args:
        x_codes: [M, K] int8, contiguous.
        x_scale: [M, 1], or [1] for static inputs, float32.
        codes: [N, K] int8, contiguous.
        scale: [N, 1] floating, contiguous.
        bias: [N] floating or None.
        dtype: of the result.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    reference.check_int8(codes, scale, reference.PER_CHANNEL)
    (rows, in_features), out_features = x_codes.shape, codes.shape[0]
    if x_codes.dtype != torch.int8 or in_features != codes.shape[1] or not x_codes.is_contiguous():
        raise ValueError(
            f"x_codes are {x_codes.dtype} {list(x_codes.shape)} with strides {x_codes.stride()}, "
            f"allowed is contiguous torch.int8 [M, {codes.shape[1]}]"
        )
    if x_scale.dtype != torch.float32 or x_scale.numel() not in (1, rows) or not x_scale.is_contiguous():
        raise ValueError(f"x_scale is {x_scale.dtype} {list(x_scale.shape)}, allowed is torch.float32 [{rows}, 1], [1]")
    if x_codes.device != codes.device or x_scale.device != codes.device:
        raise ValueError(f"x_codes are on {x_codes.device} and x_scale on {x_scale.device}, allowed is {codes.device}")
    if in_features > MAX_SUMMED_COLUMNS:
        raise ValueError(f"codes have {in_features} columns, allowed is up to {MAX_SUMMED_COLUMNS}")
    if not codes.is_contiguous() or not scale.is_contiguous():
        raise ValueError(f"codes have the strides {codes.stride()}, allowed is contiguous; the scale too")
    reference.check_bias(bias, out_features)
    out = torch.empty(rows, out_features, dtype=dtype, device=x_codes.device)
    if rows == 0:
        return out
    tiling = tiling_of(rows, out_features, in_features, generation(out.device))
    steps = triton.cdiv(in_features, BLOCK_K)
    is_split = tiling.splits > 1
    shape = (tiling.splits, rows, out_features)
    target = torch.empty(shape, dtype=torch.int32, device=out.device) if is_split else out
    tiles = triton.cdiv(rows, tiling.block_m) * triton.cdiv(out_features, tiling.block_n)
    with torch.cuda.device(out.device) if out.is_cuda else torch.device("cpu"):
        _w8a8_gemm_kernel[(tiles, tiling.splits)](
            *(x_codes, codes, x_scale, scale, bias, target),
            *(rows, out_features, in_features),
            steps,
            triton.cdiv(steps, tiling.splits),
            0 if x_scale.numel() == 1 else 1,
            out.numel(),
            IS_SPLIT=is_split,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=BLOCK_K,
            GROUP_M=GROUP_M,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if is_split:
            add_splits(target, out, x_scale, scale, bias)
    return out


class TritonW8A8:
    """An 8-bit weight on a GPU for inputs that are quantized to 8 bits on the way; calling it multiplies.

    Args:
        codes: [N, K] int8; kept as it is.
        scale: [N, 1] floating.
        dtype: of the activations.
        input_scale: [1] of static inputs, or None.
        bias: [N] floating or None.

    Precision: the sum of whole numbers is exact, the rest in float32, rounded once.
    Needs: compute capability 8.0, or a CPU in Triton's interpreter.

    Raises:
        ValueError: shapes that do not fit.
    """

    body = "triton w8a8"

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        reference.check_int8(codes, scale, reference.PER_CHANNEL)
        reference.check_bias(bias, codes.shape[0])
        self.dtype, self.bias = dtype, bias
        self.input_scale = None if input_scale is None else input_scale.float()
        self._codes, self._scale = codes.contiguous(), scale.contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        return self._codes.nbytes + self._scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K] in ``dtype``, with the weight."""
        rows = rows_of(x, self._codes.shape[1], self.dtype, self._codes.device)
        product = self.multiply(*quantize_per_token(rows, self.input_scale))
        return product.view(*x.shape[:-1], self._codes.shape[0])

    def multiply(self, x_codes: Tensor, x_scale: Tensor) -> Tensor:
        """[M, N] product of rows that are quantized already; see `multiply_codes`."""
        return multiply_codes(x_codes, x_scale, self._codes, self._scale, self.bias, self.dtype)


def w8a8_gemm(
    x: Tensor, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Quantize and multiply once; arguments and result as `quantkit_kernels.reference.w8a8_gemm`."""
    return TritonW8A8(codes, scale, x.dtype, input_scale, bias)(x)


def _launch(label: str, m: int, n: int, k: int, capabilities: tuple[int, ...] = CAPABILITIES) -> Launch:
    tiling = tiling_of(m, n, k, capabilities[0])
    assert all(tiling == tiling_of(m, n, k, capability) for capability in capabilities)
    is_split = tiling.splits > 1
    constexprs: dict[str, object] = {
        "bias_ptr": None, "IS_SPLIT": is_split, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n,
        "BLOCK_K": BLOCK_K, "GROUP_M": GROUP_M,
    }  # fmt: skip
    types = {"x_ptr": "*i8", "codes_ptr": "*i8", "row_scale_ptr": "*fp32", "scale_ptr": "*bf16"}
    types["out_ptr"] = "*i32" if is_split else "*bf16"
    signature = signature_of(_w8a8_gemm_kernel, types, constexprs)
    aligned = {"N", "K", "stride_split"}
    return Launch(
        op="w8a8_gemm",
        label=f"{label}, M={m}",
        kernel=_w8a8_gemm_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        bytes=n * k + m * k + 4 * m + 2 * n + m * n * tiling.bytes_per_output,
        flops=2 * m * n * k,
        flop_dtype="int8",
        needs=("int8 mma", "128-bit loads"),
        divisible_by_16=tuple(name for name in signature if signature[name].startswith("*") or name in aligned),
        capabilities=capabilities,
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("llama-3.1-8b o_proj", 16, 4096, 4096),
    _launch("llama-3.1-8b gate_up_proj", 64, 28672, 4096),
    _launch("llama-3.1-8b gate_up_proj", 2048, 28672, 4096, (90, 100)),
    _launch("llama-3.1-8b gate_up_proj, before Hopper", 2048, 28672, 4096, (80,)),
)
