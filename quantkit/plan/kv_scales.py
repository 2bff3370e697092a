"""Where static scales of keys and values will be stored: beside the projections of each attention module."""

from collections.abc import Mapping

import torch

from quantkit.architectures import DecoderBlocks
from quantkit.calibration.key_value_range import PROJECTIONS, attention_modules
from quantkit.errors import RecipeError
from quantkit.formats.kv_scales import KV_SCALES
from quantkit.formats.safetensors_file import TensorSpec

ENGINE_NAME = "self_attn"  # vLLM finds the scales by it


def attention_on_disk(decoder: DecoderBlocks, names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Attention module of each decoder block -> its name on disk.

    Args:
        decoder: of the model.
        names: parameter -> the tensors on disk that it is made of.

    Raises:
        RecipeError: a block has no module, or several, that cache keys and values, or one that engines do not know.
    """
    found: dict[str, str] = {}
    for index, block in enumerate(decoder.blocks):
        inside = attention_modules(block)
        if len(inside) != 1 or inside[0].rpartition(".")[2] != ENGINE_NAME:
            raise RecipeError(
                f"quantization.kv_cache: the block {decoder.name}.{index} keeps keys and values in "
                f"{', '.join(inside) or 'no module that is known'}, and engines look for one {ENGINE_NAME}",
                fix="Leave kv_cache out for this model",
                keys=("quantization", "kv_cache"),
            )
        module = f"{decoder.name}.{index}.{inside[0]}"
        stored = next(names[weight] for p in PROJECTIONS if (weight := f"{module}.{p}.weight") in names)
        found[module] = stored[0].rpartition(".")[0].rpartition(".")[0]
    return found


def scale_specs(on_disk: str, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The scales of one attention module."""
    return {f"{on_disk}.{name}": TensorSpec(dtype, (1,)) for name in KV_SCALES}
