"""What a user asks of an export, and the order in which it is done: plan, measure, choose types, write."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.calibration.dataset import CalibrationSet
from quantkit.errors import UsageError
from quantkit.export_gguf.allocation import allocate_types
from quantkit.export_gguf.calibrated_blocks import calibration_windows, measure_importance
from quantkit.export_gguf.error_feedback import solve_blocks
from quantkit.export_gguf.export import write_plan
from quantkit.export_gguf.imatrix import ImportanceMatrix, read_imatrix, write_imatrix
from quantkit.export_gguf.mixes import most_frequent
from quantkit.export_gguf.output_file import check_output
from quantkit.export_gguf.plan import ExportPlan, make_export_plan, refuse_codes
from quantkit.source import open_source

MAX_BITS = 32  # a weight
MIN_TOKENS = 8  # the shortest window

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Options of ``quantkit export gguf``.

    Attributes:
        model: hub id or folder.
        path: of the file.
        file_type: such as ``Q4_K_M``.
        calibration: ``builtin``, a text file, or None.
        tokens: of the calibration.
        error_feedback: solve layers with GPTQ.
        imatrix: an importance matrix to read.
        save_imatrix: where to write the measured one.
        target_bpw: bits a weight for which types are chosen.
        overrides: (regular expression of a GGUF name, type).
        pretokenizer: llama.cpp's name.
        split_size: largest part in 10^9 bytes.
        allow_requantize: take a .gguf that holds codes.
        overwrite: replace a file that is there.
    """

    model: str
    path: Path
    file_type: str = "Q4_K_M"
    calibration: str | None = None
    tokens: int = 16384
    error_feedback: bool = False
    imatrix: Path | None = None
    save_imatrix: Path | None = None
    target_bpw: float | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    pretokenizer: str | None = None
    split_size: float | None = None
    allow_requantize: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.target_bpw is not None and not 0 < self.target_bpw <= MAX_BITS:  # NaN is refused too
            raise UsageError(f"--target-bpw {self.target_bpw:g} is not more than 0 and at most {MAX_BITS}")
        if self.tokens < MIN_TOKENS:
            raise UsageError(f"--tokens {self.tokens} is less than {MIN_TOKENS}")
        if self.calibration is None and (self.error_feedback or self.target_bpw or self.save_imatrix):
            raise UsageError("--error-feedback, --target-bpw and --save-imatrix need --calibration")
        if self.calibration is not None and self.imatrix is not None:
            raise UsageError("--imatrix and --calibration exclude each other")
        if self.split_size is not None and not 0 < self.split_size < math.inf:
            raise UsageError(f"--split-size {self.split_size:g} is not a positive number of gigabytes")


def run_export(request: ExportRequest, progress: Progress | None = None) -> dict[str, Any]:
    """Do what is asked; see :func:`quantkit.export_gguf.export_gguf` for what can go wrong.

    Returns:
        The record of the file.
    """
    check_output(request.path, overwrite=request.overwrite)
    if request.save_imatrix is not None and request.save_imatrix.exists() and not request.overwrite:
        raise UsageError(f"{request.save_imatrix} exists", fix="Choose another name, or --overwrite")
    source = open_source(request.model)
    if not request.allow_requantize:
        refuse_codes(source)
    plan = make_export_plan(
        source,
        request.file_type,
        has_importance=request.imatrix is not None or request.calibration is not None,
        overrides=request.overrides,
        pretokenizer=request.pretokenizer,
    )
    importance = read_imatrix(request.imatrix).means if request.imatrix is not None else {}
    windows = None
    if request.calibration is not None:
        windows = calibration_windows(source, request.calibration, request.tokens)
        if not request.error_feedback or request.target_bpw or request.save_imatrix:
            importance = measure_importance(plan, windows, progress)
            if request.save_imatrix is not None:
                importance = _save(request.save_imatrix, importance, windows)
    return write_calibrated(
        plan,
        request.path,
        windows,
        importance,
        target_bpw=request.target_bpw,
        error_feedback=request.error_feedback,
        overrides=request.overrides,
        split_bytes=int((request.split_size or 0) * 1e9),
        overwrite=request.overwrite,
        progress=progress,
    )


def write_calibrated(
    plan: ExportPlan,
    path: Path,
    windows: CalibrationSet | None,
    importance: Mapping[str, Tensor],
    *,
    target_bpw: float | None = None,
    error_feedback: bool = False,
    overrides: tuple[tuple[str, str], ...] = (),
    split_bytes: int = 0,
    overwrite: bool = False,
    provenance: Mapping[str, str] | None = None,
    with_manifest: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Choose types if a size is given, solve if feedback is asked for, and write.

    Args:
        plan: of the file.
        path: of the file.
        windows: calibration tokens, which ``target_bpw`` and ``error_feedback`` need.
        importance: GGUF name -> mean squares of the input columns.
        target_bpw: bits a weight for which types are chosen.
        error_feedback: solve layers with GPTQ.
        overrides: of the plan: tensors whose type is not chosen.
        split_bytes: largest part; 0 for one file.
        overwrite: replace a file that is there.
        provenance: written into the file under ``quantkit.*``.
        with_manifest: write NAME.quantkit.json too.
        progress: is called with (stage, done, total).

    Returns:
        The record of the file.
    """
    notes = []
    if target_bpw is not None:
        assert windows is not None, "types are chosen on calibration windows"
        types, note = allocate_types(plan, importance, windows, target_bpw, pinned=overrides)
        plan, notes = replace(plan, types=types, file_type=most_frequent(types)), [note]
    return write_plan(
        plan,
        path,
        importance=importance,
        solved_blocks=solve_blocks(plan, windows) if error_feedback and windows is not None else None,
        split_bytes=split_bytes,
        overwrite=overwrite,
        provenance=provenance,
        calibration=windows.to_record() if windows is not None else None,
        notes=notes,
        with_manifest=with_manifest,
        progress=progress,
    )


def _save(path: Path, importance: dict[str, Tensor], windows: CalibrationSet) -> dict[str, Tensor]:
    """Write the importance, and give back what a reader of it finds, so that both make the same file."""
    names = tuple(str(source["name"]) for source in windows.sources)
    matrix = ImportanceMatrix(importance, names, len(windows.lengths))
    write_imatrix(path, matrix, chunk_tokens=windows.token_ids.shape[1])
    return read_imatrix(path).means
