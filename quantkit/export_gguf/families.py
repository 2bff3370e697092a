"""Model families that can be written as GGUF, as data: what llama.cpp expects of their tensors and metadata."""

from dataclasses import dataclass

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES

from quantkit.errors import UsageError


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family.

    Attributes:
        arch: llama.cpp's architecture.
        interleaved_rotary: llama.cpp rotates neighbouring rows of a query or key head, transformers the two halves:
            rows of attn_q and attn_k are reordered.
        norm_offset: transformers multiplies by this plus the norm's weight, llama.cpp by the stored weight.
        sliding_window: whether llama.cpp reads the size of a sliding window; else a model that has one differs.
    """

    arch: MODEL_ARCH
    interleaved_rotary: bool = False
    norm_offset: float = 0.0
    sliding_window: bool = False

    @property
    def name(self) -> str:
        """The architecture as files spell it."""
        return str(MODEL_ARCH_NAMES[self.arch])


FAMILIES: dict[str, GgufFamily] = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), GgufFamily(MODEL_ARCH.LLAMA, interleaved_rotary=True)),
    "qwen2": GgufFamily(MODEL_ARCH.QWEN2),
    "qwen2_moe": GgufFamily(MODEL_ARCH.QWEN2MOE),
    "qwen3": GgufFamily(MODEL_ARCH.QWEN3),
    "qwen3_moe": GgufFamily(MODEL_ARCH.QWEN3MOE),
    "gemma": GgufFamily(MODEL_ARCH.GEMMA, norm_offset=1.0),
    "gemma2": GgufFamily(MODEL_ARCH.GEMMA2, norm_offset=1.0, sliding_window=True),
    "gemma3_text": GgufFamily(MODEL_ARCH.GEMMA3, norm_offset=1.0, sliding_window=True),
    "phi3": GgufFamily(MODEL_ARCH.PHI3, sliding_window=True),
}


def find_family(model_type: str) -> GgufFamily:
    """The family of a model.

    Raises:
        UsageError: it cannot be written as GGUF.
    """
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UsageError(f"a {model_type} model cannot be written as GGUF yet", fix=f"Families that can: {known}")
    return FAMILIES[model_type]
