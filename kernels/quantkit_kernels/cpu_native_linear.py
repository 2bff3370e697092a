"""Compiled CPU bodies of products whose weights are 16 bits or 4 bits wide; native/products.cpp.

A weight lies in panels of 16 of its rows, transposed, so that one column of a panel is read at a time, and is widened
in registers. A row's product is summed from the first column to the last, whatever rows are multiplied with it: it does
not depend on the batch.
"""

from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_half import half_blocker
from quantkit_kernels.native_library import native_blocker, native_library

WIDTH = 16  # as in native/products.cpp


@cache
def _library() -> Any:
    library = native_library()
    library.half_gemm.argtypes = [*[c_void_p] * 4, *[c_int64] * 3, c_int]
    library.int4_gemm.argtypes = [*[c_void_p] * 4, *[c_int64] * 4, c_int]
    library.half_gemm.restype = library.int4_gemm.restype = None
    return library


def in_panels(rows: Tensor) -> Tensor:
    """[N, ...] -> [ceil(N / 16), ..., 16], what is missing filled with zeros."""
    missing = -len(rows) % WIDTH
    padded = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows
    return padded.unflatten(0, (-1, WIDTH)).movedim(1, -1).contiguous()


class NativeHalf:
    """A weight in float16; calling it multiplies.

    Args:
        weight: [N, K] floating or int8; not kept.
        bias: [N] or None.

    Attributes:
        out_features: N.
        in_features: K.
        nbytes: bytes that this weight keeps in memory.

    Precision: weights as in `cpu_half`; products and sums in float32, rounded once to the type of the activations.

    Raises:
        ValueError: what `native_half_blocker` says.
    """

    body = "cpu native float16"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        blocker = native_half_blocker(weight)
        if blocker is not None:
            raise ValueError(blocker)
        self.out_features, self.in_features = weight.shape
        self._panels = in_panels(weight.half())
        self._bias = None if bias is None else bias.float().contiguous()
        self.nbytes = self._panels.nbytes + (0 if self._bias is None else self._bias.nbytes)
        self._multiply = _library().half_gemm

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K], with the weight, and the bias added; in the type of x."""
        rows, product = _rows(x, self.in_features, self.out_features)
        self._multiply(
            rows.data_ptr(), self._panels.data_ptr(), None if self._bias is None else self._bias.data_ptr(),
            product.data_ptr(), rows.numel() // self.in_features, self.in_features, self.out_features,
            torch.get_num_threads(),
        )  # fmt: skip
        return product.to(x.dtype)


class NativeW4A16:
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
        self.out_features = len(weight_packed)
        self.in_features = codes.shape[1]
        self._group_size = self.in_features // scale.shape[1]
        self._codes = codes[..., :8] | codes[..., 8:] << 4
        wide = scale.float()
        zeros = wide * -8 if zero_point is None else wide * (-8 - zero_point.float())
        self._grids = torch.stack([in_panels(wide), in_panels(zeros)], dim=2)
        self.nbytes = self._codes.nbytes + self._grids.nbytes
        self._multiply = _library().int4_gemm

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K], with the weight; in the type of x."""
        rows, product = _rows(x, self.in_features, self.out_features)
        self._multiply(
            rows.data_ptr(), self._codes.data_ptr(), self._grids.data_ptr(), product.data_ptr(),
            rows.numel() // self.in_features, self.in_features, self.out_features, self._group_size,
            torch.get_num_threads(),
        )  # fmt: skip
        return product.to(x.dtype)


def native_half_blocker(weight: Tensor) -> str | None:
    """Why `NativeHalf` cannot take a weight; None if it can."""
    return _device_blocker(weight) or half_blocker(weight)


def native_w4a16_blocker(weight_packed: Tensor) -> str | None:
    """Why `NativeW4A16` cannot take a weight; None if it can."""
    return _device_blocker(weight_packed)


def _device_blocker(weight: Tensor) -> str | None:
    return native_blocker() if weight.device.type == "cpu" else f"the weight is on {weight.device}"


def _rows(x: Tensor, in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    """The activations in float32, one behind the other, and memory for their products."""
    if x.shape[-1] != in_features:
        raise ValueError(f"x is {list(x.shape)}, allowed is [..., {in_features}]")
    return x.float().contiguous(), torch.empty(*x.shape[:-1], out_features)
