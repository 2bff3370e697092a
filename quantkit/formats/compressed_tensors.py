"""The format ``pack-quantized`` of compressed-tensors: integer weights in 32-bit words; vLLM and transformers read it.

A layer P of N rows and K columns with b-bit codes is stored as
    P.weight_packed  int32 [N, ceil(K*b/32)]  code + 2**(b-1) of column j in bits [j*b, j*b+b) of the row, lowest first
    P.weight_scale   model dtype [N, G]       one scale a group of K/G columns; G = 1 for one scale a row
    P.weight_shape   int64 [2]                (N, K)
in the place of P.weight. The weight that a reader computes is code * scale.

Source: compressed-tensors, compressors/pack_quantized and quantization/quant_config.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.primitives import QuantizedWeight
from quantkit.scheme import PER_CHANNEL, QuantScheme

QUANT_METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")
WORD_BITS = 32
READ_BITS = range(2, 9)
WEIGHT_KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
# keys that change nothing for weights that are stored already
SILENT_KEYS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder", "block_structure")


def layer_specs(name: str, shape: tuple[int, int], scheme: QuantScheme, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The tensors of a quantized layer.

    Args:
        name: of the layer on disk, without ``.weight``.
        shape: (N, K) of its weight.
        scheme: how it is quantized.
        dtype: in which scales are stored.

    Raises:
        ValueError: the group size does not divide K.
    """
    rows, columns = shape
    return {
        f"{name}.weight_packed": TensorSpec(torch.int32, (rows, num_words(columns, scheme.num_bits))),
        f"{name}.weight_scale": TensorSpec(dtype, (rows, scheme.num_groups(columns))),
        f"{name}.weight_shape": TensorSpec(torch.int64, (2,)),
    }


def encode(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a quantized layer, with the specs of `layer_specs`.

    Raises:
        CheckpointError: a scheme that this format does not hold, a code out of range, or a scale that is not finite.
    """
    scheme = weight.scheme
    if not scheme.symmetric:
        raise CheckpointError(f"{name}: asymmetric weights are not supported yet")
    low, high = weight.codes.aminmax()
    if low < scheme.code_min or high > scheme.code_max:
        raise CheckpointError(f"{name}: codes from {low} to {high} do not fit into {scheme.num_bits} bits")
    if not torch.isfinite(weight.scale).all():
        raise CheckpointError(f"{name}: a scale is not finite")
    return {
        f"{name}.weight_packed": pack_int32(weight.codes, scheme.num_bits),
        f"{name}.weight_scale": weight.scale.contiguous(),
        f"{name}.weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }


def decode(tensors: Mapping[str, Tensor], name: str, scheme: QuantScheme) -> QuantizedWeight:
    """A quantized layer from its tensors; the opposite of `encode`.

    Raises:
        CheckpointError: a tensor is missing, or its type or shape is not what the scheme asks for.
    """
    missing = [suffix for suffix in SUFFIXES if f"{name}.{suffix}" not in tensors]
    if missing:
        raise CheckpointError(f"{name} has no {missing[0]}")
    packed, scale, shape = (tensors[f"{name}.{suffix}"] for suffix in SUFFIXES)
    if shape.numel() != 2:
        raise CheckpointError(f"{name}.weight_shape holds {shape.numel()} numbers instead of 2")
    rows, columns = (int(size) for size in shape)
    try:
        expected = layer_specs(name, (rows, columns), scheme, scale.dtype)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    for suffix, tensor in zip(SUFFIXES[:2], (packed, scale), strict=True):
        found = TensorSpec(tensor.dtype, tuple(tensor.shape))
        if found != expected[f"{name}.{suffix}"]:
            raise CheckpointError(
                f"{name}.{suffix} is {found.dtype} {list(found.shape)}, {scheme} of [{rows}, {columns}] needs "
                f"{expected[f'{name}.{suffix}'].dtype} {list(expected[f'{name}.{suffix}'].shape)}"
            )
    return QuantizedWeight(unpack_int32(packed, scheme.num_bits, columns), scale, scheme)


def num_words(columns: int, num_bits: int) -> int:
    """32-bit words for a row of ``columns`` codes."""
    return math.ceil(columns * num_bits / WORD_BITS)


def pack_int32(codes: Tensor, num_bits: int) -> Tensor:
    """Pack signed codes into words, lowest bits first and without gaps.

    Args:
        codes: [N, K] int8 in [-2**(num_bits-1), 2**(num_bits-1) - 1].
        num_bits: 1 to 8.

    Returns:
        [N, ceil(K*num_bits/32)] int32; the unused bits of a row's last word are 0.
    """
    rows, columns = codes.shape
    unsigned = codes.to(torch.int64) + (1 << (num_bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -columns % WORD_BITS)).reshape(rows, -1, WORD_BITS)
    words = torch.zeros(rows, unsigned.shape[1], num_bits, dtype=torch.int64, device=codes.device)
    for i in range(WORD_BITS):  # 32 codes fill exactly num_bits words
        word, shift = divmod(i * num_bits, WORD_BITS)
        words[..., word] |= unsigned[..., i] << shift
        if shift + num_bits > WORD_BITS:
            words[..., word + 1] |= unsigned[..., i] >> (WORD_BITS - shift)
    words = (words & 0xFFFFFFFF).reshape(rows, -1)[:, : num_words(columns, num_bits)]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_int32(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """Signed codes from words; the opposite of `pack_int32`.

    Args:
        words: [N, ceil(columns*num_bits/32)] int32.
        num_bits: 1 to 8.
        columns: codes in a row.

    Returns:
        [N, columns] int8.
    """
    rows = words.shape[0]
    wide = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, -words.shape[1] % num_bits))
    wide = wide.reshape(rows, -1, num_bits)
    codes = torch.empty(rows, wide.shape[1], WORD_BITS, dtype=torch.int8, device=words.device)
    mask, offset = (1 << num_bits) - 1, 1 << (num_bits - 1)
    for i in range(WORD_BITS):
        word, shift = divmod(i * num_bits, WORD_BITS)
        value = wide[..., word] >> shift
        if shift + num_bits > WORD_BITS:
            value = value | (wide[..., word + 1] << (WORD_BITS - shift))
        codes[..., i] = ((value & mask) - offset).to(torch.int8)
    return codes.reshape(rows, -1)[:, :columns].contiguous()


def quantization_config(schemes: Mapping[str, QuantScheme], ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json, with no key that an older reader would refuse.

    Args:
        schemes: layer name -> scheme. One scheme for all targets the class ``Linear``; several name their layers.
        ignore: names of the linear layers that are not quantized.

    Raises:
        ValueError: no layer, or a layer that is quantized and ignored.
    """
    if not schemes:
        raise ValueError("no layer is quantized")
    both = [name for name in ignore if name in schemes]
    if both:
        raise ValueError(f"{both[0]} is quantized and ignored")
    layers: dict[QuantScheme, list[str]] = {}
    for name, scheme in schemes.items():
        layers.setdefault(scheme, []).append(name)
    groups: dict[str, Any] = {}
    for number, (scheme, names) in enumerate(layers.items()):
        targets = ["Linear"] if len(layers) == 1 else names
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _weight_args(scheme),
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": QUANT_METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
    }


def _weight_args(scheme: QuantScheme) -> dict[str, Any]:
    """A scheme in the words of compressed-tensors."""
    args: dict[str, Any] = {
        "num_bits": scheme.num_bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": scheme.strategy,
        "dynamic": False,
    }
    if scheme.group_size != PER_CHANNEL:
        args["group_size"] = scheme.group_size
    return args


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """A ``quantization_config`` that was read.

    Attributes:
        groups: (targets, scheme) in order.
        ignore: targets that stay as they are.
    """

    groups: tuple[tuple[tuple[str, ...], QuantScheme], ...]
    ignore: tuple[str, ...]

    def scheme_of(self, name: str, class_name: str = "Linear") -> QuantScheme | None:
        """How a module is stored; None for as it is.

        A target is a module's name, ``re:`` and a regular expression that matches its beginning, or a class name; an
        exact name goes before an expression, and an expression before a class.
        """
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


def read_quantization_config(config: Mapping[str, Any]) -> PackedConfig:
    """Read a ``quantization_config`` of this format.

    Raises:
        CheckpointError: another method or format, or something that is not supported; the key and its value are named.
    """
    if config.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(f"quant_method is {config.get('quant_method')}, not {QUANT_METHOD}")
    unsupported = {
        "format": config.get("format") != FORMAT,
        "quantization_status": config.get("quantization_status", "compressed") != "compressed",
        "kv_cache_scheme": bool(config.get("kv_cache_scheme")),
        "sparsity_config": (config.get("sparsity_config") or {}).get("format", "dense") != "dense",
        "transform_config": bool((config.get("transform_config") or {}).get("config_groups")),
        "config_groups": not config.get("config_groups"),
    }
    for key, wrong in unsupported.items():
        if wrong:
            raise CheckpointError(f"quantization_config: {key}={config.get(key)} is not supported yet")
    groups = []
    for group_name, group in config["config_groups"].items():
        if not isinstance(group, Mapping) or not group.get("targets") or not group.get("weights"):
            raise CheckpointError(f"quantization_config: {group_name} has no targets or no weights")
        for key in ("input_activations", "output_activations"):
            if group.get(key):
                raise CheckpointError(f"quantization_config: {group_name}.{key} is not supported yet")
        if group.get("format") not in (None, FORMAT):
            raise CheckpointError(f"quantization_config: {group_name}.format={group['format']} is not supported yet")
        groups.append((tuple(group["targets"]), _read_weight_args(group_name, group["weights"])))
    return PackedConfig(tuple(groups), tuple(config.get("ignore") or ()))


def _read_weight_args(group_name: str, args: Mapping[str, Any]) -> QuantScheme:
    """The scheme of a group."""

    def refuse(key: str) -> CheckpointError:
        return CheckpointError(f"quantization_config: {group_name}.weights.{key}={args.get(key)} is not supported yet")

    for key in args:
        if key not in (*WEIGHT_KEYS, *SILENT_KEYS):
            raise refuse(key)
    if args.get("type", "int") != "int":
        raise refuse("type")
    if args.get("num_bits") not in READ_BITS:
        raise refuse("num_bits")
    if not args.get("symmetric", True):
        raise refuse("symmetric")
    if args.get("dynamic"):
        raise refuse("dynamic")
    if args.get("actorder") in ("group", "dynamic", True):  # the columns of a group are not side by side
        raise refuse("actorder")
    group_size = args.get("group_size")
    inferred = "tensor" if group_size is None else "channel" if group_size == PER_CHANNEL else "group"
    strategy = args.get("strategy") or inferred
    if strategy == "channel":
        return QuantScheme(num_bits=args["num_bits"], group_size=PER_CHANNEL)
    if strategy != "group":
        raise refuse("strategy")
    if not isinstance(group_size, int) or group_size <= 0:
        raise refuse("group_size")
    return QuantScheme(num_bits=args["num_bits"], group_size=group_size)
