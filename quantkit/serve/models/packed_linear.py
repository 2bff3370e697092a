"""Linear layers that multiply through quantkit_kernels."""

import torch
from torch import Tensor, nn

from quantkit_kernels import linear, prepack_w4a16


class PackedLinear(nn.Module):
    """A linear layer that keeps its weight in 4 bits.

    Args:
        weight_packed: [N, K / 8] int32, as compressed-tensors stores it; not kept if a faster form exists.
        weight_scale: [N, G].
        group_size: K / G, or -1 for one scale per row.
        bias: [N] or None.
        dtype: of the activations.

    Attributes:
        in_features: K.
        out_features: N.
        body: the kernel that multiplies.
        reason: why it is this one.
    """

    def __init__(
        self, weight_packed: Tensor, weight_scale: Tensor, group_size: int, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features = weight_packed.shape[0]
        self.in_features = weight_packed.shape[1] * 8
        self.bias = bias
        self._weight, self.reason = prepack_w4a16(weight_packed, weight_scale, group_size, dtype)

    @property
    def body(self) -> str:
        """The kernel that multiplies."""
        return self._weight.body

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in memory."""
        return self._weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] from [..., K]."""
        product = self._weight(x)
        return product if self.bias is None else product + self.bias


class DispatchedLinear(nn.Linear):
    """nn.Linear whose product goes through `quantkit_kernels.linear`, for CPUs where torch's own is slow."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] from [..., K]."""
        return linear(x, self.weight, self.bias)
