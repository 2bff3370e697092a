"""The order of the steps from a recipe to a checkpoint, block by block, and nothing else."""

import hashlib
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import Algorithm, load_algorithm
from quantkit.calibration.activations import enter_blocks, forget_weights, leave_blocks
from quantkit.calibration.dataset import CalibrationSet, build_calibration
from quantkit.calibration.staged_block import BlockBatch, StagedBlock
from quantkit.errors import CheckpointError, RecipeError, SourceError
from quantkit.formats import compressed_tensors
from quantkit.formats.shards import ShardWriter, write_text_durably
from quantkit.journal import Journal
from quantkit.manifest import build_manifest, probe_record, provenance
from quantkit.plan import Plan, make_plan
from quantkit.recipe import Recipe
from quantkit.solve import SolvedLayer, solve_block
from quantkit.source import ModelSource

Progress = Callable[[str, int, int], None]
BATCH_TOKENS = 4096  # tokens that go through a block at once
PROBE_TOKENS = 32


def quantize_model(
    recipe: Recipe, *, overwrite: bool = False, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Quantize the recipe's model and write the recipe's checkpoint.

    Args:
        recipe: with quantization and one output.
        overwrite: replace an output folder that is not empty.
        resume: keep a journal, so that an interrupted run leaves its work, and go on from the one that is there.
        progress: is called with (stage, done, total).

    Returns:
        The manifest, as written to quantkit.json.

    Raises:
        QuantkitError: of any kind; nothing is left under the output's name, and nothing beside it unless ``resume``.
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done, total: None)
    plan = make_plan(recipe)
    output = recipe.outputs[0].path
    _check_output(output, plan.source, overwrite)
    assert recipe.quantization is not None
    options = recipe.quantization.algorithm.model_dump(exclude={"name"})
    algorithm = load_algorithm(recipe.quantization.algorithm.name, options)
    calibration = None
    if algorithm.needs_calibration:
        if recipe.calibration is None:
            raise RecipeError(f"the algorithm {algorithm.name} needs a `calibration` section")
        calibration = build_calibration(recipe.calibration, plan.source.tokenizer())
    working = output.with_name(output.name + ".partial")
    facts = provenance(recipe, plan.source, calibration)
    with _working_folder(working, keep=resume):
        journal = Journal.load(working, facts["identity"]) if resume else None
        with _open_writer(plan, working, journal) as writer:
            journal = journal or (Journal(working, facts["identity"]) if resume else None)
            layers, logits = _quantize_blocks(plan, algorithm, calibration, writer, journal, report)
            _copy_the_rest(plan, writer, report)
            writer.finish()
        _write_side_files(plan, working)
        manifest = build_manifest(recipe, facts, layers, probe_record(_probe_ids(plan.model), logits))
        manifest["seconds"] = round(time.perf_counter() - started, 2)
        manifest["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        manifest["files"] = {p.name: _sha256(p) for p in sorted(working.glob("*.safetensors"))}
        write_text_durably(working / "quantkit.json", json.dumps(manifest, indent=1) + "\n")
        if journal is not None:
            journal.remove()
        _take_place(working, output)
    return manifest


def _quantize_blocks(
    plan: Plan,
    algorithm: Algorithm,
    calibration: CalibrationSet | None,
    writer: ShardWriter,
    journal: Journal | None,
    progress: Progress,
) -> tuple[list[dict[str, Any]], Tensor]:
    """Quantize every block in turn. Returns the layers' records and the quantized model's logits on the probe."""
    source, model, decoder = plan.source, plan.model, plan.decoder
    _materialize_outside(plan)
    probe = _probe_ids(model)
    batches = enter_blocks(model, decoder, probe, torch.zeros_like(probe, dtype=torch.bool), 1)
    if calibration is not None:
        batch_size = max(1, BATCH_TOKENS // calibration.token_ids.shape[1])
        windows = enter_blocks(model, decoder, calibration.token_ids, calibration.token_mask, batch_size)
        batches = windows + batches  # the probe comes last and counts in no statistics
    records = list(journal.layers) if journal else []
    first = journal.finished_blocks if journal else 0
    if journal and first:
        for batch, hidden in zip(batches, journal.hidden(), strict=True):
            batch.hidden = hidden
    progress("quantize", len(records), len(plan.layers))
    for index in range(first, len(decoder.blocks)):
        block, name = decoder.blocks[index], f"{decoder.name}.{index}"
        source.materialize(model, prefix=name, dtype=torch.float32)
        _refuse_broken_weights(plan, name)
        tell = partial(_count, progress, len(records), len(plan.layers))
        solved = _quantize_block(plan, index, algorithm, batches, tell)
        written = _write_layers(plan, solved, writer)
        records += [layer.record for layer in solved]
        forget_weights([block])
        if journal:
            writer.flush()
            journal.record(index, written, [layer.record for layer in solved], [b.hidden for b in batches])
    return records, leave_blocks(model, decoder, probe, batches[-1].hidden)


def _count(progress: Progress, before: int, total: int, done: int) -> None:
    """Layers of a block that are done, as layers of the model."""
    progress("quantize", before + done, total)


def _quantize_block(
    plan: Plan, index: int, algorithm: Algorithm, batches: list[BlockBatch], progress: Callable[[int], None]
) -> list[SolvedLayer]:
    """Solve one block and run every batch through the result."""
    block, prefix = plan.decoder.blocks[index], f"{plan.decoder.name}.{index}."
    layers = plan.in_block(index)
    linears: dict[str, nn.Linear] = {}
    for layer in layers:
        module = block.get_submodule(layer.name.removeprefix(prefix))
        assert isinstance(module, nn.Linear)
        linears[layer.name.removeprefix(prefix)] = module
    staged = StagedBlock(block, index, linears, batches)
    solved = solve_block(staged, linears, layers, algorithm, plan.source.dtype, progress)
    staged.finish()
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


def _write_layers(plan: Plan, solved: list[SolvedLayer], writer: ShardWriter) -> list[str]:
    """Put codes and scales into the shards; returns the names of the tensors."""
    names_on_disk, written = plan.source.weight_map(plan.model), []
    for layer in solved:
        name = names_on_disk.tensor_name(f"{layer.plan.name}.weight").removesuffix(".weight")
        for tensor_name, tensor in compressed_tensors.encode(name, layer.weight).items():
            writer.write(tensor_name, tensor)
            written.append(tensor_name)
    return written


def _copy_the_rest(plan: Plan, writer: ShardWriter, progress: Progress) -> None:
    """Everything that is not quantized goes over byte for byte."""
    for done, name in enumerate(plan.copied, start=1):
        writer.copy(name, *plan.source.locate(name))
        progress("copy", done, len(plan.copied))


def _write_side_files(plan: Plan, folder: Path) -> None:
    """Tokenizer, template, generation config and whatever else the source has; config.json with the quantization."""
    for path in plan.source.side_files():
        target = folder / path.relative_to(plan.source.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    config = json.loads((plan.source.folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = compressed_tensors.quantization_config(plan.schemes, plan.ignored)
    write_text_durably(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _probe_ids(model: nn.Module) -> Tensor:
    """[1, PROBE_TOKENS] fixed token ids, spread over the vocabulary: what verify runs to compare logits."""
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return (torch.arange(PROBE_TOKENS, dtype=torch.int64) * 7919 % vocabulary).unsqueeze(0)


def _check_output(output: Path, source: ModelSource, overwrite: bool) -> None:
    """Refuse an output that would destroy something, before any work."""
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"the output {output} is a file", fix="Choose another path")
    if output.exists() and output.resolve() == source.folder.resolve():
        raise CheckpointError(f"the output {output} is the model's own folder", fix="Choose another path")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise CheckpointError(f"the output folder {output} is not empty", fix="Give --overwrite to replace it")


@contextmanager
def _working_folder(folder: Path, *, keep: bool) -> Iterator[None]:
    """Where a run writes until all is there. Removed when it fails, or kept for ``--resume`` if the journal is on."""
    if folder.exists() and not keep:
        shutil.rmtree(folder)  # what a killed run left behind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if not (keep and (folder / "journal.json").exists()):
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _open_writer(plan: Plan, folder: Path, journal: Journal | None) -> Iterator[ShardWriter]:
    """Start the shards, or open those of the interrupted run; what a journal knows of stays when the work fails."""
    if journal is not None:
        writer = ShardWriter.resume(folder, plan.specs, written=journal.written)
    else:
        writer = ShardWriter(folder, plan.specs)
    try:
        yield writer
    finally:
        writer.close()


def _take_place(working: Path, output: Path) -> None:
    """Give the finished folder its name; a folder that is replaced disappears only after that."""
    old = output.with_name(output.name + ".replaced")
    if output.exists():
        os.replace(output, old)
    os.replace(working, output)
    shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
