"""A model to a GGUF file: the original weights, one tensor at a time, in the types that the plan chose."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor

from quantkit.errors import QuantizationError
from quantkit.export_gguf.file_record import write_manifest
from quantkit.export_gguf.header import WEIGHTED_KEY, add_header
from quantkit.export_gguf.output_file import open_output
from quantkit.export_gguf.plan import ExportPlan, make_export_plan, refuse_codes, tensor_bytes, usable_importance_of
from quantkit.export_gguf.tensors import ExportTensor, ParameterReader
from quantkit.formats.gguf.block_types import BLOCK_TYPES
from quantkit.formats.gguf.blocks import encode_rows
from quantkit.source import ModelSource
from quantkit.source.gguf import file_sha256

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
    allow_requantize: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a model as GGUF, with its manifest beside it.

    Args:
        source: the model, in its original weights.
        path: of the file.
        file_type: such as ``Q4_K_M``; a key of ``mixes.BASE_TYPES``.
        importance: GGUF name -> [K] mean square of each input column (for experts [E, K]); None for none.
        overrides: (regular expression that matches a whole GGUF name, type), the first that matches wins.
        pretokenizer: llama.cpp's name of it, if it is not to be told from the tokenizer.
        split_bytes: write parts of at most so many bytes; 0 for one file.
        allow_requantize: take a .gguf that holds codes.
        overwrite: replace a file that is there.
        progress: is called with (stage, done, total).

    Returns:
        The record: files with size and hash, types, notes.

    Raises:
        UsageError: something cannot be written as GGUF; the message names it.
        QuantizationError: a tensor holds NaN or does not fit its type.
        CheckpointError: the file cannot be written. Nothing is left under its name.
    """
    if not allow_requantize:
        refuse_codes(source)
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
    calibration: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    with_manifest: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a planned file; see :func:`export_gguf`.

    Args:
        plan: of the file.
        path: of the file.
        importance: as there.
        solved_blocks: gives, decoder block by decoder block, the bytes of tensors that are solved already; the output
            matrix comes after them.
        split_bytes: as there.
        overwrite: as there.
        provenance: more keys under ``quantkit.*`` and their values.
        calibration: record of the tokens, for the record.
        notes: on how the plan was made, for the record.
        with_manifest: write NAME.quantkit.json too; a recipe writes its own.
        progress: as there.
    """
    started = time.perf_counter()
    weights = usable_importance_of(plan, importance or {})
    encoder = _Encoder(plan, weights, solved_blocks)
    with open_output(path, plan.family.name, split_bytes=split_bytes, overwrite=overwrite) as (writer, folder):
        said = add_header(writer, plan)
        writer.add_bool(WEIGHTED_KEY, encoder.is_weighted)
        for key, text in (provenance or {}).items():
            writer.add_string(f"quantkit.{key}", text)
        _write_tensors(writer, plan, encoder, progress or (lambda stage, done, total: None))
        writer.close()
        record = _record(plan, folder) | {
            "importance_entries": len(weights),
            "error_feedback": solved_blocks is not None,
            "notes": [*said, *_unseen_experts(weights), *encoder.notes(), *notes],
            "calibration": calibration,
            "seconds": round(time.perf_counter() - started, 2),
        }
        if with_manifest:
            write_manifest(folder / path.name, plan.source, record)
    return record


def _write_tensors(writer: GGUFWriter, plan: ExportPlan, encoder: "_Encoder", progress: Progress) -> None:
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
        progress("export", done, len(plan.tensors))


def _record(plan: ExportPlan, folder: Path) -> dict[str, Any]:
    """What the plan says, and the files that lie in the folder."""
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(folder.iterdir())
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
        self._alike: list[str] = []

    @property
    def is_weighted(self) -> bool:
        """Whether importance or error feedback has a say."""
        return bool(self._importance) or self._solved_blocks is not None

    def notes(self) -> list[str]:
        """A line on the tensors, if there are any, of which nothing was measured while it was of others."""
        if not self._alike or not self.is_weighted:
            return []
        more = f" and {len(self._alike) - 1} more" if len(self._alike) > 1 else ""
        return [f"nothing was measured of {self._alike[0]}{more}: all columns count the same"]

    def encode(self, tensor: ExportTensor) -> Tensor:
        """Its bytes.

        Raises:
            QuantizationError: it does not fit its type; the message names it.
        """
        block = ".".join(tensor.name.split(".")[:2]) if tensor.name.startswith(("blk.", "output.")) else ""
        if block and block != self._block and self._solved_blocks is not None:
            self._block, self._solved = block, dict(next(self._solved_blocks, {}))
        if tensor.name in self._solved:
            return self._solved.pop(tensor.name)
        value, type_name = self._reader.read(tensor), self._plan.types[tensor.name]
        importance = self._importance.get(tensor.name)
        if importance is None and type_name in BLOCK_TYPES:
            self._alike.append(tensor.name)
        try:
            if value.dim() == 3 and importance is not None:
                experts = zip(value, importance, strict=True)
                return torch.stack([encode_rows(expert, type_name, columns) for expert, columns in experts])
            return encode_rows(value, type_name, importance)
        except QuantizationError as error:
            raise QuantizationError(f"{tensor.name}: {error}") from error
