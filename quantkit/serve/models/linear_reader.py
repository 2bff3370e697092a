"""The linear layers of a checkpoint, dense or as codes, by the names that transformers gives them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import CheckpointError, EngineError
from quantkit.formats import StoredConfig, read_quantization_config
from quantkit.primitives import QuantizedWeight
from quantkit.scheme import QuantScheme
from quantkit.source import ModelSource
from quantkit.source.skeleton import PACKED_SUFFIXES

CPU = torch.device("cpu")
PACKED_BITS = (4, 8)  # of w4a16_gemm, and of w8a16_gemm and w8a8_gemm


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear layer.

    Attributes:
        name: in the model.
        weight: [N, K], or its codes.
        bias: [N] or None.
        input_scale: [1], of a scheme with static inputs.
    """

    name: str
    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    input_scale: Tensor | None = None

    @property
    def out_features(self) -> int:
        """N."""
        codes = self.weight.codes if isinstance(self.weight, QuantizedWeight) else self.weight
        return codes.shape[0]


class LinearReader:
    """Reads the linear layers of a model whose other parameters have their data already.

    Args:
        source: where it comes from.
        model: its skeleton, after ``source.materialize``.
        device: where the layers that are stored as codes go; the others are where the model has them.

    Attributes:
        packed: names of the layers whose codes are stored.
        schemes: of the layers that have been read.

    Raises:
        CheckpointError: its quantization is not one that the engine runs.
        EngineError: what has codes is no linear layer.
    """

    def __init__(self, source: ModelSource, model: nn.Module, device: torch.device = CPU) -> None:
        self._source, self._model, self._device = source, model, device
        self._config = _stored_config(source)
        by_parameter = source.weight_map(model).packed if self._config is not None else {}
        self._stored_names = {name.removesuffix(".weight"): stored for name, stored in by_parameter.items()}
        self.packed = tuple(self._stored_names)
        modules = dict(model.named_modules())
        for name in self.packed:
            if not isinstance(modules.get(name), nn.Linear):
                raise EngineError(
                    f"{name} is quantized, and the engine runs quantized linear layers only, not this one"
                )
        self.schemes: set[QuantScheme] = set()

    def read(self, name: str) -> StoredLinear:
        """The layer of a name.

        Raises:
            CheckpointError: its codes are broken, or nothing says how to read them.
        """
        module: Any = self._model.get_submodule(name)
        if name not in self._stored_names:
            bias = getattr(module, "bias", None)
            return StoredLinear(name, module.weight.detach(), None if bias is None else bias.detach())
        weight, input_scale = self._codes(self._stored_names[name], (module.out_features, module.in_features))
        return StoredLinear(name, weight, None if module.bias is None else module.bias.detach(), input_scale)

    def _codes(self, stored_name: str, shape: tuple[int, int]) -> tuple[QuantizedWeight, Tensor | None]:
        """The codes of a layer by its name on disk, and the scale of its inputs if that is static."""
        assert self._config is not None, "layers with codes come with a quantization_config"
        scheme = self._config.scheme_of(stored_name)
        if scheme is None:
            raise CheckpointError(f"{stored_name} has codes, and the quantization_config does not say how to read them")
        self.schemes.add(scheme)
        names = [f"{stored_name}.{suffix}" for suffix in PACKED_SUFFIXES]
        tensors = {tensor: self._source.read(tensor) for tensor in names if tensor in self._source.tensors}
        weight = _moved(self._config.format.decode(tensors, stored_name, scheme, shape), self._device)
        if scheme.input is None or scheme.input.dynamic:
            return weight, None
        input_scale = tensors.get(f"{stored_name}.input_scale")
        if input_scale is None:
            raise CheckpointError(f"{stored_name} has no input_scale")
        return weight, input_scale.float().reshape(1).to(self._device)


def _moved(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    zero_point = None if weight.zero_point is None else weight.zero_point.to(device)
    return QuantizedWeight(weight.codes.to(device), weight.scale.to(device), weight.scheme, zero_point)


def _stored_config(source: ModelSource) -> StoredConfig | None:
    """The quantization of a packed checkpoint; None for an ordinary one."""
    if source.quantization is None:
        return None
    try:
        config = read_quantization_config(source.quantization)
    except CheckpointError as error:
        raise CheckpointError(
            f"the engine cannot run {source.name}: {error.message}",
            fix="it runs ordinary checkpoints, and compressed-tensors, gptq and awq with 4 or 8 bits",
        ) from error
    for scheme in config.schemes:
        if scheme.num_bits not in PACKED_BITS:
            bits = " or ".join(map(str, PACKED_BITS))
            raise CheckpointError(
                f"the engine cannot run {source.name}: {scheme} has {scheme.num_bits} bits, not {bits}"
            )
    return config


def join(layers: list[StoredLinear]) -> list[StoredLinear]:
    """Layers of the same input, those that can be one layer made into one; their outputs lie side by side in it."""
    joined = [layers[0]]
    for layer in layers[1:]:
        both = _join_two(joined[-1], layer)
        joined[-1:] = [joined[-1], layer] if both is None else [both]
    return joined


def _join_two(first: StoredLinear, second: StoredLinear) -> StoredLinear | None:
    """None if they are stored in different ways."""
    a, b = first.weight, second.weight
    weight: Tensor | QuantizedWeight
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        weight = torch.cat([a, b])
    elif isinstance(a, QuantizedWeight) and isinstance(b, QuantizedWeight):
        scales = first.input_scale, second.input_scale
        has_same_inputs = all(scale is None for scale in scales) or (
            scales[0] is not None and scales[1] is not None and torch.equal(scales[0], scales[1])
        )
        if a.scheme != b.scheme or a.scale.dtype != b.scale.dtype or not has_same_inputs:
            return None
        zeros = None
        if a.zero_point is not None and b.zero_point is not None:
            zeros = torch.cat([a.zero_point, b.zero_point])
        weight = QuantizedWeight(torch.cat([a.codes, b.codes]), torch.cat([a.scale, b.scale]), a.scheme, zeros)
    else:
        return None
    bias = None
    if first.bias is not None or second.bias is not None:
        like = first.bias if first.bias is not None else second.bias
        assert like is not None
        bias = torch.cat([like.new_zeros(x.out_features) if x.bias is None else x.bias for x in (first, second)])
    return StoredLinear(f"{first.name}+{second.name}", weight, bias, first.input_scale)
