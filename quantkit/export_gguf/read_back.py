"""A file that quantkit wrote as the model that it was made of: the configuration it carries, the weights decoded."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from quantkit.errors import SourceError
from quantkit.export_gguf.families import find_family
from quantkit.export_gguf.tensors import ExportTensor, list_tensors
from quantkit.source.gguf import CONFIG_KEY
from quantkit.source.skeleton import build_skeleton


def read_back(
    parts: Sequence[Path], metadata: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """The model with its weights decoded.

    Args:
        parts: all files of it, in order.
        metadata: of the first one, with ``CONFIG_KEY``.
        dtype: of its weights.

    Raises:
        SourceError: a tensor is missing or has another shape.
    """
    stored = {tensor.name: tensor for part in parts for tensor in gguf.GGUFReader(part).tensors}
    config = _config(metadata)
    model = build_skeleton(config, dtype)
    assert isinstance(model, PreTrainedModel)
    _give_memory(model)
    parameters = dict(model.named_parameters())
    for tensor in list_tensors(model, find_family(config.model_type)):
        if tensor.name not in stored:
            raise SourceError(f"{parts[0]} has no tensor {tensor.name}", fix="Export the model again")
        found = stored[tensor.name]
        value = torch.from_numpy(np.array(gguf.quants.dequantize(found.data, found.tensor_type)))
        if value.numel() != np.prod(tensor.shape):
            raise SourceError(f"{tensor.name} in {parts[0]} has {value.numel()} values, not {tensor.shape}")
        put_back(tensor, value.reshape(tensor.shape), parameters[tensor.parameter])
    return model


def _config(metadata: Mapping[str, Any]) -> PretrainedConfig:
    settings = json.loads(metadata[CONFIG_KEY])
    settings.pop("quantization_config", None)
    config: PretrainedConfig = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return config


def _give_memory(model: nn.Module) -> None:
    """Parameters that hold something in the place of those on meta; tied ones stay one."""
    for parameter in list(model.parameters()):
        real = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
        for name, same in list(model.named_parameters(remove_duplicate=False)):
            if same is parameter:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, real)


@torch.no_grad()
def put_back(tensor: ExportTensor, value: Tensor, parameter: Tensor) -> None:
    """Undo :meth:`ExportTensor.lay_out`: write a tensor of the file into the parameter that it was made of.

    Args:
        tensor: how it was laid out.
        value: of the tensor's shape.
        parameter: changed in place.
    """
    if tensor.heads:
        value = value[torch.argsort(tensor.row_order(value.shape[0]))]
    target = parameter if tensor.part is None else parameter.chunk(2, dim=-2)[tensor.part]
    target.copy_((value - tensor.added).reshape(target.shape))
