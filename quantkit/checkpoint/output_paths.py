"""What a run may write: never over what it reads, nothing of an earlier run unasked, and only where it can."""

import os
from collections.abc import Iterator
from pathlib import Path

from quantkit.checkpoint.folder import (
    check_working_folder,
    put_back_replaced,
    replaced_folder,
    standing,
    working_folder,
)
from quantkit.checkpoint.manifest import manifest_path
from quantkit.errors import CheckpointError
from quantkit.gguf_files import places_of
from quantkit.recipe import DatasetSource, GgufOutput, Recipe, SelfGeneratedSource, StructuredChatSource, name_places
from quantkit.source import ModelSource
from quantkit_eval.records import check_writable

BUILTIN = "builtin"
DEFAULT_FOLDER = Path("out")
ELSEWHERE = "Choose another path"
REPLACE = "Give --overwrite to replace it"


def records_folder(recipe: Recipe) -> Path:
    """Where ``quantkit run`` keeps records: ``records`` beside the first report, else beside the checkpoint, or out."""
    for path in recipe.report.paths.values():
        return path.parent / "records"
    return (recipe.outputs[0].path.parent if recipe.outputs else DEFAULT_FOLDER) / "records"


def check_outputs(recipe: Recipe, source: ModelSource, *, overwrite: bool, writes: bool = True) -> None:
    """Refuse outputs that would destroy something or cannot be made, before any work. Makes and moves nothing.

    Args:
        recipe: with outputs.
        source: its model.
        overwrite: the user allows to replace what lies in them.
        writes: a run follows, so that no other may be writing them.

    Raises:
        CheckpointError: an output is a file, is not empty, is in the way of another output, it is, holds or lies in
            something that the recipe reads or writes elsewhere, or something is in the way of its working folder.
        RecordError: the folder cannot be made.
    """
    taken: dict[Path, Path] = {}
    for number, output in enumerate(recipe.outputs):
        with name_places(recipe, "outputs", number, "path"):
            _check_reads(output.path, recipe, source)
            for place in (output.path, working_folder(output.path), replaced_folder(output.path)):
                other = taken.setdefault(place.resolve(), output.path)
                if other is not output.path:
                    both = f"the outputs {other} and {output.path} both need the folder {place}"
                    raise CheckpointError(both, fix=ELSEWHERE)
            if isinstance(output, GgufOutput):
                _check_file(output.path, overwrite=overwrite)
            else:
                _check_folder(output.path, overwrite=overwrite)
            check_working_folder(output.path, writes=writes)
            check_writable(working_folder(output.path) / "config.json")


def put_back_outputs(recipe: Recipe) -> None:
    """Give back their names to the outputs that a run had moved aside when it was killed."""
    for output in recipe.outputs:
        is_file = isinstance(output, GgufOutput)
        for place in (output.path, manifest_path(output.path)) if is_file else (output.path,):
            put_back_replaced(place)


def _check_folder(path: Path, *, overwrite: bool) -> None:
    there = standing(path)
    if there.is_symlink() and not there.exists():
        raise CheckpointError(f"the output {path} is a link to {there.readlink()}, which is not there", fix=ELSEWHERE)
    if there.exists() and not there.is_dir():
        raise CheckpointError(f"the output {path} is a file", fix=ELSEWHERE)
    if there.is_dir() and any(there.iterdir()) and not overwrite:
        raise CheckpointError(f"the output folder {path} is not empty", fix=REPLACE)


def _check_file(path: Path, *, overwrite: bool) -> None:
    moved = [place for place in map(standing, (path, manifest_path(path))) if os.path.lexists(place)]
    if standing(path).is_dir():
        raise CheckpointError(f"the output {path} is a folder", fix=ELSEWHERE)
    there = [*places_of(path), *moved]
    if there and not overwrite:
        raise CheckpointError(f"the output {there[0]} exists", fix=REPLACE)


def check_reports(recipe: Recipe, source: ModelSource) -> None:
    """Refuse reports and records that cannot be written, or that would take the place of what the recipe reads.

    Raises:
        CheckpointError, RecordError: naming the file.
    """
    for kind, path in recipe.report.paths.items():
        with name_places(recipe, "report", kind):
            _check_report(path, recipe, source)
    _check_report(records_folder(recipe) / "verdict.json", recipe, source)


def _check_report(path: Path, recipe: Recipe, source: ModelSource) -> None:
    for name, read in _reads(recipe, source):
        if path.resolve() == read.resolve():
            raise CheckpointError(f"{path} is {name} and would be overwritten", fix=ELSEWHERE)
    if source.folder.resolve() in path.resolve().parents:
        raise CheckpointError(f"{path} is inside the model's own folder", fix=ELSEWHERE)
    check_writable(path)


def _check_reads(output: Path, recipe: Recipe, source: ModelSource) -> None:
    """The folders that a run replaces or removes hold nothing that it needs."""
    if source.folder.resolve() in output.resolve().parents:
        raise CheckpointError(f"the output {output} is inside the model's own folder", fix=ELSEWHERE)
    if records_folder(recipe).resolve() in output.resolve().parents:
        raise CheckpointError(f"the output {output} is inside the folder of the records", fix=ELSEWHERE)
    for place in (output, working_folder(output), replaced_folder(output)):
        use = "" if place is output else f" needs {place}, which"
        for name, path in (*_reads(recipe, source), *_writes(recipe)):
            if place.resolve() == path.resolve():
                raise CheckpointError(f"the output {output}{use} is {name}", fix=ELSEWHERE)
            if place.resolve() in path.resolve().parents:
                raise CheckpointError(f"the output {output}{use} holds {name} ({path})", fix=ELSEWHERE)


def _reads(recipe: Recipe, source: ModelSource) -> Iterator[tuple[str, Path]]:
    """What must survive the run, with its name."""
    yield "the current folder", Path.cwd()
    yield "the model's own folder", source.folder
    if recipe.model is not None and Path(recipe.model).expanduser().exists():
        yield "the model", Path(recipe.model).expanduser()
    if recipe.path is not None:
        yield "the recipe", recipe.path
    for entry in (recipe.calibration.sources if recipe.calibration else None) or ():
        if isinstance(entry, StructuredChatSource):
            continue
        if isinstance(entry, DatasetSource):
            text = entry.name
        else:
            text = entry.seed_prompts if isinstance(entry, SelfGeneratedSource) else entry.path
        if text != BUILTIN and Path(text).exists():
            yield "a source of the calibration", Path(text)
    for name, path in recipe.gates.files.items():
        yield f"the file of the suite {name}", Path(path)


def _writes(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """What the run puts elsewhere."""
    for kind, path in recipe.report.paths.items():
        yield f"the {kind} report", path
    yield "the folder of the records", records_folder(recipe)
