"""Compiled CPU bodies of products whose weights are 16 bits or 4 bits wide; native/products.cpp.

A weight lies in panels of 16 of its rows, transposed, so that one column of a panel is read at a time, and is widened
in registers. A row's product is summed from the first column to the last, whatever rows are multiplied with it: it does
not depend on the batch.
"""

from copy import copy
from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_half import half_blocker
from quantkit_kernels.native_arguments import check_readable, pointer
from quantkit_kernels.native_library import native_blocker, native_library

WIDTH = 16  # as in native/panels.h
HALF, INT4, INT8_INPUTS = range(3)  # as in native/bodies.h


class Product(Structure):
    """A weight as native/bodies.h has it; the tensors that it points to belong to a `NativeWeight`."""

    _fields_ = (
        ("kind", c_int), ("depth", c_int64), ("width", c_int64), ("group_size", c_int64),
        ("weight", c_void_p), ("scales", c_void_p), ("bias", c_void_p), ("input_scale", c_void_p),
    )  # fmt: skip


@cache
def _multiply() -> Any:
    function = native_library().multiply
    function.argtypes = [POINTER(Product), c_void_p, c_void_p, c_int64, c_int]
    function.restype = None
    return function


def in_panels(rows: Tensor) -> Tensor:
    """[N, ...] -> [ceil(N / 16), ..., 16], what is missing filled with zeros."""
    missing = -len(rows) % WIDTH
    padded = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows
    return padded.unflatten(0, (-1, WIDTH)).movedim(1, -1).contiguous()


class NativeWeight:
    """A weight in panels; calling it multiplies.

    Args:
        kind: of native/bodies.h.
        shape: N, K.
        panels: what is multiplied.
        scales: of codes, float32.
        group_size: columns that share a scale.
        bias: [N] floating or None.
        input_scale: [1] float32 of static inputs, or None.

    Attributes:
        out_features: N.
        in_features: K.
        product: the same for other compiled bodies, as long as this weight lives.
    """

    def __init__(
        self,
        kind: int,
        shape: tuple[int, int],
        panels: Tensor,
        *,
        scales: Tensor | None = None,
        group_size: int = 0,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        self.out_features, self.in_features = shape
        reference.check_bias(bias, self.out_features)
        self._bias = None if bias is None else bias.float().contiguous()
        self._panels, self._scales, self._input_scale = panels, scales, input_scale
        pointers = (pointer(part) for part in (panels, scales, self._bias, input_scale))
        self.product = Product(kind, self.in_features, self.out_features, group_size, *pointers)

    def with_bias(self, bias: Tensor) -> Self:
        """The same weight, in the same memory, with another bias, [N]; this one stays as it is."""
        reference.check_bias(bias, self.out_features)
        other = copy(self)
        other._bias = bias.float().contiguous()
        other.product = Product.from_buffer_copy(self.product)
        other.product.bias = pointer(other._bias)
        return other

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        kept = (self._panels, self._scales, self._bias, self._input_scale)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K], with the weight, and the bias added; in the type of x."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x is {list(x.shape)}, allowed is [..., {self.in_features}]")
        check_readable(x=x)
        rows, product = x.float().contiguous(), torch.empty(*x.shape[:-1], self.out_features)
        num_rows = rows.numel() // self.in_features  # 1 or more: an empty weight is refused
        _multiply()(byref(self.product), rows.data_ptr(), product.data_ptr(), num_rows, torch.get_num_threads())
        return product.to(x.dtype)


class NativeHalf(NativeWeight):
    """A weight in float16; calling it multiplies.

    Args:
        weight: [N, K] floating or int8; not kept.
        bias: [N] or None.

    Precision: weights as in `cpu_half`; products and sums in float32, rounded once to the type of the activations.

    Raises:
        ValueError: what `native_half_blocker` says.
    """

    body = "cpu native float16"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        blocker = native_half_blocker(weight)
        if blocker is not None:
            raise ValueError(blocker)
        super().__init__(HALF, (weight.shape[0], weight.shape[1]), in_panels(weight.half()), bias=bias)


class NativeW4A16(NativeWeight):
    """A 4-bit weight; calling it multiplies.

    Args:
        weight_packed: [N, K / 8] int32, see `reference.unpack_int4`; not kept.
        scale: [N, K / group_size] floating; not kept.
        group_size: columns that share a scale, or -1.
        zero_point: [N, K / group_size] int8, or None for symmetric weights.

    Precision: weights are (code - zero_point) * scale in float32 with one rounding; sums in float32, rounded once.

    Raises:
        ValueError: shapes that do not fit, or what `native_w4a16_blocker` says.
    """

    body = "cpu native int4"

    def __init__(self, weight_packed: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None) -> None:
        reference.check_w4a16(weight_packed, scale, group_size, zero_point)
        blocker = native_w4a16_blocker(weight_packed)
        if blocker is not None:
            raise ValueError(blocker)
        codes = in_panels(reference.unpack_int4(weight_packed).add_(8).view(torch.uint8))
        wide = scale.float()
        zeros = wide * -8 if zero_point is None else wide * (-8 - zero_point.float())
        shape = len(weight_packed), codes.shape[1]
        grids = torch.stack([in_panels(wide), in_panels(zeros)], dim=2)
        panels = codes[..., :8] | codes[..., 8:] << 4
        super().__init__(INT4, shape, panels, scales=grids, group_size=shape[1] // scale.shape[1])


def native_half_blocker(weight: Tensor) -> str | None:
    """Why `NativeHalf` cannot take a weight; None if it can."""
    return native_weight_blocker(weight) or half_blocker(weight)


def native_w4a16_blocker(weight_packed: Tensor) -> str | None:
    """Why `NativeW4A16` cannot take a weight; None if it can."""
    return native_weight_blocker(weight_packed)


def native_weight_blocker(weight: Tensor) -> str | None:
    """Why no compiled body takes a weight, whatever its numbers are; None if one may."""
    if weight.device.type != "cpu":
        return f"the weight is on {weight.device}"
    return native_blocker() if weight.numel() else f"a weight of {list(weight.shape)} is empty"
