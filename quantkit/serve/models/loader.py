"""From a source to a model that the engine can run: transformers' own class, our attention, packed layers packed."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from quantkit.errors import CheckpointError, EngineError
from quantkit.formats import StoredConfig, read_quantization_config
from quantkit.scheme import QuantScheme
from quantkit.serve.attention import ATTENTION_NAME, register_attention
from quantkit.serve.kv_cache import KVShape
from quantkit.serve.models.packed_linear import DispatchedLinear, PackedLinear
from quantkit.serve.models.probe import probe_model
from quantkit.skeleton import PACKED_SUFFIXES
from quantkit.source import ModelSource
from quantkit_kernels.dispatch import choose_linear, choose_store_kv_cache

PACKED_BITS = (4, 8)  # of w4a16_gemm, and of w8a16_gemm and w8a8_gemm
MOVING_ROPE_TYPES = ("dynamic", "longrope")  # their frequencies depend on the longest sequence in the batch
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        model: in eval mode, with `quantkit.serve.attention` in every layer.
        dtype: of its activations.
        shapes: of the keys and values, one a layer.
        max_model_len: most tokens of a sequence that it was made for.
        scheme: how its weights are stored, in one phrase.
        kernels: which body runs each operation, and why; one line each.
        weight_bytes: memory of all weights.
    """

    model: nn.Module
    dtype: torch.dtype
    shapes: tuple[KVShape, ...]
    max_model_len: int
    scheme: str
    kernels: tuple[str, ...]
    weight_bytes: int


def resolve_dtype(name: str, stored: torch.dtype) -> torch.dtype:
    """The dtype to run in: as asked, or for ``auto`` as stored; float16 becomes bfloat16, which CPUs multiply."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return torch.float32 if stored in (torch.float32, torch.float64) else torch.bfloat16


def load_model(source: ModelSource, dtype: torch.dtype) -> LoadedModel:
    """Build and fill the model, and try it once.

    Args:
        source: where it comes from.
        dtype: to run it in.

    Raises:
        CheckpointError: its quantization is not one that the engine runs, or a packed layer is broken.
        EngineError: its architecture is not one that the engine runs.
        SourceError: a tensor is missing or broken.
    """
    packed_config = _packed_config(source)
    register_attention()
    model: Any = source.skeleton()
    model.set_attn_implementation(ATTENTION_NAME)
    source.materialize(model, dtype=dtype)
    scheme = str(dtype).removeprefix("torch.")
    if packed_config is not None:
        used = _pack_layers(model, source, packed_config, dtype)
        scheme = ", ".join(sorted({str(scheme) for scheme in used}))
    choice = choose_linear(CPU, dtype)
    if choice.function is not nn.functional.linear:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = DispatchedLinear
    kernels = [str(choose_store_kv_cache(CPU)), str(choice)]
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    chosen = Counter((module.operation, module.body, module.reason) for module in packed)
    for (operation, body, reason), count in sorted(chosen.items()):
        kernels.append(f"{operation}: {body} in {count} layers ({reason})")
    dense = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    return LoadedModel(
        model=model,
        dtype=dtype,
        shapes=probe_model(model, dtype),
        max_model_len=_max_model_len(model.config),
        scheme=scheme,
        kernels=tuple(kernels),
        weight_bytes=sum(dense.values()) + sum(module.nbytes for module in packed),
    )


def _packed_config(source: ModelSource) -> StoredConfig | None:
    """The quantization of a packed checkpoint; None for an ordinary one."""
    if source.quantization is None:
        return None
    try:
        config = read_quantization_config(source.quantization)
    except CheckpointError as error:
        raise CheckpointError(
            f"the engine cannot run {source.name}: {error.message}",
            fix="it runs ordinary checkpoints, and compressed-tensors, gptq and awq with 4 or 8 bits",
        ) from error
    for scheme in config.schemes:
        if scheme.num_bits not in PACKED_BITS:
            bits = " or ".join(map(str, PACKED_BITS))
            raise CheckpointError(
                f"the engine cannot run {source.name}: {scheme} has {scheme.num_bits} bits, not {bits}"
            )
    return config


def _pack_layers(model: nn.Module, source: ModelSource, config: StoredConfig, dtype: torch.dtype) -> set[QuantScheme]:
    """Put a `PackedLinear` in the place of every layer whose codes are stored; returns the schemes that occur."""
    used = set()
    for parameter, stored_name in source.weight_map(model).packed.items():
        name = parameter.removesuffix(".weight")
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            raise EngineError(f"{name} is quantized, and the engine runs quantized linear layers only, not this one")
        scheme = config.scheme_of(stored_name)
        if scheme is None:
            raise CheckpointError(f"{stored_name} has codes, and the quantization_config does not say how to read them")
        names = [f"{stored_name}.{suffix}" for suffix in PACKED_SUFFIXES]
        tensors = {tensor: source.read(tensor) for tensor in names if tensor in source.tensors}
        weight = config.format.decode(tensors, stored_name, scheme, (module.out_features, module.in_features))
        input_scale = tensors.get(f"{stored_name}.input_scale")
        if scheme.input is None or scheme.input.dynamic:
            input_scale = None
        elif input_scale is None:
            raise CheckpointError(f"{stored_name} has no input_scale")
        parent, _, leaf = name.rpartition(".")
        bias = None if module.bias is None else module.bias.data
        setattr(model.get_submodule(parent), leaf, PackedLinear(weight, bias, dtype, input_scale))
        used.add(scheme)
    return used


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
