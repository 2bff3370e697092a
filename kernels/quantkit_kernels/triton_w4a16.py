"""Triton bodies of w4a16_gemm: 4-bit codes go from memory to the multiplier's registers, never to a dense tile.

The product is computed as weight times transposed activations, so that the codes are the factor that a tensor core
takes from registers, and few tokens waste little of it. Codes minus zero point are whole numbers up to 15, exact in
16-bit floats; the scale of a group multiplies the group's partial sum, in float32.
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
from quantkit_kernels.triton_dequantize import dequantize_words
from quantkit_kernels.triton_split_k import add_splits
from quantkit_kernels.w4a16_layout import BLOCK_COLUMNS, groups_per_block, to_words
from quantkit_kernels.weight_limits import w4a16_blocker


@triton.jit
def _codes_of_strip(words, STRIP: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Code 0 to 15 plus a power of two, exactly: the code's bits under the exponent of 128 (1024 in float16)."""
    nibble = (words >> (4 * STRIP)) & 15
    if tl.bfloat16 == DTYPE:
        return (nibble | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return (nibble | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def _group_of(block, g, blocks_per_group, last_group, GROUPS_PER_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Group ``g`` of a block; the columns past K belong to the last one, which keeps the address legal."""
    if GROUPS_PER_BLOCK > 0:
        return tl.minimum((block * GROUPS_PER_BLOCK + g) // blocks_per_group, last_group)
    else:
        return 0


@triton.jit
def _w4a16_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    M,
    N,
    K,
    num_blocks,
    blocks_per_split,
    blocks_per_group,
    last_group,
    stride_x,
    stride_split,
    GROUPS_PER_BLOCK: tl.constexpr,  # 4, 2 or 1; 0 if the whole row is one group
    HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    j = tl.arange(0, 32)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BIAS: tl.constexpr = 136 if tl.bfloat16 == DTYPE else 1032  # the power of two of `_codes_of_strip`, plus 8
    STRIPS_PER_GROUP: tl.constexpr = 4 if GROUPS_PER_BLOCK == 0 else 4 // GROUPS_PER_BLOCK
    x_rows = x_ptr + m.to(tl.int64)[None, :] * stride_x + j[:, None]
    first = split * blocks_per_split
    words_rows = words_ptr + (first.to(tl.int64) * N + n[:, None]) * 32 + j[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    for block in range(first, tl.minimum(first + blocks_per_split, num_blocks)):
        words = tl.load(words_rows, mask=n[:, None] < N, other=0)
        for g in tl.static_range(4 // STRIPS_PER_GROUP):
            group = _group_of(block, g, blocks_per_group, last_group, GROUPS_PER_BLOCK)
            offset = tl.full((BLOCK_N,), BIAS, DTYPE)
            if HAS_ZERO:
                zero = tl.load(zero_ptr + group * N + n, mask=n < N, other=0)
                offset = (zero.to(tl.float32) + BIAS).to(DTYPE)
            part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if GROUPS_PER_BLOCK > 0 else acc
            for i in tl.static_range(STRIPS_PER_GROUP):
                column = block * 128 + 32 * (g * STRIPS_PER_GROUP + i)
                x = tl.load(x_rows + column, mask=(m[None, :] < M) & (column + j[:, None] < K), other=0.0)
                codes = _codes_of_strip(words, g * STRIPS_PER_GROUP + i, DTYPE) - offset[:, None]
                part = tl.dot(codes, x, part)
            if GROUPS_PER_BLOCK > 0:
                scale = tl.load(scale_ptr + group * N + n, mask=n < N, other=0.0)
                acc += part * scale.to(tl.float32)[:, None]
            else:
                acc = part
        words_rows += N * 32
    if GROUPS_PER_BLOCK == 0:
        acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + split.to(tl.int64) * stride_split + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


@triton.jit
def _w4a16_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    num_blocks,
    blocks_per_split,
    blocks_per_group,
    last_group,
    GROUPS_PER_BLOCK: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    j = tl.arange(0, 32)
    STRIPS_PER_GROUP: tl.constexpr = 4 if GROUPS_PER_BLOCK == 0 else 4 // GROUPS_PER_BLOCK
    first = split * blocks_per_split
    words_rows = words_ptr + (first.to(tl.int64) * N + n[:, None]) * 32 + j[None, :]
    acc = tl.zeros((BLOCK_N, 32), tl.float32)

    for block in tl.range(first, tl.minimum(first + blocks_per_split, num_blocks), num_stages=STAGES):
        words = tl.load(words_rows, mask=n[:, None] < N, other=0).to(tl.int32)
        for g in tl.static_range(4 // STRIPS_PER_GROUP):
            group = _group_of(block, g, blocks_per_group, last_group, GROUPS_PER_BLOCK)
            offset = tl.full((BLOCK_N,), 8388616.0, tl.float32)  # 2**23, whose last bit is worth 1, plus 8
            if HAS_ZERO:
                offset += tl.load(zero_ptr + group * N + n, mask=n < N, other=0).to(tl.float32)
            part = tl.zeros((BLOCK_N, 32), tl.float32)
            for i in tl.static_range(STRIPS_PER_GROUP):
                column = block * 128 + 32 * (g * STRIPS_PER_GROUP + i)
                x = tl.load(x_ptr + column + j, mask=column + j < K, other=0.0).to(tl.float32)
                nibble = (words >> (4 * (g * STRIPS_PER_GROUP + i))) & 15
                part += ((nibble | 0x4B000000).to(tl.float32, bitcast=True) - offset[:, None]) * x[None, :]
            if GROUPS_PER_BLOCK > 0:
                scale = tl.load(scale_ptr + group * N + n, mask=n < N, other=0.0)
                part *= scale.to(tl.float32)[:, None]
            acc += part
        words_rows += N * 32
    total = tl.sum(acc, axis=1)
    if GROUPS_PER_BLOCK == 0:
        total *= tl.load(scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + split.to(tl.int64) * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def gemv_tiling(n: int, k: int) -> Tiling:
    """How one row is multiplied by a weight of ``n`` rows and ``k`` columns."""
    block_n = 64
    return Tiling(1, block_n, choose_splits(triton.cdiv(n, block_n), triton.cdiv(k, BLOCK_COLUMNS)), 4, 4)


def gemm_tiling(m: int, n: int, k: int) -> Tiling:
    """How ``m`` rows are multiplied by a weight of ``n`` rows and ``k`` columns."""
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    block_n, num_warps = (64, 4) if block_m <= 32 else (128, 8)
    num_stages = 4 if block_m in (16, 64) else 3
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    return Tiling(block_m, block_n, choose_splits(tiles, triton.cdiv(k, BLOCK_COLUMNS)), num_warps, num_stages)


class TritonW4A16:
    """A 4-bit weight on a GPU; calling it multiplies.

    Args:
        weight_packed: [N, K / 8] int32; not kept.
        scale: [N, G] floating.
        group_size: K / G, or -1.
        dtype: of the activations, bfloat16 or float16.
        zero_point: [N, G] int8 or None.

    Precision: codes and products are exact, sums in float32, rounded once. With more rows than
        `crossover_table.Crossover.w4a16_packed_rows` the weight is rounded to ``dtype`` and multiplied densely.
    Needs: what `w4a16_blocker` says; compute capability 8.0. A CPU in Triton's interpreter.

    Raises:
        ValueError: what `w4a16_blocker` says, or shapes that do not fit.
    """

    body = "triton w4a16"

    def __init__(
        self,
        weight_packed: Tensor,
        scale: Tensor,
        group_size: int,
        dtype: torch.dtype,
        zero_point: Tensor | None = None,
    ) -> None:
        reference.check_w4a16(weight_packed, scale, group_size, zero_point)
        blocker = w4a16_blocker(weight_packed.shape[1] * reference.CODES_PER_WORD, group_size, dtype)
        if blocker is not None:
            raise ValueError(blocker)
        self.dtype = dtype
        self.in_features = weight_packed.shape[1] * reference.CODES_PER_WORD
        self.out_features = weight_packed.shape[0]
        self.group_size = group_size
        if scale.numel() >= 2**31:
            raise ValueError(f"scale has {scale.numel()} elements, allowed are fewer than {2**31}")
        self._words = to_words(weight_packed)
        self._scale = scale.T.contiguous()
        self._zero = None if zero_point is None else zero_point.T.contiguous()
        device = weight_packed.device
        self.crossover = crossover(torch.cuda.get_device_name(device) if device.type == "cuda" else DEFAULT)

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        return self._words.nbytes + self._scale.nbytes + (0 if self._zero is None else self._zero.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K] in ``dtype``, with the weight."""
        rows = rows_of(x, self.in_features, self.dtype, self._words.device)
        with torch.cuda.device(x.device) if x.is_cuda else torch.device("cpu"):
            if rows.shape[0] == 0:
                product = rows.new_empty(0, self.out_features)
            elif rows.shape[0] <= self.crossover.w4a16_gemv_rows:
                product = self.gemv(rows)
            elif rows.shape[0] <= self.crossover.w4a16_packed_rows:
                product = self.gemm(rows)
            else:
                product = F.linear(rows, self.dequantize())
        return product.view(*x.shape[:-1], self.out_features)

    def dequantize(self) -> Tensor:
        """[N, K] the weight in ``dtype``."""
        return dequantize_words(self._words, self._scale, self._zero, self.in_features, self.dtype)

    def gemv(self, rows: Tensor) -> Tensor:
        """[1, N] product of one row, [1, K], on the scalar units."""
        tiling = gemv_tiling(self.out_features, self.in_features)
        out, target = tiling.outputs(rows, self.out_features)
        grid = triton.cdiv(self.out_features, tiling.block_n), tiling.splits
        blocks = self._words.shape[0]
        _w4a16_gemv_kernel[grid](
            rows,
            self._words,
            self._scale,
            self._zero,
            target,
            self.out_features,
            self.in_features,
            blocks,
            triton.cdiv(blocks, tiling.splits),
            max(1, self.group_size // BLOCK_COLUMNS),
            self._scale.shape[0] - 1,
            GROUPS_PER_BLOCK=groups_per_block(self.group_size),
            HAS_ZERO=self._zero is not None,
            STAGES=tiling.num_stages,
            BLOCK_N=tiling.block_n,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if target is not out:
            add_splits(target, out)
        return out

    def gemm(self, rows: Tensor) -> Tensor:
        """[M, N] product of rows, [M, K], on the tensor cores."""
        tiling = gemm_tiling(rows.shape[0], self.out_features, self.in_features)
        out, target = tiling.outputs(rows, self.out_features)
        grid = (
            triton.cdiv(self.out_features, tiling.block_n),
            triton.cdiv(rows.shape[0], tiling.block_m),
            tiling.splits,
        )
        blocks = self._words.shape[0]
        _w4a16_gemm_kernel[grid](
            rows,
            self._words,
            self._scale,
            self._zero,
            target,
            rows.shape[0],
            self.out_features,
            self.in_features,
            blocks,
            triton.cdiv(blocks, tiling.splits),
            max(1, self.group_size // BLOCK_COLUMNS),
            self._scale.shape[0] - 1,
            rows.stride(0),
            out.numel(),
            GROUPS_PER_BLOCK=groups_per_block(self.group_size),
            HAS_ZERO=self._zero is not None,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if target is not out:
            add_splits(target, out)
        return out


def w4a16_gemm(
    x: Tensor, weight_packed: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None
) -> Tensor:
    """Lay the weight out and multiply once; arguments and result as `quantkit_kernels.reference.w4a16_gemm`."""
    return TritonW4A16(weight_packed, scale, group_size, x.dtype, zero_point)(x)


def _launch(label: str, m: int, n: int, k: int, group_size: int, *, has_zero: bool = False) -> Launch:
    tiling = gemv_tiling(n, k) if m == 1 else gemm_tiling(m, n, k)
    kernel = _w4a16_gemv_kernel if m == 1 else _w4a16_gemm_kernel
    constexprs: dict[str, object] = {
        "GROUPS_PER_BLOCK": groups_per_block(group_size), "HAS_ZERO": has_zero, "BLOCK_N": tiling.block_n
    }  # fmt: skip
    types = {"x_ptr": "*bf16", "words_ptr": "*i16", "scale_ptr": "*bf16"}
    types["out_ptr"] = "*bf16" if tiling.splits == 1 else "*fp32"
    constexprs |= {"STAGES": tiling.num_stages} if m == 1 else {"BLOCK_M": tiling.block_m}
    if has_zero:
        types["zero_ptr"] = "*i8"
    else:
        constexprs["zero_ptr"] = None
    signature = signature_of(kernel, types, constexprs)
    groups = 1 if group_size == reference.PER_CHANNEL else k // group_size
    aligned = {"N", "K", "stride_x", "stride_split"}
    return Launch(
        op="w4a16_gemm",
        label=f"{label}, M={m}, {'asymmetric, ' if has_zero else ''}group {group_size}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        bytes=n * k // 2 + n * groups * (3 if has_zero else 2) + 2 * m * k + m * n * tiling.bytes_per_output,
        flops=2 * m * n * k,
        flop_dtype="fp32" if m == 1 else "bf16",
        needs=("128-bit loads",) if m == 1 else ("mma", "128-bit loads"),
        divisible_by_16=tuple(name for name in signature if signature[name].startswith("*") or name in aligned),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("llama-3.1-8b o_proj", 1, 4096, 4096, 128),
    _launch("llama-3.1-8b o_proj", 1, 4096, 4096, 32, has_zero=True),
    _launch("llama-3.1-8b gate_up_proj", 16, 28672, 4096, 128),
    _launch("llama-3.1-8b down_proj", 16, 4096, 14336, 64, has_zero=True),
    _launch("qwen3-0.6b down_proj", 32, 1024, 3072, -1),
    _launch("llama-3.1-8b down_proj", 64, 4096, 14336, 128),
    _launch("llama-3.1-8b gate_up_proj", 256, 28672, 4096, 128),
)
