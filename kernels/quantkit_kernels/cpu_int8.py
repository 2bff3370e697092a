"""CPU bodies of w8a16_gemm and w8a8_gemm.

With 16-bit inputs the codes stay 8 bits wide in memory. Few bfloat16 rows go to aten's int8 kernel, which widens the
codes in registers; for more rows they are widened a piece at a time, small enough to stay in the caches, and multiplied
in float32. With 8-bit inputs both factors are whole numbers. Where the CPU multiplies those (VNNI) torch does it; else
`cpu_native_int8` does, and where that cannot be compiled the codes are kept as float16, which holds them exactly, for a
float32 product that is exact up to 2**24.
"""

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_capability import has_int8_matmul
from quantkit_kernels.cpu_half import CpuHalf, cpu_half_blocker

MAX_INT8_ROWS = 16  # most rows for which aten's kernel is the faster one; `python -m quantkit_kernels.crossover`
PIECE_ELEMENTS = 1 << 18  # codes widened at a time
WHOLE_NUMBERS, AS_FLOAT16, WIDENED = "cpu int8 whole numbers", "cpu int8 as float16", "cpu int8 widened"
PER_CHANNEL = reference.PER_CHANNEL
_multiply_int8 = torch.ops.aten._weight_int8pack_mm.default  # named once: finding it takes longer than a call


def cpu_int8_blocker(codes: Tensor, dtype: torch.dtype) -> str | None:
    """Why the bodies of this file cannot take a weight; None if they can."""
    if codes.device.type != "cpu":
        return f"the weight is on {codes.device}"
    if not codes.numel():
        return f"a weight of {list(codes.shape)} is empty"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"activations are {dtype}, not torch.bfloat16 or torch.float32"
    return None


def w8a8_body(codes: Tensor) -> str:
    """How `CpuW8A8` multiplies by a weight on this CPU."""
    if has_int8_matmul():
        return WHOLE_NUMBERS
    return AS_FLOAT16 if cpu_half_blocker(codes) is None else WIDENED


def widened_product(rows: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """[M, N] float32 product of float32 rows with (codes - zero_point) * scale, a piece of the weight at a time.

    Args:
        rows: [M, K] float32.
        codes: [N, K] int8.
        scale: [N, G] float32.
        zero_point: [N, G] int8 or None.
    """
    out_features, in_features = codes.shape
    product = torch.empty(rows.shape[0], out_features)
    step = max(1, PIECE_ELEMENTS // in_features)
    for start in range(0, out_features, step):
        piece = slice(start, start + step)
        if scale.shape[1] == 1 and zero_point is None:  # a scale per row: apply it to the product
            torch.matmul(rows, codes[piece].float().t(), out=product[:, piece])
        else:
            zeros = None if zero_point is None else zero_point[piece]
            torch.matmul(rows, reference.dequantize(codes[piece], scale[piece], zeros).t(), out=product[:, piece])
    return product.mul_(scale.t()) if scale.shape[1] == 1 and zero_point is None else product


class CpuW8A16:
    """An 8-bit weight; calling it multiplies.

    Args:
        codes: [N, K] int8; kept as it is.
        scale: [N, G] floating.
        group_size: K / G, or -1.
        dtype: of the activations: bfloat16, or float32 (then every product widens the codes, because aten's int8
            kernel is vectorized for bfloat16 only).
        zero_point: [N, G] int8 or None.

    Precision: sums in float32, rounded once; the int8 kernel reads scales in bfloat16, so that scales that bfloat16
    does not hold are never given to it.

    Raises:
        ValueError: what `cpu_int8_blocker` says, or shapes that do not fit.
    """

    body = "cpu int8"

    def __init__(
        self, codes: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype, zero_point: Tensor | None = None
    ) -> None:
        reference.check_int8(codes, scale, group_size, zero_point)
        blocker = cpu_int8_blocker(codes, dtype)
        if blocker is not None:
            raise ValueError(blocker)
        self.dtype = dtype
        self._codes, self._zero_point = codes.contiguous(), zero_point
        self._scale = scale.float()
        narrow = scale.to(torch.bfloat16)
        exact = scale.shape[1] == 1 and zero_point is None and torch.equal(narrow.float(), self._scale)
        self._row_scale = narrow.flatten().contiguous() if exact and dtype == torch.bfloat16 else None

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        kept = (self._codes, self._scale, self._zero_point, self._row_scale)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K] in ``dtype`` or float32, with the weight; in their type.

        float32 activations are rounded to ``dtype`` for the int8 kernel.
        """
        out_features, in_features = self._codes.shape
        if x.dtype not in (self.dtype, torch.float32) or x.shape[-1] != in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, allowed is {self.dtype} [..., {in_features}]")
        rows = x.reshape(-1, in_features)
        if self._row_scale is not None and rows.shape[0] <= MAX_INT8_ROWS:
            product = _multiply_int8(rows.to(self.dtype).contiguous(), self._codes, self._row_scale).to(x.dtype)
        else:
            product = widened_product(rows.float(), self._codes, self._scale, self._zero_point).to(x.dtype)
        return product.view(*x.shape[:-1], out_features)


class CpuW8A8:
    """An 8-bit weight for inputs that are quantized to 8 bits on the way; calling it multiplies.

    Args:
        codes: [N, K] int8.
        scale: [N, 1] floating.
        dtype: of the activations: bfloat16 or float32.
        input_scale: [1] of static inputs, or None.
        bias: [N] floating or None.

    Precision: the sum of whole numbers is exact with VNNI; without, it is a float32 sum, exact up to 2**24, which no
    sum of up to 1,024 columns exceeds. The scales are applied in float32, and the product rounded once.

    Raises:
        ValueError: what `cpu_int8_blocker` says, or shapes that do not fit.
    """

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        reference.check_int8(codes, scale, PER_CHANNEL)
        reference.check_bias(bias, codes.shape[0])
        blocker = cpu_int8_blocker(codes, dtype)
        if blocker is not None:
            raise ValueError(blocker)
        self.dtype = dtype
        self.out_features, self.in_features = codes.shape
        self._scale = scale.float().t().contiguous()
        self._input_scale = None if input_scale is None else input_scale.float()
        self._bias = None if bias is None else bias.float()
        self.body = w8a8_body(codes)
        self._codes: Tensor | None = None
        self._half: CpuHalf | None = None
        if self.body == AS_FLOAT16:
            self._half = CpuHalf(codes)
        else:
            self._codes = codes.contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        kept = (self._scale, self._codes, self._half, self._input_scale, self._bias)
        return sum(part.nbytes for part in kept if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K] in ``dtype`` or float32, with the weight; in their type."""
        if x.dtype not in (self.dtype, torch.float32) or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, allowed is {self.dtype} [..., {self.in_features}]")
        rows, row_scale = self._quantized(x.reshape(-1, self.in_features).float())
        if self._half is not None:
            product = self._half(rows)
        elif self.body == WHOLE_NUMBERS:
            assert self._codes is not None, "kept unless there is a float16 form"
            product = torch._int_mm(rows.to(torch.int8), self._codes.t()).float()
        else:
            assert self._codes is not None, "kept unless there is a float16 form"
            product = widened_product(rows, self._codes, torch.ones(self.out_features, 1))
        product.mul_(row_scale).mul_(self._scale)
        if self._bias is not None:
            product.add_(self._bias)
        return product.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _quantized(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As `reference.quantize_input`, in fewer calls: a token of zeros has zeros for codes with any scale."""
        if self._input_scale is not None:
            codes = (rows / self._input_scale).round_().clamp_(-128, 127)
            if self.body != WHOLE_NUMBERS:
                return codes, self._input_scale
            # No whole number is NaN: where a code would be, the scale of the row is.
            return codes, self._input_scale + 0 * codes.amax(dim=-1, keepdim=True)
        largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, keepdim=True)
        scale = largest.div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        return (rows / scale).round_(), scale
