"""Bytes of a model's weights in every form that quantkit or its readers store them in.

Integers lie in 32-bit words of a row, each group of input columns with a 16-bit scale and, if asymmetric, a zero point
packed like the codes: the layout of compressed-tensors. GGUF types are blocks of fixed size; the mixed types follow
llama.cpp's rules for which layers get more bits.

Source: compressed-tensors, compressors/pack_quantized; llama.cpp, src/llama-quant.cpp.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantkit.capacity.model_facts import ModelFacts, Weight
from quantkit.errors import SourceError

KEPT_BITS = 16  # of what a scheme leaves alone: embeddings, output matrix, norms, routers
SCALE_BITS, WORD_BITS = 16, 32
PER_CHANNEL = -1
Compute = Literal["16-bit", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the matrices of the blocks are stored.

    Attributes:
        name: as tables show it.
        bits: of a code.
        group_size: columns that share a scale; -1 for one scale a row; 0 for none.
        symmetric: no zero points.
        compute: in which type the products are computed.
        gguf: type of llama.cpp, such as ``Q4_K_M``; None for safetensors.
    """

    name: str
    bits: float
    group_size: int = 0
    symmetric: bool = True
    compute: Compute = "16-bit"
    gguf: str | None = None

    @property
    def is_weight_only(self) -> bool:
        """Codes that are widened before they are multiplied."""
        return self.bits < KEPT_BITS and self.compute == "16-bit"


SIXTEEN = WeightScheme("16-bit", 16)
SCHEMES: tuple[WeightScheme, ...] = (
    SIXTEEN,
    WeightScheme("W8A8", 8, PER_CHANNEL, compute="int8"),
    WeightScheme("FP8", 8, PER_CHANNEL, compute="fp8"),
    WeightScheme("W8A16", 8, PER_CHANNEL),
    WeightScheme("W4A16 g128", 4, 128),
    WeightScheme("W4A16 g64", 4, 64),
    WeightScheme("W4A16 g32", 4, 32),
    WeightScheme("W4A16_ASYM g128", 4, 128, symmetric=False),
    *(WeightScheme(name, bits, gguf=name) for name, bits in (("Q8_0", 8), ("Q6_K", 6), ("Q5_K_M", 5))),
    *(WeightScheme(name, 4, gguf=name) for name in ("Q4_K_M", "Q4_0")),
)
SCHEME_BY_NAME = {scheme.name: scheme for scheme in SCHEMES}


AS_STORED = "as stored"


class SchemeDoesNotFitError(ValueError):
    """The scheme cannot hold this model; the message says which matrix and why."""


def matrix_bytes(rows: int, columns: int, scheme: WeightScheme) -> int:
    """Bytes of a matrix in integers: codes, scales and zero points.

    Raises:
        SchemeDoesNotFitError: the group size does not divide the columns.
    """
    if scheme.bits >= KEPT_BITS:
        return rows * columns * KEPT_BITS // 8
    bits = int(scheme.bits)
    codes = rows * math.ceil(columns * bits / WORD_BITS) * WORD_BITS // 8
    if scheme.group_size == 0:
        return codes
    if scheme.group_size != PER_CHANNEL and columns % scheme.group_size:
        raise SchemeDoesNotFitError(f"groups of {scheme.group_size} do not divide {columns} columns")
    groups = 1 if scheme.group_size == PER_CHANNEL else columns // scheme.group_size
    zeros = 0 if scheme.symmetric else groups * math.ceil(rows * bits / WORD_BITS) * WORD_BITS // 8
    return codes + rows * groups * SCALE_BITS // 8 + zeros


def weight_bytes(weight: Weight, scheme: WeightScheme, facts: ModelFacts) -> int:
    """Bytes of equal matrices.

    Raises:
        SchemeDoesNotFitError: as `matrix_bytes`, with the name of the matrix.
    """
    if scheme.name == AS_STORED and weight.stored_bits is not None:
        return round(weight.parameters * weight.stored_bits / 8)
    if scheme.gguf is not None:
        return _gguf_bytes(weight, scheme.gguf, facts)
    if weight.role not in ("linear", "expert"):
        return weight.parameters * KEPT_BITS // 8
    try:
        return weight.count * matrix_bytes(weight.rows, weight.columns, scheme)
    except SchemeDoesNotFitError as error:
        raise SchemeDoesNotFitError(f"{error} of {weight.name}") from error


def model_bytes(facts: ModelFacts, scheme: WeightScheme) -> int:
    """Bytes of all weights.

    Raises:
        SchemeDoesNotFitError: the scheme cannot hold the model.
    """
    return sum(weight_bytes(weight, scheme, facts) for weight in facts.weights)


def bits_per_weight(facts: ModelFacts, scheme: WeightScheme) -> float:
    """Stored bits a parameter, over the whole model."""
    return 8 * model_bytes(facts, scheme) / facts.parameters


def stored_scheme(facts: ModelFacts) -> WeightScheme | None:
    """How a quantized checkpoint is stored; None for an ordinary model or a method that is not known.

    Raises:
        SourceError: its quantization_config is nonsense.
    """
    try:
        found = _stored_scheme(facts)
    except (AttributeError, TypeError, ValueError) as error:
        raise SourceError(f"{facts.name}: its quantization_config is not understood ({error})") from error
    if found is not None and not 1 <= found.bits <= 2 * KEPT_BITS:
        raise SourceError(f"{facts.name}: its quantization_config says {found.bits} bits")
    if found is not None and found.group_size < PER_CHANNEL:
        raise SourceError(f"{facts.name}: its quantization_config says group_size={found.group_size}")
    return found


def _stored_scheme(facts: ModelFacts) -> WeightScheme | None:
    if facts.quantization == "gguf":
        return WeightScheme(AS_STORED, 8 * (facts.stored_bytes or 0) / facts.parameters, gguf=AS_STORED)
    config = facts.quantization_config
    groups = config.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        weights, inputs = first.get("weights") or {}, first.get("input_activations")
        compute: Compute = "16-bit" if inputs is None else "fp8" if weights.get("type") == "float" else "int8"
        size = int(weights.get("group_size") or PER_CHANNEL) if weights.get("strategy") == "group" else PER_CHANNEL
        return WeightScheme(
            AS_STORED, float(weights.get("num_bits", 8)), size, bool(weights.get("symmetric", True)), compute
        )
    if config.get("quant_method") in ("gptq", "awq"):
        symmetric = not config.get("zero_point", not config.get("sym", True))
        size = int(config.get("group_size") or PER_CHANNEL)
        return WeightScheme(AS_STORED, float(config.get("bits", 4)), size, symmetric)
    if config.get("quant_method") == "fp8":
        return WeightScheme(AS_STORED, 8, PER_CHANNEL, compute="fp8")
    return None


def step_ratio(bits: int, reference_bits: int) -> float:
    """How much wider a quantization step is over the same range: 17 for 4 bits beside 8."""
    return float((2**reference_bits - 1) / (2**bits - 1))


FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where a row is no multiple of 256
BASE_TYPES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}


def _gguf_bytes(weight: Weight, kind: str, facts: ModelFacts) -> int:
    """Blocks of a GGUF type; vectors and routers stay in 32 bits."""
    if weight.role == "other":
        return weight.parameters * 4
    base = BASE_TYPES.get(kind, kind)
    short = weight.name.rpartition(".")[2]
    if weight.role == "lm_head" or (weight.role == "embedding" and facts.tied):
        return weight.count * _blocks(weight, "Q8_0" if kind == "Q8_0" else "Q6_K")
    if kind in BASE_TYPES and short in ("v_proj", "attn_v") and facts.num_experts == 8:
        return weight.count * _blocks(weight, "Q8_0")
    if kind in BASE_TYPES and short in ("v_proj", "attn_v", "down_proj", "w2", "ffn_down", "ffn_down_exps"):
        plain = "Q5_K" if base == "Q4_K" and short in ("v_proj", "attn_v") and _is_70b(facts) else base
        more = sum(_gets_more_bits(layer, facts.num_layers) for layer in range(facts.num_layers))
        share = more / facts.num_layers
        return round(weight.count * (share * _blocks(weight, "Q6_K") + (1 - share) * _blocks(weight, plain)))
    if kind in BASE_TYPES and short in ("qkv_proj", "attn_qkv"):
        return weight.count * _blocks(weight, "Q5_K" if base == "Q4_K" else "Q6_K")
    return weight.count * _blocks(weight, base)


def _is_70b(facts: ModelFacts) -> bool:
    """llama.cpp gives the small value matrices of a Llama of 80 layers with few key/value heads more bits."""
    return facts.num_layers == 80 and facts.model_type == "llama"


def _gets_more_bits(layer: int, count: int) -> bool:
    eighth = count // 8
    return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2


def _blocks(weight: Weight, kind: str) -> int:
    """Bytes of one matrix in a GGUF type, or in the one that takes its place where the rows are too short."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for name in (kind, FALLBACKS.get(kind), "F16"):
        if name is not None:
            size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
            if weight.columns % size == 0:
                return int(weight.rows * weight.columns // size * nbytes)
    raise AssertionError("F16 holds every row")
