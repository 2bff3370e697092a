"""Solve the layers of one decoder block: collect, quantize, write the result back into the block, go on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import Algorithm, Solution
from quantkit.algorithms.gptq import output_error
from quantkit.calibration.input_range import static_input_scale
from quantkit.calibration.staged_block import StagedBlock
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import QuantizationError
from quantkit.plan import LayerPlan
from quantkit.primitives import QuantizedWeight, fake_quantize_input
from quantkit.scheme import QuantScheme

DEFAULT_OBSERVER = "mse"


@dataclass(frozen=True, slots=True)
class SolvedLayer:
    """A quantized layer and its line in the record.

    Attributes:
        plan: of the layer.
        weight: codes, scales, zero points.
        record: for quantkit.json.
        input_scale: [1] in storage dtype, of a scheme with static inputs; else None.
    """

    plan: LayerPlan
    weight: QuantizedWeight
    record: dict[str, Any]
    input_scale: Tensor | None = None


def solve_block(
    staged: StagedBlock,
    linears: dict[str, nn.Linear],
    layers: Sequence[LayerPlan],
    algorithm: Algorithm,
    dtype: torch.dtype,
    progress: Callable[[int], None],
    *,
    original: StagedBlock | None = None,
    observer: str = DEFAULT_OBSERVER,
) -> list[SolvedLayer]:
    """Quantize the layers of a block stage by stage; each stage sees the inputs that the solved ones give.

    Args:
        staged: the block over the calibration windows.
        linears: the block's layers by their name in the block; their weights are replaced by what a reader will see.
        layers: the plan of the same layers.
        algorithm: how to solve.
        dtype: storage dtype of scales, and of the weight that a reader computes from codes and scales.
        progress: is told how many layers are done.
        original: the same block over the original model's stream, if the algorithm looks at it.
        observer: key of ``input_range.OBSERVERS``, for schemes with static inputs.

    Raises:
        QuantizationError: the algorithm cannot solve a layer; the message names it.
    """
    plans = {name: plan for plan in layers for name in linears if plan.name.endswith(f".{name}")}
    solved: list[SolvedLayer] = []
    for stage in staged.stages:
        started = time.perf_counter()
        own = {name: algorithm.for_layer(plans[name].name) for name in stage}
        wanted = Wanted(histogram=any(_has_static_input(plans[name].scheme) for name in stage))
        wanted = reduce(or_, (each.wanted for each in own.values()), wanted)
        statistics = staged.collect(stage, wanted, original) if wanted else None
        if original is not None:
            original.pass_by(stage)  # while the layers still have their own weights
        together = {name: (plans[name].scheme, own[name], staged.experts.expert_of(name)) for name in stage}
        for scheme, solver, expert in dict.fromkeys(together.values()):
            members = [name for name in stage if together[name] == (scheme, solver, expert)]
            stacked = torch.cat([linears[name].weight for name in members])
            try:
                input_scale = _input_scale(scheme, statistics, observer, dtype)
                solution = solver.solve(stacked, statistics, scheme, solver.options, dtype)
            except QuantizationError as error:
                raise QuantizationError(f"{plans[members[0]].name}: {error.message}", fix=error.fix) from error
            total = statistics.hessian().float() if statistics is not None and wanted.gram else None
            seconds = (time.perf_counter() - started) / len(members)
            rows = [linears[name].weight.shape[0] for name in members]
            for name, weight in zip(members, solution.weight.split(rows), strict=True):
                record = _record(plans[name], linears[name].weight, weight, solution, algorithm, total)
                record |= {"input_tokens": statistics.num_tokens if statistics else None, "seconds": round(seconds, 3)}
                if input_scale is not None:
                    record |= {"input_scale": float(input_scale), "input_observer": observer}
                solved.append(SolvedLayer(plans[name], weight, record, input_scale))
                linears[name].weight = nn.Parameter(weight.dequantize(dtype).float(), requires_grad=False)
                progress(len(solved))
            seen = (
                None if scheme.input is None else partial(fake_quantize_input, scheme=scheme.input, scale=input_scale)
            )
            staged.solved(members, seen)
            started = time.perf_counter()
    return solved


def _has_static_input(scheme: QuantScheme) -> bool:
    return scheme.input is not None and not scheme.input.dynamic


def _input_scale(
    scheme: QuantScheme, statistics: InputStatistics | None, observer: str, dtype: torch.dtype
) -> Tensor | None:
    """The scale of a layer's inputs, if the scheme stores one."""
    if not _has_static_input(scheme):
        return None
    if statistics is None or statistics.histogram is None or statistics.num_tokens == 0:
        raise QuantizationError(
            "static input scales need calibration tokens and saw none", fix="Add calibration sources"
        )
    return static_input_scale(statistics.histogram, observer, dtype)


def _record(
    plan: LayerPlan,
    original: Tensor,
    weight: QuantizedWeight,
    solution: Solution,
    algorithm: Algorithm,
    hessian: Tensor | None,
) -> dict[str, Any]:
    """The layer's line in quantkit.json. Errors are ratios of squared norms, 0 for a perfect copy."""
    dequantized = weight.dequantize()
    size = float(original.square().sum())
    weight_error = float((dequantized - original).square().sum()) / size if size > 0 else 0.0
    return {
        "name": plan.name,
        "scheme": str(plan.scheme),
        "num_bits": plan.scheme.num_bits,
        "group_size": plan.scheme.group_size,
        "algorithm": algorithm.name,
        "damp_fraction": solution.damp_fraction,
        "fallbacks": list(solution.fallbacks),
        "stages": solution.stages,
        "relative_output_error": None if hessian is None else output_error(original, dequantized, hessian),
        "relative_weight_error": weight_error,
        "dead_columns": solution.dead_columns,
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
    }
