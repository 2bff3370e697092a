"""What is known of each model family, as data: where its decoder blocks are and which layers an engine fuses.

A family that is not listed still works: its blocks are found by walking the model, and the layers of a block by class.
What the table adds are the facts that no walk can find.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from quantkit.errors import SourceError

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family.

    Attributes:
        blocks: name of the list of decoder blocks.
        fused_units: layers of a block that vLLM joins into one matrix and that must therefore share a scheme.
    """

    blocks: str = "model.layers"
    fused_units: tuple[tuple[str, ...], ...] = (QKV, GATE_UP)


ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3", "granite", "olmo2"), Architecture()
    ),
    "phi3": Architecture(fused_units=()),  # qkv_proj and gate_up_proj are one matrix on disk already
    "mixtral": Architecture(fused_units=(QKV,)),
    "qwen3_moe": Architecture(fused_units=(QKV,)),
}


@dataclass(frozen=True, slots=True)
class DecoderBlocks:
    """The decoder blocks of a model.

    Attributes:
        name: of the list in the model, such as ``model.layers``.
        blocks: the modules, in order.
        known: False if the family is not in the table and the list was found by walking the model.
    """

    name: str
    blocks: Sequence[nn.Module]
    known: bool


def find_decoder_blocks(model: nn.Module, model_type: str) -> DecoderBlocks:
    """The list of decoder blocks: by the table, else the longest list of modules of one class.

    Raises:
        SourceError: there is no such list.
    """
    facts = ARCHITECTURES.get(model_type)
    if facts is not None:
        blocks = model.get_submodule(facts.blocks)
        return DecoderBlocks(facts.blocks, list(blocks.children()), known=True)
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    if not candidates:
        raise SourceError(
            f"no list of decoder blocks was found in a {model_type} model",
            fix=f"Families that are known: {', '.join(sorted(ARCHITECTURES))}",
        )
    name, found = max(candidates, key=lambda item: len(item[1]))
    return DecoderBlocks(name, list(found), known=False)
