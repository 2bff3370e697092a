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

from quantkit.algorithms import Algorithm, Solution, load_algorithm
from quantkit.allocation.allocate import allocate, check_target
from quantkit.calibration.activations import enter_blocks, forget_outside, forget_weights, leave_blocks
from quantkit.calibration.dataset import CalibrationSet, build_calibration
from quantkit.calibration.heap import return_large_blocks
from quantkit.calibration.staged_block import BlockBatch, StagedBlock
from quantkit.calibration.statistics import InputStatistics
from quantkit.checkpoint_folder import take_places, working_folders
from quantkit.checkpoint_writer import CheckpointWriter
from quantkit.errors import CheckpointError, RecipeError, SourceError
from quantkit.journal import Journal
from quantkit.manifest import build_manifest, probe_record, provenance, read_manifest
from quantkit.output_paths import check_outputs
from quantkit.plan import Plan, make_plan
from quantkit.recipe import Recipe
from quantkit.scheme import QuantScheme
from quantkit.solve import SolvedLayer, solve_block
from quantkit.source import ModelSource
from quantkit.transforms.fold_block import transform_block
from quantkit.tuning.apply import tune_checkpoint

Progress = Callable[[str, int, int], None]
BATCH_TOKENS = 2048  # tokens that go through a block at once
PROBE_TOKENS = 32
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
    """Quantize the recipe's model once and write the recipe's checkpoints.

    Args:
        recipe: with quantization and outputs.
        overwrite: replace output folders that are not empty.
        resume: keep a journal, so that an interrupted run leaves its work, and go on from the one that is there; do
            nothing if the outputs are finished checkpoints of this very run.
        progress: is called with (stage, done, total).
        source: the recipe's model, if it is open already.

    Returns:
        The manifest of the first output, as written to its quantkit.json.

    Raises:
        QuantkitError: of any kind; nothing is left under the outputs' names, and nothing beside them unless ``resume``.
    """
    started = time.perf_counter()
    return_large_blocks()
    report = progress or (lambda stage, done, total: None)
    plan = make_plan(recipe, source)
    paths = [output.path for output in recipe.outputs]
    check_outputs(recipe, plan.source, overwrite=overwrite or resume)
    for note in plan.notes:
        logger.warning("%s", note)
    if recipe.require_quantization().has_target:
        check_target(plan, recipe)
    algorithm = _algorithm(recipe, plan)
    calibration = _calibration(recipe, plan, algorithm, report)
    allocation = None
    if recipe.require_quantization().has_target:
        assert calibration is not None, "a target is chosen on calibration windows"
        allocation = allocate(plan, recipe, calibration, report)
        plan = make_plan(recipe, plan.source, schemes=allocation.schemes)
    facts = provenance(recipe, plan.source, calibration)
    if resume:
        finished = _finished(recipe, facts["identity"])
        if finished is not None:
            return finished
        check_outputs(recipe, plan.source, overwrite=overwrite)
    with working_folders(paths, keep=resume) as folders:
        sizes = {"num_outputs": len(paths), "num_blocks": len(plan.decoder.blocks)}
        journal = Journal.load(folders[0], facts["identity"], **sizes) if resume else None
        with _open_writers(plan, folders, journal) as writers:
            journal = journal or (Journal(folders[0], facts["identity"]) if resume else None)
            layers, logits = _quantize_blocks(plan, algorithm, calibration, writers, journal, report)
            _copy_the_rest(plan, writers, report)
            tuning = recipe.require_quantization().tuning
            tuned = None
            if tuning is not None:
                folder = folders[0] if resume else None
                probe = _probe_ids(plan.model)
                tuned = tune_checkpoint(plan, writers, tuning, recipe.calibration, probe, report, folder)
                logits = tuned.logits
            manifest = build_manifest(recipe, facts, layers, probe_record(_probe_ids(plan.model), logits))
            if allocation is not None:
                manifest["allocation"] = allocation.to_record()
            if tuned is not None:
                manifest["tuning"] = tuned.record
            manifest["seconds"] = round(time.perf_counter() - started, 2)
            manifest["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            manifests = [writer.finish(manifest) for writer in writers]
        if journal is not None:
            journal.remove()
        take_places(paths)
    return manifests[0]


def _finished(recipe: Recipe, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The first output's manifest if every output is the finished checkpoint of such a run."""
    manifests = []
    for output in recipe.outputs:
        try:
            manifest = read_manifest(output.path) or {}
        except CheckpointError:
            return None  # whatever lies there is not the run's; it is kept or replaced like any other folder
        is_whole = all((output.path / name).is_file() for name in manifest.get("files", ()))
        if manifest.get("identity") != identity or not is_whole:
            return None
        manifests.append(manifest)
    return manifests[0]


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
    """The recipe's algorithm, finding scales in the type that every output stores."""
    section = recipe.require_quantization().algorithm
    algorithm = load_algorithm(section.name, section.model_dump(exclude={"name"}))

    def solve(
        weight: Tensor, statistics: InputStatistics | None, scheme: QuantScheme, options: Any, dtype: torch.dtype
    ) -> Solution:
        return algorithm.solve(weight, statistics, scheme, options, plan.scale_dtype)

    return replace(algorithm, solve=solve)


def _calibration(recipe: Recipe, plan: Plan, algorithm: Algorithm, progress: Progress) -> CalibrationSet | None:
    """The recipe's tokens, if the algorithm or a static input scale needs them."""
    inputs = [layer.scheme.input for layer in plan.layers]
    static = any(scheme is not None and not scheme.dynamic for scheme in inputs)
    chosen = recipe.require_quantization().has_target
    if not (algorithm.needs_calibration or plan.transforms or static or chosen):
        return None
    if recipe.calibration is None:
        raise RecipeError("the recipe needs a `calibration` section")
    return build_calibration(recipe.calibration, plan.source, progress)


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
        batches = enter_blocks(model, decoder, calibration.batches(BATCH_TOKENS)) + batches
    forget_outside(model, decoder)  # until the probe leaves the last block
    records = list(journal.layers) if journal else []
    first = journal.finished_blocks if journal else 0
    if journal and first:
        for batch, hidden in zip(batches, journal.hidden([batch.hidden for batch in batches]), strict=True):
            batch.hidden = hidden
    progress("quantize", len(records), len(plan.layers))
    for index in range(first, len(decoder.blocks)):
        block, name = decoder.blocks[index], f"{decoder.name}.{index}"
        source.materialize(model, prefix=name, dtype=torch.float32)
        _refuse_broken_weights(plan, name)
        tell = partial(_count, progress, "quantize", len(records), len(plan.layers))
        solved = _quantize_block(plan, index, algorithm, batches, tell)
        written = [writer.write_block(solved, f"{name}.") for writer in writers]
        records += [layer.record for layer in solved]
        forget_weights([block])
        if journal:
            for writer in writers:
                writer.flush()
            journal.record(index, written, [layer.record for layer in solved], [b.hidden for b in batches])
    _materialize_outside(plan)
    return records, leave_blocks(model, decoder, probe, batches[-1].hidden)


def _count(progress: Progress, stage: str, before: int, total: int, done: int) -> None:
    """What is done of a part, as what is done of the whole."""
    progress(stage, before + done, total)


def _quantize_block(
    plan: Plan, index: int, algorithm: Algorithm, batches: list[BlockBatch], progress: Callable[[int], None]
) -> list[SolvedLayer]:
    """Transform and solve one block, and run every batch through the result."""
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
    staged = StagedBlock(block, index, linears, batches)
    solved = solve_block(staged, linears, layers, algorithm, dtype, progress, observer=plan.input_observer)
    staged.finish()
    for done in solved:
        done.record["transforms"] = transformed[done.plan.name.removeprefix(prefix)]
    return solved


def _materialize_outside(plan: Plan) -> None:
    """Read embeddings, final norm and head."""
    inside = f"{plan.decoder.name}."
    for name in plan.model.state_dict():
        if not name.startswith(inside):
            plan.source.materialize(plan.model, prefix=name, dtype=torch.float32)
    _refuse_broken_weights(plan, "")


def _refuse_broken_weights(plan: Plan, prefix: str) -> None:
    """NaN or infinity in a weight that is in memory is the source's fault, and it is named."""
    names = plan.source.weight_map(plan.model).names
    for name, value in plan.model.get_submodule(prefix).named_parameters(prefix=prefix):
        if not value.is_meta and not torch.isfinite(value).all():
            count = int((~torch.isfinite(value)).sum())
            raise SourceError(
                f"{', '.join(names[name])} in {plan.source.name} holds {count} values that are not finite"
            )


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
