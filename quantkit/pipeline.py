"""The order of the steps from a recipe to a checkpoint, block by block, and nothing else."""

import logging
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import Algorithm, Solution, algorithm_of
from quantkit.allocation.allocate import allocate, check_target
from quantkit.calibration.activations import enter_blocks, forget_outside, forget_weights, leave_blocks
from quantkit.calibration.dataset import CalibrationSet, build_calibration, check_sources
from quantkit.calibration.heap import return_large_blocks
from quantkit.calibration.key_value_range import observe_keys_and_values
from quantkit.calibration.staged_block import BlockBatch, StagedBlock
from quantkit.calibration.statistics import InputStatistics
from quantkit.checkpoint.finished_outputs import finished_manifest
from quantkit.checkpoint.folder import remove, take_places, working_folders
from quantkit.checkpoint.journal import Journal
from quantkit.checkpoint.manifest import MANIFEST_NAME, build_manifest, probe_record, provenance
from quantkit.checkpoint.output_paths import check_outputs, put_back_outputs
from quantkit.checkpoint.stored_weights import refuse_broken_weights
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.errors import RecipeError
from quantkit.float16_scales import fit_scales
from quantkit.gguf_files import GgufFile, gguf_only_notes, moves_of, places_of, plan_gguf_files, write_gguf_files
from quantkit.plan import Plan, make_plan
from quantkit.recipe import Calibration, Recipe, name_places
from quantkit.scheme import QuantScheme
from quantkit.solve import SolvedLayer, solve_block
from quantkit.source import ModelSource, open_model
from quantkit.transforms.fold_block import transform_block
from quantkit.tuning.apply import tune_checkpoint
from quantkit.tuning.windows import TuningSource, check_tuning_sources, read_tuning_sources

Progress = Callable[[str, int, int], None]
BATCH_TOKENS = 2048  # tokens that go through a block at once
PROBE_TOKENS = 32
STAGE = "quantize (layers)"
MEGABYTE = 10**6

logger = logging.getLogger(__name__)


def quantize_model(
    recipe: Recipe,
    *,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    source: ModelSource | None = None,
) -> dict[str, Any]:
    """Quantize the recipe's model once and write its checkpoints; and its GGUF files, which have types of their own.

    Args:
        recipe: with quantization and outputs.
        overwrite: replace output folders that are not empty.
        resume: keep a journal and finished GGUF files, so that an interrupted run leaves its work, and go on from what
            is there; do nothing if the outputs are finished ones of this very run.
        progress: is called with (stage, done, total).
        source: the recipe's model, if it is open already.

    Returns:
        The manifest of the first output, as written to its quantkit.json (of a GGUF file: NAME.quantkit.json).

    Raises:
        QuantkitError: of any kind; nothing is left under the outputs' names, and nothing beside them unless ``resume``.
    """
    started = time.perf_counter()
    return_large_blocks()
    report = progress or (lambda stage, done, total: None)
    recipe.require_outputs()
    source = source or open_model(recipe)
    plan, files = plan_run(recipe, source, overwrite=overwrite or resume)
    put_back_outputs(recipe)
    for note in plan.notes if plan is not None else gguf_only_notes(recipe):
        logger.warning("%s", note)
    calibration = _calibration(recipe, source, plan, files, report)
    facts = provenance(recipe, source, calibration)
    allocation = None
    if plan is not None and recipe.require_quantization().has_target:
        assert calibration is not None, "a target is chosen on calibration windows"
        allocation = allocate(plan, recipe, calibration, report)
        plan = make_plan(recipe, source, schemes=allocation.schemes)
    if resume:
        finished = finished_manifest(recipe, facts["identity"])
        if finished is not None:
            return finished
        check_outputs(recipe, source, overwrite=overwrite)
    tuning = _tuning_sources(recipe, source, plan, report)
    with ExitStack() as held:
        places = [file.output.path for file in files]
        made = [working_folders([path], keep=resume, work=MANIFEST_NAME) for path in places]
        folders = [held.enter_context(folder)[0] for folder in made]
        manifests = dict(zip(places, write_gguf_files(recipe, files, folders, facts, calibration, report), strict=True))
        moves = [move for pair in zip(folders, places, strict=True) for move in moves_of(*pair)]
        if plan is not None:
            paths = [output.path for output in recipe.checkpoints]
            own = held.enter_context(working_folders(paths, keep=resume))
            facts |= {"allocation": allocation.to_record()} if allocation is not None else {}
            written = _write_checkpoints(recipe, plan, calibration, tuning, facts, own, started, report, resume=resume)
            manifests |= dict(zip(paths, written, strict=True))
            moves += list(zip(own, paths, strict=True))
        stale = {old for path in places for old in places_of(path)} - {place for _, place in moves}
        take_places(moves)
        for path in (*stale, *folders):
            remove(path)
    return manifests[recipe.outputs[0].path]


def plan_run(
    recipe: Recipe, source: ModelSource, *, overwrite: bool = False, writes: bool = True
) -> tuple[Plan | None, list[GgufFile]]:
    """Decide what can be decided before the work, and refuse what cannot be done. Writes nothing.

    Args:
        recipe: with outputs.
        source: its model.
        overwrite: the user allows to replace what lies in the outputs.
        writes: the run follows; a dry run is not in the way of another that writes the same outputs.

    Returns:
        The plan of the checkpoints, if there are any, and the GGUF files.

    Raises:
        QuantkitError: of any kind.
    """
    plan = make_plan(recipe, source) if recipe.checkpoints else None
    if plan is not None and recipe.require_quantization().has_target:
        check_target(plan, recipe)
    files = plan_gguf_files(recipe, source)
    check_outputs(recipe, source, overwrite=overwrite, writes=writes)
    return plan, files


def _write_checkpoints(
    recipe: Recipe,
    plan: Plan,
    calibration: CalibrationSet | None,
    tuning_sources: Sequence[TuningSource],
    facts: dict[str, Any],
    folders: Sequence[Path],
    started: float,
    report: Progress,
    *,
    resume: bool,
) -> list[dict[str, Any]]:
    """Fill the working folders of the checkpoints. Returns their manifests."""
    sizes = {"num_outputs": len(folders), "num_blocks": len(plan.decoder.blocks)}
    journal = Journal.load(folders[0], facts["identity"], **sizes) if resume else None
    with _open_writers(plan, folders, journal) as writers:
        journal = journal or (Journal(folders[0], facts["identity"]) if resume else None)
        layers, logits = _quantize_blocks(plan, _algorithm(recipe, plan), calibration, writers, journal, report)
        _copy_the_rest(plan, writers, report)
        tuning = recipe.require_quantization().tuning
        tuned = None
        if tuning is not None:
            folder = folders[0] if resume else None
            probe = _probe_ids(plan.model)
            tuned = tune_checkpoint(plan, writers, tuning, tuning_sources, probe, report, folder)
            logits = tuned.logits
        manifest = build_manifest(recipe, facts, layers, probe_record(_probe_ids(plan.model), logits))
        manifest |= {key: facts[key] for key in ("allocation",) if key in facts}
        if tuned is not None:
            manifest["tuning"] = tuned.record
        manifest["seconds"] = round(time.perf_counter() - started, 2)
        manifest["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        manifests = [writer.finish(manifest) for writer in writers]
    if journal is not None:
        journal.remove()
    return manifests


def _copy_the_rest(plan: Plan, writers: Sequence[CheckpointWriter], progress: Progress) -> None:
    """Copy what is not written yet, counted in megabytes: an embedding takes longer than a norm."""
    total = sum(plan.source.tensors[name].nbytes for name in plan.copied) * len(writers)
    done = 0

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("copy (MB)", -(-done // MEGABYTE), -(-total // MEGABYTE))

    tell(0)
    for writer in writers:
        writer.write_outside()
        writer.copy_the_rest(tell)


def _algorithm(recipe: Recipe, plan: Plan) -> Algorithm:
    """The recipe's algorithm, finding scales that every output stores."""
    algorithm = algorithm_of(recipe)

    def solve(
        weight: Tensor, statistics: InputStatistics | None, scheme: QuantScheme, options: Any, dtype: torch.dtype
    ) -> Solution:
        solution: Solution = algorithm.solve(weight, statistics, scheme, options, plan.scale_dtype)
        if not plan.has_float16_scales:
            return solution
        fitted, groups = fit_scales(weight, solution.weight)
        why = (f"rounded to nearest in {groups} groups, whose scales are too small for float16",) if groups else ()
        return replace(solution, weight=fitted, fallbacks=(*solution.fallbacks, *why))

    return replace(algorithm, solve=solve)


def _calibration(
    recipe: Recipe, source: ModelSource, plan: Plan | None, files: Sequence[GgufFile], progress: Progress
) -> CalibrationSet | None:
    """The recipe's tokens, if something needs them."""
    section = needed_calibration(recipe, plan, files)
    with name_places(recipe):
        return None if section is None else build_calibration(section, source, progress)


def _tuning_sources(
    recipe: Recipe, source: ModelSource, plan: Plan | None, progress: Progress
) -> Sequence[TuningSource]:
    """The windows of the tuning, if there is one: read before the work, because they may be missing."""
    tuning = recipe.quantization.tuning if plan is not None and recipe.quantization is not None else None
    with name_places(recipe):
        return () if tuning is None else read_tuning_sources(tuning, recipe.calibration, source, progress)


def needed_calibration(recipe: Recipe, plan: Plan | None, files: Sequence[GgufFile]) -> Calibration | None:
    """The recipe's section, if a GGUF file, the algorithm, a transform, a target or a static input scale needs tokens.

    Raises:
        RecipeError: it is needed and not there.
    """
    needed = recipe.calibration is not None and any(file.wants_calibration for file in files)
    if plan is not None:
        inputs = [layer.scheme.input for layer in plan.layers]
        static = any(scheme is not None and not scheme.dynamic for scheme in inputs)
        target = recipe.require_quantization().has_target
        more = plan.transforms or plan.attention or static or target
        needed = needed or bool(_algorithm(recipe, plan).needs_calibration or more)
    if not needed:
        return None
    if recipe.calibration is None:
        raise RecipeError("the recipe needs a `calibration` section")
    return recipe.calibration


def check_data(recipe: Recipe, source: ModelSource, plan: Plan | None, files: Sequence[GgufFile]) -> None:
    """Refuse sources of calibration and tuning that the run would refuse, as far as nothing has to be generated for it.

    Raises:
        QuantkitError: of any kind.
    """
    calibration = needed_calibration(recipe, plan, files)
    tuning = recipe.quantization.tuning if recipe.quantization is not None else None
    with name_places(recipe):
        if calibration is not None:
            check_sources(calibration, source)
        if tuning is not None:
            check_tuning_sources(tuning, recipe.calibration, source)


def _quantize_blocks(
    plan: Plan,
    algorithm: Algorithm,
    calibration: CalibrationSet | None,
    writers: Sequence[CheckpointWriter],
    journal: Journal | None,
    progress: Progress,
) -> tuple[list[dict[str, Any]], Tensor]:
    """Quantize every block in turn. Returns the layers' records and the quantized model's logits on the probe."""
    source, model, decoder = plan.source, plan.model, plan.decoder
    _materialize_outside(plan)
    probe = _probe_ids(model)
    batches = enter_blocks(model, decoder, [(probe, torch.zeros_like(probe, dtype=torch.bool))])
    if calibration is not None:  # the probe comes last and counts in no statistics
        windows = enter_blocks(model, decoder, calibration.batches(BATCH_TOKENS))
        of_windows = calibration.source_of.unsqueeze(1).split([len(batch.hidden) for batch in windows])
        for batch, numbers in zip(windows, of_windows, strict=True):
            batch.source = numbers
        batches = windows + batches
    originals = [replace(batch) for batch in batches] if algorithm.wanted.original else []
    forget_outside(model, decoder)  # until the probe leaves the last block
    records = list(journal.layers) if journal else []
    first = journal.finished_blocks if journal else 0
    if journal and first:
        both = [*batches, *originals]
        for batch, hidden in zip(both, journal.hidden([batch.hidden for batch in both]), strict=True):
            batch.hidden = hidden
    progress(STAGE, len(records), len(plan.layers))
    for index in range(first, len(decoder.blocks)):
        block, name = decoder.blocks[index], f"{decoder.name}.{index}"
        source.materialize(model, prefix=name, dtype=torch.float32)
        refuse_broken_weights(source, model, name)
        tell = partial(_count, progress, STAGE, len(records), len(plan.layers))
        solved, kv_scales = _quantize_block(plan, index, algorithm, batches, originals, tell)
        written = [writer.write_block(solved, f"{name}.", kv_scales) for writer in writers]
        records += [layer.record for layer in solved]
        forget_weights([block])
        if journal:
            for writer in writers:
                writer.flush()
            states = [batch.hidden for batch in (*batches, *originals)]
            journal.record(index, written, [layer.record for layer in solved], states)
    _materialize_outside(plan)
    return records, leave_blocks(model, decoder, probe, batches[-1].hidden)


def _count(progress: Progress, stage: str, before: int, total: int, done: int) -> None:
    """What is done of a part, as what is done of the whole."""
    progress(stage, before + done, total)


def _quantize_block(
    plan: Plan,
    index: int,
    algorithm: Algorithm,
    batches: list[BlockBatch],
    originals: list[BlockBatch],
    progress: Callable[[int], None],
) -> tuple[list[SolvedLayer], dict[str, Tensor]]:
    """Transform and solve one block, and run every batch through the result (originals: through what it was).

    Returns:
        Its layers, and if they are wanted the scales of its keys and values by their names on disk.
    """
    block, prefix = plan.decoder.blocks[index], f"{plan.decoder.name}.{index}."
    layers = plan.in_block(index)
    linears: dict[str, nn.Linear] = {}
    for layer in layers:
        module = block.get_submodule(layer.name.removeprefix(prefix))
        assert isinstance(module, nn.Linear)
        linears[layer.name.removeprefix(prefix)] = module
    dtype, schemes = plan.source.dtype, {layer.name.removeprefix(prefix): layer.scheme for layer in layers}
    family = plan.source.config.model_type
    transformed = transform_block(plan.transforms, family, block, index, schemes, batches, dtype)
    staged = StagedBlock(block, index, linears, batches, plan.experts)
    beside = StagedBlock(block, index, linears, originals, plan.experts) if originals else None
    observer = plan.input_observer
    attention = next((name for name in plan.attention if name.startswith(prefix)), None)
    with ExitStack() as watching:
        seen = watching.enter_context(observe_keys_and_values(batches, index)) if attention is not None else None
        solved = solve_block(staged, linears, layers, algorithm, dtype, progress, original=beside, observer=observer)
        staged.finish()
    if beside is not None:
        beside.finish()
    for done in solved:
        done.record["transforms"] = transformed[done.plan.name.removeprefix(prefix)]
    if attention is None or seen is None:
        return solved, {}
    scales = seen.scales(dtype)
    for done in solved:
        if done.plan.name.startswith(f"{attention}."):
            done.record["kv_scales"] = {name: float(scale) for name, scale in scales.items()}
    return solved, {f"{plan.attention[attention]}.{name}": scale for name, scale in scales.items()}


def _materialize_outside(plan: Plan) -> None:
    """Read embeddings, final norm and head."""
    inside = f"{plan.decoder.name}."
    for name in plan.model.state_dict():
        if not name.startswith(inside):
            plan.source.materialize(plan.model, prefix=name, dtype=torch.float32)
    refuse_broken_weights(plan.source, plan.model)


def _probe_ids(model: nn.Module) -> Tensor:
    """[1, PROBE_TOKENS] fixed token ids, spread over the vocabulary: what verify runs to compare logits."""
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return (torch.arange(PROBE_TOKENS, dtype=torch.int64) * 7919 % vocabulary).unsqueeze(0)


@contextmanager
def _open_writers(plan: Plan, folders: Sequence[Path], journal: Journal | None) -> Iterator[list[CheckpointWriter]]:
    """Start the checkpoints, or open those of an interrupted run; what a journal knows of stays when the work fails."""
    with ExitStack() as stack:
        writers = []
        for number, (output, folder) in enumerate(zip(plan.outputs, folders, strict=True)):
            written = journal.written[number] if journal is not None else None
            writers.append(CheckpointWriter(plan, output, folder, written))
            stack.callback(writers[-1].close)
        yield writers
