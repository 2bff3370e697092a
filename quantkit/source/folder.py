"""What an ordinary model folder must hold, checked before anything is read: config.json and whole safetensors files."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantkit.errors import SourceError
from quantkit.formats.safetensors_file import SafetensorsFileError, TensorSlot, read_header
from quantkit.formats.shards import INDEX_NAME

SINGLE_NAME = "model.safetensors"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_SUFFIXES = (*PICKLED_SUFFIXES, ".safetensors", ".h5", ".msgpack", ".gguf", ".onnx", ".partial")
NOT_SIDE_FILES = ("config.json", "quantkit.json")
SIDE_FOLDERS = ("additional_chat_templates",)
OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "image_token_id")
MAX_TEXT = 300  # of somebody else's error in one of ours
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
CAUSAL_ARCHITECTURES = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def first_line(error: BaseException) -> str:
    """The first paragraph of an error's text on one line, without the full stop and not endlessly long."""
    lines: list[str] = []
    for line in str(error).strip().splitlines():
        if not line.strip() and lines:
            break
        lines.append(line.strip())
    text = " ".join(lines) or type(error).__name__
    return (text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "...").rstrip(".")


def side_files(folder: Path) -> list[Path]:
    """What belongs to the model beside weights, their index and config.json: tokenizer, template, code, card."""
    found = [path for path in folder.iterdir() if path.is_file()]
    for name in SIDE_FOLDERS:
        found += [path for path in (folder / name).glob("*") if path.is_file()]
    return sorted(path for path in found if not _is_weight_or_config(path.name))


def _is_weight_or_config(name: str) -> bool:
    return name in NOT_SIDE_FILES or name.startswith(".") or name.endswith((*WEIGHT_SUFFIXES, ".index.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model.

    Raises:
        SourceError: missing, unreadable, or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{path.parent} has no {path.name}", fix="It is no model folder, or incomplete") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SourceError(f"{path} is no valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds no JSON object")
    return value


def load_config(folder: Path) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The configuration of a causal decoder of text, and config.json as it is written.

    Raises:
        SourceError: missing, broken, an unknown kind of model, or no causal decoder of text.
    """
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if raw.get("is_encoder_decoder"):
        raise SourceError(f"{folder} holds an encoder-decoder model ({model_type}); quantkit takes decoders only")
    others = [key for key in OTHER_INPUTS if key in raw]
    if others:
        raise SourceError(
            f"{folder} holds a model of more than text ({model_type} has {others[0]}); quantkit takes text only"
        )
    unknown = [name for name in raw.get("architectures") or () if name not in CAUSAL_ARCHITECTURES]
    if "auto_map" in raw and (unknown or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        name = unknown[0] if unknown else f"the model type {model_type}"
        raise SourceError(f"{folder} needs its own code for {name}, which is not supported yet")
    if unknown:
        raise SourceError(f"{folder} holds {unknown[0]}, which is no causal decoder that transformers knows")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        # Each family checks its configuration in its own way; whatever it raises, it refuses this one.
        raise SourceError(f"transformers cannot read {folder / 'config.json'}: {first_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise SourceError(f"{folder} holds a {config.model_type} model, which is no causal decoder")
    return config, raw


def read_shards(folder: Path) -> dict[str, tuple[str, TensorSlot]]:
    """Every tensor of the model -> its file and its place there; all files are checked to be whole.

    Raises:
        SourceError: no safetensors weights, a missing or broken file, or a tensor that the index promises in vain.
    """
    if (folder / SINGLE_NAME).is_file():
        return {name: (SINGLE_NAME, slot) for name, slot in _read_shard(folder / SINGLE_NAME).items()}
    if not (folder / INDEX_NAME).is_file():
        raise _no_weights(folder)
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{folder / INDEX_NAME} has no weight_map")
    slots: dict[str, tuple[str, TensorSlot]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise SourceError(f"{folder} lacks {shard}, which its index names", fix="Download it again")
        for name, slot in _read_shard(folder / shard).items():
            if weight_map.get(name, shard) == shard:
                slots[name] = (shard, slot)
    for name, shard in weight_map.items():
        if name not in slots:
            raise SourceError(f"{folder / shard} lacks the tensor {name}, which the index promises")
    return slots


def _read_shard(path: Path) -> dict[str, TensorSlot]:
    try:
        return read_header(path)
    except SafetensorsFileError as error:
        raise SourceError(f"{path} is no whole safetensors file: {error}", fix="Download it again") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error


def _no_weights(folder: Path) -> SourceError:
    """Why a folder without model.safetensors cannot be used."""
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.endswith(PICKLED_SUFFIXES)]
    if pickled:
        return SourceError(
            f"{folder} has its weights only as {pickled[0]}, a pickle that can run code when it is loaded",
            fix="Load it once with transformers and save_pretrained to a new folder, which writes safetensors",
        )
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return SourceError(f"{folder} has no {SINGLE_NAME}", fix=f"Give the file itself: {folder / ggufs[0]}")
    return SourceError(f"{folder} has no {SINGLE_NAME} and no {INDEX_NAME}")
