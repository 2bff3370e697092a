"""Linear layers inside transformers' models that multiply through quantkit_kernels."""

from torch import Tensor, dtype, nn

from quantkit.primitives import QuantizedWeight
from quantkit.serve.models.prepack import prepack
from quantkit_kernels import linear


class PackedLinear(nn.Module):
    """A linear layer that keeps its weight in 4 or 8 bits.

    Args:
        weight: codes, scales, zero points; only the form that the kernel wants is kept.
        bias: [N] or None.
        dtype: of the activations.
        input_scale: [1], of a scheme with static inputs.

    Attributes:
        in_features: K.
        out_features: N.
        operation: of quantkit_kernels.
        reason: why its body is this one.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, dtype: dtype, input_scale: Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.codes.shape
        self.bias = bias
        self.operation, self._weight, self.reason = prepack(weight, dtype, input_scale)

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
