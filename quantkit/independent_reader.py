"""Read a checkpoint back with code that is not ours: the compressed-tensors package, through transformers."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from quantkit.errors import CheckpointError
from quantkit.formats.compressed_tensors import PackedConfig, decode
from quantkit.model_folder import first_line
from quantkit.primitives import QuantizedWeight
from quantkit.source import ModelSource


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer whose weight is stored as codes.

    Attributes:
        name: of the module.
        on_disk: of its tensors, without the suffix.
        weight: as our own decoder reads it.
    """

    name: str
    on_disk: str
    weight: QuantizedWeight


def package_accepts(config: Mapping[str, Any]) -> str | None:
    """What the package's own schema says against a ``quantization_config``; None if nothing."""
    try:
        QuantizationConfig.model_validate(dict(config))
    except ValidationError as error:
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    return None


def stored_layers(checkpoint: ModelSource, config: PackedConfig, packed: Mapping[str, str]) -> Iterator[StoredLayer]:
    """Decode the layers one at a time.

    Args:
        checkpoint: the folder that was written.
        config: its quantization_config.
        packed: parameter -> name on disk, from the checkpoint's weight map.

    Raises:
        CheckpointError: a layer does not decode.
    """
    for parameter, on_disk in packed.items():
        name = parameter.removesuffix(".weight")
        scheme = config.scheme_of(name)
        if scheme is not None:
            wanted = [f"{on_disk}.{suffix}" for suffix in ("weight_packed", "weight_scale", "weight_shape")]
            tensors = {tensor: checkpoint.read(tensor) for tensor in wanted if tensor in checkpoint.tensors}
            yield StoredLayer(name, on_disk, decode(tensors, on_disk, scheme))


def package_codes(checkpoint: ModelSource, layer: StoredLayer) -> Tensor:
    """[N, K] int8 codes of a layer as the package unpacks them."""
    packed = checkpoint.read(f"{layer.on_disk}.weight_packed")
    codes: Tensor = unpack_from_int32(packed, layer.weight.scheme.num_bits, layer.weight.codes.shape)
    return codes.to(torch.int8)


class ReaderModel:
    """A checkpoint as transformers loads it, with the weights that compressed-tensors makes of the codes.

    Args:
        folder: of the checkpoint.
        dtype: in which the weights are made, the checkpoint's own; the model computes in float32.

    Raises:
        CheckpointError: it does not load, or parameters are missing.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        try:
            with _quiet():
                self.model, loading = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, output_loading_info=True
                )
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, ImportError) as error:
            reason = first_line(error).partition(". ")[0]
            raise CheckpointError(f"transformers does not load it: {reason}") from error
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if loading.get(kind):
                example = sorted(map(str, loading[kind]))[0]
                raise CheckpointError(f"transformers reports {kind.replace('_', ' ')}: {example}")
        self.model.eval().requires_grad_(False)
        with torch.no_grad(), _quiet():
            self.model(torch.zeros(1, 1, dtype=torch.int64))  # the package unpacks at the first use

    def weight(self, name: str) -> Tensor:
        """[N, K] weight of a linear layer, in the checkpoint's type."""
        weight = getattr(self.model.get_submodule(name), "weight", None)
        if not isinstance(weight, nn.Parameter | Tensor):
            raise CheckpointError(f"the reader has made no weight of {name}")
        return weight

    @torch.no_grad()
    def logits(self, token_ids: Tensor) -> Tensor:
        """[T, V] float32 logits for [1, T] token ids, computed in float32; changes the model's type for good."""
        nn.Module.float(self.model)  # transformers' own refuses, though nothing is packed any more
        logits: Tensor = self.model(token_ids).logits[0]
        return logits.float()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the loading report and the progress bars of the reader: what they say is in the check."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
