"""The GGUF files of a recipe: planned before the work, written beside their places, named together with the rest."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.calibration.dataset import CalibrationSet
from quantkit.checkpoint.manifest import MANIFEST_NAME, build_manifest, manifest_path, read_manifest
from quantkit.errors import CheckpointError
from quantkit.export_gguf.calibrated_blocks import measure_importance
from quantkit.export_gguf.export import Progress
from quantkit.export_gguf.output_file import parts_of
from quantkit.export_gguf.plan import ExportPlan, make_export_plan
from quantkit.export_gguf.request import write_calibrated
from quantkit.formats.gguf.block_types import BLOCK_TYPES
from quantkit.formats.shards import write_text_durably
from quantkit.recipe import GgufOutput, Recipe, name_places
from quantkit.source import ModelSource
from quantkit_eval.file_lock import LOCK_NAME


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file that will be written.

    Attributes:
        output: as the recipe has it.
        plan: the type of every tensor; with ``target_bpw`` where its choice begins.
    """

    output: GgufOutput
    plan: ExportPlan

    @property
    def wants_calibration(self) -> bool:
        """Whether it holds codes, for which it matters what the layers' inputs are."""
        return self.output.target_bpw is not None or any(name in BLOCK_TYPES for name in self.plan.types.values())

    @property
    def wants_importance(self) -> bool:
        """Whether that is to be measured beforehand; error feedback does it as it goes."""
        return self.wants_calibration and (not self.output.error_feedback or self.output.target_bpw is not None)

    def to_dict(self) -> dict[str, Any]:
        """The file as a plan shows it."""
        return {
            "format": "gguf",
            "path": str(self.output.path),
            "type": self.output.type,
            "bytes": self.plan.num_bytes,
            "bits_per_weight": self.output.target_bpw or self.plan.bits_per_weight,
            "tensors": dict(self.plan.types),
        }


def plan_gguf_files(recipe: Recipe, source: ModelSource) -> list[GgufFile]:
    """Decide the types of all files, and refuse what cannot be written.

    Raises:
        UsageError: an architecture, tokenizer or override that cannot be written as GGUF.
        SourceError: the model is broken.
    """
    files = []
    for output in recipe.gguf_files:
        with name_places(recipe, "outputs", recipe.outputs.index(output)):
            plan = make_export_plan(
                source,
                output.type,
                has_importance=recipe.calibration is not None,
                overrides=_overrides(output),
                pretokenizer=output.pretokenizer,
            )
        files.append(GgufFile(output, plan))
    return files


def gguf_only_notes(recipe: Recipe) -> list[str]:
    """What the user should know of a recipe whose outputs are all GGUF files."""
    if recipe.quantization is None:
        return []
    return ["`quantization` is not used: every output is GGUF, which has types of its own"]


def write_gguf_files(
    recipe: Recipe,
    files: Sequence[GgufFile],
    folders: Sequence[Path],
    facts: Mapping[str, Any],
    calibration: CalibrationSet | None,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Write every file that its working folder does not hold yet, with its manifest.

    Args:
        recipe: of the run.
        files: its files.
        folders: the working folder of each.
        facts: of :func:`quantkit.checkpoint.manifest.provenance`.
        calibration: the recipe's tokens; None: every column of a weight counts the same.
        progress: is called with (stage, done, total).

    Returns:
        The manifest of each file.

    Raises:
        QuantizationError, CheckpointError: as :func:`quantkit.export_gguf.export_gguf`.
    """
    manifests = [_finished_in(folder, facts["identity"]) for folder in folders]
    todo = [file for file, manifest in zip(files, manifests, strict=True) if manifest is None]
    importance = _measure(todo, calibration, progress)
    for number, (file, folder) in enumerate(zip(files, folders, strict=True)):
        if manifests[number] is None:
            manifests[number] = _write(recipe, file, folder, facts, calibration, importance, progress)
    return [manifest for manifest in manifests if manifest is not None]


def _finished_in(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of the file that an interrupted run of the same kind has finished."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return None
    if manifest is None or manifest.get("identity") != identity:
        return None
    return manifest if all((folder / name).is_file() for name in manifest["files"]) else None


def _measure(files: Sequence[GgufFile], calibration: CalibrationSet | None, progress: Progress) -> dict[str, Tensor]:
    """Which columns matter in the tensors that any of the files quantizes."""
    wanting = [file.plan for file in files if file.wants_importance]
    if calibration is None or not wanting:
        return {}
    types = dict(wanting[0].types)
    for plan in wanting:
        types |= {name: kind for name, kind in plan.types.items() if kind in BLOCK_TYPES}
    return measure_importance(replace(wanting[0], types=types), calibration, progress)


def _write(
    recipe: Recipe,
    file: GgufFile,
    folder: Path,
    facts: Mapping[str, Any],
    calibration: CalibrationSet | None,
    importance: Mapping[str, Tensor],
    progress: Progress,
) -> dict[str, Any]:
    output = file.output
    record = write_calibrated(
        file.plan,
        folder / output.path.name,
        calibration,
        importance if file.wants_importance else {},
        target_bpw=output.target_bpw,
        error_feedback=output.error_feedback,
        overrides=_overrides(output),
        split_bytes=output.split_size or 0,
        overwrite=True,
        provenance={"recipe": recipe.text, "recipe_sha256": recipe.sha256},
        with_manifest=False,
        progress=progress,
    )
    files = {entry["name"]: entry["sha256"] for entry in record["files"]}
    manifest = build_manifest(recipe, dict(facts), (), None) | {
        "format": "gguf",
        "files": files,
        "gguf": record,
        "seconds": record["seconds"],
    }
    write_text_durably(folder / MANIFEST_NAME, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _overrides(output: GgufOutput) -> tuple[tuple[str, str], ...]:
    return tuple((override.match, override.type) for override in output.overrides)


def places_of(output: Path) -> list[Path]:
    """What a file with its parts and its manifest takes or took, as far as it is there."""
    places = (output, manifest_path(output), *parts_of(output))
    return [path for path in places if path.exists() or path.is_symlink()]


def moves_of(folder: Path, output: Path) -> list[tuple[Path, Path]]:
    """What goes from the working folder to which place, the file or its parts first."""
    made = sorted(path for path in folder.iterdir() if path.name not in (LOCK_NAME, MANIFEST_NAME))
    return [
        *((path, output.parent / path.name) for path in made),
        (folder / MANIFEST_NAME, manifest_path(output)),
    ]
