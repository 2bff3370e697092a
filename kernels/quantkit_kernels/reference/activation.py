"""silu_mul and gelu_mul: the gate of a feed-forward layer times its other half."""

import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.reference.arguments import FLOATING, check_argument


def check_gated(x: Tensor) -> None:
    """Raise ValueError, with the allowed values, unless x is what `silu_mul` and `gelu_mul` take."""
    check_argument("x", x, FLOATING, ("T", "2F"))
    if x.shape[1] % 2:
        raise ValueError(f"x has {x.shape[1]} columns, allowed is an even number: gate and other half")


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold gate and up side by side, in float32, rounded once.

    Args:
        x: [T, 2F], unit stride along 2F, float32, bfloat16 or float16: F columns of gate, F of up.

    Returns:
        [T, F] in the type of x.

    Raises:
        ValueError: a shape, type or stride that does not fit.
    """
    check_gated(x)
    gate, up = x.float().chunk(2, dim=1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_mul(x: Tensor, tanh: bool) -> Tensor:
    """gelu(gate) * up of rows as for `silu_mul`; ``tanh`` for the approximation with a hyperbolic tangent."""
    check_gated(x)
    gate, up = x.float().chunk(2, dim=1)
    return (F.gelu(gate, approximate="tanh" if tanh else "none") * up).to(x.dtype)
