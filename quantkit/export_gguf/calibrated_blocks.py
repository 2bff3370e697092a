"""A model run over calibration windows block by block, each layer known by its GGUF name."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.architectures import find_decoder_blocks
from quantkit.calibration.activations import enter_blocks, forget_outside, forget_weights, leave_blocks
from quantkit.calibration.dataset import CalibrationSet, build_calibration
from quantkit.calibration.sources import BUILTIN
from quantkit.calibration.staged_block import StagedBlock
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.checkpoint.stored_weights import refuse_broken_weights
from quantkit.export_gguf.plan import ExportPlan
from quantkit.export_gguf.tensors import ExportTensor
from quantkit.formats.gguf.block_types import BLOCK_TYPES
from quantkit.recipe.calibration import Calibration, JsonlSource, TextSource
from quantkit.recipe.quantization import Experts
from quantkit.source import ModelSource
from quantkit.source.experts import LinearExperts, fused_weight, is_fused, why_not_linear

Progress = Callable[[str, int, int], None]
BATCH_TOKENS = 2048
_COLUMNS = Wanted(columns=True)
_HOWEVER_FEW = Experts.model_construct(calibrate="routed", min_tokens=0)  # experts without tokens have no importance
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj")  # of `quantkit.source.experts.LinearExperts`
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


class BlockRun:
    """A model on its way through the windows: block after block, and then the output matrix.

    It is a skeleton of its own, as the plan's is read tensor by tensor meanwhile.

    Args:
        plan: says which tensors hold codes.
        windows: the tokens.

    Raises:
        SourceError: a weight is not finite.
    """

    def __init__(self, plan: ExportPlan, windows: CalibrationSet) -> None:
        self._plan, source = plan, plan.source
        self._model = source.skeleton(use_linear_experts=True)
        self._decoder = find_decoder_blocks(self._model, source.config.model_type)
        self._read_outside()
        refuse_broken_weights(source, self._model)
        self._batches = enter_blocks(self._model, self._decoder, windows.batches(BATCH_TOKENS))
        forget_outside(self._model, self._decoder)

    def _read_outside(self) -> None:
        for name in self._model.state_dict():
            if not name.startswith(f"{self._decoder.name}."):
                self._plan.source.materialize(self._model, prefix=name, dtype=torch.float32)

    def blocks(self) -> Iterator[CalibratedBlock]:
        """Each block in turn, weights in float32; the caller goes through its stages before it asks for the next."""
        types = self._plan.types
        coded = {
            (tensor.parameter, tensor.part): tensor
            for tensor in self._plan.tensors
            if types[tensor.name] in BLOCK_TYPES
        }
        for index, block in enumerate(self._decoder.blocks):
            prefix = f"{self._decoder.name}.{index}"
            self._plan.source.materialize(self._model, prefix=prefix, dtype=torch.float32)
            refuse_broken_weights(self._plan.source, self._model, prefix)
            _open_fused_experts(block)
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
            staged = StagedBlock(block, index, linears, self._batches, _HOWEVER_FEW)
            yield CalibratedBlock(staged, linears, tensors, numbers)
            staged.finish()
            forget_weights([block])

    def head(self) -> tuple[Tensor, Tensor] | None:
        """[V, K] float32 output matrix and [K] mean square of its inputs, which have left the last block.

        None if it holds no codes of its own. The model is of no use afterwards.
        """
        if self._plan.types.get("output.weight") not in BLOCK_TYPES:
            return None
        self._read_outside()
        head: Any = self._model.get_output_embeddings()  # type: ignore[operator]
        statistics = InputStatistics(head.in_features, _COLUMNS)
        inputs = nn.Identity()
        self._model.set_output_embeddings(inputs)  # type: ignore[operator]
        for batch in self._batches:
            seen = partial(_count, statistics, batch.token_mask)
            handle = inputs.register_forward_pre_hook(seen)
            no_ids = torch.zeros(batch.hidden.shape[:2], dtype=torch.int64)
            leave_blocks(self._model, self._decoder, no_ids, batch.hidden)
            handle.remove()
        return head.weight.detach(), statistics.mean_square


def _open_fused_experts(block: nn.Module) -> None:
    """Experts that are stored as one tensor, in place of which come linear layers that are views of it."""
    for name, fused in list(block.named_modules()):
        if not is_fused(fused) or why_not_linear(fused) is not None:
            continue
        opened = LinearExperts(fused, {})
        for layer, module in opened.named_modules():
            if isinstance(module, nn.Linear):
                number, _, leaf = layer.partition(".")
                module.weight = nn.Parameter(fused_weight(fused, int(number), leaf), requires_grad=False)
        parent, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(parent), leaf, opened)


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
    run = BlockRun(plan, windows)
    importance: dict[str, Tensor] = {}
    for block in run.blocks():
        if importance:
            yield importance
        importance = _block_importance(block)
    if (head := run.head()) is not None:
        importance["output.weight"] = head[1]
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


def _count(statistics: InputStatistics, token_mask: Tensor, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    statistics.add(args[0], token_mask)
