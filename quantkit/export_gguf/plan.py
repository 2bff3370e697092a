"""What a file will hold, decided from names and shapes before any weight is read."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UsageError
from quantkit.export_gguf.families import GgufFamily, find_family
from quantkit.export_gguf.metadata import rope_tensors
from quantkit.export_gguf.mixes import MixFacts, check_file_type, choose_types, is_mix, most_frequent
from quantkit.export_gguf.pretokenizer import check_pretokenizer
from quantkit.export_gguf.tensors import ExportTensor, list_tensors
from quantkit.export_gguf.tokenizer import Vocabulary, read_vocabulary
from quantkit.formats.gguf.block_types import bits_per_weight
from quantkit.source import ModelSource

LLAMA_70B_BLOCKS = 80


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A file.

    Attributes:
        source: the model.
        model: its skeleton.
        family: what llama.cpp calls it.
        file_type: named type, whose rules gave ``types``; ``mostly Q4_K`` where they were chosen otherwise.
        tensors: in file order.
        types: by GGUF name.
        rope: tensors of rotary factors, which no parameter holds.
        vocabulary: of the tokenizer.
        named_pretokenizer: llama.cpp's name of the pre-tokenizer, if a user or a .gguf source gave it.
    """

    source: ModelSource
    model: nn.Module
    family: GgufFamily
    file_type: str
    tensors: list[ExportTensor]
    types: dict[str, str]
    rope: dict[str, Tensor]
    vocabulary: Vocabulary
    named_pretokenizer: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor_bytes(tensor.shape, self.types[tensor.name]) for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Mean over all weights."""
        return 8 * self.num_bytes / sum(math.prod(tensor.shape) for tensor in self.tensors)


def tensor_bytes(shape: tuple[int, ...], type_name: str) -> int:
    """Stored bytes of a tensor."""
    return round(math.prod(shape) * bits_per_weight(type_name) / 8)


def make_export_plan(
    source: ModelSource,
    file_type: str,
    *,
    has_importance: bool = False,
    overrides: Iterable[tuple[str, str]] = (),
    pretokenizer: str | None = None,
) -> ExportPlan:
    """Decide the type of every tensor, and refuse what cannot be written.

    Args:
        source: an ordinary model or a .gguf; no quantized checkpoint.
        file_type: such as ``Q4_K_M``.
        has_importance: whether an importance matrix will be there; some rules ask.
        overrides: (regular expression of a GGUF name, type), the first that matches wins.
        pretokenizer: llama.cpp's name of it, if it is not to be told from the tokenizer.

    Raises:
        UsageError: an architecture, tokenizer or type that cannot be written.
        SourceError: the model is broken.
    """
    check_file_type(file_type)
    if source.quantization is not None:
        raise UsageError(f"{source.name} is quantized already", fix="Give the original model")
    if pretokenizer is None and source.gguf is not None:
        pretokenizer = source.gguf.pretokenizer  # what transformers makes of a .gguf cuts text in one way always
    named = check_pretokenizer(pretokenizer) if pretokenizer is not None else None
    family = find_family(source.config.model_type)
    model = source.skeleton()
    tensors = list_tensors(model, family)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    rows = shapes["token_embd.weight"][0]
    own = source.gguf is None
    vocabulary = read_vocabulary(source.tokenizer(), source.folder, rows, named, has_own_files=own)
    facts = _facts(source.config, shapes, has_importance)
    types = choose_types(shapes, file_type, facts, overrides)
    label = file_type if is_mix(types, choose_types(shapes, file_type, facts)) else most_frequent(types)
    rope = rope_tensors(source.config)
    return ExportPlan(source, model, family, label, tensors, types, rope, vocabulary, named)


def refuse_codes(source: ModelSource) -> None:
    """Codes of codes add their errors, so that must be asked for.

    Raises:
        UsageError: the model is a .gguf that holds codes.
    """
    if source.gguf is not None and source.gguf.codes:
        raise UsageError(
            f"{source.name} is quantized already ({', '.join(source.gguf.codes)})",
            fix="Give the original model, or --allow-requantize",
        )


def _facts(config: Any, shapes: Mapping[str, tuple[int, ...]], has_importance: bool) -> MixFacts:
    heads = config.num_attention_heads
    blocks = config.num_hidden_layers
    return MixFacts(
        num_blocks=blocks,
        queries_per_key=heads // (getattr(config, "num_key_value_heads", None) or heads),
        num_experts=getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0,
        tied="output.weight" not in shapes,
        has_importance=has_importance,
        is_70b=config.model_type == "llama" and blocks == LLAMA_70B_BLOCKS,
    )


def usable_importance_of(plan: ExportPlan, importance: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of an importance matrix that belong to the plan's tensors.

    Args:
        plan: of the file.
        importance: GGUF name -> [K] or, for experts, [E, K] mean squares; other names are left aside.

    Raises:
        UsageError: an entry has another number of columns than its tensor, or nothing fits.
    """
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    used = {}
    for name, values in importance.items():
        if name not in shapes:
            continue
        shape = shapes[name]
        expected = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        if values.numel() != expected:
            raise UsageError(
                f"the importance of {name} has {values.numel()} values and the tensor {expected} columns",
                fix="The importance matrix belongs to another model",
            )
        if not torch.isfinite(values).all() or bool((values < 0).any()):
            raise UsageError(f"the importance of {name} holds NaN, infinity or negative values")
        used[name] = values.reshape(-1, shape[-1]) if len(shape) == 3 else values.reshape(-1)
    if importance and not used:
        raise UsageError(
            f"the importance matrix names no tensor of this model (its first is {next(iter(importance))})",
            fix="It belongs to another model",
        )
    return used
