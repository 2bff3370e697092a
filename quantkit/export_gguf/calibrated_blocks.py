"""A model run over calibration windows block by block, each layer known by its GGUF name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures import find_decoder_blocks
from quantkit.calibration.activations import enter_blocks, forget_outside, forget_weights
from quantkit.calibration.dataset import CalibrationSet, build_calibration
from quantkit.calibration.sources import BUILTIN
from quantkit.calibration.staged_block import StagedBlock
from quantkit.calibration.statistics import Wanted
from quantkit.export_gguf.plan import ExportPlan
from quantkit.export_gguf.tensors import ExportTensor
from quantkit.formats.gguf.block_types import BLOCK_TYPES
from quantkit.recipe.calibration import Calibration, JsonlSource, TextSource
from quantkit.source import ModelSource

Progress = Callable[[str, int, int], None]
BATCH_TOKENS = 2048
_COLUMNS = Wanted(columns=True)


@dataclass(frozen=True, slots=True)
class CalibratedBlock:
    """A decoder block at its turn.

    Attributes:
        staged: the block over the windows.
        linears: its layers, by their name in the block.
        tensors: the file's tensor of each layer.
    """

    staged: StagedBlock
    linears: dict[str, nn.Linear]
    tensors: dict[str, ExportTensor]


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
    source = plan.source
    model = source.skeleton()  # of its own: the plan's is read tensor by tensor meanwhile
    decoder = find_decoder_blocks(model, source.config.model_type)
    for name in model.state_dict():
        if not name.startswith(f"{decoder.name}."):
            source.materialize(model, prefix=name, dtype=torch.float32)
    batches = enter_blocks(model, decoder, windows.batches(BATCH_TOKENS))
    forget_outside(model, decoder)
    by_parameter = {tensor.parameter: tensor for tensor in plan.tensors if plan.types[tensor.name] in BLOCK_TYPES}
    for index, block in enumerate(decoder.blocks):
        prefix = f"{decoder.name}.{index}"
        source.materialize(model, prefix=prefix, dtype=torch.float32)
        linears, tensors = {}, {}
        for name, module in block.named_modules():
            tensor = by_parameter.get(f"{prefix}.{name}.weight")
            if isinstance(module, nn.Linear) and tensor is not None:
                linears[name], tensors[name] = module, tensor
        staged = StagedBlock(block, index, linears, batches)
        yield CalibratedBlock(staged, linears, tensors)
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
        plan: says which tensors hold codes; experts, which are no linear layers, are left out.
        windows: the tokens.

    Yields:
        GGUF name -> [K] float32.
    """
    for block in run_blocks(plan, windows):
        importance: dict[str, Tensor] = {}
        for stage in block.staged.stages:
            mean_square = block.staged.collect(stage, _COLUMNS).mean_square
            importance |= {block.tensors[name].name: mean_square for name in stage}
            block.staged.solved(stage)
        yield importance
