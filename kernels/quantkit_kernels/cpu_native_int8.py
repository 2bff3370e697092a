"""Compiled CPU body of w8a8_gemm where the CPU has no 8-bit matrix products (VNNI); native/whole_numbers.cpp.

Codes stay 8 bits wide in memory and are widened to 16 in registers. Sums are whole numbers of 32 bits, exact in
whatever order they are taken: results are those of the reference to the bit, and a row's product does not depend on the
batch.
"""

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_native_linear import INT8_INPUTS, NativeWeight, in_panels, native_weight_blocker

MAX_COLUMNS = 2**17 - 1  # of a weight whose sums of -128 times -128 are less than 2**31


class NativeW8A8(NativeWeight):
    """An 8-bit weight for inputs that are quantized to 8 bits on the way; calling it multiplies.

    Args:
        codes: [N, K] int8; not kept.
        scale: [N, 1] floating; not kept.
        input_scale: [1] of static inputs; None to find one per row.
        bias: [N] floating or None.

    Precision: the sum of whole numbers is exact; the scale of the row, the scale of the weight and the bias are applied
    in float32 in this order, each with one rounding, and the product is rounded once to the type of the activations.

    Raises:
        ValueError: shapes that do not fit, or what `native_w8a8_blocker` says.
    """

    body = "cpu native int8"

    def __init__(
        self, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        reference.check_int8(codes, scale, reference.PER_CHANNEL)
        reference.check_bias(bias, codes.shape[0])
        if input_scale is not None and input_scale.shape != (1,):
            raise ValueError(f"input_scale is {list(input_scale.shape)}, allowed is [1] or None")
        blocker = native_w8a8_blocker(codes)
        if blocker is not None:
            raise ValueError(blocker)
        out_features, in_features = codes.shape
        pairs = torch.nn.functional.pad(codes, (0, in_features % 2)).unflatten(1, (-1, 2))
        super().__init__(
            INT8_INPUTS,
            (out_features, in_features),
            in_panels(pairs).transpose(-1, -2).contiguous(),
            scales=scale.float().flatten().contiguous(),
            bias=bias,
            input_scale=None if input_scale is None else input_scale.float(),
        )


def native_w8a8_blocker(codes: Tensor) -> str | None:
    """Why `NativeW8A8` cannot take a weight; None if it can."""
    if codes.shape[1] > MAX_COLUMNS:
        return f"K={codes.shape[1]} is more than {MAX_COLUMNS}, up to which 32 bits hold every sum"
    return native_weight_blocker(codes)
