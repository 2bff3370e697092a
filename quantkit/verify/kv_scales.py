"""The static scales of keys and values in a checkpoint: where config.json announces them, and usable."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quantkit.architectures import find_decoder_blocks
from quantkit.errors import RecipeError
from quantkit.formats.kv_scales import stored_kv_scales
from quantkit.plan.kv_scales import attention_on_disk, scale_specs
from quantkit.source import ModelSource


def kv_scale_problems(checkpoint: ModelSource, skeleton: nn.Module, *, announced: bool) -> list[str]:
    """What is wrong with them.

    Args:
        checkpoint: the folder that was written.
        skeleton: of its model.
        announced: whether config.json has a ``kv_cache_scheme``.
    """
    if not announced:
        return [
            f"{name} is stored, but config.json has no kv_cache_scheme" for name in stored_kv_scales(checkpoint.tensors)
        ]
    weights = checkpoint.weight_map(skeleton)
    names = {parameter: (f"{layer}.weight",) for parameter, layer in weights.packed.items()} | weights.names
    try:
        attention = attention_on_disk(find_decoder_blocks(skeleton, checkpoint.config.model_type), names)
    except RecipeError as error:
        return [error.message]
    return list(_unusable(checkpoint, list(attention.values())))


def _unusable(checkpoint: ModelSource, attention: list[str]) -> Iterator[str]:
    for module in attention:
        for name, spec in scale_specs(module, checkpoint.dtype).items():
            info = checkpoint.tensors.get(name)
            if info is None:
                yield f"{name} is missing, and vLLM would take 1"
            elif (info.dtype, info.shape) != (spec.dtype, spec.shape):
                yield f"{name} is {info.dtype} {list(info.shape)}, not {spec.dtype} {list(spec.shape)}"
            elif not (torch.isfinite(scale := checkpoint.read(name)).all() and bool((scale > 0).all())):
                yield f"{name} is {float(scale):g}"


def kv_scales_in(model: nn.Module) -> dict[str, Tensor]:
    """The scales [1] that a reader's model has taken, by name; none where the reader does not know them."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in stored_kv_scales(parameters)}
