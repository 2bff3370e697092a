"""From a checkpoint to a model that the engine can run: a decoder of our own, or transformers' definition."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from quantkit.errors import EngineError
from quantkit.serve.attention import ATTENTION_NAME, register_attention
from quantkit.serve.device import CPU, move_parameters, runs_triton
from quantkit.serve.kv_cache import KVShape, reads_blocks
from quantkit.serve.models.build_decoder import build_decoder
from quantkit.serve.models.decoder_config import UnknownDecoderError, read_decoder_config
from quantkit.serve.models.linear_reader import LinearReader
from quantkit.serve.models.packed_linear import DispatchedLinear, PackedLinear
from quantkit.serve.models.probe import probe_model
from quantkit.source import ModelSource
from quantkit_kernels.dispatch import choose, choose_linear

MOVING_ROPE_TYPES = ("dynamic", "longrope")  # their frequencies depend on the longest sequence in the batch
DECODER_OPERATIONS = ("rms_norm", "rotary_embedding", "silu_mul", "gelu_mul")
CODED_OPERATIONS = ("rms_norm_quantize", "silu_mul_quantize")  # in front of products that take codes
DEVICE_OPERATIONS = ("paged_attention", "sample_tokens")  # elsewhere torch's attention and our own sampler
Definition = Literal["quantkit", "transformers"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        model: a `Decoder`, or transformers' in eval mode with `quantkit.serve.attention` in every layer.
        dtype: of its keys and values.
        shapes: of the keys and values, one a layer.
        max_model_len: most tokens of a sequence that it was made for.
        scheme: how its weights are stored, in one phrase.
        kernels: whose definition it is, and which body runs each operation, and why; one line each.
        weight_bytes: memory of all weights.
        device: where they are.
    """

    model: nn.Module
    dtype: torch.dtype
    shapes: tuple[KVShape, ...]
    max_model_len: int
    scheme: str
    kernels: tuple[str, ...]
    weight_bytes: int
    device: torch.device = CPU


def resolve_dtype(name: str, stored: torch.dtype) -> torch.dtype:
    """The dtype to run in: as asked, or for ``auto`` as stored; float16 becomes bfloat16, which CPUs multiply."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return torch.float32 if stored in (torch.float32, torch.float64) else torch.bfloat16


def load_model(
    source: ModelSource, dtype: torch.dtype, *, definition: Definition = "quantkit", device: torch.device = CPU
) -> LoadedModel:
    """Build and fill the model; transformers' definition is tried once.

    Args:
        source: where it comes from.
        dtype: to run it in.
        definition: ``quantkit`` is a decoder of our own where the configuration is one that it knows entirely, and
            transformers' where not; ``transformers`` is that in any case, for comparison, and on the CPU only.
        device: to run it on.

    Raises:
        CheckpointError: its quantization is not one that the engine runs, or a packed layer is broken.
        EngineError: its architecture is not one that the engine runs.
        SourceError: a tensor is missing or broken.
    """
    model: Any = source.skeleton(use_linear_experts=True)
    max_model_len = _max_model_len(model.config)
    reader = LinearReader(source, model, device)
    reason = "as asked"
    if definition == "quantkit":
        try:
            config = read_decoder_config(source.config)
        except UnknownDecoderError as error:
            reason = str(error)
        else:
            source.materialize(model, dtype=dtype)
            move_parameters(model, device)
            decoder = build_decoder(model, reader, config, dtype)
            kernels = [f"definition: quantkit ({source.config.model_type})", *_kernels(Counter(decoder.bodies), device)]
            kernels += _attention(decoder.shapes, device)
            kernels += [str(decoder.compiled)] if device.type == "cpu" else []
            operations = (*DECODER_OPERATIONS, *(CODED_OPERATIONS if decoder.takes_codes else ()))
            kernels += [str(choose(operation, device)) for operation in operations]
            kernels += [str(choose(operation, device)) for operation in DEVICE_OPERATIONS if runs_triton(device)]
            scheme = _scheme(reader, dtype)
            return LoadedModel(
                decoder, dtype, decoder.shapes, max_model_len, scheme, tuple(kernels), decoder.weight_bytes, device
            )
    if device.type != "cpu":
        raise EngineError(
            f"the engine runs {source.config.model_type} in transformers' definition ({reason}), on the CPU only",
            fix="give device=cpu",
        )
    source.materialize(model, dtype=dtype)
    kernels = [f"definition: transformers ({reason})", *_adapt(model, reader, dtype)]
    packed = sum(module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    dense = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    has_coded_inputs = any(scheme.input is not None for scheme in reader.schemes)
    shapes = probe_model(model, dtype, has_coded_inputs=has_coded_inputs)
    return LoadedModel(
        model=model,
        dtype=dtype,
        shapes=shapes,
        max_model_len=max_model_len,
        scheme=_scheme(reader, dtype),
        kernels=(*kernels, *_attention(shapes, CPU)),
        weight_bytes=sum(dense.values()) + packed,
    )


def _adapt(model: Any, reader: LinearReader, dtype: torch.dtype) -> list[str]:
    """Put our attention and our linear layers into transformers' model; which bodies run."""
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    for name in reader.packed:
        layer = reader.read(name)
        assert not isinstance(layer.weight, torch.Tensor), "it is stored as codes"
        parent, _, leaf = name.rpartition(".")
        replacement = PackedLinear(layer.weight, layer.bias, dtype, layer.input_scale)
        setattr(model.get_submodule(parent), leaf, replacement)
    choice = choose_linear(CPU, dtype)
    if choice.function is not nn.functional.linear:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = DispatchedLinear
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    bodies = Counter((module.operation, module.body, module.reason) for module in packed)
    return [str(choice), *_kernels(bodies, CPU)]


def _kernels(bodies: Counter[tuple[str, str, str]], device: torch.device) -> list[str]:
    lines = [f"{operation}: {body} in {n} layers ({why})" for (operation, body, why), n in sorted(bodies.items())]
    return [str(choose("store_kv_cache", device)), *lines]


def _attention(shapes: Sequence[KVShape], device: torch.device) -> list[str]:
    """The body of a decode's attention on a CPU, where it is not gathered blocks and torch's."""
    is_read = not runs_triton(device) and reads_blocks(shapes, device)
    return [str(choose("paged_attention", device))] if is_read else []


def _scheme(reader: LinearReader, dtype: torch.dtype) -> str:
    return ", ".join(sorted(map(str, reader.schemes))) or str(dtype).removeprefix("torch.")


def _max_model_len(config: PretrainedConfig) -> int:
    """Most tokens of a sequence, by the model's configuration.

    Raises:
        EngineError: the configuration names none.
    """
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise EngineError(f"the configuration of {config.model_type} has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_layer:
        if parameters.get("rope_type") in MOVING_ROPE_TYPES:
            original = parameters.get("original_max_position_embeddings")
            length = min(length, original if isinstance(original, int) else length)
    return length
