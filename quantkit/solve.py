"""Solve the layers of one decoder block: collect, quantize, write the result back into the block, go on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import Algorithm, Solution
from quantkit.calibration.staged_block import StagedBlock
from quantkit.calibration.statistics import InputStatistics
from quantkit.errors import QuantizationError
from quantkit.plan import LayerPlan
from quantkit.primitives import QuantizedWeight


@dataclass(frozen=True, slots=True)
class SolvedLayer:
    """A quantized layer and its line in the record."""

    plan: LayerPlan
    weight: QuantizedWeight
    record: dict[str, Any]


def solve_block(
    staged: StagedBlock,
    linears: dict[str, nn.Linear],
    layers: Sequence[LayerPlan],
    algorithm: Algorithm,
    dtype: torch.dtype,
    progress: Callable[[int], None],
) -> list[SolvedLayer]:
    """Quantize the layers of a block stage by stage; each stage sees the inputs that the solved ones give.

    Args:
        staged: the block over the calibration windows.
        linears: the block's layers by their name in the block; their weights are replaced by what a reader will see.
        layers: the plan of the same layers.
        algorithm: how to solve.
        dtype: storage dtype of scales, and of the weight that a reader computes from codes and scales.
        progress: is told how many layers are done.

    Raises:
        QuantizationError: the algorithm cannot solve a layer; the message names it.
    """
    plans = {name: plan for plan in layers for name in linears if plan.name.endswith(f".{name}")}
    solved: list[SolvedLayer] = []
    for stage in staged.stages:
        started = time.perf_counter()
        statistics = staged.collect(stage) if algorithm.needs_calibration else None
        for scheme in dict.fromkeys(plans[name].scheme for name in stage):
            members = [name for name in stage if plans[name].scheme == scheme]
            stacked = torch.cat([linears[name].weight for name in members])
            try:
                solution = algorithm.solve(stacked, statistics, scheme, algorithm.options, dtype)
            except QuantizationError as error:
                raise QuantizationError(f"{plans[members[0]].name}: {error.message}", fix=error.fix) from error
            seconds = (time.perf_counter() - started) / len(members)
            rows = [linears[name].weight.shape[0] for name in members]
            for name, codes, scale in zip(
                members, solution.weight.codes.split(rows), solution.weight.scale.split(rows), strict=True
            ):
                weight = QuantizedWeight(codes, scale, scheme)
                record = _record(plans[name], linears[name].weight, weight, solution, algorithm, statistics, seconds)
                solved.append(SolvedLayer(plans[name], weight, record))
                linears[name].weight = nn.Parameter(weight.dequantize(dtype).float(), requires_grad=False)
                progress(len(solved))
            started = time.perf_counter()
        staged.solved(stage)
    return solved


def _record(
    plan: LayerPlan,
    original: Tensor,
    weight: QuantizedWeight,
    solution: Solution,
    algorithm: Algorithm,
    statistics: InputStatistics | None,
    seconds: float,
) -> dict[str, Any]:
    """The layer's line in quantkit.json. Errors are ratios of squared norms, 0 for a perfect copy."""
    difference = weight.dequantize() - original
    output_error = None
    if statistics is not None:
        hessian = statistics.hessian().float()
        output_error = _ratio(((difference @ hessian) * difference).sum(), ((original @ hessian) * original).sum())
    return {
        "name": plan.name,
        "scheme": str(plan.scheme),
        "num_bits": plan.scheme.num_bits,
        "group_size": plan.scheme.group_size,
        "algorithm": algorithm.name,
        "damp_fraction": solution.damp_fraction,
        "fallbacks": list(solution.fallbacks),
        "input_tokens": None if statistics is None else statistics.num_tokens,
        "relative_output_error": output_error,
        "relative_weight_error": _ratio(difference.square().sum(), original.square().sum()),
        "dead_columns": solution.dead_columns,
        "seconds": round(seconds, 3),
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
    }


def _ratio(error: Tensor, size: Tensor) -> float:
    """Error / size; 0 if both vanish (a layer of zeros is copied perfectly)."""
    return float(error / size) if float(size) > 0 else 0.0
