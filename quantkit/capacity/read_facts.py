"""From what was found of a model to the facts that planning needs; says what could not be counted."""

from collections.abc import Sequence
from dataclasses import replace

from quantkit.capacity.config_fields import ConfigFields
from quantkit.capacity.kv_layout import kv_layers
from quantkit.capacity.model_facts import ModelFacts, Weight
from quantkit.capacity.model_files import ModelFiles, find_model
from quantkit.capacity.stored_tensors import StoredTensor, weights_from_tensors
from quantkit.capacity.weight_schemes import KEPT_BITS, stored_scheme
from quantkit.capacity.weight_shapes import FAMILIES, weights_of
from quantkit.errors import SourceError


def read_facts(model: str) -> ModelFacts:
    """The facts of a model; no weight is read or downloaded.

    Args:
        model: hub id, folder, .gguf file, or a config.json.

    Raises:
        SourceError: not found, broken, or nothing can be counted; one line.
    """
    return facts_of(find_model(model))


def facts_of(files: ModelFiles) -> ModelFacts:
    """The facts of what was found.

    Raises:
        SourceError: a field is missing or impossible, or the model is no decoder.
    """
    fields = ConfigFields(files.config, files.where)
    if fields.raw.get("is_encoder_decoder"):
        raise SourceError(f"{files.name} is an encoder-decoder model ({fields.model_type}), planning knows decoders")
    layers = kv_layers(fields)
    quantization = _quantization(files)
    weights, counted_from = _weights(files, fields, quantization)
    if fields.model_type not in FAMILIES and not quantization:
        fields.notes.append(
            f"the family {fields.model_type} is not known: the KV cache is counted from the usual fields of its "
            "configuration, and layers of a kind of its own would be missed"
        )
    names = {weight.role for weight in weights}
    facts = ModelFacts(
        name=files.name,
        model_type=fields.model_type,
        weights=weights,
        kv_layers=layers,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size", 4 * fields.integer("hidden_size")),
        vocab_size=fields.integer("vocab_size"),
        num_heads=fields.num_heads,
        max_model_len=fields.optional("max_position_embeddings"),
        tied=bool(weights) and "lm_head" not in names,
        num_experts=fields.num_experts,
        experts_per_token=fields.experts_per_token,
        quantization=quantization,
        quantization_config=files.config.get("quantization_config") or {},
        stored_bytes=files.stored_bytes,
        counted_from=counted_from,
        notes=(*files.notes, *fields.notes),
    )
    if quantization and stored_scheme(facts) is None:
        unknown = f"{quantization} is not known: what its weights take as they are stored is not planned for"
        return replace(facts, notes=(*facts.notes, unknown))
    return facts


def _quantization(files: ModelFiles) -> str | None:
    """How the weights are stored already, in one phrase."""
    config = files.config.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise SourceError(f"{files.where}: quantization_config={config!r} is no JSON object")
    if config:
        return " ".join(str(config[key]) for key in ("quant_method", "format") if config.get(key)) or "unknown method"
    return "gguf" if files.counted_from == "the GGUF header" else None


def _weights(files: ModelFiles, fields: ConfigFields, quantization: str | None) -> tuple[tuple[Weight, ...], str]:
    """The matrices: from headers, or from the configuration where those are missing or hold codes."""
    tensors = _planned(files.tensors, fields) if files.tensors is not None else None
    has_codes = tensors is not None and any(tensor.is_code for tensor in tensors)
    if tensors is not None and not has_codes:
        return weights_from_tensors(tensors), files.counted_from
    if fields.model_type in FAMILIES:
        weights = weights_of(fields)
        return (weights if tensors is None else _as_stored(weights, tensors)), "config.json"
    if tensors is None:
        fields.notes.append("weights are not counted: there is no header to read the matrices from")
        return (), "config.json"
    fields.notes.append(f"parameters are numbers as stored: {quantization} keeps several in one")
    return weights_from_tensors(tensors), files.counted_from


def _as_stored(weights: tuple[Weight, ...], tensors: Sequence[StoredTensor]) -> tuple[Weight, ...]:
    """The matrices of a quantized checkpoint with the bits that its files have for them, on the average."""
    inner = [weight for weight in weights if weight.role in ("linear", "expert")]
    kept = sum(weight.parameters for weight in weights) - sum(weight.parameters for weight in inner)
    nbytes = sum(tensor.nbytes for tensor in tensors) - kept * KEPT_BITS // 8
    if nbytes <= 0:
        return weights
    bits = 8 * nbytes / sum(weight.parameters for weight in inner)
    return tuple(replace(weight, stored_bits=bits) if weight in inner else weight for weight in weights)


def _planned(tensors: Sequence[StoredTensor], fields: ConfigFields) -> list[StoredTensor]:
    """Without layers behind the last one, which predict further tokens and are loaded only for that."""
    count = fields.num_layers
    kept = [tensor for tensor in tensors if tensor.layer is None or tensor.layer < count]
    if len(kept) < len(tensors):
        fields.notes.append(
            f"{len(tensors) - len(kept)} tensors of layers beyond num_hidden_layers={count} are not planned for"
        )
    return kept
