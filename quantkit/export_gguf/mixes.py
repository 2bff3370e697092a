"""Which type each tensor gets in a named file type, by llama.cpp's rules.

A named type such as Q4_K_M is a base type and exceptions: values, the MLP's second matrix and the output matrix get
more bits in some blocks. A type whose blocks do not divide a row gives way to one with smaller blocks.

Source: llama_tensor_get_type_impl and tensor_type_fallback of llama.cpp's llama-quant.cpp.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gguf import LlamaFileType

from quantkit.errors import UsageError, did_you_mean
from quantkit.formats.gguf.block_types import PLAIN_TYPES, check_tensor_type, row_multiple

BASE_TYPES = {
    **{name: name for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q6_K")},
    **{f"Q3_K_{size}": "Q3_K" for size in "SML"},
    **{f"Q{bits}_K_{size}": f"Q{bits}_K" for bits in (4, 5) for size in "SM"},
    **{name: name for name in ("IQ4_NL", "IQ4_XS")},
}
FILE_TYPES = tuple(BASE_TYPES)
SMALLER_BLOCKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
_MOSTLY = "mostly "
_GUESSES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # of llama.cpp, for want of a type's own number
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_NEVER_QUANTIZED = re.compile(r".*(norm|ffn_gate_inp|ffn_gate_inp_shexp)\.weight|rope_.*|.*\.bias")


@dataclass(frozen=True, slots=True)
class MixFacts:
    """What the rules ask about a model.

    Attributes:
        num_blocks: decoder blocks.
        queries_per_key: query heads that share a key/value head.
        num_experts: 0 for a dense model.
        tied: whether the embedding is the output matrix too.
        has_importance: whether there is an importance matrix.
        is_70b: whether it is the Llama of 80 blocks, whose values get more bits.
    """

    num_blocks: int
    queries_per_key: int
    num_experts: int
    tied: bool
    has_importance: bool
    is_70b: bool = False


def check_file_type(name: str) -> str:
    """The name itself.

    Raises:
        UsageError: there is no such file type.
    """
    if name not in BASE_TYPES:
        raise UsageError(
            f"there is no file type {name!r}",
            fix=f"Choose from {', '.join(FILE_TYPES)}{did_you_mean(name, FILE_TYPES)}",
        )
    return name


def file_type_number(name: str) -> int:
    """llama.cpp's number of a file type, or of :func:`most_frequent`, for general.file_type."""
    if name.startswith(_MOSTLY):
        kind = name.removeprefix(_MOSTLY)
        return file_type_number(_GUESSES.get(kind, kind)) | int(LlamaFileType.GUESSED)
    return int(LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{name}"])


def most_frequent(types: Mapping[str, str]) -> str:
    """A label such as ``mostly Q4_K`` for types that are no named mix: the type of most tensors.

    llama.cpp calls files without a label so, among types that are not F32, and marks that as its guess.
    """
    counts = Counter(kind for kind in types.values() if kind != "F32")
    return f"{_MOSTLY}{counts.most_common(1)[0][0]}" if counts else "F32"


def is_mix(types: Mapping[str, str], by_rules: Mapping[str, str]) -> bool:
    """Whether types are still the named mix that the rules give: with exceptions, which are fewer than the rest."""
    quantized = [name for name, kind in by_rules.items() if kind != "F32" or types[name] != "F32"]
    return 2 * sum(types[name] == by_rules[name] for name in quantized) >= len(quantized)


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this name and shape is ever stored as anything but F32."""
    return len(shape) > 1 and _NEVER_QUANTIZED.fullmatch(name) is None


def choose_types(
    tensors: Mapping[str, tuple[int, ...]],
    file_type: str,
    facts: MixFacts,
    overrides: Iterable[tuple[str, str]] = (),
) -> dict[str, str]:
    """The type of every tensor.

    Args:
        tensors: GGUF name -> shape, rows last.
        file_type: key of ``BASE_TYPES``.
        facts: of the model.
        overrides: (regular expression that matches a whole GGUF name, type); the first that matches wins.

    Returns:
        GGUF name -> type name.

    Raises:
        UsageError: unknown file type or type, a pattern that matches no tensor, or a type that does not fit a row.
    """
    base = BASE_TYPES[check_file_type(file_type)]
    rules = [(_pattern(pattern), check_tensor_type(type_name)) for pattern, type_name in overrides]
    used: set[str] = set()
    types = {}
    for name, shape in tensors.items():
        if not is_quantizable(name, shape):
            types[name] = "F32"
            continue
        override = next(((regex, type_name) for regex, type_name in rules if regex.fullmatch(name)), None)
        if override is not None:
            used.add(override[0].pattern)
            types[name] = override[1]
            if shape[-1] % (multiple := row_multiple(override[1])):
                problem = f"its rows of {shape[-1]} are no multiple of {multiple}"
                raise UsageError(f"{name} cannot be {override[1]}: {problem}")
        else:
            types[name] = base if base in PLAIN_TYPES else fitting(_by_rules(name, file_type, base, facts), shape[-1])
    unused = [regex.pattern for regex, _ in rules if regex.pattern not in used]
    if unused:
        fix = "The pattern matches whole names, which are llama.cpp's, such as blk.0.attn_q.weight"
        raise UsageError(f"no tensor is called {unused[0]!r}", fix=fix)
    return types


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        fix = "Of a tensor type it is what stands before the last ="
        raise UsageError(f"{text!r} is no regular expression: {error}", fix=fix) from error


def fitting(type_name: str, columns: int) -> str:
    """The type, or the one that takes its place for rows of ``columns``."""
    if columns % row_multiple(type_name):
        type_name = SMALLER_BLOCKS.get(type_name, "F16")
    return "F16" if columns % row_multiple(type_name) else type_name


def _by_rules(name: str, file_type: str, base: str, facts: MixFacts) -> str:
    if name == "output.weight" or (facts.tied and name == "token_embd.weight"):
        return "Q8_0" if base == "Q8_0" else "Q6_K"
    match = _BLOCK.fullmatch(name)
    rule = _RULES.get(match[2]) if match else None
    return rule(file_type, base, int(match[1]), facts) if match and rule else base


def _more_bits(block: int, num_blocks: int) -> bool:
    """Blocks at both ends, and every third between."""
    eighth = num_blocks // 8
    return block < eighth or block >= 7 * num_blocks // 8 or (block - eighth) % 3 == 2


def _values(file_type: str, base: str, block: int, facts: MixFacts) -> str:
    """attn_v, and the fused attn_qkv, which llama.cpp counts as values."""
    chosen = base
    if file_type == "Q2_K":
        chosen = "Q4_K" if facts.queries_per_key >= 4 else "Q3_K"
    elif file_type == "Q3_K_M":
        chosen = "Q5_K" if block < 2 else "Q4_K"
    elif file_type == "Q3_K_L" or (file_type in ("IQ4_NL", "IQ4_XS") and facts.queries_per_key >= 4):
        chosen = "Q5_K"
    elif file_type in ("Q4_K_M", "Q5_K_M") and _more_bits(block, facts.num_blocks):
        chosen = "Q6_K"
    elif file_type == "Q4_K_S" and block < 4:
        chosen = "Q5_K"
    if facts.is_70b and chosen in ("Q3_K", "Q4_K"):
        chosen = "Q5_K"
    return "Q8_0" if facts.num_experts == 8 else chosen


def _keys(file_type: str, base: str, block: int, facts: MixFacts) -> str:
    return "Q8_0" if facts.num_experts == 8 else base


def _down(file_type: str, base: str, block: int, facts: MixFacts) -> str:
    first_eighth = block < facts.num_blocks // 8
    if file_type == "Q2_K":
        return "Q3_K"
    if file_type == "Q3_K_M":
        return "Q5_K" if block < facts.num_blocks // 16 else "Q4_K"
    if file_type == "Q3_K_L":
        return "Q5_K"
    if file_type in ("Q4_K_M", "Q5_K_M") and _more_bits(block, facts.num_blocks):
        return "Q6_K"
    if first_eighth and file_type == "Q4_K_S":
        return "Q5_K"
    if first_eighth and file_type in ("IQ4_NL", "IQ4_XS") and not facts.has_importance:
        return "Q5_K"
    if first_eighth and file_type in ("Q4_0", "Q5_0") and facts.has_importance:
        return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[file_type]
    return base


def _attention_output(file_type: str, base: str, block: int, facts: MixFacts) -> str:
    if facts.num_experts == 8:
        small = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS")
        return "Q5_K" if file_type in small else base
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(file_type, base)


_RULES: dict[str, Callable[[str, str, int, MixFacts], str]] = {
    "attn_v": _values,
    "attn_qkv": _values,
    "attn_k": _keys,
    "ffn_down": _down,
    "ffn_down_exps": _down,
    "ffn_down_shexp": _down,
    "attn_output": _attention_output,
}
