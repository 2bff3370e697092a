"""File formats: each module writes one, reads it back and says what it cannot read.

A newcomer adds one file with the functions of `Format`, one line in ``FORMAT_MODULES``, and what it holds to `holds`.
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.scheme import QuantScheme

if TYPE_CHECKING:  # recipes look into this package, and they import no torch
    from torch import Tensor
    from torch import dtype as Dtype

    from quantkit.formats.safetensors_file import TensorSpec
    from quantkit.primitives import QuantizedWeight

FORMAT_MODULES = {  # name in recipes -> module; imported on first use
    "compressed-tensors": "quantkit.formats.compressed_tensors",
    "gptq": "quantkit.formats.gptq",
    "awq": "quantkit.formats.awq",
}


@dataclass(frozen=True, slots=True)
class Format:
    """A format, its options bound.

    Attributes:
        name: in recipes; also the ``quant_method`` of config.json.
        options: of the format, such as ``checkpoint_format`` of GPTQ.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()

    def _function(self, name: str) -> Callable[..., Any]:
        return partial(getattr(importlib.import_module(FORMAT_MODULES[self.name]), name), **dict(self.options))

    def layer_specs(
        self, name: str, shape: tuple[int, int], scheme: QuantScheme, dtype: "Dtype"
    ) -> "dict[str, TensorSpec]":
        """The tensors of a quantized layer; ``dtype`` is that of the model's weights."""
        specs: dict[str, TensorSpec] = self._function("layer_specs")(name, shape, scheme, dtype)
        return specs

    def scale_dtype(self, dtype: "Dtype") -> "Dtype":
        """In which scales must be found so that this format stores them without loss, for weights of ``dtype``."""
        found: Dtype = importlib.import_module(FORMAT_MODULES[self.name]).scale_dtype(dtype)
        return found

    def encode(self, name: str, weight: "QuantizedWeight", input_scale: "Tensor | None" = None) -> "dict[str, Tensor]":
        """The tensors of a quantized layer, with the specs of `layer_specs`.

        Raises:
            CheckpointError: the format cannot store the weight without loss.
        """
        tensors: dict[str, Tensor] = self._function("encode")(name, weight, input_scale)
        return tensors

    def decode(
        self, tensors: "Mapping[str, Tensor]", name: str, scheme: QuantScheme, shape: tuple[int, int]
    ) -> "QuantizedWeight":
        """A quantized layer from its tensors; the opposite of `encode`.

        Raises:
            CheckpointError: a tensor is missing, or is not what the scheme and the shape of the weight ask for.
        """
        weight: QuantizedWeight = self._function("decode")(tensors, name, scheme, shape)
        return weight

    def quantization_config(
        self, schemes: Mapping[str, QuantScheme], ignore: Sequence[str], *, kv_scales: bool = False
    ) -> dict[str, Any]:
        """The ``quantization_config`` of config.json for layers with schemes and for linear layers that stay.

        With ``kv_scales`` the checkpoint holds scales of keys and values; compressed-tensors alone has a word for it.
        """
        more = {"kv_scales": True} if kv_scales else {}
        config: dict[str, Any] = self._function("quantization_config")(schemes, ignore, **more)
        return config


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """A ``quantization_config`` that was read.

    Attributes:
        format: which decodes the layers.
        groups: (targets, scheme) in order. A target is a module's name, ``re:`` and a regular expression that matches
            its beginning, or a class name; an exact name goes before an expression, and an expression before a class.
        ignore: targets that stay as they are.
        storage: what the format calls its way of storing, such as ``pack-quantized`` or ``gptq_v2``.
        kv_scales: whether static scales of keys and values are stored.
    """

    format: Format
    groups: tuple[tuple[tuple[str, ...], QuantScheme], ...]
    ignore: tuple[str, ...]
    storage: str
    kv_scales: bool = False

    @property
    def schemes(self) -> tuple[QuantScheme, ...]:
        """Every scheme once, in order."""
        return tuple(dict.fromkeys(scheme for _, scheme in self.groups))

    def scheme_of(self, name: str, class_name: str = "Linear") -> QuantScheme | None:
        """How a module is stored; None for as it is."""
        if any(_matches(target, name, class_name) for target in self.ignore):
            return None
        found = [
            (_matches(target, name, class_name), -number, scheme)
            for number, (targets, scheme) in enumerate(self.groups)
            for target in targets
        ]
        rank, _, scheme = max(found, key=lambda item: item[:2])
        return scheme if rank else None


def _matches(target: str, name: str, class_name: str) -> int:
    """How closely a target names a module: 3 by name, 2 by expression, 1 by class, 0 not at all."""
    if target == name:
        return 3
    if target.startswith("re:"):
        return 2 if re.match(target[3:], name) else 0
    return 1 if target == class_name else 0


def read_quantization_config(config: Mapping[str, Any]) -> StoredConfig:
    """Read a ``quantization_config`` of any format of ours.

    Raises:
        CheckpointError: another method, or something that is not supported; the key and its value are named.
    """
    from quantkit.errors import CheckpointError

    method = config.get("quant_method")
    if method not in FORMAT_MODULES:
        raise CheckpointError(f"quant_method is {method}, not one of {', '.join(FORMAT_MODULES)}")
    read: StoredConfig = importlib.import_module(FORMAT_MODULES[method]).read_quantization_config(config)
    return read
