"""What is known of each model family, as data: its decoder blocks, where scales can hide; and what engines fuse.

A family that is not listed still works: its blocks are found by walking the model, and the layers of a block by class.
What the table adds are the facts that no walk can find.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from quantkit.errors import SourceError

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class Fold:
    """Where scales of input columns can hide: the producer is divided by them, the consumers' columns are multiplied.

    Attributes:
        producer: a norm, or a linear layer whose last rows make the consumers' input (all rows of up_proj; the second
            half of a fused gate_up_proj; the values of a fused qkv_proj). What lies between must be linear in it.
        consumers: the linear layers that read the producer's output, all of them: nothing else may read it.
        offset: what the norm adds to its weight before it multiplies.
        through_heads: attention lies between: each value channel reaches one column in every query head of its group.
    """

    producer: str
    consumers: tuple[str, ...]
    offset: float = 0.0
    through_heads: bool = False

    def __str__(self) -> str:
        return f"{self.producer} -> {', '.join(self.consumers)}"


VALUE_OUT = Fold("self_attn.v_proj", ("self_attn.o_proj",), through_heads=True)
UP_DOWN = Fold("mlp.up_proj", ("mlp.down_proj",))


def _norm_folds(attention: str, mlp: str, offset: float = 0.0) -> tuple[Fold, ...]:
    """The four folds of a sequential block whose norms stand before attention and MLP."""
    return (Fold(attention, QKV, offset), VALUE_OUT, Fold(mlp, GATE_UP, offset), UP_DOWN)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family.

    Attributes:
        blocks: name of the list of decoder blocks.
        folds: where transforms may put scales. A fold whose layers a block does not have is passed over (the dense MLP
            of a block with experts).
    """

    blocks: str = "model.layers"
    folds: tuple[Fold, ...] = _norm_folds("input_layernorm", "post_attention_layernorm")


ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "granite", "seed_oss", "helium"), Architecture()
    ),
    "gemma": Architecture(folds=_norm_folds("input_layernorm", "post_attention_layernorm", offset=1.0)),
    # Norms on both sides of attention and MLP; the ones before it multiply by 1 + weight.
    **dict.fromkeys(
        ("gemma2", "gemma3_text"),
        Architecture(folds=_norm_folds("input_layernorm", "pre_feedforward_layernorm", offset=1.0)),
    ),
    # No norm before attention and MLP: q, k, v and gate, up read the residual stream itself.
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), Architecture(folds=(VALUE_OUT, UP_DOWN))),
    # Attention and MLP side by side behind one norm.
    "cohere": Architecture(folds=(Fold("input_layernorm", QKV + GATE_UP), VALUE_OUT, UP_DOWN)),
    "phi3": Architecture(  # qkv_proj and gate_up_proj are one matrix on disk already
        folds=(
            Fold("input_layernorm", ("self_attn.qkv_proj",)),
            Fold("self_attn.qkv_proj", ("self_attn.o_proj",), through_heads=True),
            Fold("post_attention_layernorm", ("mlp.gate_up_proj",)),
            Fold("mlp.gate_up_proj", ("mlp.down_proj",)),
        ),
    ),
    "mixtral": Architecture(folds=(Fold("input_layernorm", QKV), VALUE_OUT)),
    # The norm before experts also feeds their router, so nothing may hide in it; before a dense MLP it may.
    "qwen2_moe": Architecture(
        folds=(
            *_norm_folds("input_layernorm", "post_attention_layernorm"),
            Fold("mlp.shared_expert.up_proj", ("mlp.shared_expert.down_proj",)),
        ),
    ),
    "qwen3_moe": Architecture(),
}


def fused_units(layers: Iterable[str]) -> list[tuple[str, ...]]:
    """Of some layers those that engines join into one matrix and that must therefore share a scheme.

    They are told by their names, in families that are not in the table too: vLLM joins queries, keys and values, and
    gate and up, wherever it finds them side by side.

    Args:
        layers: names in the model or on disk.

    Returns:
        A tuple for each matrix of two layers or more, in the order in which they are joined.
    """
    names = dict.fromkeys(layers)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
    units = [tuple(f"{parent}.{leaf}" for leaf in unit) for parent in parents for unit in FUSED]
    found = [tuple(name for name in unit if name in names) for unit in units]
    return [unit for unit in found if len(unit) > 1]


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
