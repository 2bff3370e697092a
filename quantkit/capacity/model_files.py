"""Finds config.json and the headers of a model: hub id, folder, .gguf, or a config.json; no weight is read."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.capacity.config_fields import GGUF_FAMILIES
from quantkit.capacity.hub_files import CONFIG, download_config, hub_headers
from quantkit.capacity.stored_tensors import StoredTensor, safetensors_bytes
from quantkit.errors import SourceError

if TYPE_CHECKING:
    from quantkit.formats.gguf.header import GgufHeader

PART = re.compile(r"(.+)-(\d{5})-of-\d{5}\.gguf")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What was found of a model.

    Attributes:
        name: hub id, or name of the folder or file.
        config: config.json, or the same made from a .gguf's metadata.
        where: what error lines call the configuration.
        tensors: of the headers; None if there are none at hand.
        stored_bytes: of all tensors; of an index alone what it says.
        counted_from: the headers' kind, or ``config.json``.
        notes: what is missing.
    """

    name: str
    config: dict[str, Any]
    where: str
    tensors: tuple[StoredTensor, ...] | None = None
    stored_bytes: int | None = None
    counted_from: str = CONFIG
    notes: list[str] = field(default_factory=list)


def find_model(model: str) -> ModelFiles:
    """Open a model without its weights.

    Args:
        model: hub id, folder, .gguf file, or a config.json.

    Raises:
        SourceError: not found, or broken; one line with the file and the fix.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SourceError(f"no such file: {path}")
        return _gguf(path)
    if path.suffix == ".json" and path.is_file():
        return ModelFiles(path.resolve().parent.name, _read_json(path), str(path))
    if path.is_dir():
        return _folder(path.resolve(), path.resolve().name)
    if path.exists():
        raise SourceError(f"{path} is neither a folder, a .gguf file nor a config.json")
    if not HUB_ID.fullmatch(model) or model.startswith("."):
        raise SourceError(f"no such folder: {path}", fix="Give a folder, a .gguf file or a hub id such as owner/name")
    return _hub(model)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{path.parent} has no {path.name}", fix="It is no model folder, or incomplete") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SourceError(f"{path} is no valid JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds no JSON object")
    return value


def _folder(folder: Path, name: str) -> ModelFiles:
    """A folder: headers if all its shards are there, else the index, else the configuration alone."""
    files = ModelFiles(name, _read_json(folder / CONFIG), str(folder / CONFIG))
    if (folder / SINGLE).is_file():
        shards, promised = [SINGLE], None
    elif (folder / INDEX).is_file():
        index = _read_json(folder / INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise SourceError(f"{folder / INDEX} has no weight_map")
        shards, promised = sorted(set(weight_map.values())), (index.get("metadata") or {}).get("total_size")
    else:
        return files
    if not all((folder / shard).is_file() for shard in shards):
        note = "the weight files are not here: parameters are counted from config.json"
        stored = promised if isinstance(promised, int) else None
        return ModelFiles(name, files.config, files.where, None, stored, CONFIG, [note])
    tensors = tuple(tensor for shard in shards for tensor in _read_shard(folder / shard))
    total = sum(tensor.nbytes for tensor in tensors)
    return ModelFiles(name, files.config, files.where, tensors, total, "safetensors headers")


def _read_shard(path: Path) -> list[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as shard:
            found = []
            for name in shard.keys():  # noqa: SIM118 - not a dict
                part = shard.get_slice(name)
                shape = tuple(part.get_shape())
                found.append(StoredTensor(name, shape, safetensors_bytes(part.get_dtype(), shape)))
            return found
    except SafetensorError as error:
        raise SourceError(f"{path} is no whole safetensors file: {error}", fix="Download it again") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error


def _hub(name: str) -> ModelFiles:
    """A hub id: config.json from the network or the cache, then headers from the cache or by reading their range."""
    from huggingface_hub import try_to_load_from_cache

    config = download_config(name)
    index = try_to_load_from_cache(name, INDEX)
    if (config.parent / SINGLE).exists() or isinstance(index, str):
        files = _folder(config.parent, name)
        if files.tensors is not None:
            return files
    tensors, note = hub_headers(name)
    if tensors is None:
        return ModelFiles(name, _read_json(config), f"{name}/{CONFIG}", notes=[note] if note else [])
    total = sum(tensor.nbytes for tensor in tensors)
    return ModelFiles(name, _read_json(config), f"{name}/{CONFIG}", tensors, total, "safetensors headers of the hub")


# config.json's field -> the end of the metadata key that has it in a .gguf
GGUF_FIELDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}


def _gguf(path: Path) -> ModelFiles:
    header = _read_header(path)
    parts = header.metadata.get("split.count", 1)
    headers = [header]
    if isinstance(parts, int) and parts > 1:
        found = PART.fullmatch(path.name)
        if found is None or int(found[2]) != 1:
            first = f"the part 00001-of-{parts:05d}"
            raise SourceError(f"{path} is one part of a split GGUF", fix=f"Give {first}, with the others beside it")
        others = [f"{found[1]}-{number:05d}-of-{parts:05d}.gguf" for number in range(2, parts + 1)]
        headers += [_read_header(path.with_name(name)) for name in others]
    family = header.metadata.get("general.architecture")
    if not isinstance(family, str):
        raise SourceError(f"{path} does not say its general.architecture")
    config: dict[str, Any] = {"model_type": GGUF_FAMILIES.get(family, family)}
    for name, key in GGUF_FIELDS.items():
        value = header.metadata.get(f"{family}.{key}")
        if value is not None:
            config[name] = list(value) if isinstance(value, tuple) else value
    if "kv_lora_rank" in config:  # the key of llama.cpp's MLA is the latent's
        key = header.metadata.get(f"{family}.attention.key_length_mla", config.pop("head_dim"))
        config["qk_nope_head_dim"] = key - config["qk_rope_head_dim"]
        config["v_head_dim"] = header.metadata.get(f"{family}.attention.value_length_mla", key)
    else:
        config.pop("qk_rope_head_dim", None)
    stored = [tensor for part in headers for tensor in part.tensors]
    names = {tensor.name for tensor in stored}
    config["tie_word_embeddings"] = "output.weight" not in names
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = header.metadata.get(f"{family}.vocab_size", len(tokens) if tokens else None)
    tensors = tuple(StoredTensor(t.name, tuple(reversed(t.shape)), t.nbytes) for t in stored)
    total = sum(tensor.nbytes for tensor in tensors)
    return ModelFiles(path.name, config, str(path), tensors, total, "the GGUF header")


def _read_header(path: Path) -> "GgufHeader":
    from quantkit.formats.gguf.header import GgufHeaderError, read_gguf_header

    try:
        return read_gguf_header(path)
    except GgufHeaderError as error:
        raise SourceError(f"{path} is no whole GGUF file: {error}", fix="Download it again") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
