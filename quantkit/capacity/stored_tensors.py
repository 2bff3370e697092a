"""Tensors by their names in a checkpoint -> the matrices of a model by role."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.capacity.model_facts import Role, Weight

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk|layer)\.(\d+)\.")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
GGUF_ROLES: dict[str, Role] = {"token_embd.weight": "embedding", "output.weight": "lm_head"}
KEPT = re.compile(r"norm|router|gate_inp|conv|vision|visual|audio|\.gate\.weight$|shared_expert_gate|rope_freqs")
CODES = re.compile(
    r"\.(weight_packed|weight_scale|weight_scale_inv|weight_zero_point|weight_shape|weight_g_idx|input_scale"
    r"|qweight|qzeros|scales|g_idx|absmax|quant_map)$"
)
STORED_BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An entry of a header.

    Attributes:
        name: of the tensor.
        shape: slowest dimension first.
        nbytes: stored bytes.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def is_code(self) -> bool:
        """True if it is a part of a quantized matrix: codes, scales, zero points."""
        return CODES.search(self.name) is not None

    @property
    def layer(self) -> int | None:
        """Number of the decoder block; None outside of the blocks."""
        found = LAYER.search(self.name)
        return int(found[1]) if found else None


def safetensors_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Stored bytes of a tensor; of a type that is not known the 16 bits of most."""
    return math.prod(shape) * STORED_BITS.get(dtype, 16) // 8


def weights_from_tensors(tensors: Iterable[StoredTensor]) -> tuple[Weight, ...]:
    """Equal tensors together, each with its role; in the order of the file."""
    counts: Counter[tuple[str, Role, int, int, float]] = Counter()
    for tensor in tensors:
        role = _role(tensor)
        experts = math.prod(tensor.shape[:-2]) if role == "expert" else 1
        rows = tensor.shape[-2] if role in ("linear", "expert") else (tensor.shape[0] if tensor.shape else 1)
        columns = math.prod(tensor.shape) // (experts * rows) if rows else 0
        bits = 8 * tensor.nbytes / max(1, math.prod(tensor.shape))
        counts[short_name(tensor.name), role, rows, columns, bits] += experts
    return tuple(
        Weight(name, role, rows, columns, count, bits) for (name, role, rows, columns, bits), count in counts.items()
    )


def short_name(name: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` -> ``q_proj``."""
    inside = LAYER.split(name)[-1].removesuffix(".weight")
    inside = re.sub(r"\.\d+\.", ".", inside)
    return re.sub(r"^(model|self_attn|mlp|attention|attn|block_sparse_moe|transformer)\.", "", inside)


def _role(tensor: StoredTensor) -> Role:
    name = tensor.name
    if name in GGUF_ROLES:
        return GGUF_ROLES[name]
    if name.endswith(EMBEDDINGS) and "vision" not in name:
        return "embedding"
    if name.endswith(HEADS):
        return "lm_head"
    if tensor.layer is None or len(tensor.shape) < 2 or KEPT.search(name) or name.endswith("bias"):
        return "other"
    return "expert" if len(tensor.shape) > 2 or ("experts." in name and "shared" not in name) else "linear"
