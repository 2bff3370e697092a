"""quantkit_kernels: operations with a plain torch reference each, and faster bodies of the same name and signature.

`reference` is the specification; `dispatch` picks a body and says why. Only torch is imported here; triton where a
tensor lies on a GPU.
"""

from typing import Protocol

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.dispatch import (
    choose_linear,
    choose_store_kv_cache,
    choose_w4a16_gemm,
    choose_w8a8_gemm,
    choose_w8a16_gemm,
)
from quantkit_kernels.reference import check_int8, check_w4a16, pack_int4

__all__ = [
    "PreparedWeight",
    "linear",
    "pack_int4",
    "prepack_w4a16",
    "prepack_w8a8",
    "prepack_w8a16",
    "store_kv_cache",
    "w4a16_gemm",
    "w8a8_gemm",
    "w8a16_gemm",
]


class PreparedWeight(Protocol):
    """A weight of integer codes in the form that its body wants."""

    body: str

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K], with the weight."""
        ...


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values into the paged cache; see `reference.store_kv_cache`."""
    choose_store_kv_cache(key.device).function(key, value, key_cache, value_cache, slot_mapping)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a dense weight; see `reference.linear`."""
    product: Tensor = choose_linear(x.device, x.dtype).function(x, weight, bias)
    return product


def prepack_w4a16(
    weight_packed: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype, zero_point: Tensor | None = None
) -> tuple[PreparedWeight, str]:
    """Bring a 4-bit weight into the form that the fastest body wants, once; calling the result multiplies.

    Args:
        weight_packed: [N, K / 8] int32, see `reference.unpack_int4`; the caller may drop it.
        scale: [N, K / group_size] floating.
        group_size: columns that share a scale; -1 is one scale per row.
        dtype: of the activations.
        zero_point: like scale, int8; None for symmetric weights.

    Returns:
        The weight, whose call equals `reference.w4a16_gemm` within the precision of its body, and the reason for it.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_w4a16(weight_packed, scale, group_size, zero_point)
    choice = choose_w4a16_gemm(weight_packed, scale, group_size, dtype)
    weight: PreparedWeight = choice.function(weight_packed, scale, group_size, zero_point)
    return weight, choice.reason


def prepack_w8a16(
    codes: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype, zero_point: Tensor | None = None
) -> tuple[PreparedWeight, str]:
    """The same for an 8-bit weight, [N, K] int8; the call equals `reference.w8a16_gemm`."""
    check_int8(codes, scale, group_size, zero_point)
    choice = choose_w8a16_gemm(codes, dtype)
    weight: PreparedWeight = choice.function(codes, scale, group_size, zero_point)
    return weight, choice.reason


def prepack_w8a8(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, input_scale: Tensor | None = None
) -> tuple[PreparedWeight, str]:
    """The same for an 8-bit weight, [N, K] int8, and 8-bit inputs; the call equals `reference.w8a8_gemm`."""
    check_int8(codes, scale, reference.PER_CHANNEL)
    choice = choose_w8a8_gemm(codes, dtype)
    weight: PreparedWeight = choice.function(codes, scale, input_scale)
    return weight, choice.reason


def w4a16_gemm(
    x: Tensor, weight_packed: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None
) -> Tensor:
    """Multiply by a 4-bit weight once; see `reference.w4a16_gemm`. For repeated use prepack it (`prepack_w4a16`)."""
    weight, _ = prepack_w4a16(weight_packed, scale, group_size, x.dtype, zero_point)
    return weight(x)


def w8a16_gemm(x: Tensor, codes: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None) -> Tensor:
    """Multiply by an 8-bit weight once; see `reference.w8a16_gemm`. For repeated use prepack it (`prepack_w8a16`)."""
    weight, _ = prepack_w8a16(codes, scale, group_size, x.dtype, zero_point)
    return weight(x)


def w8a8_gemm(x: Tensor, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None) -> Tensor:
    """Multiply 8-bit inputs by an 8-bit weight once; see `reference.w8a8_gemm`. For repeated use `prepack_w8a8`."""
    weight, _ = prepack_w8a8(codes, scale, x.dtype, input_scale)
    return weight(x)
