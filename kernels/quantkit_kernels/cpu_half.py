"""CPU body of products with 16-bit weights where the CPU has no bfloat16 matrix instructions: weights kept in float16.

FBGEMM, which torch carries, packs a float16 weight once and widens it in registers (F16C), so that a product reads half
the bytes of a float32 one and needs no piece of it written down. float16 has three bits of precision more than bfloat16
and a narrower range: it holds bfloat16 numbers from 2**-17 to 65504 exactly, and whole numbers of 8 bits too.
"""

import torch
from torch import Tensor

MAX_HALF = 65504.0
# Below 2**-17 float16 keeps numbers to within 2**-25: less than bfloat16 itself rounds if the largest are this large.
MIN_LARGEST = 2.0**-10
# FBGEMM goes through the whole of a weight for every six rows of activations, 512 columns at a time: a piece of so many
# rows stays in the caches meanwhile.
PIECE_ROWS = 3072
# Without torch's wrapper, which looks through the arguments of every call for tensors that are not real: a quarter of
# the time of a small product.
_multiply_half = torch.ops.quantized.linear_dynamic_fp16.default._op


def cpu_half_blocker(weight: Tensor) -> str | None:
    """Why `CpuHalf` cannot take a weight; None if it can."""
    if weight.device.type != "cpu":
        return f"the weight is on {weight.device}"
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "torch carries no FBGEMM for this CPU"
    return half_blocker(weight)


def half_blocker(weight: Tensor) -> str | None:
    """Why float16 does not hold the numbers of a weight; None if it does."""
    if not weight.numel():
        return f"a weight of {list(weight.shape)} is empty"
    lowest, highest = map(float, weight.aminmax())
    largest = max(-lowest, highest)
    if not MIN_LARGEST <= largest <= MAX_HALF:  # a NaN is refused too
        return f"float16 does not hold weights up to {largest:.3g}"
    return None


class CpuHalf:
    """A weight in float16, packed; calling it multiplies.

    Args:
        weight: [N, K] floating; not kept.
        bias: [N] or None.

    Attributes:
        out_features: N.
        in_features: K.

    Precision: weights as said above; products and sums in float32, rounded once to the type of the activations.

    Raises:
        ValueError: what `cpu_half_blocker` says.
    """

    body = "cpu float16 packed"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        blocker = cpu_half_blocker(weight)
        if blocker is not None:
            raise ValueError(blocker)
        self.out_features, self.in_features = weight.shape
        num_pieces = -(-self.out_features // PIECE_ROWS)
        size = -(-self.out_features // (16 * num_pieces)) * 16
        biases = [None] * num_pieces if bias is None else [piece.float() for piece in bias.split(size)]
        self._pieces = [
            torch.ops.quantized.linear_prepack_fp16(piece.float(), wide_bias)
            for piece, wide_bias in zip(weight.split(size), biases, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        return 2 * self.out_features * self.in_features

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K], with the weight, and the bias added; in the type of x."""
        wide = x.float()
        products: list[Tensor] = [_multiply_half(wide, piece) for piece in self._pieces]
        return (products[0] if len(products) == 1 else torch.cat(products, dim=-1)).to(x.dtype)
