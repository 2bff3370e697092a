"""quantkit_kernels: operations with a plain torch reference each, and faster bodies of the same name and signature.

`reference` is the specification; `dispatch` picks a body and says why. Only torch is imported here; triton where a
tensor lies on a GPU.
"""

from typing import Protocol

import torch
from torch import Tensor

from quantkit_kernels.dispatch import choose_linear, choose_store_kv_cache, choose_w4a16_gemm
from quantkit_kernels.reference import check_w4a16

__all__ = ["W4A16Weight", "linear", "prepack_w4a16", "store_kv_cache", "w4a16_gemm"]


class W4A16Weight(Protocol):
    """A 4-bit weight in the form that its body wants."""

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


def prepack_w4a16(weight_packed: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype) -> tuple[W4A16Weight, str]:
    """Bring a 4-bit weight into the form that the fastest body wants, once; calling the result multiplies.

    Args:
        weight_packed: [N, K / 8] int32, see `reference.unpack_int4`; the caller may drop it.
        scale: [N, K / group_size] floating.
        group_size: columns that share a scale; -1 is one scale per row.
        dtype: of the activations.

    Returns:
        The weight, whose call equals `reference.w4a16_gemm` within the precision of its body, and the reason for it.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_w4a16(weight_packed, scale, group_size)
    choice = choose_w4a16_gemm(weight_packed, scale, group_size, dtype)
    weight: W4A16Weight = choice.function(weight_packed, scale, group_size)
    return weight, choice.reason


def w4a16_gemm(x: Tensor, weight_packed: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """Multiply by a 4-bit weight once; see `reference.w4a16_gemm`. For repeated use prepack it (`prepack_w4a16`)."""
    weight, _ = prepack_w4a16(weight_packed, scale, group_size, x.dtype)
    return weight(x)
