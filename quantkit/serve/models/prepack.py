"""The operation of quantkit_kernels that a quantized weight needs, and the weight in its form."""

import torch
from torch import Tensor

from quantkit.primitives import QuantizedWeight
from quantkit_kernels import PreparedWeight, pack_int4, prepack_w4a16, prepack_w8a8, prepack_w8a16


def prepack(
    weight: QuantizedWeight, activations: torch.dtype, input_scale: Tensor | None
) -> tuple[str, PreparedWeight, str]:
    """The name of the operation, the weight, and why it has this form.

    Args:
        weight: as stored.
        activations: their type; on a CPU without bfloat16 products those of a bfloat16 model may also be float32.
        input_scale: [1], of a scheme with static inputs.
    """
    scheme, codes, scale, zero_point = weight.scheme, weight.codes, weight.scale, weight.zero_point
    if scheme.input is not None:
        return "w8a8_gemm", *prepack_w8a8(codes, scale, activations, input_scale)
    if scheme.num_bits == 8:
        return "w8a16_gemm", *prepack_w8a16(codes, scale, scheme.group_size, activations, zero_point)
    return "w4a16_gemm", *prepack_w4a16(pack_int4(codes), scale, scheme.group_size, activations, zero_point)
