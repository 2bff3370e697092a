"""What is in a model: format, schemes, bits per weight, biggest tensors, provenance; no weight is read."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.manifest import read_manifest
from quantkit.errors import CheckpointError, SourceError
from quantkit.formats import read_quantization_config
from quantkit.formats.gguf.header import GgufHeader, GgufHeaderError, read_gguf_header
from quantkit.formats.safetensors_file import DTYPE_NAMES
from quantkit.source import ModelSource, TensorInfo, open_source
from quantkit.source.skeleton import code_tensors

SCHEMA_VERSION = 1
NUM_LARGEST = 10
NUM_WORST = 10
WORD_BITS = 32
# modules that hold a row a token and not a matrix of a block
EMBEDDINGS = frozenset(
    ("embed_tokens", "lm_head", "wte", "wpe", "word_embeddings", "embed_in", "embed_out", "token_embd", "output")
)
FACTS = ("format", "bits", "group_size", "sym", "desc_act", "zero_point", "version", "checkpoint_format", "quant_type")


@dataclass(frozen=True, slots=True)
class Item:
    """A weight as it is stored: one tensor, or the tensors of a quantized layer together.

    Attributes:
        name: of the layer or tensor.
        scheme: how it is stored, such as ``W4A16 g64 symmetric`` or ``BF16``.
        num_weights: weights that it stands for.
        nbytes: stored bytes.
        shape: of the weight.
        is_layer: True if it is stored as codes.
    """

    name: str
    scheme: str
    num_weights: int
    nbytes: int
    shape: tuple[int, ...]
    is_layer: bool = False

    @property
    def in_body(self) -> bool:
        """False for embeddings and the output head."""
        return not EMBEDDINGS.intersection(self.name.split("."))


def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """What is in a model, as one JSON document.

    Args:
        path: a folder, a .gguf file (only its header is read), or a hub id.

    Raises:
        SourceError: it cannot be found or is broken.
        CheckpointError: its quantkit.json is broken.
    """
    if Path(path).suffix == ".gguf":
        return _inspect_gguf(Path(path).expanduser())
    source = open_source(path)
    form, facts, notes, items = _read_items(source)
    manifest = read_manifest(source.folder)
    files = sorted({info.shard for info in source.tensors.values()})
    return _report(source.name, form, items) | {
        "kind": source.kind,
        "model_type": source.config.model_type,
        "quantization": facts,
        "notes": notes,
        "files": [{"name": name, "bytes": (source.folder / name).stat().st_size} for name in files],
        "side_files": [str(side.relative_to(source.folder)) for side in source.side_files()],
        "provenance": _provenance(manifest),
        "worst_layers": _worst_layers(manifest),
    }


def _report(name: str, form: str, items: list[Item]) -> dict[str, Any]:
    """What can be said of any list of items."""
    body = [item for item in items if item.in_body]
    schemes: dict[str, dict[str, Any]] = {}
    for item in items:
        entry = schemes.setdefault(item.scheme, {"scheme": item.scheme, "count": 0, "weights": 0, "bytes": 0})
        entry["count"] += 1
        entry["weights"] += item.num_weights
        entry["bytes"] += item.nbytes
    largest = sorted(items, key=lambda item: (-item.nbytes, item.name))[:NUM_LARGEST]
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "format": form,
        "weights": sum(item.num_weights for item in items),
        "bytes": sum(item.nbytes for item in items),
        "bits_per_weight": {"body": _bits_per_weight(body), "overall": _bits_per_weight(items)},
        "schemes": sorted(schemes.values(), key=lambda entry: (-entry["bytes"], entry["scheme"])),
        "quantized_layers": sum(item.is_layer for item in items),
        "largest": [asdict(item) for item in largest],
    }


def _bits_per_weight(items: list[Item]) -> float | None:
    weights = sum(item.num_weights for item in items)
    return 8 * sum(item.nbytes for item in items) / weights if weights else None


def _read_items(source: ModelSource) -> tuple[str, dict[str, Any], list[str], list[Item]]:
    """Format, facts about the quantization, notes, and what is stored."""
    config = source.quantization
    layers = code_tensors({name: info.dtype for name, info in source.tensors.items()})
    if config is None:
        return "safetensors", {}, [], _items(source, {}, "", {})
    method = str(config.get("quant_method", "unknown"))
    facts = {"method": method} | {key: config[key] for key in FACTS if key in config}
    if config.get("kv_cache_scheme"):
        facts["kv_cache_scheme"] = config["kv_cache_scheme"]
    form = " ".join(
        [method, *(str(config[key]) for key in ("format", "checkpoint_format", "version") if key in config)]
    )
    try:
        stored = read_quantization_config(config)
    except CheckpointError as error:
        bits, group_size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
        label = f"{method} {bits} bits g{group_size}" if bits is not None else form
        return form, facts, [f"{error}: sizes only"], _items(source, {}, label, layers, int(bits or 0))
    schemes = {layer: stored.scheme_of(layer) for layer in layers}
    words = {layer: str(scheme or "codes without a scheme") for layer, scheme in schemes.items()}
    bits = {scheme.num_bits for scheme in schemes.values() if scheme is not None}
    facts |= {"ignore": list(config.get("ignore") or config.get("modules_to_not_convert") or ())}
    return form, facts, [], _items(source, words, form, layers, max(bits, default=0))


def _items(
    source: ModelSource,
    schemes: Mapping[str, str],
    label: str,
    layers: Mapping[str, list[str]],
    num_bits: int = 0,
) -> list[Item]:
    """Gather the tensors of each quantized layer; other tensors stand for themselves."""
    layer_of = {name: layer for layer, names in layers.items() for name in names}
    items = []
    for name, info in source.tensors.items():
        if name not in layer_of:
            items.append(Item(name, DTYPE_NAMES[info.dtype], math.prod(info.shape), info.nbytes, info.shape))
    for layer, names in layers.items():
        tensors = {name.rpartition(".")[2]: source.tensors[name] for name in names}
        shape = _layer_shape(source, layer, tensors, num_bits)
        nbytes = sum(info.nbytes for info in tensors.values())
        items.append(Item(layer, schemes.get(layer, label), shape[0] * shape[1], nbytes, shape, is_layer=True))
    return items


def _layer_shape(source: ModelSource, layer: str, tensors: Mapping[str, TensorInfo], num_bits: int) -> tuple[int, int]:
    """(N, K) of a layer that is stored as codes."""
    if "weight_shape" in tensors:
        rows, columns = source.read(f"{layer}.weight_shape").tolist()
        return int(rows), int(columns)
    if "weight" in tensors:
        return tensors["weight"].shape[0], tensors["weight"].shape[1]
    if "g_idx" in tensors and "scales" in tensors:
        return tensors["scales"].shape[1], tensors["g_idx"].shape[0]
    if "scales" in tensors and num_bits:  # AWQ packs along N, GPTQ along K; scales are [G, N]
        words = math.prod(tensors["qweight"].shape)
        rows = tensors["scales"].shape[1]
        return rows, words * WORD_BITS // num_bits // rows
    return 0, 0


def _provenance(manifest: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Where the checkpoint comes from, without the long parts of quantkit.json."""
    if manifest is None:
        return None
    keys = ("quantkit_version", "recipe_sha256", "model", "calibration", "seed", "versions", "machine", "seconds")
    return {key: manifest[key] for key in keys if key in manifest}


def _worst_layers(manifest: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The layers with the largest error, by output where it was measured and else by weight."""
    layers = (manifest or {}).get("layers") or []
    for measure in ("relative_output_error", "relative_weight_error"):
        measured = [layer for layer in layers if layer.get(measure) is not None]
        if measured:
            worst = sorted(measured, key=lambda layer: -layer[measure])[:NUM_WORST]
            keys = ("name", "scheme", "algorithm", "fallbacks")
            return [{"measure": measure, "error": w[measure]} | {k: w[k] for k in keys if k in w} for w in worst]
    return []


def _inspect_gguf(path: Path) -> dict[str, Any]:
    """A .gguf by its header alone."""
    try:
        header = read_gguf_header(path)
    except GgufHeaderError as error:
        raise SourceError(f"{path} is no whole GGUF file: {error}", fix="Download it again") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    items = [
        Item(
            t.name, t.type_name, t.num_elements, t.nbytes, tuple(reversed(t.shape)), is_layer=_is_quantized(t.type_name)
        )
        for t in header.tensors
    ]
    return _report(path.name, f"gguf version {header.version}", items) | {
        "kind": "gguf",
        "model_type": header.metadata.get("general.architecture"),
        "quantization": {"method": "gguf"},
        "notes": [] if "tokenizer.chat_template" in header.metadata else ["it has no chat template"],
        "files": [{"name": path.name, "bytes": path.stat().st_size}],
        "side_files": [],
        "provenance": _gguf_provenance(header),
        "worst_layers": [],
    }


def _is_quantized(type_name: str) -> bool:
    return re.fullmatch(r"F\d+|BF16|I\d+", type_name) is None


def _gguf_provenance(header: GgufHeader) -> dict[str, Any]:
    """What the file says of its origin."""
    keys = ("general.name", "general.basename", "general.size_label", "general.license", "general.file_type")
    return {key.removeprefix("general."): header.metadata[key] for key in keys if key in header.metadata}
