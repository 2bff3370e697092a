"""CPU body of w4a16_gemm: the codes stay packed; few rows go to aten's int4 kernel, for many the weight is dequantized.

The int4 kernel unpacks in registers and reads a quarter of the bytes of a bfloat16 weight, so it wins where memory is
the limit. From some number of rows on arithmetic is, and a dense product wins although the weight that was dequantized
for it is thrown away. There is one copy of the weight, in aten's layout, for both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_capability import has_bfloat16_matmul
from quantkit_kernels.int4pack_layout import ROW_MULTIPLE, Panel, split_panels

GROUP_SIZES = (32, 64, 128, 256)
MAX_INT4_ROWS = 64  # most rows for which the int4 kernel is the faster one; `python -m quantkit_kernels.crossover`
_multiply_int4 = torch.ops.aten._weight_int4pack_mm_for_cpu.default  # named once: finding it takes longer than a call
PIECE_ELEMENTS = 1 << 18  # weights dequantized at a time: few calls, and a piece stays in the caches


@dataclass(frozen=True, slots=True)
class _Run:
    """Panels of one width, side by side.

    Attributes:
        start: the first row of the weight in it.
        packed: [P, K, width / 2] uint8, a view of the packed weight.
        scale: [G, 1, P * width], in the order of the codes in the bytes.
        zero: likewise, what a code of 0 is worth; None for symmetric weights.
        panel: the layout of each.
    """

    start: int
    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    panel: Panel


def cpu_w4a16_blocker(weight_packed: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype) -> str | None:
    """Why `CpuW4A16` cannot take this weight; None if it can."""
    out_features = weight_packed.shape[0]
    if weight_packed.device.type != "cpu":
        return f"the weight is on {weight_packed.device}"
    if out_features % ROW_MULTIPLE:
        return f"N={out_features} is not a multiple of {ROW_MULTIPLE}"
    if group_size not in GROUP_SIZES:
        return f"group_size={group_size} is not one of {', '.join(map(str, GROUP_SIZES))}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"activations are {dtype}, not torch.bfloat16 or torch.float32"
    if not torch.equal(scale.to(dtype).float(), scale.float()):
        return f"the scales in {scale.dtype} cannot be written in the activations' {dtype} without loss"
    if split_panels(out_features) is None:
        return "the layout of aten's packed weights on this machine is not understood"
    return None


class CpuW4A16:
    """A 4-bit weight in aten's packed layout; calling it multiplies.

    Args:
        weight_packed: [N, K / 8] int32, see `reference.unpack_int4`; not kept.
        scale: [N, K / group_size] floating; not kept.
        group_size: 32, 64, 128 or 256.
        dtype: of the activations: bfloat16, or float32 (then every product dequantizes, because aten's int4 kernel is
            vectorized for bfloat16 only).
        zero_point: [N, K / group_size] int8, or None for symmetric weights.

    Precision: the int4 kernel multiplies exact weights; the dense product too where it runs in float32, and where it
        runs in bfloat16 it rounds the weights to it first. Sums are in float32, rounded once. The int4 kernel reads
        what a code of 0 is worth, -zero_point * scale, in bfloat16: within 1/64 of a step of the grid.

    Raises:
        ValueError: what `cpu_w4a16_blocker` says.
    """

    body = "cpu int4pack"

    def __init__(
        self,
        weight_packed: Tensor,
        scale: Tensor,
        group_size: int,
        dtype: torch.dtype,
        zero_point: Tensor | None = None,
    ) -> None:
        reference.check_w4a16(weight_packed, scale, group_size, zero_point)
        blocker = cpu_w4a16_blocker(weight_packed, scale, group_size, dtype)
        if blocker is not None:
            raise ValueError(blocker)
        self.out_features = weight_packed.shape[0]
        self.in_features = weight_packed.shape[1] * reference.CODES_PER_WORD
        self.group_size = group_size
        self.dtype = dtype
        self.max_int4_rows = MAX_INT4_ROWS if dtype == torch.bfloat16 else 0
        self.dense_dtype = torch.bfloat16 if dtype == torch.bfloat16 and has_bfloat16_matmul() else torch.float32
        codes = reference.unpack_int4(weight_packed).to(torch.int32).add_(8)
        self._packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = scale.to(dtype).t()
        zeros = None if zero_point is None else -zero_point.t().float() * scales.float()
        rounded = torch.zeros_like(scales) if zeros is None else zeros.to(dtype)
        self._scale_and_zero = torch.stack([scales, rounded], dim=-1).contiguous()
        self._runs = self._split(scales, zeros)

    def _split(self, scales: Tensor, zeros: Tensor | None) -> list[_Run]:
        panels = split_panels(self.out_features)
        assert panels is not None, "cpu_w4a16_blocker lets no such weight through"
        runs: list[_Run] = []
        start = 0
        flat = self._packed.flatten()
        for count, panel in panels:
            stop = start + count * panel.width
            scale = self._in_panels(scales[:, start:stop], count, panel)
            zero = None if zeros is None else self._in_panels(zeros[:, start:stop], count, panel)
            packed = flat[start * self.in_features // 2 : stop * self.in_features // 2]
            view = packed.view(count, self.in_features, panel.width // 2)
            runs.append(_Run(start, view, scale, zero, panel))
            start = stop
        return runs

    def _in_panels(self, values: Tensor, count: int, panel: Panel) -> Tensor:
        """[G, 1, P * width] in ``dense_dtype`` from [G, P * width], in the order of the codes in the bytes."""
        if panel.rows is not None:
            values = values.unflatten(1, (count, panel.width))[:, :, panel.rows].flatten(1)
        return values.to(self.dense_dtype).unsqueeze(1).contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        by_run = [tensor.nbytes for run in self._runs for tensor in (run.scale, run.zero) if tensor is not None]
        return self._packed.nbytes + self._scale_and_zero.nbytes + sum(by_run)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K] in ``dtype`` or float32, with the weight; in their type.

        float32 activations are rounded to ``dtype`` for the int4 kernel.
        """
        if x.dtype not in (self.dtype, torch.float32) or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, allowed is {self.dtype} [..., {self.in_features}]")
        rows = x.reshape(-1, self.in_features)
        product = self._int4_product(rows) if rows.shape[0] <= self.max_int4_rows else self._dense_product(rows)
        return product.view(*x.shape[:-1], self.out_features)

    def _int4_product(self, rows: Tensor) -> Tensor:
        narrow = rows.to(self.dtype).contiguous()
        product: Tensor = _multiply_int4(narrow, self._packed, self.group_size, self._scale_and_zero)
        return product.to(rows.dtype)

    def _dense_product(self, rows: Tensor) -> Tensor:
        product = torch.empty(rows.shape[0], self.out_features, dtype=rows.dtype)
        dense_rows = rows.to(self.dense_dtype)
        for columns, weight in self._pieces():
            product[:, columns] = (dense_rows @ weight).to(rows.dtype)
        return product

    def _pieces(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """The weight in ``dense_dtype``, a piece at a time: (rows of the weight, [K, rows] transposed)."""
        for run in self._runs:
            width = run.panel.width
            step = max(1, PIECE_ELEMENTS // (self.in_features * width))
            for first in range(0, run.packed.shape[0], step):
                packed = run.packed[first : first + step]
                count = packed.shape[0]
                weight = torch.empty(self.in_features, count, 2, width // 2, dtype=self.dense_dtype)
                by_panel = weight.permute(1, 0, 2, 3)
                by_panel[:, :, 0] = (packed & 15).view(torch.int8).sub_(8)
                by_panel[:, :, 1] = (packed >> 4).view(torch.int8).sub_(8)
                members = slice(first * width, (first + count) * width)
                by_group = weight.view(run.scale.shape[0], -1, count * width).mul_(run.scale[:, :, members])
                if run.zero is not None:
                    by_group.add_(run.zero[:, :, members])
                start = run.start + first * width
                columns: slice | Tensor = slice(start, start + count * width)
                if run.panel.rows is not None:
                    base = torch.arange(start, start + count * width, width)
                    columns = (base.unsqueeze(1) + run.panel.rows).flatten()
                yield columns, weight.view(self.in_features, -1)
