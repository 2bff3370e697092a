"""The formats ``pack-quantized`` and ``int-quantized`` of compressed-tensors; vLLM and transformers read them.

A layer P of N rows and K columns with b-bit codes and G scales a row is stored in the place of P.weight as

    pack-quantized, for 16-bit inputs
    P.weight_packed      int32 [N, ceil(K*b/32)]  code + 2**(b-1) of column j in bits [j*b, j*b+b) of the row
    P.weight_scale       model dtype [N, G]       one scale a group of K/G columns; G = 1 for one scale a row
    P.weight_zero_point  int32 [ceil(N*b/32), G]  if asymmetric: zero point + 2**(b-1) of row i in bits [i*b, i*b+b)
    P.weight_shape       int64 [2]                (N, K)

    int-quantized, for 8-bit inputs
    P.weight             int8 [N, K]              codes
    P.weight_scale       model dtype [N, 1]
    P.input_scale        model dtype [1]          if the inputs are static

The weight that a reader computes is (code - zero point) * scale.
Keys and values may have scales too: `kv_scales`.

Source: compressed-tensors, compressors/pack_quantized, compressors/naive_quantized and quantization/quant_config.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats import Format, StoredConfig
from quantkit.formats.expert_names import expression, join_names, join_schemes
from quantkit.formats.holds import why_not
from quantkit.formats.kv_scales import KV_CACHE_SCHEME, is_kv_cache_scheme
from quantkit.formats.layer_tensors import check_weight, take
from quantkit.formats.packing import num_words, pack_int32, unpack_int32
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.primitives import QuantizedWeight
from quantkit.scheme import PER_CHANNEL, InputScheme, QuantScheme

QUANT_METHOD = "compressed-tensors"
PACKED, INT, MIXED = "pack-quantized", "int-quantized", "mixed-precision"
READ_BITS = range(2, 9)
WEIGHT_KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
# keys that change nothing for weights that are stored already
SILENT_KEYS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder", "block_structure")


def storage(scheme: QuantScheme) -> str:
    """The package's name for the way a scheme is stored."""
    return PACKED if scheme.input is None else INT


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scales are stored in the type of the weights."""
    return dtype


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
    scale = TensorSpec(dtype, (rows, scheme.num_groups(columns)))
    if scheme.input is not None:
        specs = {f"{name}.weight": TensorSpec(torch.int8, shape), f"{name}.weight_scale": scale}
        if not scheme.input.dynamic:
            specs[f"{name}.input_scale"] = TensorSpec(dtype, (1,))
        return specs
    specs = {
        f"{name}.weight_packed": TensorSpec(torch.int32, (rows, num_words(columns, scheme.num_bits))),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": TensorSpec(torch.int64, (2,)),
    }
    if not scheme.symmetric:
        packed_rows = num_words(rows, scheme.num_bits)
        specs[f"{name}.weight_zero_point"] = TensorSpec(torch.int32, (packed_rows, scale.shape[1]))
    return specs


def encode(name: str, weight: QuantizedWeight, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors of a quantized layer, with the specs of `layer_specs`.

    Args:
        name: of the layer on disk.
        weight: codes, scales and zero points.
        input_scale: [1] or [], of a scheme with static inputs.

    Raises:
        CheckpointError: a scheme that this format does not hold, a code out of range, a scale that is not usable.
    """
    check_weight(QUANT_METHOD, name, weight, input_scale)
    scheme = weight.scheme
    scale = weight.scale.contiguous()
    if scheme.input is not None:
        tensors = {f"{name}.weight": weight.codes.contiguous(), f"{name}.weight_scale": scale}
        if input_scale is not None:
            tensors[f"{name}.input_scale"] = input_scale.reshape(1).to(scale.dtype)
        return tensors
    tensors = {
        f"{name}.weight_packed": pack_int32(weight.codes, scheme.num_bits),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }
    if weight.zero_point is not None:
        tensors[f"{name}.weight_zero_point"] = pack_int32(weight.zero_point.t(), scheme.num_bits).t().contiguous()
    return tensors


def decode(
    tensors: Mapping[str, Tensor], name: str, scheme: QuantScheme, shape: tuple[int, int] | None = None
) -> QuantizedWeight:
    """A quantized layer from its tensors; the opposite of `encode`.

    Args:
        tensors: at least those of the layer.
        name: of the layer on disk.
        scheme: how it is quantized.
        shape: (N, K) that the model asks for; None for whatever is stored.

    Raises:
        CheckpointError: a tensor is missing, or its type or shape is not what the scheme asks for.
    """
    scale = tensors.get(f"{name}.weight_scale")
    if scale is None:
        raise CheckpointError(f"{name} has no weight_scale")
    stored = _stored_shape(tensors, name, scheme)
    if shape is not None and stored != shape:
        raise CheckpointError(f"{name} is stored as {list(stored)}, the model asks for {list(shape)}")
    if not scale.dtype.is_floating_point:
        raise CheckpointError(f"{name}.weight_scale is {scale.dtype}")
    try:
        found = take(tensors, name, layer_specs(name, stored, scheme, scale.dtype))
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{error} for {scheme} of {list(stored)}") from error
    if scheme.input is not None:
        return QuantizedWeight(found[0], scale, scheme)
    zero_point = None
    if not scheme.symmetric:
        zero_point = unpack_int32(found[3].t().contiguous(), scheme.num_bits, stored[0]).t().contiguous()
    return QuantizedWeight(unpack_int32(found[0], scheme.num_bits, stored[1]), scale, scheme, zero_point)


def _stored_shape(tensors: Mapping[str, Tensor], name: str, scheme: QuantScheme) -> tuple[int, int]:
    """(N, K) as the checkpoint says it."""
    suffix = "weight_shape" if scheme.input is None else "weight"
    tensor = tensors.get(f"{name}.{suffix}")
    if tensor is None:
        raise CheckpointError(f"{name} has no {suffix}")
    sizes = tensor.tolist() if suffix == "weight_shape" else list(tensor.shape)
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise CheckpointError(f"{name}.{suffix} does not give 2 sizes")
    return int(sizes[0]), int(sizes[1])


def quantization_config(
    schemes: Mapping[str, QuantScheme], ignore: Sequence[str], *, kv_scales: bool = False
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json, with no key that an older reader would refuse.

    Args:
        schemes: layer name -> scheme. One scheme for all targets the class ``Linear``; several name their layers, and
            the experts of a layer by one expression.
        ignore: names of the linear layers that are not quantized.

        kv_scales: whether scales of keys and values are stored.

    Raises:
        ValueError: no layer, or a layer that is quantized and ignored.
    """
    if not schemes:
        raise ValueError("no layer is quantized")
    schemes, ignore = join_schemes(schemes), join_names(ignore)
    both = [name for name in ignore if name in schemes]
    if both:
        raise ValueError(f"{both[0]} is quantized and ignored")
    layers: dict[QuantScheme, list[str]] = {}
    for name, scheme in schemes.items():
        layers.setdefault(scheme, []).append(name)
    storages = {storage(scheme) for scheme in layers}
    groups: dict[str, Any] = {}
    for number, (scheme, names) in enumerate(layers.items()):
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(layers) == 1 else [_target(name) for name in names],
            "weights": _weight_args(scheme),
            "input_activations": None if scheme.input is None else _input_args(scheme.input),
            "output_activations": None,
        }
        if len(storages) > 1:  # a key that the oldest readers do not know, and without which they would be wrong
            groups[f"group_{number}"]["format"] = storage(scheme)
    config = {
        "quant_method": QUANT_METHOD,
        "format": MIXED if len(storages) > 1 else storages.pop(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [_target(name) for name in ignore],
    }
    return config | ({"kv_cache_scheme": dict(KV_CACHE_SCHEME)} if kv_scales else {})


def _target(name: str) -> str:
    """What names a layer, or all experts of one."""
    return f"re:{expression(name)}" if name.endswith(".experts") else name


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


def _input_args(scheme: InputScheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.num_bits,
        "type": "int",
        "symmetric": True,
        "strategy": scheme.strategy,
        "dynamic": scheme.dynamic,
    }


def read_quantization_config(config: Mapping[str, Any]) -> StoredConfig:
    """Read a ``quantization_config`` of this format.

    Raises:
        CheckpointError: another method or format, or something that is not supported; the key and its value are named.
    """
    if config.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(f"quant_method is {config.get('quant_method')}, not {QUANT_METHOD}")
    unsupported = {
        "format": config.get("format") not in (PACKED, INT, MIXED),
        "quantization_status": config.get("quantization_status", "compressed") != "compressed",
        "kv_cache_scheme": not is_kv_cache_scheme(config.get("kv_cache_scheme") or KV_CACHE_SCHEME, SILENT_KEYS),
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
        if group.get("output_activations"):
            raise CheckpointError(f"quantization_config: {group_name}.output_activations is not supported yet")
        scheme = _read_weight_args(group_name, group["weights"])
        if group.get("input_activations"):
            scheme = replace(scheme, input=_read_input_args(group_name, group["input_activations"]))
        form = group.get("format") or (storage(scheme) if config["format"] == MIXED else config["format"])
        reason = why_not(QUANT_METHOD, scheme) if scheme.input is not None else None
        if form != storage(scheme) or reason is not None:
            raise CheckpointError(
                f"quantization_config: {group_name} holds {scheme} as {form}, which is not supported yet"
            )
        groups.append((tuple(group["targets"]), scheme))
    ignore, kv_scales = tuple(config.get("ignore") or ()), bool(config.get("kv_cache_scheme"))
    return StoredConfig(Format(QUANT_METHOD), tuple(groups), ignore, config["format"], kv_scales)


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
    if args.get("dynamic"):
        raise refuse("dynamic")
    if args.get("actorder") in ("group", "dynamic", True):  # the columns of a group are not side by side
        raise refuse("actorder")
    symmetric = args.get("symmetric", True) is True
    group_size = args.get("group_size")
    inferred = "tensor" if group_size is None else "channel" if group_size == PER_CHANNEL else "group"
    strategy = args.get("strategy") or inferred
    if strategy == "channel":
        return QuantScheme(args["num_bits"], PER_CHANNEL, symmetric)
    if strategy != "group":
        raise refuse("strategy")
    if not isinstance(group_size, int) or group_size <= 0:
        raise refuse("group_size")
    return QuantScheme(args["num_bits"], group_size, symmetric)


def _read_input_args(group_name: str, args: Mapping[str, Any]) -> InputScheme:
    """What a group does to its inputs."""
    inputs = InputScheme(dynamic=args.get("dynamic") is True)
    wanted = _input_args(inputs)
    for key, value in args.items():
        if key in wanted and value is not None and value != wanted[key]:
            raise CheckpointError(
                f"quantization_config: {group_name}.input_activations.{key}={value} is not supported yet"
            )
        if key not in wanted and key not in (*SILENT_KEYS, "group_size"):
            raise CheckpointError(f"quantization_config: {group_name}.input_activations.{key} is not supported yet")
    return inputs
