"""A model run over calibration windows block by block, each layer known by its GGUF name."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.architectures import DecoderBlocks, find_decoder_blocks
from quantkit.calibration.activations import enter_blocks, forget_outside, forget_weights, leave_blocks
from quantkit.calibration.dataset import CalibrationSet, build_calibration
from quantkit.calibration.sources import BUILTIN
from quantkit.calibration.staged_block import BlockBatch, StagedBlock
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.export_gguf.plan import ExportPlan
from quantkit.export_gguf.tensors import ExportTensor
from quantkit.formats.gguf.block_types import BLOCK_TYPES
from quantkit.recipe.calibration import Calibration, JsonlSource, TextSource
from quantkit.recipe.quantization import Experts
from quantkit.source import ModelSource
from quantkit.stored_weights import refuse_broken_weights

Progress = Callable[[str, int, int], None]
BATCH_TOKENS = 2048
_COLUMNS = Wanted(columns=True)
_HOWEVER_FEW = Experts.model_construct(calibrate="routed", min_tokens=0)  # experts without tokens have no importance
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj")  # of `quantkit.experts.LinearExperts`
_PARTS = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}


@dataclass(frozen=True, slots=True)
class CalibratedBlock:
    """A decoder block at its turn.

    Attributes:
        staged: the block over the windows.
        linears: its layers, by their name in the block.
        tensors: the file's tensor of each layer; all experts of a projection are in one.
        expert_numbers: of the layers that are one expert's.
    """

    staged: StagedBlock
    linears: dict[str, nn.Linear]
    tensors: dict[str, ExportTensor]
    expert_numbers: dict[str, int] = field(default_factory=dict)


def calibration_windows(source: ModelSource, text: str, num_tokens: int) -> CalibrationSet:
    """Windows of the built-in texts and chats (``builtin``) or of a text file.

    Raises:
        CalibrationError: the file is missing or too short.
    """
    if text != BUILTIN:
        sources: tuple[TextSource | JsonlSource, ...] = (TextSource(kind="text", path=text),)
    elif source.tokenizer().chat_template:
        sources = (
            TextSource(kind="text", path=BUILTIN, share=0.5),
            JsonlSource(kind="jsonl", path=BUILTIN, share=0.5),
        )
    else:
        sources = (TextSource(kind="text", path=BUILTIN),)
    window = min(512, num_tokens)
    return build_calibration(Calibration(sources=sources, num_tokens=num_tokens, window_tokens=window), source)


def run_blocks(plan: ExportPlan, windows: CalibrationSet) -> Iterator[CalibratedBlock]:
    """Each block in turn, its weights in float32; the caller goes through its stages before it asks for the next.

    Args:
        plan: says which tensors hold codes.
        windows: the tokens.
    """
    model, decoder, batches = _enter(plan, windows)
    yield from _run_blocks(plan, model, decoder, batches)


def _enter(plan: ExportPlan, windows: CalibrationSet) -> tuple[nn.Module, DecoderBlocks, list[BlockBatch]]:
    """A skeleton of its own, as the plan's is read tensor by tensor meanwhile, and the windows at its first block."""
    source = plan.source
    model = source.skeleton(use_linear_experts=True)
    decoder = find_decoder_blocks(model, source.config.model_type)
    _read_outside(source, model, decoder)
    refuse_broken_weights(source, model)
    batches = enter_blocks(model, decoder, windows.batches(BATCH_TOKENS))
    forget_outside(model, decoder)
    return model, decoder, batches


def _read_outside(source: ModelSource, model: nn.Module, decoder: DecoderBlocks) -> None:
    for name in model.state_dict():
        if not name.startswith(f"{decoder.name}."):
            source.materialize(model, prefix=name, dtype=torch.float32)


def _run_blocks(
    plan: ExportPlan, model: nn.Module, decoder: DecoderBlocks, batches: list[BlockBatch]
) -> Iterator[CalibratedBlock]:
    coded = {
        (tensor.parameter, tensor.part): tensor for tensor in plan.tensors if plan.types[tensor.name] in BLOCK_TYPES
    }
    for index, block in enumerate(decoder.blocks):
        prefix = f"{decoder.name}.{index}"
        plan.source.materialize(model, prefix=prefix, dtype=torch.float32)
        refuse_broken_weights(plan.source, model, prefix)
        linears: dict[str, nn.Linear] = {}
        tensors: dict[str, ExportTensor] = {}
        numbers: dict[str, int] = {}
        for name, module in block.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            place: tuple[str, int | None] = (f"{prefix}.{name}.weight", None)
            if match := _EXPERT.fullmatch(name):
                parameter, part = _PARTS[match[3]]
                place = (f"{prefix}.{match[1]}.{parameter}", part)
            if place in coded:
                linears[name], tensors[name] = module, coded[place]
                if match:
                    numbers[name] = int(match[2])
        staged = StagedBlock(block, index, linears, batches, _HOWEVER_FEW)
        yield CalibratedBlock(staged, linears, tensors, numbers)
        staged.finish()
        forget_weights([block])


def measure_importance(
    plan: ExportPlan, windows: CalibrationSet, progress: Progress | None = None
) -> dict[str, Tensor]:
    """The importance of all blocks together; see :func:`collect_importance`."""
    importance: dict[str, Tensor] = {}
    total = int(plan.source.config.num_hidden_layers)
    for done, block in enumerate(collect_importance(plan, windows), start=1):
        importance |= block
        if progress is not None:
            progress("measure", done, total)
    return importance


def collect_importance(plan: ExportPlan, windows: CalibrationSet) -> Iterator[dict[str, Tensor]]:
    """The mean square of each input column of a block's layers, block by block, under GGUF names.

    Args:
        plan: says which tensors hold codes. An embedding that is the output matrix too is left out: it is looked up by
            row as well, where every column counts the same.
        windows: the tokens.

    Yields:
        GGUF name -> [K] float32, for experts [E, K] over the tokens that are routed to each; 0 without any. With the
        last block comes the output matrix.
    """
    model, decoder, batches = _enter(plan, windows)
    importance: dict[str, Tensor] = {}
    for block in _run_blocks(plan, model, decoder, batches):
        if importance:
            yield importance
        importance = _block_importance(block)
    if plan.types.get("output.weight") in BLOCK_TYPES:
        _read_outside(plan.source, model, decoder)
        importance["output.weight"] = _head_importance(model, decoder, batches)
    yield importance


def _block_importance(block: CalibratedBlock) -> dict[str, Tensor]:
    importance: dict[str, Tensor] = {}
    for stage in block.staged.stages:
        mean_square = block.staged.collect(stage, _COLUMNS).mean_square
        for name in stage:
            tensor, number = block.tensors[name], block.expert_numbers.get(name)
            if number is None:
                importance[tensor.name] = mean_square
            else:
                experts = importance.setdefault(tensor.name, torch.zeros(tensor.shape[0], tensor.shape[-1]))
                experts[number] = mean_square
        block.staged.solved(stage)
    return importance


def _head_importance(model: nn.Module, decoder: DecoderBlocks, batches: list[BlockBatch]) -> Tensor:
    """[K] mean square of the inputs of the output matrix, which itself is not computed."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    statistics = InputStatistics(head.in_features, _COLUMNS)
    inputs = nn.Identity()
    model.set_output_embeddings(inputs)  # type: ignore[operator]
    for batch in batches:
        seen = partial(_count, statistics, batch.token_mask)
        handle = inputs.register_forward_pre_hook(seen)
        leave_blocks(model, decoder, torch.zeros(batch.hidden.shape[:2], dtype=torch.int64), batch.hidden)
        handle.remove()
    return statistics.mean_square


def _count(statistics: InputStatistics, token_mask: Tensor, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    statistics.add(args[0], token_mask)
