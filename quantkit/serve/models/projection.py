"""Linear layers of a decoder: those of the same input are one product."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.primitives import QuantizedWeight
from quantkit.serve.models.linear_reader import StoredLinear, join
from quantkit.serve.models.prepack import prepack
from quantkit_kernels import PreparedWeight, prepack_linear
from quantkit_kernels.dispatch import DenseWeight


class Projection:
    """Linear layers of the same input, whose outputs lie side by side; calling it multiplies.

    Layers that are stored in the same way are one matrix, which is brought once into the form that its kernel wants.

    Args:
        layers: one or more.
        dtype: of the model.

    Attributes:
        bodies: (operation, body, reason) of each product.
        parameters: name -> weights and biases that are kept as they are stored; views of what is multiplied.
        nbytes: of all weights.
    """

    def __init__(self, layers: list[StoredLinear], dtype: torch.dtype) -> None:
        self.bodies: list[tuple[str, str, str]] = []
        self.parameters: dict[str, Tensor] = {}
        self.nbytes = 0
        self._products = [self._prepare(part, layers, dtype) for part in join(layers)]

    def _prepare(self, part: StoredLinear, layers: list[StoredLinear], dtype: torch.dtype) -> PreparedWeight:
        members = [layer for layer in layers if layer.name in part.name.split("+")]
        weight: PreparedWeight
        if isinstance(part.weight, QuantizedWeight):
            operation, weight, reason = prepack(part.weight, dtype, part.input_scale)
            if part.bias is not None:
                weight = _Biased(weight, part.bias)
        else:
            operation = "linear"
            weight, reason = prepack_linear(part.weight, part.bias)
            if isinstance(weight, DenseWeight):
                self.parameters |= dict(_views(members, weight))
        self.bodies.append((operation, weight.body, reason))
        self.nbytes += weight.nbytes
        return weight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, all N] from [T, K]."""
        if len(self._products) == 1:
            return self._products[0](x)
        return torch.cat([product(x) for product in self._products], dim=-1)


class _Biased:
    """A prepared weight, and a bias that is added to its product."""

    def __init__(self, weight: PreparedWeight, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias
        self.body, self.nbytes = weight.body, weight.nbytes + bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._weight(x).add_(self._bias)


def _views(members: list[StoredLinear], weight: DenseWeight) -> Iterator[tuple[str, Tensor]]:
    """The parts of a dense weight by the names of the layers that it was joined from."""
    heights = [member.out_features for member in members]
    for member, rows in zip(members, weight.weight.split(heights), strict=True):
        yield f"{member.name}.weight", rows
    if weight.bias is not None:
        for member, values in zip(members, weight.bias.split(heights), strict=True):
            if member.bias is not None:
                yield f"{member.name}.bias", values
