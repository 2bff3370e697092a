"""The format of GPTQ (AutoGPTQ, GPTQModel): integer weights in 32-bit words along the inputs; vLLM reads it.

A layer P of N rows and K columns with b-bit codes and groups of g columns is stored in the place of P.weight as

    P.qweight  int32 [K*b/32, N]    code u of column k, row n in bits [b*(k % (32/b)), ...) of word [k // (32/b), n]
    P.qzeros   int32 [K/g, N*b/32]  zero point of row n likewise in word n // (32/b); v1 stores it less one
    P.scales   float16 [K/g, N]
    P.g_idx    int32 [K]            group of a column: k // g, because columns stay in their order

Codes and zero points are unsigned here: u = code + 2**(b-1). The weight that a reader computes is (u - zero) * scale.
``checkpoint_format`` ``gptq`` (v1) stores zero points less one, so that a zero point of 0 has no place in it. Such a
group is stored mirrored, with u' = 2**b - 1 - u, zero' = 2**b - 1 and scale' = -scale: the same weights bit for bit.

Source: GPTQModel, nn_modules/qlinear (packing) and quantization/config.py; vLLM, quantization/gptq.py.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats import Format, StoredConfig
from quantkit.formats.expert_names import expression, join_names, join_schemes
from quantkit.formats.layer_tensors import check_weight, take, to_float16
from quantkit.formats.packing import WORD_BITS, pack_int32, unpack_int32
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.primitives import QuantizedWeight
from quantkit.scheme import PER_CHANNEL, QuantScheme

QUANT_METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"
READ_BITS = (4, 8)
OUTSIDE_BLOCKS = r"re:(?!.*\.\d+\.)"  # names without a block's number: heads and embeddings stay dense
# layers that engines look up under the name of the matrix that they join them into
FUSED_NAMES = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scales are stored in float16, which holds those of bfloat16 unless they are very large or small."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def layer_specs(
    name: str, shape: tuple[int, int], scheme: QuantScheme, dtype: torch.dtype, checkpoint_format: str = V1
) -> dict[str, TensorSpec]:
    """The tensors of a quantized layer.

    Args:
        name: of the layer on disk, without ``.weight``.
        shape: (N, K) of its weight.
        scheme: how it is quantized.
        dtype: of the model's weights; scales are float16 whatever it is.
        checkpoint_format: the same tensors for both.

    Raises:
        ValueError: the group size does not divide K, or rows or columns do not fill whole words.
    """
    (rows, columns), per_word = shape, WORD_BITS // scheme.num_bits
    for what, size in (("rows", rows), ("columns", columns)):
        if size % per_word:
            raise ValueError(f"gptq stores {scheme.num_bits}-bit layers whose {what} are a multiple of {per_word}")
    groups = scheme.num_groups(columns)
    return {
        f"{name}.qweight": TensorSpec(torch.int32, (columns // per_word, rows)),
        f"{name}.qzeros": TensorSpec(torch.int32, (groups, rows // per_word)),
        f"{name}.scales": TensorSpec(torch.float16, (groups, rows)),
        f"{name}.g_idx": TensorSpec(torch.int32, (columns,)),
    }


def encode(
    name: str, weight: QuantizedWeight, input_scale: Tensor | None = None, checkpoint_format: str = V1
) -> dict[str, Tensor]:
    """The tensors of a quantized layer, with the specs of `layer_specs`.

    Raises:
        CheckpointError: a scheme that this format does not hold, a code out of range, or a scale that float16 lacks.
    """
    check_weight(QUANT_METHOD, name, weight, input_scale)
    bits, scale = weight.scheme.num_bits, weight.scale
    zero_point = torch.zeros(scale.shape, dtype=torch.int8) if weight.zero_point is None else weight.zero_point
    codes = weight.codes
    if checkpoint_format == V1:
        mirrored = zero_point == weight.scheme.code_min
        if bool(mirrored.any()):
            groups = codes.reshape(*scale.shape, -1)
            codes = torch.where(mirrored.unsqueeze(-1), -1 - groups, groups).reshape(codes.shape)
            zero_point = torch.where(mirrored, -1 - zero_point, zero_point)
            scale = torch.where(mirrored, -scale, scale)
        zero_point = zero_point - 1
    columns = codes.shape[1]
    return {
        f"{name}.qweight": pack_int32(codes, bits).t().contiguous(),
        f"{name}.qzeros": pack_int32(zero_point.t(), bits),
        f"{name}.scales": to_float16(QUANT_METHOD, name, scale).t().contiguous(),
        f"{name}.g_idx": torch.arange(columns, dtype=torch.int32) // (columns // scale.shape[1]),
    }


def decode(
    tensors: Mapping[str, Tensor],
    name: str,
    scheme: QuantScheme,
    shape: tuple[int, int],
    checkpoint_format: str = V1,
) -> QuantizedWeight:
    """A quantized layer from its tensors; the opposite of `encode`.

    Args:
        tensors: at least those of the layer; ``g_idx`` may be missing.
        name: of the layer on disk.
        scheme: how it is quantized.
        shape: (N, K) that the model asks for.
        checkpoint_format: ``gptq`` or ``gptq_v2``.

    Raises:
        CheckpointError: a tensor is missing or does not fit, columns are permuted, or the zero points of symmetric
            weights are not in the middle, as when the file was written in the other ``checkpoint_format``.
    """
    try:
        expected = layer_specs(name, shape, scheme, torch.float16)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    order = expected.pop(f"{name}.g_idx")
    stored_scale = tensors.get(f"{name}.scales")
    if stored_scale is not None and stored_scale.dtype in (
        torch.bfloat16,
        torch.float32,
    ):  # some writers keep their own
        spec = expected[f"{name}.scales"]
        expected[f"{name}.scales"] = TensorSpec(stored_scale.dtype, spec.shape)
    qweight, qzeros, scales = take(tensors, name, expected)
    columns = torch.arange(shape[1], dtype=torch.int32) // (shape[1] // scales.shape[0])
    if f"{name}.g_idx" in tensors and not torch.equal(take(tensors, name, {f"{name}.g_idx": order})[0], columns):
        raise CheckpointError(
            f"{name}: its columns are permuted (g_idx), which is not supported yet",
            fix="Quantize with desc_act false, or with static groups",
        )
    zero_point = unpack_int32(qzeros, scheme.num_bits, shape[0])
    if checkpoint_format == V1:
        if bool((zero_point == scheme.code_max).any()):
            raise CheckpointError(f"{name}: a zero point does not fit into {scheme.num_bits} bits, as gptq stores it")
        zero_point = zero_point + 1
    codes = unpack_int32(qweight.t().contiguous(), scheme.num_bits, shape[1])
    if not scheme.symmetric:
        return QuantizedWeight(codes, scales.t().contiguous(), scheme, zero_point.t().contiguous())
    if bool((zero_point != 0).any()):
        other = V2 if checkpoint_format == V1 else V1
        raise CheckpointError(
            f"{name}: config.json says symmetric, and a zero point is {int(zero_point[zero_point != 0][0]):+d} off the "
            f"middle (it may be stored as {other})"
        )
    return QuantizedWeight(codes, scales.t().contiguous(), scheme)


def quantization_config(
    schemes: Mapping[str, QuantScheme], ignore: Sequence[str], checkpoint_format: str = V1
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json: the commonest scheme, and in ``dynamic`` what differs from it.

    Raises:
        ValueError: no layer is quantized.
    """
    if not schemes:
        raise ValueError("no layer is quantized")
    schemes, ignore = join_schemes(schemes), join_names(ignore)
    (common, _), *others = Counter(schemes.values()).most_common()
    dynamic: dict[str, Any] = {}
    for name, scheme in schemes.items():
        if others and scheme != common:
            dynamic[_pattern(name)] = _scheme_keys(scheme)
    dynamic |= {f"-:{_pattern(name)}": {} for name in ignore if re.search(r"\.\d+\.", name)}
    config = {
        "quant_method": QUANT_METHOD,
        "checkpoint_format": checkpoint_format,
        **_scheme_keys(common),
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
    }
    return config | ({"dynamic": dynamic} if dynamic else {})


def _scheme_keys(scheme: QuantScheme) -> dict[str, Any]:
    return {"bits": scheme.num_bits, "group_size": scheme.group_size, "sym": scheme.symmetric}


def _pattern(name: str) -> str:
    """An expression for a layer, also under the name of what engines join it into; or for all experts of one."""
    parent, _, leaf = name.rpartition(".")
    fused = FUSED_NAMES.get(leaf)
    return rf"^{re.escape(parent)}\.(?:{leaf}|{fused})$" if fused else f"^{expression(name)}"


def read_quantization_config(config: Mapping[str, Any]) -> StoredConfig:
    """Read a ``quantization_config`` of GPTQ.

    Raises:
        CheckpointError: something that is not supported; the key and its value are named.
    """
    form = config.get("checkpoint_format") or config.get("format") or V1
    if form not in (V1, V2):
        raise CheckpointError(f"quantization_config: checkpoint_format={form} is not supported yet")
    base = _read_scheme(config, {})
    groups: list[tuple[tuple[str, ...], QuantScheme]] = []
    ignore: list[str] = []
    for pattern, keys in (config.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            ignore.append(f"re:{pattern[2:]}")
        else:
            groups.append(((f"re:{pattern.removeprefix('+:')}",), _read_scheme(config, keys)))
    groups.append((("Linear",), base))
    if not config.get("lm_head"):
        ignore.append(OUTSIDE_BLOCKS)
    return StoredConfig(Format(QUANT_METHOD, (("checkpoint_format", form),)), tuple(groups), tuple(ignore), form)


def _read_scheme(config: Mapping[str, Any], keys: Mapping[str, Any]) -> QuantScheme:
    """The scheme of ``config`` with some keys replaced."""
    bits, group_size = (keys.get(key, config.get(key)) for key in ("bits", "group_size"))
    if bits not in READ_BITS:
        raise CheckpointError(f"quantization_config: bits={bits} is not supported yet")
    if not isinstance(group_size, int) or (group_size <= 0 and group_size != PER_CHANNEL):
        raise CheckpointError(f"quantization_config: group_size={group_size} is not supported yet")
    return QuantScheme(bits, group_size, bool(keys.get("sym", config.get("sym", True))))
