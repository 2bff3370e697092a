"""From what was found of a model to the facts that planning needs; says what could not be counted."""

from collections.abc import Sequence

from quantkit.capacity.config_fields import ConfigFields
from quantkit.capacity.kv_layout import kv_layers
from quantkit.capacity.model_facts import ModelFacts, Weight
from quantkit.capacity.model_files import ModelFiles, find_model
from quantkit.capacity.stored_tensors import StoredTensor, weights_from_tensors
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
    length = fields.get("max_position_embeddings")
    names = {weight.role for weight in weights}
    return ModelFacts(
        name=files.name,
        model_type=fields.model_type,
        weights=weights,
        kv_layers=layers,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size", 4 * fields.integer("hidden_size")),
        vocab_size=fields.integer("vocab_size"),
        num_heads=fields.num_heads,
        max_model_len=length if isinstance(length, int) and length > 0 else None,
        tied=bool(weights) and "lm_head" not in names,
        num_experts=fields.num_experts,
        experts_per_token=fields.experts_per_token,
        quantization=quantization,
        quantization_config=files.config.get("quantization_config") or {},
        stored_bytes=files.stored_bytes,
        counted_from=counted_from,
        notes=(*files.notes, *fields.notes),
    )


def _quantization(files: ModelFiles) -> str | None:
    """How the weights are stored already, in one phrase."""
    config = files.config.get("quantization_config")
    if isinstance(config, dict):
        return " ".join(str(config[key]) for key in ("quant_method", "format") if config.get(key)) or "unknown method"
    return "gguf" if files.counted_from == "the GGUF header" else None


def _weights(files: ModelFiles, fields: ConfigFields, quantization: str | None) -> tuple[tuple[Weight, ...], str]:
    """The matrices: from headers, or from the configuration where those are missing or hold codes."""
    tensors = _planned(files.tensors, fields) if files.tensors is not None else None
    has_codes = tensors is not None and any(tensor.is_code for tensor in tensors)
    if tensors is not None and not has_codes:
        return weights_from_tensors(tensors), files.counted_from
    if fields.model_type in FAMILIES:
        return weights_of(fields), "config.json"
    if tensors is None:
        fields.notes.append("weights are not counted: there is no header to read the matrices from")
        return (), "config.json"
    fields.notes.append(f"parameters are numbers as stored: {quantization} keeps several in one")
    return weights_from_tensors(tensors), files.counted_from


def _planned(tensors: Sequence[StoredTensor], fields: ConfigFields) -> list[StoredTensor]:
    """Without layers behind the last one, which predict further tokens and are loaded only for that."""
    count = fields.num_layers
    kept = [tensor for tensor in tensors if tensor.layer is None or tensor.layer < count]
    if len(kept) < len(tensors):
        fields.notes.append(
            f"{len(tensors) - len(kept)} tensors of layers beyond num_hidden_layers={count} are not planned for"
        )
    return kept
