"""The tensors of a model under llama.cpp's names: which parameter each is made of, and how its rows are laid out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gguf import get_tensor_name_map
from torch import Tensor, nn

from quantkit.errors import QuantizationError, UsageError
from quantkit.export_gguf.families import GgufFamily
from quantkit.source import ModelSource

MAX_NAME_BYTES = 63
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.weight")


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """A tensor of the file.

    Attributes:
        name: llama.cpp's.
        parameter: the model's, of which it is made.
        shape: of the tensor, input columns last.
        heads: number of heads whose rows are interleaved; 0 for none.
        part: which half of the parameter's rows it is (0 or 1); None for all of them.
        added: what is added to every value.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    heads: int = 0
    part: int | None = None
    added: float = 0.0

    def lay_out(self, value: Tensor) -> Tensor:
        """The tensor as llama.cpp expects it, of the parameter's value (or of something with the same rows)."""
        if self.part is not None:
            value = value.chunk(2, dim=-2)[self.part]
        if self.added:
            value = value.float() + self.added
        if value.dim() == 2 and len(self.shape) == 1:
            value = value.squeeze(0)
        return value[self.row_order(value.shape[0])] if self.heads else value

    def row_order(self, rows: int) -> Tensor:
        """[rows] which row of the parameter comes first, second, ...: the two halves of each head in turn."""
        return torch.arange(rows).reshape(self.heads, 2, -1).transpose(1, 2).reshape(-1)


def list_tensors(model: nn.Module, family: GgufFamily) -> list[ExportTensor]:
    """The tensors of the file, embedding first, then block by block.

    Args:
        model: skeleton of the source.
        family: of the model.

    Raises:
        UsageError: a parameter has no place in the architecture, or its name would be too long.
    """
    config: Any = model.config
    names = get_tensor_name_map(family.arch, config.num_hidden_layers)
    tensors: list[ExportTensor] = []
    for parameter, value in model.named_parameters():  # a tied weight comes once, as the embedding
        shape = tuple(value.shape)
        if match := _EXPERTS.fullmatch(parameter):
            tensors += _expert_tensors(parameter, shape, match[1], match[2])
            continue
        if match := _ROUTER.fullmatch(parameter):
            tensors.append(ExportTensor(f"blk.{match[1]}.ffn_gate_inp.weight", parameter, shape))
            continue
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UsageError(f"{parameter} has no place in llama.cpp's {family.name} architecture")
        if "ffn_gate_inp_shexp" in name:
            shape = shape[1:]
        added = family.norm_offset if family.norm_offset and name.endswith("norm.weight") else 0.0
        tensors.append(ExportTensor(name, parameter, shape, _interleaved_heads(name, family, config), added=added))
    for tensor in tensors:
        if len(tensor.name.encode()) > MAX_NAME_BYTES:
            raise UsageError(f"the tensor name {tensor.name} is longer than GGUF's {MAX_NAME_BYTES} bytes")
    return tensors


def _expert_tensors(parameter: str, shape: tuple[int, ...], block: str, which: str) -> Iterator[ExportTensor]:
    if which == "down_proj":
        yield ExportTensor(f"blk.{block}.ffn_down_exps.weight", parameter, shape)
        return
    half = (shape[0], shape[1] // 2, shape[2])
    yield ExportTensor(f"blk.{block}.ffn_gate_exps.weight", parameter, half, part=0)
    yield ExportTensor(f"blk.{block}.ffn_up_exps.weight", parameter, half, part=1)


def _interleaved_heads(name: str, family: GgufFamily, config: Any) -> int:
    if not family.interleaved_rotary:
        return 0
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads or config.num_attention_heads) if ".attn_k." in name else 0


class ParameterReader:
    """Reads the parameters of a model one at a time and keeps only the last one.

    Args:
        source: the model.
        model: its skeleton; parameters go back to meta when the next one is read.
    """

    def __init__(self, source: ModelSource, model: nn.Module) -> None:
        self._source, self._model = source, model
        self._last: tuple[str, Tensor] | None = None

    def read(self, tensor: ExportTensor) -> Tensor:
        """The tensor as llama.cpp expects it, in the stored type.

        Raises:
            QuantizationError: it holds NaN or infinity.
            SourceError: it cannot be read.
        """
        if self._last is None or self._last[0] != tensor.parameter:
            self._last = None
            self._last = tensor.parameter, self._read(tensor.parameter)
        value = tensor.lay_out(self._last[1])
        if not torch.isfinite(value.float().sum()) and not torch.isfinite(value).all():
            raise QuantizationError(f"{tensor.parameter} holds NaN or infinity", fix="The model is broken")
        return value

    def _read(self, name: str) -> Tensor:
        self._source.materialize(self._model, prefix=name)
        parameter = self._model.get_parameter(name)
        value = parameter.detach()
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for other, same in list(self._model.named_parameters(remove_duplicate=False)):
            if same is parameter:
                parent, _, leaf = other.rpartition(".")
                setattr(self._model.get_submodule(parent), leaf, empty)
        return value
