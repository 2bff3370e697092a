"""Triton bodies of w8a16_gemm: 8-bit codes as they are stored, widened in registers.

As for 4 bits (`triton_w4a16`): weight times transposed activations, codes minus zero point are whole numbers up to 255,
exact in 16-bit floats, and the scale of a group multiplies the group's partial sum, in float32.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.crossover_table import DEFAULT, crossover
from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.tiling import Tiling, choose_splits, rows_of
from quantkit_kernels.triton_dequantize import dequantize_int8
from quantkit_kernels.triton_split_k import add_splits
from quantkit_kernels.w4a16_layout import BLOCK_COLUMNS
from quantkit_kernels.weight_limits import w8a16_blocker

PER_CHANNEL = reference.PER_CHANNEL


@triton.jit
def _whole_numbers(codes, zero):  # type: ignore[no-untyped-def]
    """float32 of 8-bit codes less ``zero``, without the slow conversion: the bits under the exponent of 2**23."""
    unsigned = (codes.to(tl.int32) & 255) ^ 128
    return (unsigned | 0x4B000000).to(tl.float32, bitcast=True) - (8388736.0 + zero)


@triton.jit
def _w8a16_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    M,
    N,
    K,
    steps,
    steps_per_split,
    steps_per_group,
    groups,
    stride_x,
    stride_split,
    HAS_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    first = split * steps_per_split
    x_tile = x_ptr + m.to(tl.int64)[None, :] * stride_x + k[:, None]
    codes_tile = codes_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, tl.minimum(first + steps_per_split, steps)):
        column = step * BLOCK_K
        codes = tl.load(codes_tile + column, mask=(n[:, None] < N) & (column + k[None, :] < K), other=0)
        x = tl.load(x_tile + column, mask=(m[None, :] < M) & (column + k[:, None] < K), other=0.0)
        group = step // steps_per_group if HAS_GROUPS else 0
        zero = tl.zeros((BLOCK_N,), tl.float32)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + n * groups + group, mask=n < N, other=0).to(tl.float32)
        weight = _whole_numbers(codes, zero[:, None]).to(x.dtype)
        if HAS_GROUPS:
            scale = tl.load(scale_ptr + n * groups + group, mask=n < N, other=0.0)
            acc += tl.dot(weight, x) * scale.to(tl.float32)[:, None]
        else:
            acc = tl.dot(weight, x, acc)
    if not HAS_GROUPS:
        acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + split.to(tl.int64) * stride_split + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


@triton.jit
def _w8a16_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    steps,
    steps_per_split,
    steps_per_group,
    groups,
    HAS_GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    first = split * steps_per_split
    codes_tile = codes_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in tl.range(first, tl.minimum(first + steps_per_split, steps), num_stages=STAGES):
        column = step * BLOCK_K
        codes = tl.load(codes_tile + column, mask=(n[:, None] < N) & (column + k[None, :] < K), other=0)
        x = tl.load(x_ptr + column + k, mask=column + k < K, other=0.0).to(tl.float32)
        group = step // steps_per_group if HAS_GROUPS else 0
        zero = tl.zeros((BLOCK_N,), tl.float32)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + n * groups + group, mask=n < N, other=0).to(tl.float32)
        part = _whole_numbers(codes, zero[:, None]) * x[None, :]
        if HAS_GROUPS:
            part *= tl.load(scale_ptr + n * groups + group, mask=n < N, other=0.0).to(tl.float32)[:, None]
        acc += part
    total = tl.sum(acc, axis=1)
    if not HAS_GROUPS:
        total *= tl.load(scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + split.to(tl.int64) * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def block_columns(group_size: int) -> int:
    """Columns of a step: a group's, at most 128."""
    return BLOCK_COLUMNS if group_size == PER_CHANNEL else min(group_size, BLOCK_COLUMNS)


def tiling_of(m: int, n: int, k: int, group_size: int) -> Tiling:
    """How ``m`` rows are multiplied by a weight of ``n`` rows and ``k`` columns; by a vector body if m is 1."""
    block_m = 1 if m == 1 else min(128, max(16, triton.next_power_of_2(m)))
    block_n, num_warps = (64, 4) if block_m <= 32 else (128, 8)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    return Tiling(block_m, block_n, choose_splits(tiles, triton.cdiv(k, block_columns(group_size))), num_warps, 3)


class TritonW8A16:
    """An 8-bit weight on a GPU; calling it multiplies.

    Args:
        codes: [N, K] int8; kept as it is.
        scale: [N, G] floating.
        group_size: K / G, or -1.
        dtype: of the activations, bfloat16 or float16.
        zero_point: [N, G] int8 or None.

    Precision: codes and products are exact, sums in float32, rounded once. With more rows than
        `crossover_table.Crossover.w8a16_packed_rows` the weight is rounded to ``dtype`` and multiplied densely.
    Needs: what `w8a16_blocker` says; compute capability 8.0. A CPU in Triton's interpreter.

    Raises:
        ValueError: what `w8a16_blocker` says, or shapes that do not fit.
    """

    body = "triton w8a16"

    def __init__(
        self, codes: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype, zero_point: Tensor | None = None
    ) -> None:
        reference.check_int8(codes, scale, group_size, zero_point)
        blocker = w8a16_blocker(group_size, dtype)
        if blocker is not None:
            raise ValueError(blocker)
        if scale.numel() >= 2**31:
            raise ValueError(f"scale has {scale.numel()} elements, allowed are fewer than {2**31}")
        self.dtype = dtype
        self.out_features, self.in_features = codes.shape
        self.group_size = group_size
        self._codes, self._scale = codes.contiguous(), scale.contiguous()
        self._zero = None if zero_point is None else zero_point.contiguous()
        self.crossover = crossover(torch.cuda.get_device_name(codes.device) if codes.is_cuda else DEFAULT)

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        return self._codes.nbytes + self._scale.nbytes + (0 if self._zero is None else self._zero.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K] in ``dtype``, with the weight."""
        rows = rows_of(x, self.in_features, self.dtype, self._codes.device)
        with torch.cuda.device(x.device) if x.is_cuda else torch.device("cpu"):
            if rows.shape[0] == 0:
                product = rows.new_empty(0, self.out_features)
            elif rows.shape[0] <= self.crossover.w8a16_gemv_rows:
                product = self.gemv(rows)
            elif rows.shape[0] <= self.crossover.w8a16_packed_rows:
                product = self.gemm(rows)
            else:
                product = F.linear(rows, self.dequantize())
        return product.view(*x.shape[:-1], self.out_features)

    def dequantize(self) -> Tensor:
        """[N, K] the weight in ``dtype``."""
        return dequantize_int8(self._codes, self._scale, self._zero, self.dtype)

    def gemv(self, rows: Tensor) -> Tensor:
        """[1, N] product of one row, [1, K], on the scalar units."""
        tiling = tiling_of(1, self.out_features, self.in_features, self.group_size)
        out, target = tiling.outputs(rows, self.out_features)
        grid = triton.cdiv(self.out_features, tiling.block_n), tiling.splits
        _w8a16_gemv_kernel[grid](
            rows,
            *(self._codes, self._scale, self._zero),
            target,
            *(self.out_features, self.in_features),
            *self._steps(tiling),
            self._scale.shape[1],
            HAS_GROUPS=self.group_size != PER_CHANNEL,
            STAGES=tiling.num_stages,
            BLOCK_N=tiling.block_n,
            BLOCK_K=block_columns(self.group_size),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if target is not out:
            add_splits(target, out)
        return out

    def gemm(self, rows: Tensor) -> Tensor:
        """[M, N] product of rows, [M, K], on the tensor cores."""
        tiling = tiling_of(max(2, rows.shape[0]), self.out_features, self.in_features, self.group_size)
        out, target = tiling.outputs(rows, self.out_features)
        tiles = triton.cdiv(self.out_features, tiling.block_n), triton.cdiv(rows.shape[0], tiling.block_m)
        _w8a16_gemm_kernel[(*tiles, tiling.splits)](
            rows,
            *(self._codes, self._scale, self._zero),
            target,
            *(rows.shape[0], self.out_features, self.in_features),
            *self._steps(tiling),
            self._scale.shape[1],
            rows.stride(0),
            out.numel(),
            HAS_GROUPS=self.group_size != PER_CHANNEL,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=block_columns(self.group_size),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if target is not out:
            add_splits(target, out)
        return out

    def _steps(self, tiling: Tiling) -> tuple[int, int, int]:
        """Steps over all columns, of a split, of a group."""
        block_k = block_columns(self.group_size)
        steps = triton.cdiv(self.in_features, block_k)
        return steps, triton.cdiv(steps, tiling.splits), max(1, self.group_size // block_k)


def w8a16_gemm(x: Tensor, codes: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None) -> Tensor:
    """Multiply once; arguments and result as `quantkit_kernels.reference.w8a16_gemm`."""
    return TritonW8A16(codes, scale, group_size, x.dtype, zero_point)(x)


def _launch(label: str, m: int, n: int, k: int, group_size: int, *, has_zero: bool = False) -> Launch:
    tiling = tiling_of(m, n, k, group_size)
    kernel = _w8a16_gemv_kernel if m == 1 else _w8a16_gemm_kernel
    constexprs: dict[str, object] = {
        "HAS_GROUPS": group_size != PER_CHANNEL, "BLOCK_N": tiling.block_n, "BLOCK_K": block_columns(group_size)
    }  # fmt: skip
    types = {"x_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*bf16"}
    types["out_ptr"] = "*bf16" if tiling.splits == 1 else "*fp32"
    constexprs |= {"STAGES": tiling.num_stages} if m == 1 else {"BLOCK_M": tiling.block_m}
    if has_zero:
        types["zero_ptr"] = "*i8"
    else:
        constexprs["zero_ptr"] = None
    signature = signature_of(kernel, types, constexprs)
    groups = 1 if group_size == PER_CHANNEL else k // group_size
    aligned = {"N", "K", "stride_x", "stride_split"}
    return Launch(
        op="w8a16_gemm",
        label=f"{label}, M={m}, {'asymmetric, ' if has_zero else ''}group {group_size}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        bytes=n * k + n * groups * (3 if has_zero else 2) + 2 * m * k + m * n * tiling.bytes_per_output,
        flops=2 * m * n * k,
        flop_dtype="fp32" if m == 1 else "bf16",
        needs=("128-bit loads",) if m == 1 else ("mma", "128-bit loads"),
        divisible_by_16=tuple(name for name in signature if signature[name].startswith("*") or name in aligned),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("llama-3.1-8b o_proj", 1, 4096, 4096, -1),
    _launch("llama-3.1-8b down_proj", 16, 4096, 14336, -1),
    _launch("llama-3.1-8b gate_up_proj", 64, 28672, 4096, 128, has_zero=True),
)
