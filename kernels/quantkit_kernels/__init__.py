"""quantkit_kernels: operations with a plain torch reference each, and faster bodies of the same name and signature.

`reference` is the specification; `dispatch` picks a body and says why. Only torch is imported here; triton where a
tensor lies on a GPU.
"""

from typing import Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.dispatch import (
    choose,
    choose_linear,
    choose_prepacked_linear,
    choose_w4a16_gemm,
    choose_w8a8_gemm,
    choose_w8a16_gemm,
)
from quantkit_kernels.reference import check_int8, check_w4a16, pack_int4

__all__ = [
    "CodedWeight",
    "PreparedWeight",
    "apply_token_bitmask",
    "gelu_mul",
    "gptq_columns",
    "hessian_accumulate",
    "linear",
    "pack_int4",
    "paged_attention",
    "prepack_linear",
    "prepack_w4a16",
    "prepack_w8a8",
    "prepack_w8a16",
    "quantize_per_token",
    "rms_norm",
    "rms_norm_quantize",
    "rotary_embedding",
    "sample_tokens",
    "silu_mul",
    "silu_mul_quantize",
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


@runtime_checkable
class CodedWeight(PreparedWeight, Protocol):
    """A prepared weight for 8-bit inputs that also takes rows which are codes already.

    Attributes:
        input_scale: [1] of static inputs; None where each row has its own scale.
    """

    input_scale: Tensor | None

    def multiply(self, x_codes: Tensor, x_scale: Tensor) -> Tensor:
        """[M, N] product of rows as `quantize_per_token` gives them."""
        ...


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    max_query_len: int,
    max_context_len: int,
    num_splits: int | None = None,
) -> Tensor:
    """Attend over keys and values in blocks; see `reference.paged_attention`."""
    output: Tensor = choose("paged_attention", query.device).function(
        query, key_cache, value_cache, block_tables, cu_seqlens, context_lens,
        scale=scale, sliding_window=sliding_window, softcap=softcap, key_scale=key_scale, value_scale=value_scale,
        max_query_len=max_query_len, max_context_len=max_context_len, num_splits=num_splits,
    )  # fmt: skip
    return output


def store_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write new keys and values into the paged cache; see `reference.store_kv_cache`."""
    body = choose("store_kv_cache", key.device).function
    body(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: None = None, offset: float = 0.0) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Bring rows to root mean square 1, behind the addition of a residual; see `reference.rms_norm`."""
    result: Tensor | tuple[Tensor, Tensor]
    result = choose("rms_norm", x.device).function(x, weight, eps, residual=residual, offset=offset)
    return result


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Turn queries and keys by their places, in place; see `reference.rotary_embedding`."""
    choose("rotary_embedding", q.device).function(q, k, cos, sin, interleaved=interleaved)


def silu_mul(x: Tensor) -> Tensor:
    """Multiply silu of the first half of each row with the second; see `reference.silu_mul`."""
    product: Tensor = choose("silu_mul", x.device).function(x)
    return product


def gelu_mul(x: Tensor, tanh: bool) -> Tensor:
    """Multiply gelu of the first half of each row with the second; see `reference.gelu_mul`."""
    product: Tensor = choose("gelu_mul", x.device).function(x, tanh)
    return product


def quantize_per_token(x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits with one scale each; see `reference.quantize_per_token`."""
    result: tuple[Tensor, Tensor] = choose("quantize_per_token", x.device).function(x, input_scale)
    return result


@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]: ...


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Norm rows and round them to 8 bits; see `reference.rms_norm_quantize`."""
    result: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
    result = choose("rms_norm_quantize", x.device).function(x, weight, eps, residual=residual, offset=offset)
    return result


def silu_mul_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate rows and round them to 8 bits; see `reference.silu_mul_quantize`."""
    result: tuple[Tensor, Tensor] = choose("silu_mul_quantize", x.device).function(x)
    return result


def hessian_accumulate(x: Tensor, total: Tensor, token_mask: Tensor | None = None) -> None:
    """Add the second moment of a layer's inputs, in place; see `reference.hessian_accumulate`."""
    choose("hessian_accumulate", x.device).function(x, total, token_mask)


def gptq_columns(
    columns: Tensor,
    scale: Tensor,
    group: Tensor,
    factor: Tensor,
    code_min: int,
    code_max: int,
    zero_point: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round the columns of one block one after the other; see `reference.gptq_columns`."""
    body = choose("gptq_columns", columns.device).function
    result: tuple[Tensor, Tensor] = body(columns, scale, group, factor, code_min, code_max, zero_point)
    return result


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Draw one token a row; see `reference.sample_tokens`."""
    tokens: Tensor = choose("sample_tokens", logits.device).function(
        logits, temperature, top_k, top_p, min_p, uniform
    )  # fmt: skip
    return tokens


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Forbid tokens, in place; see `reference.apply_token_bitmask`."""
    choose("apply_token_bitmask", logits.device).function(logits, bitmask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a dense weight; see `reference.linear`."""
    product: Tensor = choose_linear(x.device, x.dtype).function(x, weight, bias)
    return product


def prepack_linear(weight: Tensor, bias: Tensor | None = None) -> tuple[PreparedWeight, str]:
    """Bring a dense weight into the form that the fastest body wants, once; calling the result multiplies.

    Args:
        weight: [N, K] floating; the caller may drop it.
        bias: [N] or None.

    Returns:
        The weight, whose call, with activations in `dispatch.activation_dtype` or the weight's own type, equals
        `reference.linear` within the precision of its body, and the reason for it.
    """
    choice = choose_prepacked_linear(weight)
    prepared: PreparedWeight = choice.function(weight, bias)
    return prepared, choice.reason


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
    choice = choose_w8a16_gemm(codes, dtype, group_size)
    weight: PreparedWeight = choice.function(codes, scale, group_size, zero_point)
    return weight, choice.reason


def prepack_w8a8(
    codes: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[PreparedWeight, str]:
    """The same for an 8-bit weight, [N, K] int8, and 8-bit inputs; the call equals `reference.w8a8_gemm`."""
    check_int8(codes, scale, reference.PER_CHANNEL)
    choice = choose_w8a8_gemm(codes, dtype)
    weight: PreparedWeight = choice.function(codes, scale, input_scale, bias)
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


def w8a8_gemm(
    x: Tensor, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Multiply 8-bit inputs by an 8-bit weight once; see `reference.w8a8_gemm`. For repeated use `prepack_w8a8`."""
    weight, _ = prepack_w8a8(codes, scale, x.dtype, input_scale, bias)
    return weight(x)
