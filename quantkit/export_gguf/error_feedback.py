"""GPTQ on the grids of GGUF: open columns make up for the rounding errors of those before them."""

import logging
from collections.abc import Iterator

import gguf
import torch
from torch import Tensor, nn

from quantkit.algorithms.error_feedback import factor_inverse
from quantkit.algorithms.gptq import output_error
from quantkit.calibration.dataset import CalibrationSet
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import QuantizationError
from quantkit.export_gguf.calibrated_blocks import BlockRun, CalibratedBlock
from quantkit.export_gguf.plan import ExportPlan
from quantkit.formats.gguf.block_types import BLOCK_TYPES, BlockType
from quantkit.formats.gguf.blocks import encode_rows, fit_grid
from quantkit.formats.gguf.grid import Grid, dequantize, nearest_levels, safe_inverse
from quantkit.formats.gguf.packing import pack

DAMP_FRACTIONS = (0.01, 0.1)  # the one with less error on held-out windows is taken
_BLOCK = 128  # columns whose errors are passed on to the rest in one product
_STRIP = 16
_WANTED = Wanted(gram=True, held_out=True)
logger = logging.getLogger(__name__)


def solve_blocks(plan: ExportPlan, windows: CalibrationSet) -> Iterator[dict[str, Tensor]]:
    """The bytes of the layers of each decoder block, solved on the inputs that the solved ones before it give.

    Args:
        plan: says the type of every tensor.
        windows: the calibration tokens.

    Yields:
        GGUF name -> [N, bytes] uint8 (experts [E, N, bytes]), a block at a time; at last the output matrix, if it holds
        codes, rounded by the importance of its inputs alone.

    Raises:
        QuantizationError: a layer cannot be solved; the message names it.
    """
    run = BlockRun(plan, windows)
    for block in run.blocks():
        solved: dict[str, Tensor] = {}
        experts: dict[str, dict[int, Tensor]] = {}
        few: dict[str, int] = {}
        for stage in block.staged.stages:
            statistics = block.staged.collect(stage, _WANTED)
            for name in stage:
                tensor, number = block.tensors[name], block.expert_numbers.get(name)
                try:
                    if number is None:
                        solved[tensor.name] = _solve_layer(block, name, statistics, plan.types[tensor.name])
                    else:
                        encoded, enough = _solve_expert(block.linears[name], statistics, plan.types[tensor.name])
                        experts.setdefault(tensor.name, {})[number] = encoded
                        few[tensor.name] = few.get(tensor.name, 0) + (not enough)
                except QuantizationError as error:
                    raise QuantizationError(f"{tensor.name}: {error}") from error
            block.staged.solved(stage)
        for name, count in few.items():
            if count:
                words = "%s: %d of %d experts see fewer tokens than columns: rounded without error feedback"
                logger.warning(words, name, count, len(experts[name]))
        yield solved | {name: torch.stack([by[i] for i in range(len(by))]) for name, by in experts.items()}
    if (head := run.head()) is not None:
        weight, importance = head
        yield {"output.weight": encode_rows(weight, plan.types["output.weight"], importance)}


def _solve_layer(block: CalibratedBlock, name: str, statistics: InputStatistics, type_name: str) -> Tensor:
    """Its bytes; the layer gets the rounded weights."""
    tensor, module = block.tensors[name], block.linears[name]
    weight = tensor.lay_out(module.weight.detach())
    encoded, rounded = solve_tensor(weight, statistics, type_name)
    if tensor.heads:
        module.weight.data[tensor.row_order(weight.shape[0])] = rounded
    else:
        module.weight.data.copy_(rounded)
    return encoded


def _solve_expert(module: nn.Linear, statistics: InputStatistics, type_name: str) -> tuple[Tensor, bool]:
    """The bytes of an expert, and whether it sees tokens enough for feedback; without, importance alone rounds it."""
    weight = module.weight.detach().float()
    enough = statistics.num_tokens - statistics.num_held_out >= weight.shape[1]
    if enough:
        encoded, rounded = solve_tensor(weight, statistics, type_name)
    else:
        encoded = encode_rows(weight, type_name, statistics.mean_square if statistics.num_tokens else None)
        rounded = torch.from_numpy(gguf.quants.dequantize(encoded.numpy(), BLOCK_TYPES[type_name].ggml))
    module.weight.data.copy_(rounded)
    return encoded, enough


def solve_tensor(weight: Tensor, statistics: InputStatistics, type_name: str) -> tuple[Tensor, Tensor]:
    """Quantize one layer so that its outputs on the calibration tokens change least.

    Scales are searched on the original weights and stay fixed; columns are visited by descending activation. Rounding
    to nearest is kept if no feedback does better on the windows that judge; the damping that does best there is used on
    all windows.

    Args:
        weight: [N, K] float32; not modified.
        statistics: second moments of its inputs.
        type_name: a key of ``BLOCK_TYPES``.

    Returns:
        [N, bytes] uint8, and the [N, K] float32 weights that a reader computes of them.

    Raises:
        QuantizationError: no tokens, or the Hessian cannot be factored.
    """
    if statistics.num_tokens == 0:
        raise QuantizationError("no calibration token reaches it")
    block_type = BLOCK_TYPES[type_name]
    grid = fit_grid(weight, type_name, statistics.mean_square)
    judge, _ = statistics.judge()
    levels = nearest_levels(weight, grid, block_type)
    chosen, least = None, output_error(weight, dequantize(levels, grid, block_type), judge)
    for damp_fraction in DAMP_FRACTIONS:
        trial = _solve(weight, grid, block_type, statistics.fit_hessian(), damp_fraction)
        error = output_error(weight, dequantize(trial, grid, block_type), judge)
        if error < least:
            chosen, least = damp_fraction, error
    if chosen is not None:
        levels = _solve(weight, grid, block_type, statistics.hessian(), chosen)
    return pack(levels, grid, block_type), dequantize(levels, grid, block_type)


def _solve(weight: Tensor, grid: Grid, block_type: BlockType, hessian: Tensor, damp_fraction: float) -> Tensor:
    """[N, K] float32 levels by error feedback under one second moment, which is changed."""
    diagonal = hessian.diagonal().clone()
    dead = diagonal <= 0
    hessian[dead, dead] = float(diagonal[~dead].mean()) if bool((~dead).any()) else 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)
    factor, _ = factor_inverse(hessian, order, damp_fraction)
    return feed_back(weight, grid, block_type, factor, order)


def feed_back(weight: Tensor, grid: Grid, block_type: BlockType, factor: Tensor, order: Tensor) -> Tensor:
    """Algorithm 1 of GPTQ on a grid that is fixed beforehand.

    Args:
        weight: [N, K] float32.
        grid: of the same rows.
        block_type: of the grid.
        factor: [K, K] float32 upper factor of the inverse Hessian, in solving order.
        order: [K] the column that is solved first, second, ...

    Returns:
        [N, K] float32 levels, columns in their own places.

    Source: arXiv:2210.17323, Algorithm 1; on these grids also IST-DASLab/gptq-gguf-toolkit.
    """
    w = weight.T[order].contiguous()
    group = (order // block_type.sub_block).tolist()
    scales = grid.scale.T.contiguous()
    inverses = safe_inverse(scales)
    minima = None if grid.minimum is None else grid.minimum.T.contiguous()
    columns, levels = w.shape[0], torch.empty_like(w)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = torch.empty(stop - start, w.shape[1])
        pivots = factor[start:stop, start:stop].diagonal().tolist()
        for first in range(start, stop, _STRIP):
            last = min(first + _STRIP, stop)
            for i in range(first, last):
                at = group[i]
                shifted = w[i] if minima is None else w[i] + minima[at]
                levels[i] = block_type.levels.nearest(shifted * inverses[at])
                error = torch.addcmul(shifted, levels[i], scales[at], value=-1.0, out=errors[i - start])
                error /= pivots[i - start]
                if i + 1 < last:
                    w[i + 1 : last].addr_(factor[i, i + 1 : last], error, alpha=-1.0)
            strip = errors[first - start : last - start]
            w[last:stop].addmm_(factor[first:last, last:stop].T, strip, alpha=-1.0)
        w[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1.0)
    result = torch.empty_like(weight)
    result[:, order] = levels.T
    return result
