"""Products with weights: dense, of 4-bit and of 8-bit codes."""

import torch
import torch.nn.functional as F
from torch import Tensor

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES_PER_WORD = 8  # 4-bit codes in an int32
PER_CHANNEL = -1


def _check_scale(
    out_features: int, in_features: int, scale: Tensor, group_size: int, zero_point: Tensor | None
) -> None:
    """Raise ValueError, with the allowed values, unless scales and zero points fit a weight of this shape."""
    if group_size != PER_CHANNEL and (group_size <= 0 or in_features % group_size):
        raise ValueError(f"group_size={group_size}, allowed is -1 or a divisor of K={in_features}")
    groups = 1 if group_size == PER_CHANNEL else in_features // group_size
    if scale.shape != (out_features, groups) or not scale.dtype.is_floating_point:
        raise ValueError(f"scale is {scale.dtype} {list(scale.shape)}, allowed is floating [{out_features}, {groups}]")
    if zero_point is not None and (zero_point.shape != scale.shape or zero_point.dtype != torch.int8):
        raise ValueError(
            f"zero_point is {zero_point.dtype} {list(zero_point.shape)}, "
            f"allowed is torch.int8 [{out_features}, {groups}] or None"
        )


def _check_device(weight: Tensor, scale: Tensor) -> None:
    if scale.device != weight.device:
        raise ValueError(f"scale is on {scale.device}, allowed is the device of the weight, {weight.device}")


def _check_input(x: Tensor, in_features: int) -> None:
    if x.shape[-1:] != (in_features,) or x.dtype not in INPUT_DTYPES:
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}, allowed is [..., {in_features}] of {', '.join(map(str, INPUT_DTYPES))}"
        )


def check_w4a16(weight_packed: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None) -> None:
    """Raise ValueError, with the allowed values, unless a packed 4-bit weight and its scales fit together."""
    if weight_packed.dim() != 2 or weight_packed.dtype != torch.int32:
        raise ValueError(
            f"weight_packed is {weight_packed.dtype} {list(weight_packed.shape)}, allowed is torch.int32 [N, K / 8]"
        )
    shape = weight_packed.shape[0], weight_packed.shape[1] * CODES_PER_WORD
    _check_scale(*shape, scale, group_size, zero_point)
    _check_device(weight_packed, scale)


def check_int8(codes: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None) -> None:
    """Raise ValueError, with the allowed values, unless an 8-bit weight and its scales fit together."""
    if codes.dim() != 2 or codes.dtype != torch.int8:
        raise ValueError(f"codes are {codes.dtype} {list(codes.shape)}, allowed is torch.int8 [N, K]")
    _check_scale(codes.shape[0], codes.shape[1], scale, group_size, zero_point)
    _check_device(codes, scale)


def check_bias(bias: Tensor | None, out_features: int) -> None:
    """Raise ValueError, with the allowed values, unless a bias fits a product of so many columns."""
    if bias is not None and (bias.shape != (out_features,) or not bias.dtype.is_floating_point):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, allowed is floating [{out_features}] or None")


def pack_int4(codes: Tensor) -> Tensor:
    """[N, K / 8] int32 from [N, K] int8 signed codes in [-8, 7]; the opposite of `unpack_int4`."""
    unsigned = (codes + 8).view(torch.uint8)
    return (unsigned[:, ::2] | (unsigned[:, 1::2] << 4)).flatten().view(torch.int32).view(codes.shape[0], -1)


def unpack_int4(weight_packed: Tensor) -> Tensor:
    """[N, K] int8 signed codes in [-8, 7] from [N, K / 8] int32.

    Code k of a row lies, with 8 added, in bits 4 * (k % 8) to 4 * (k % 8) + 3 of word k // 8.

    Source: compressed-tensors, pack-quantized format.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight_packed.device)
    codes = (weight_packed.unsqueeze(-1) >> shifts) & 15
    return codes.to(torch.int8).sub_(8).flatten(1)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """[N, K] float32 weights: (code - zero point) * scale of the code's group."""
    groups = codes.float().unflatten(1, (scale.shape[1], -1))
    if zero_point is not None:
        groups = groups - zero_point.unsqueeze(-1)
    return (groups * scale.float().unsqueeze(-1)).flatten(1)


def w4a16_gemm(
    x: Tensor, weight_packed: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None
) -> Tensor:
    """Multiply by a weight of 4-bit codes with one scale per group of input columns.

        y[m, n] = sum over k of x[m, k] * (code[n, k] - zero_point[n, k // group_size]) * scale[n, k // group_size]

    Args:
        x: [..., K] float32, bfloat16 or float16.
        weight_packed: [N, K / 8] int32, see `unpack_int4`.
        scale: [N, K / group_size] floating; may be negative.
        group_size: columns that share a scale; -1 is one scale per row, then scale is [N, 1].
        zero_point: like scale, int8; None for symmetric weights.

    Returns:
        [..., N] in x's dtype; products and sums in float32, rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_w4a16(weight_packed, scale, group_size, zero_point)
    _check_input(x, weight_packed.shape[1] * CODES_PER_WORD)
    return F.linear(x.float(), dequantize(unpack_int4(weight_packed), scale, zero_point)).to(x.dtype)


def w8a16_gemm(x: Tensor, codes: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None = None) -> Tensor:
    """Multiply by a weight of 8-bit codes with one scale per group of input columns.

        y[m, n] = sum over k of x[m, k] * (code[n, k] - zero_point[n, k // group_size]) * scale[n, k // group_size]

    Args:
        x: [..., K] float32, bfloat16 or float16.
        codes: [N, K] int8.
        scale: [N, K / group_size] floating; may be negative.
        group_size: columns that share a scale; -1 is one scale per row, then scale is [N, 1].
        zero_point: like scale, int8; None for symmetric weights.

    Returns:
        [..., N] in x's dtype; products and sums in float32, rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_int8(codes, scale, group_size, zero_point)
    _check_input(x, codes.shape[1])
    return F.linear(x.float(), dequantize(codes, scale, zero_point)).to(x.dtype)


def quantize_input(x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """8-bit codes of a layer's input and their scale.

        dynamic: scale = max|x| / 127 of the token, 1 for a token of zeros;  code = round(x / scale) in [-128, 127]

    Args:
        x: [..., K] floating.
        input_scale: [1], of static inputs; None to find one per token.

    Returns:
        Codes [..., K] float32, whole numbers, and scale [..., 1] or [1] float32.

    Source: vLLM, kernels of scaled_int8_quant. compressed-tensors divides by 127.5, which puts the largest negative
    value of every token half-way between two codes, where the last bit of a sum decides.
    """
    wide = x.float()
    if input_scale is None:
        scale = wide.abs().amax(dim=-1, keepdim=True) / 127
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    else:
        scale = input_scale.float()
    return (wide / scale).round_().clamp_(-128, 127), scale


def w8a8_gemm(
    x: Tensor, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Multiply 8-bit inputs by a weight of 8-bit codes with one scale per row.

        y[m, n] = (sum over k of x_code[m, k] * code[n, k]) * x_scale[m] * scale[n] + bias[n]

    Args:
        x: [..., K] float32, bfloat16 or float16; see `quantize_input`.
        codes: [N, K] int8.
        scale: [N, 1] floating.
        input_scale: [1], of static inputs; None to find one per token.
        bias: [N] floating; None for 0.

    Returns:
        [..., N] in x's dtype; the sum of whole numbers is exact, the rest in float32, rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_int8(codes, scale, PER_CHANNEL)
    _check_input(x, codes.shape[1])
    if input_scale is not None and input_scale.shape != (1,):
        raise ValueError(f"input_scale is {list(input_scale.shape)}, allowed is [1] or None")
    check_bias(bias, codes.shape[0])
    rows, row_scale = quantize_input(x, input_scale)
    product = F.linear(rows.double(), codes.double()).float() * row_scale * scale.float().flatten()
    return (product if bias is None else product + bias.float()).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a dense weight.

        y[m, n] = sum over k of x[m, k] * weight[n, k], + bias[n]

    Args:
        x: [..., K] floating.
        weight: [N, K], dtype of x.
        bias: [N], dtype of x, or None.

    Returns:
        [..., N] in x's dtype; sums in float32 or wider for 16-bit types, rounded once.
    """
    if x.dtype == torch.float64:
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
