"""Tune the checkpoint that a run has just written: codes and scales in, better ones back into the same places."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quantkit.calibration.activations import forget_weights
from quantkit.calibration.heap import large_blocks_kept
from quantkit.checkpoint.journal import TUNING_AGAIN_NAME, TUNING_RESULT_NAME, TUNING_STATE_NAME
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.plan import LayerPlan, Plan
from quantkit.primitives import QuantizedWeight
from quantkit.recipe.tuning import Tuning
from quantkit.tuning.optimize import Tuner, TuningState
from quantkit.tuning.reround import reround, training_windows
from quantkit.tuning.score import Targets
from quantkit.tuning.small_parameter import small_parameters
from quantkit.tuning.student import Student
from quantkit.tuning.teacher import original_outputs
from quantkit.tuning.tunable_linear import CodeOffsets, TunableLinear
from quantkit.tuning.windows import TuningSource

Progress = Callable[[str, int, int], None]

_DOCUMENT = "about"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TunedCheckpoint:
    """What tuning leaves.

    Attributes:
        logits: [1, T, V] float32 answer of the tuned model, as it is stored, to the probe.
        record: for quantkit.json.
    """

    logits: Tensor
    record: dict[str, Any]


def tune_checkpoint(
    plan: Plan,
    writers: Sequence[CheckpointWriter],
    tuning: Tuning,
    sources: Sequence[TuningSource],
    probe: Tensor,
    progress: Progress,
    state_folder: Path | None = None,
) -> TunedCheckpoint:
    """Tune the model in the first writer's files and write the result into all of them.

    Args:
        plan: of the run; everything outside the decoder blocks has its original weights.
        writers: hold every tensor of their checkpoints.
        tuning: the recipe's section.
        sources: what `read_tuning_sources` gave, before the work began.
        probe: [1, T] tokens for which the tuned model's logits are wanted.
        progress: is called with (stage, done, total).
        state_folder: keeps what an interrupted run needs to go on; None keeps nothing.

    Raises:
        CheckpointError: an output cannot store a result without loss.
    """
    kept = None if state_folder is None else state_folder / TUNING_RESULT_NAME
    if kept is not None and kept.exists():  # the run was interrupted while the result was written
        tensors, record = _load(kept)
    else:
        with large_blocks_kept():
            tensors, record = _tune(plan, writers[0], tuning, sources, progress, state_folder)
        if kept is not None:
            _save(kept, tensors, record)
    for writer in writers:
        for layer in plan.layers:
            stored, input_scale = writer.read_layer(layer)
            codes, scale = tensors[f"{layer.name}.codes"], tensors[f"{layer.name}.scale"]
            tuned = QuantizedWeight(codes, scale, layer.scheme, stored.zero_point)
            writer.rewrite_layer(layer, tuned, input_scale)
        for name in small_parameters(plan.model):
            writer.rewrite_parameter(name, tensors[name])
    student = _build_student(plan, writers[0], tuning.model_copy(update={"codes": "frozen"}))
    return TunedCheckpoint(student.logits(probe), record)


def _tune(
    plan: Plan,
    writer: CheckpointWriter,
    tuning: Tuning,
    sources: Sequence[TuningSource],
    progress: Progress,
    state_folder: Path | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Codes, scales and small parameters that tuning found, by name, and its record."""
    batches = [windows for source in sources for windows in (*source.training, *source.validation)]
    outputs = original_outputs(plan, batches, lambda done, total: progress("original", done, total))
    targets = {id(windows): output.clone() for windows, output in zip(batches, outputs, strict=True)}
    del outputs
    student = _build_student(plan, writer, tuning)
    before = {name: layer.start.codes for name, layer in student.layers.items()}
    path = None if state_folder is None else state_folder / TUNING_STATE_NAME
    tuner = Tuner(student, sources, targets, tuning, _read_state(path))
    save = None if path is None else partial(_write_state, path)
    tuner.run(lambda done, total: progress("tune", done, total), save)
    again = None
    if tuning.reround:
        again = _tune_again(plan, student, tuner, (sources, targets, tuning), progress, state_folder)
    tensors = {name: value().detach() for name, value in student.small.items()}
    for name, layer in student.layers.items():
        tensors |= {f"{name}.codes": layer.codes(), f"{name}.scale": layer.scale()}
    record = _record(tuning, sources, tuner, student, before, again)
    for planned in plan.layers:  # ordinary layers come back, for whoever builds the next student
        _restore_linear(plan, planned)
    return tensors, record


def _tune_again(
    plan: Plan,
    student: Student,
    first: Tuner,
    task: tuple[Sequence[TuningSource], Targets, Tuning],
    progress: Progress,
    state_folder: Path | None,
) -> dict[str, Any]:
    """Round the codes anew to the tuned scales and tune once more; kept if it scores better than the first's best.

    Returns:
        The second tuning's part of the record.
    """
    tuned = {name: (layer.start, layer.offsets) for name, layer in student.layers.items()}
    reround(plan, student, training_windows(task[0]), lambda done, total: progress("reround", done, total))
    path = None if state_folder is None else state_folder / TUNING_AGAIN_NAME
    second = Tuner(student, *task, _read_state(path))
    save = None if path is None else partial(_write_state, path)
    second.run(lambda done, total: progress("tune again", done, total), save)
    is_kept = second.best_score.is_better_than(first.best_score)
    if not is_kept:
        logger.warning("rounding to the tuned scales found nothing better; the codes are as they were before it")
        for name, (start, offsets) in tuned.items():
            student.layers[name].start, student.layers[name].offsets = start, offsets
        first.take_best()
    return {"kept": is_kept, "kept_step": second.state.best_step, "history": second.state.history}


def _restore_linear(plan: Plan, layer: LayerPlan) -> None:
    """Put an ordinary layer without weights in the place of a tunable one."""
    parent, _, leaf = layer.name.rpartition(".")
    tunable = plan.model.get_submodule(layer.name)
    rows, columns = layer.shape
    linear = nn.Linear(columns, rows, bias=getattr(tunable, "bias", None) is not None, device="meta")
    setattr(plan.model.get_submodule(parent), leaf, linear)


def _build_student(plan: Plan, writer: CheckpointWriter, tuning: Tuning) -> Student:
    """The model as the writer's files hold it, its original float weights read only to place offsets."""
    model, decoder = plan.model, plan.decoder
    layers: dict[str, TunableLinear] = {}
    for index in range(len(decoder.blocks)):
        prefix = f"{decoder.name}.{index}"
        plan.source.materialize(model, prefix=prefix, dtype=torch.float32)
        for layer in plan.in_block(index):
            layers[layer.name] = _tunable(model.get_submodule(layer.name), layer, writer, tuning, plan)
            parent, _, leaf = layer.name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layers[layer.name])
    for parameter in plan.rewritten:
        value = writer.read_parameter(parameter).float()
        model.get_parameter(parameter).data = value
    for name, value in model.named_parameters():
        value.requires_grad_(name.endswith(".shift"))
    vocab_size = int(plan.source.config.get_text_config().vocab_size)
    return Student(model, decoder, layers, plan.source.dtype, vocab_size, checkpointing=tuning.checkpointing)


def _tunable(
    module: nn.Module, layer: LayerPlan, writer: CheckpointWriter, tuning: Tuning, plan: Plan
) -> TunableLinear:
    """A quantized layer of the checkpoint in the place of the original one, which is freed."""
    assert isinstance(module, nn.Linear)
    weight, input_scale = writer.read_layer(layer)
    offsets = None
    if tuning.codes == "tuned":
        # A transform has rescaled the columns, so the original says nothing about the distance to the next code.
        original = weight.dequantize() if plan.transforms else module.weight.detach()
        offsets = CodeOffsets.start(weight, original)
    bias = None if module.bias is None else module.bias.detach()
    tunable = TunableLinear(weight, bias, plan.scale_dtype, input_scale, offsets, plan.source.dtype)
    forget_weights([module])
    return tunable


def _record(
    tuning: Tuning,
    sources: Sequence[TuningSource],
    tuner: Tuner,
    student: Student,
    before: Mapping[str, Tensor],
    again: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The tuning's part of quantkit.json."""
    if tuner.state.best_step == 0 and not (again and again["kept"]):
        logger.warning("tuning found nothing better on the windows that judge; the checkpoint is as it was before")
    changed, total = 0, 0
    for name, layer in student.layers.items():
        changed += int((layer.codes() != before[name]).sum())
        total += before[name].numel()
    return {
        "options": json.loads(tuning.model_dump_json()),
        "sources": [
            {
                "name": source.label,
                "share": source.share,
                "training_tokens": sum(int(windows.token_mask.sum()) for windows in source.training),
                "validation_tokens": sum(int(windows.token_mask.sum()) for windows in source.validation),
            }
            for source in sources
        ],
        "history": tuner.state.history,
        "kept_step": tuner.state.best_step,
        "changed_codes": changed / total if total else 0.0,
        **({} if again is None else {"reround": again}),
    }


def _read_state(path: Path | None) -> TuningState | None:
    if path is None or not path.exists():
        return None
    tensors, about = _load(path)
    best = {name.removeprefix("best:"): value for name, value in tensors.items() if name.startswith("best:")}
    now = {name: value for name, value in tensors.items() if not name.startswith("best:")}
    return TuningState(about["step"], now, best, about["best_step"], about["history"])


def _write_state(path: Path, state: TuningState) -> None:
    best = {f"best:{name}": value for name, value in state.best.items()}
    _save(path, state.tensors | best, {"step": state.step, "best_step": state.best_step, "history": state.history})


def _save(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Tensors and a JSON document in one file, whole or absent under its name."""
    document = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    unfinished = path.with_name(path.name + ".partial")
    save_file(tensors | {_DOCUMENT: document}, unfinished)
    unfinished.replace(path)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = load_file(path)
    about: dict[str, Any] = json.loads(tensors.pop(_DOCUMENT).numpy().tobytes())
    return tensors, about
