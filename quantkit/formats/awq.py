"""The format of AWQ, version GEMM (AutoAWQ): 4-bit weights in 32-bit words along the outputs; vLLM reads it.

A layer P of N rows and K columns with groups of g columns is stored in the place of P.weight as

    P.qweight  int32 [K, N/8]      nibble i (lowest first) of word c holds the code of row 8*c + ORDER[i]
    P.qzeros   int32 [K/g, N/8]    zero points in the same order
    P.scales   float16 [K/g, N]

Codes and zero points are unsigned here: u = code + 8. The weight that a reader computes is (u - zero) * scale. Weights
without zero points are stored with 8 for all of them.

Source: AutoAWQ, modules/linear/gemm.py and utils/packing_utils.py; vLLM, quantization/awq.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats import Format, StoredConfig
from quantkit.formats.expert_names import join_names
from quantkit.formats.gptq import OUTSIDE_BLOCKS, scale_dtype
from quantkit.formats.layer_tensors import check_weight, take, to_float16
from quantkit.formats.packing import pack_int32, unpack_int32
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.primitives import QuantizedWeight
from quantkit.scheme import QuantScheme

__all__ = ["decode", "encode", "layer_specs", "quantization_config", "read_quantization_config", "scale_dtype"]

QUANT_METHOD = "awq"
NUM_BITS, PER_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # row of each nibble
INVERSE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each row


def layer_specs(name: str, shape: tuple[int, int], scheme: QuantScheme, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The tensors of a quantized layer.

    Args:
        name: of the layer on disk, without ``.weight``.
        shape: (N, K) of its weight.
        scheme: how it is quantized.
        dtype: of the model's weights; scales are float16 whatever it is.

    Raises:
        ValueError: the group size does not divide K, or N is no multiple of 8.
    """
    rows, columns = shape
    if rows % PER_WORD:
        raise ValueError(f"awq stores layers whose rows are a multiple of {PER_WORD}")
    groups = scheme.num_groups(columns)
    return {
        f"{name}.qweight": TensorSpec(torch.int32, (columns, rows // PER_WORD)),
        f"{name}.qzeros": TensorSpec(torch.int32, (groups, rows // PER_WORD)),
        f"{name}.scales": TensorSpec(torch.float16, (groups, rows)),
    }


def encode(name: str, weight: QuantizedWeight, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors of a quantized layer, with the specs of `layer_specs`.

    Raises:
        CheckpointError: a scheme that this format does not hold, a code out of range, or a scale that float16 lacks.
    """
    check_weight(QUANT_METHOD, name, weight, input_scale)
    zero_point = torch.zeros(weight.scale.shape, dtype=torch.int8) if weight.zero_point is None else weight.zero_point
    return {
        f"{name}.qweight": pack_int32(_reorder(weight.codes.t(), ORDER), NUM_BITS),
        f"{name}.qzeros": pack_int32(_reorder(zero_point.t(), ORDER), NUM_BITS),
        f"{name}.scales": to_float16(QUANT_METHOD, name, weight.scale).t().contiguous(),
    }


def decode(tensors: Mapping[str, Tensor], name: str, scheme: QuantScheme, shape: tuple[int, int]) -> QuantizedWeight:
    """A quantized layer from its tensors; the opposite of `encode`, with a zero point always.

    Args:
        tensors: at least those of the layer.
        name: of the layer on disk.
        scheme: how it is quantized.
        shape: (N, K) that the model asks for.

    Raises:
        CheckpointError: a tensor is missing or does not fit.
    """
    try:
        expected = layer_specs(name, shape, scheme, torch.float16)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    scales = tensors.get(f"{name}.scales")
    if scales is not None and scales.dtype == torch.bfloat16:  # some writers keep the model's type
        expected[f"{name}.scales"] = TensorSpec(scales.dtype, expected[f"{name}.scales"].shape)
    qweight, qzeros, scales = take(tensors, name, expected)
    codes, zero_point = (
        _reorder(unpack_int32(words, NUM_BITS, shape[0]), INVERSE_ORDER).t().contiguous() for words in (qweight, qzeros)
    )
    return QuantizedWeight(codes, scales.t().contiguous(), replace(scheme, symmetric=False), zero_point)


def _reorder(rows: Tensor, order: Sequence[int]) -> Tensor:
    """[R, N] with the columns of each 8 in another order."""
    return rows.unflatten(1, (-1, PER_WORD))[:, :, list(order)].flatten(1)


def quantization_config(schemes: Mapping[str, QuantScheme], ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Raises:
        ValueError: no layer is quantized, or not all in the same way.
    """
    if len(set(schemes.values())) != 1:
        raise ValueError(f"awq holds one scheme, not {len(set(schemes.values()))}")
    return {
        "quant_method": QUANT_METHOD,
        "bits": NUM_BITS,
        "group_size": next(iter(schemes.values())).group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": join_names(ignore) or None,
    }


def read_quantization_config(config: Mapping[str, Any]) -> StoredConfig:
    """Read a ``quantization_config`` of AWQ.

    Raises:
        CheckpointError: something that is not supported; the key and its value are named.
    """
    bits = config.get("bits", config.get("w_bit"))
    group_size = config.get("group_size", config.get("q_group_size"))
    version = str(config.get("version", "gemm")).lower()
    facts = {"bits": bits, "group_size": group_size, "version": version, "zero_point": config.get("zero_point", True)}
    good = {"bits": bits == NUM_BITS, "group_size": isinstance(group_size, int) and group_size > 0}
    good |= {"version": version == "gemm", "zero_point": bool(facts["zero_point"])}
    for key, fine in good.items():
        if not fine:
            raise CheckpointError(f"quantization_config: {key}={facts[key]} is not supported yet")
    assert isinstance(group_size, int)
    ignore = [f"re:.*{re.escape(name)}" for name in config.get("modules_to_not_convert") or ()]
    scheme = QuantScheme(NUM_BITS, group_size, symmetric=False)
    return StoredConfig(Format(QUANT_METHOD), ((("Linear",), scheme),), (*ignore, OUTSIDE_BLOCKS), version)
