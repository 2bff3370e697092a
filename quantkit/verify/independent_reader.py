"""Read a checkpoint back with code that is not ours, in transformers.

compressed-tensors through its package; GPTQ and AWQ, whose packages need a GPU, through `independent_decoder`.
"""

import contextlib
import io
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import logging as transformers_logging

from quantkit.errors import CheckpointError, SourceError
from quantkit.formats import StoredConfig
from quantkit.formats.expert_names import experts_of
from quantkit.formats.kv_scales import KV_SCALES
from quantkit.primitives import QuantizedWeight
from quantkit.source import ModelSource
from quantkit.source.experts import fused_weight
from quantkit.source.folder import first_line
from quantkit.source.skeleton import PACKED_SUFFIXES
from quantkit.source.tensor_renaming import TensorRenaming
from quantkit.verify.independent_decoder import decode_steps


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer whose weight is stored as codes.

    Attributes:
        name: of the module.
        on_disk: of its tensors, without the suffix.
        weight: as our own decoder reads it.
        input_scale: [1] of a scheme with static inputs, else None.
    """

    name: str
    on_disk: str
    weight: QuantizedWeight
    input_scale: Tensor | None = None


def reader_accepts(config: Mapping[str, Any]) -> str | None:
    """What the reader's own schema says against a ``quantization_config``; None if nothing.

    It is that of compressed-tensors, or for gptq and awq that of transformers.
    """
    if config["quant_method"] == "compressed-tensors":
        try:
            QuantizationConfig.model_validate(dict(config))
        except ValidationError as error:
            problem = error.errors()[0]
            return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        return None
    try:
        with _quiet():
            AutoQuantizationConfig.from_dict(dict(config))
    except (ValueError, TypeError, KeyError, ImportError) as error:
        return first_line(error)
    return None


def stored_layers(checkpoint: ModelSource, config: StoredConfig, skeleton: nn.Module) -> Iterator[StoredLayer]:
    """Decode the layers one at a time, with our own decoder.

    Args:
        checkpoint: the folder that was written.
        config: its quantization_config.
        skeleton: of the checkpoint.

    Raises:
        CheckpointError: a layer does not decode.
    """
    for parameter, on_disk in checkpoint.weight_map(skeleton).packed.items():
        name = parameter.removesuffix(".weight")
        scheme = config.scheme_of(on_disk)
        if scheme is not None:
            rows, columns = skeleton.get_parameter(parameter).shape
            wanted = [f"{on_disk}.{suffix}" for suffix in PACKED_SUFFIXES]
            tensors = {tensor: checkpoint.read(tensor) for tensor in wanted if tensor in checkpoint.tensors}
            weight = config.format.decode(tensors, on_disk, scheme, (rows, columns))
            yield StoredLayer(name, on_disk, weight, tensors.get(f"{on_disk}.input_scale"))


def independent_steps(checkpoint: ModelSource, layer: StoredLayer) -> Tensor:
    """[N, K] int16 code minus zero point of a layer, by code that is not ours or shares nothing with ours."""
    assert checkpoint.quantization is not None
    bits = layer.weight.scheme.num_bits
    if checkpoint.quantization["quant_method"] != "compressed-tensors":
        return decode_steps(checkpoint.read, layer.on_disk, checkpoint.quantization, bits)[0]
    if layer.weight.scheme.input is not None:
        return checkpoint.read(f"{layer.on_disk}.weight").to(torch.int16)
    shape = layer.weight.codes.shape
    codes: Tensor = unpack_from_int32(checkpoint.read(f"{layer.on_disk}.weight_packed"), bits, shape).to(torch.int16)
    if layer.weight.scheme.symmetric:
        return codes
    groups = layer.weight.scale.shape
    packed = checkpoint.read(f"{layer.on_disk}.weight_zero_point")
    zero_point: Tensor = unpack_from_int32(packed, bits, groups, packed_dim=0).to(torch.int16)
    return codes - zero_point.repeat_interleave(shape[1] // groups[1], dim=1)


def open_reader(
    checkpoint: ModelSource, layers: Sequence[StoredLayer], extra: Collection[str] = ()
) -> "ReaderModel | DecodedModel":
    """The checkpoint in transformers: through the format's own reader, or where that cannot be, decoded here.

    Args:
        checkpoint: the folder that was written.
        layers: those that are stored as codes.
        extra: tensors that belong to no parameter of the model, which transformers may leave out.

    Raises:
        CheckpointError: it does not load.
    """
    assert checkpoint.quantization is not None
    if checkpoint.quantization["quant_method"] != "compressed-tensors":
        return DecodedModel(checkpoint, layers, "an independent decoder makes its weights (its own readers need a GPU)")
    experts = {layer.weight.scheme for layer in layers if experts_of(layer.on_disk) is not None}
    reason = None
    if len(experts) > 1 or any(scheme.input is not None or not scheme.symmetric for scheme in experts):
        reason = "transformers takes 16-bit inputs and one symmetric scheme for all experts"
    else:
        symmetric = all(layer.weight.scheme.symmetric for layer in layers)
        try:
            return ReaderModel(checkpoint.folder, checkpoint.dtype, dequantize=not symmetric, extra=extra)
        except CheckpointError as error:
            if not experts:
                raise
            reason = error.message
    return DecodedModel(checkpoint, layers, f"compressed-tensors unpacks its weights ({reason})")


class DecodedModel:
    """A checkpoint in transformers' own model, with weights that code makes which is not ours or shares none with ours.

    Args:
        checkpoint: the folder.
        layers: those that are stored as codes.
        weights: whose weights these are and why, for the description.

    Raises:
        CheckpointError: a parameter is missing.
    """

    quantizes_inputs = False

    def __init__(self, checkpoint: ModelSource, layers: Sequence[StoredLayer], weights: str) -> None:
        assert checkpoint.quantization is not None
        self.description = f"{weights}, transformers runs them"
        packaged = checkpoint.quantization["quant_method"] == "compressed-tensors"
        self.model: Any = checkpoint.skeleton(use_linear_experts=True)
        try:
            checkpoint.materialize(self.model)
        except SourceError as error:
            raise CheckpointError(f"transformers' model is not complete: {error}") from error
        for layer in layers:
            if packaged:
                steps, scale = independent_steps(checkpoint, layer), checkpoint.read(f"{layer.on_disk}.weight_scale")
                scale = scale.float().repeat_interleave(steps.shape[1] // scale.shape[1], dim=1)
            else:
                bits = layer.weight.scheme.num_bits
                steps, scale = decode_steps(checkpoint.read, layer.on_disk, checkpoint.quantization, bits)
            weight = (steps.float() * scale).to(checkpoint.dtype)
            self.model.get_submodule(layer.name).weight = nn.Parameter(weight, requires_grad=False)

    def weight(self, name: str) -> Tensor:
        """[N, K] weight of a linear layer, in the checkpoint's type."""
        weight: Tensor = self.model.get_submodule(name).weight
        return weight

    @torch.no_grad()
    def logits(self, token_ids: Tensor) -> Tensor:
        """[T, V] float32 logits for [1, T] token ids, computed in float32; changes the model's type for good."""
        logits: Tensor = self.model.float()(token_ids).logits[0]
        return logits


class ReaderModel:
    """A checkpoint as transformers loads it, with the weights that compressed-tensors makes of the codes.

    Args:
        folder: of the checkpoint.
        dtype: in which the weights are made, the checkpoint's own; the model computes in float32.
        dequantize: ask transformers to make the weights while it loads. Its ordinary way, which makes them at the first
            use and quantizes inputs, has no place for packed zero points.
        extra: tensors that belong to no parameter of the model.

    Raises:
        CheckpointError: it does not load, or parameters are missing.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, *, dequantize: bool = False, extra: Collection[str] = ()
    ) -> None:
        options = {}
        self.description = "transformers loads it through compressed-tensors, nothing missing, nothing left over"
        self.quantizes_inputs = not dequantize
        if dequantize:
            keyword = (
                "dequantize" if "dequantize" in signature(CompressedTensorsConfig).parameters else "run_compressed"
            )
            options["quantization_config"] = CompressedTensorsConfig(**{keyword: keyword == "dequantize"})
            self.description += "; zero points only with CompressedTensorsConfig(dequantize=True)"
        try:
            with _quiet():
                self.model, loading = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, output_loading_info=True, **options
                )
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, ImportError) as error:
            reason = first_line(error).partition(". ")[0]
            raise CheckpointError(f"transformers does not load it: {reason}") from error
        renaming = TensorRenaming(self.model)
        left_out = {*extra, *(renaming.rename(name)[0] for name in extra)}  # verify says so, and of scales of the cache
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            wrong = sorted(map(str, loading.get(kind) or ()))
            if kind == "unexpected_keys":
                wrong = [key for key in wrong if key not in left_out and not key.endswith(KV_SCALES)]
            if wrong:
                raise CheckpointError(f"transformers reports {kind.replace('_', ' ')}: {wrong[0]}")
        self.model.eval().requires_grad_(False)
        for module in self.model.modules():
            if hasattr(module, KV_SCALES[0]):
                module.quantization_enabled = False  # the logits on record are of keys and values as they are
        try:
            with torch.no_grad(), _quiet():
                self.model(torch.zeros(1, 1, dtype=torch.int64))  # the package unpacks at the first use
        except RuntimeError as error:
            raise CheckpointError(f"transformers does not run it: {first_line(error)}") from error

    def weight(self, name: str) -> Tensor:
        """[N, K] weight of a linear layer, in the checkpoint's type."""
        experts = experts_of(name)
        if experts is not None:
            number, part = name.removeprefix(f"{experts}.").split(".")
            return fused_weight(self.model.get_submodule(experts), int(number), part)
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
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
