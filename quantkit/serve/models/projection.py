"""Linear layers of a decoder: those of the same input are one product."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.primitives import QuantizedWeight
from quantkit.serve.models.coded_rows import CodedRows, Rows
from quantkit.serve.models.linear_reader import StoredLinear, join
from quantkit.serve.models.prepack import prepack
from quantkit_kernels import CodedWeight, PreparedWeight, prepack_linear
from quantkit_kernels.cpu_native_linear import NativeWeight
from quantkit_kernels.dispatch import DenseWeight


class Projection:
    """Linear layers of the same input, whose outputs lie side by side; calling it multiplies.

    Layers that are stored in the same way are one matrix, which is brought once into the form that its kernel wants.

    Args:
        layers: one or more.
        dtype: of the model.

    Attributes:
        bodies: (operation, body, reason) of each product.
        products: prepared weights, whose outputs lie side by side.
        parameters: name -> weights and biases that are kept as they are stored; views of what is multiplied.
        nbytes: of all weights.
        takes_codes: every product rounds its inputs to 8 bits with a scale a row, and takes rows that are so already.
    """

    def __init__(self, layers: list[StoredLinear], dtype: torch.dtype) -> None:
        self.bodies: list[tuple[str, str, str]] = []
        self.parameters: dict[str, Tensor] = {}
        self.nbytes = 0
        self.products = [self._prepare(part, layers, dtype) for part in join(layers)]
        self.takes_codes = all(isinstance(p, CodedWeight) and p.input_scale is None for p in self.products)

    def _prepare(self, part: StoredLinear, layers: list[StoredLinear], dtype: torch.dtype) -> PreparedWeight:
        members = [layer for layer in layers if layer.name in part.name.split("+")]
        weight: PreparedWeight
        if isinstance(part.weight, QuantizedWeight):
            operation, weight, reason = prepack(part.weight, dtype, part.input_scale)
            if part.bias is not None:
                weight = _with_bias(weight, part.bias)
        else:
            operation = "linear"
            weight, reason = prepack_linear(part.weight, part.bias)
            if isinstance(weight, DenseWeight):
                self.parameters |= dict(_views(members, weight))
        self.bodies.append((operation, weight.body, reason))
        self.nbytes += weight.nbytes
        return weight

    def __call__(self, x: Rows) -> Tensor:
        """[T, all N] from [T, K]; codes only if it takes them."""
        products = [_multiply(product, x) for product in self.products]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def _multiply(weight: PreparedWeight, x: Rows) -> Tensor:
    if not isinstance(x, CodedRows):
        return weight(x)
    assert isinstance(weight, CodedWeight), "it takes codes"
    return weight.multiply(x.codes, x.scale)


def _with_bias(weight: PreparedWeight, bias: Tensor) -> PreparedWeight:
    if isinstance(weight, NativeWeight):
        return weight.with_bias(bias)
    return _BiasedCodes(weight, bias) if isinstance(weight, CodedWeight) else _Biased(weight, bias)


class _Biased:
    """A prepared weight, and a bias that is added to its product."""

    def __init__(self, weight: PreparedWeight, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias
        self.body, self.nbytes = weight.body, weight.nbytes + bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._weight(x).add_(self._bias)


class _BiasedCodes(_Biased):
    """The same of a weight that takes codes."""

    def __init__(self, weight: PreparedWeight, bias: Tensor) -> None:
        super().__init__(weight, bias)
        assert isinstance(weight, CodedWeight), "it takes codes"
        self._coded, self.input_scale = weight, weight.input_scale

    def multiply(self, x_codes: Tensor, x_scale: Tensor) -> Tensor:
        return self._coded.multiply(x_codes, x_scale).add_(self._bias)


def _views(members: list[StoredLinear], weight: DenseWeight) -> Iterator[tuple[str, Tensor]]:
    """The parts of a dense weight by the names of the layers that it was joined from."""
    heights = [member.out_features for member in members]
    for member, rows in zip(members, weight.weight.split(heights), strict=True):
        yield f"{member.name}.weight", rows
    if weight.bias is not None:
        for member, values in zip(members, weight.bias.split(heights), strict=True):
            if member.bias is not None:
                yield f"{member.name}.bias", values
