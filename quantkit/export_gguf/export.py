"""A model to a GGUF file: the original weights, one tensor at a time, in the types that the plan chose."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor

from quantkit import __version__
from quantkit.errors import QuantizationError
from quantkit.export_gguf.metadata import add_hyperparameters
from quantkit.export_gguf.mixes import file_type_number
from quantkit.export_gguf.output_file import open_output, written_files
from quantkit.export_gguf.plan import ExportPlan, make_export_plan, tensor_bytes, usable_importance_of
from quantkit.export_gguf.tensors import ExportTensor, ParameterReader
from quantkit.export_gguf.tokenizer import add_tokenizer
from quantkit.formats.gguf.blocks import encode_rows
from quantkit.gguf_source import CONFIG_KEY, file_sha256
from quantkit.model_folder import read_json
from quantkit.source import ModelSource

Progress = Callable[[str, int, int], None]
Solved = Mapping[str, Tensor]  # GGUF name -> bytes that an algorithm has made


def export_gguf(
    source: ModelSource,
    path: Path,
    file_type: str,
    *,
    importance: Mapping[str, Tensor] | None = None,
    overrides: Iterable[tuple[str, str]] = (),
    pretokenizer: str | None = None,
    split_bytes: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a model as GGUF.

    Args:
        source: the model, in its original weights.
        path: of the file.
        file_type: such as ``Q4_K_M``; a key of ``mixes.BASE_TYPES``.
        importance: GGUF name -> [K] mean square of each input column (for experts [E, K]); None for none.
        overrides: (regular expression that matches a whole GGUF name, type), the first that matches wins.
        pretokenizer: llama.cpp's name of it, if it is not to be told from the tokenizer.
        split_bytes: write parts of at most so many bytes; 0 for one file.
        overwrite: replace a file that is there.
        progress: is called with (stage, done, total).

    Returns:
        The record: files with size and hash, types, notes.

    Raises:
        UsageError: something cannot be written as GGUF; the message names it.
        QuantizationError: a tensor holds NaN or does not fit its type.
        CheckpointError: the file cannot be written. Nothing is left under its name.
    """
    plan = make_export_plan(
        source, file_type, has_importance=bool(importance), overrides=overrides, pretokenizer=pretokenizer
    )
    return write_plan(
        plan, path, importance=importance, split_bytes=split_bytes, overwrite=overwrite, progress=progress
    )


def write_plan(
    plan: ExportPlan,
    path: Path,
    *,
    importance: Mapping[str, Tensor] | None = None,
    solved_blocks: Iterator[Solved] | None = None,
    split_bytes: int = 0,
    overwrite: bool = False,
    provenance: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a planned file; see :func:`export_gguf`.

    Args:
        plan: of the file.
        path: of the file.
        importance: as there.
        solved_blocks: gives, decoder block by decoder block, the bytes of tensors that are solved already.
        split_bytes: as there.
        overwrite: as there.
        provenance: more keys under ``quantkit.*`` and their values.
        progress: as there.
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done, total: None)
    weights = usable_importance_of(plan, importance or {})
    encoder = _Encoder(plan, weights, solved_blocks)
    with open_output(path, plan.family.name, split_bytes=split_bytes, overwrite=overwrite) as writer:
        notes = _add_metadata(writer, plan)
        for key, text in (provenance or {}).items():
            writer.add_string(f"quantkit.{key}", text)
        for name, value in plan.rope.items():
            writer.add_tensor_info(name, value.shape, np.dtype(np.float32), value.numel() * 4)
        for tensor in plan.tensors:
            kind = gguf.GGMLQuantizationType[plan.types[tensor.name]]
            size = tensor_bytes(tensor.shape, plan.types[tensor.name])
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for value in plan.rope.values():
            writer.write_tensor_data(value.numpy())
        for done, tensor in enumerate(plan.tensors, start=1):
            writer.write_tensor_data(encoder.encode(tensor).numpy())
            report("export", done, len(plan.tensors))
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file)} for file in written_files(path)
    ]
    return {
        "format": "gguf",
        "model": plan.source.name,
        "architecture": plan.family.name,
        "file_type": plan.file_type,
        "pretokenizer": plan.vocabulary.pretokenizer,
        "files": files,
        "source_bytes": sum(info.nbytes for info in plan.source.tensors.values()),
        "bits_per_weight": plan.bits_per_weight,
        "types": dict(Counter(plan.types.values())),
        "tensors": dict(plan.types),
        "importance_entries": len(weights),
        "error_feedback": solved_blocks is not None,
        "notes": notes + _unseen_experts(weights),
        "seconds": round(time.perf_counter() - started, 2),
    }


def _unseen_experts(importance: Mapping[str, Tensor]) -> list[str]:
    """A note on the experts that no token of the calibration reached: their columns count the same."""
    unseen = {name: int((~(values.sum(-1) > 0)).sum()) for name, values in importance.items() if values.dim() == 2}
    return [
        f"{name}: {count} experts saw no token, their columns count the same" for name, count in unseen.items() if count
    ]


class _Encoder:
    """The bytes of each tensor: those that an algorithm has solved, or the weight encoded here."""

    def __init__(
        self, plan: ExportPlan, importance: Mapping[str, Tensor], solved_blocks: Iterator[Solved] | None
    ) -> None:
        self._plan, self._importance = plan, importance
        self._reader = ParameterReader(plan.source, plan.model)
        self._solved_blocks = solved_blocks
        self._block, self._solved = "", dict[str, Tensor]()

    def encode(self, tensor: ExportTensor) -> Tensor:
        """Its bytes.

        Raises:
            QuantizationError: it does not fit its type; the message names it.
        """
        block = ".".join(tensor.name.split(".")[:2]) if tensor.name.startswith("blk.") else ""
        if block and block != self._block and self._solved_blocks is not None:
            self._block, self._solved = block, dict(next(self._solved_blocks))
        if tensor.name in self._solved:
            return self._solved.pop(tensor.name)
        value, type_name = self._reader.read(tensor), self._plan.types[tensor.name]
        importance = self._importance.get(tensor.name)
        try:
            if value.dim() == 3 and importance is not None:
                experts = zip(value, importance, strict=True)
                return torch.stack([encode_rows(expert, type_name, columns) for expert, columns in experts])
            return encode_rows(value, type_name, importance)
        except QuantizationError as error:
            raise QuantizationError(f"{tensor.name}: {error}") from error


def _add_metadata(writer: GGUFWriter, plan: ExportPlan) -> list[str]:
    """Everything before the tensors. Returns notes."""
    source, config = plan.source, plan.source.config
    writer.add_type("model")
    writer.add_name(source.name)
    writer.add_file_type(file_type_number(plan.file_type))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    notes = add_hyperparameters(writer, config, plan.family)
    tokenizer = source.tokenizer()
    add_tokenizer(writer, tokenizer, plan.vocabulary, _end_tokens(source))
    writer.add_string("quantkit.version", __version__)
    writer.add_string(CONFIG_KEY, (source.folder / "config.json").read_text(encoding="utf-8"))
    writer.add_string("quantkit.source", source.name)
    writer.add_string("quantkit.source_fingerprint", source.fingerprint())
    if source.revision:
        writer.add_string("quantkit.source_revision", source.revision)
    return notes + plan.vocabulary.notes


def _end_tokens(source: ModelSource) -> list[int]:
    """Every token at which a generation ends, by generation_config.json, else by config.json."""
    path = source.folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    value = getattr(source.config, "eos_token_id", None) if value is None else value
    return [int(token) for token in (value if isinstance(value, list) else [] if value is None else [value])]
