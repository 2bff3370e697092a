"""GPTQ with its grid, its damping and its scales chosen by held-out error, one plain function a stage."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms import Solution
from quantkit.algorithms.error_feedback import MAX_DAMP_FRACTION, factor_inverse, solve_columns
from quantkit.algorithms.scale_refit import refit_scales
from quantkit.algorithms.scale_search import search_qparams
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import QuantizationError
from quantkit.primitives import QuantizedWeight
from quantkit.scheme import QuantScheme

_TRIAL_ROWS = 128  # rows that grids and dampings are tried on; each row is a problem of its own

Qparams = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of GPTQ.

    Attributes:
        damp_fraction: added to the Hessian's diagonal, as a fraction of its mean; in (0, 1]. Of several the one with
            the least held-out error is taken. Raised tenfold, and recorded, while the Hessian cannot be factored.
        scale_search: what weights the rounding error of a column when scales are searched: ``pivot`` (what error
            feedback leaves of it: its mean square given the columns that are solved later), ``diagonal`` (its mean
            square), or ``auto`` (by held-out error).
        scale_refit: fit the scales again to the finished codes, and keep them if the held-out error falls.
        block_size: columns whose errors are passed on to the rest in one matrix product.
    """

    damp_fraction: tuple[float, ...] = (0.01,)
    scale_search: str = "pivot"
    scale_refit: bool = True
    block_size: int = 128

    def __post_init__(self) -> None:
        for fraction in self.damp_fraction:
            if not 0 < fraction <= MAX_DAMP_FRACTION:
                raise TypeError(f"damp_fraction={fraction} is outside (0, {MAX_DAMP_FRACTION}]")
        if self.scale_search not in ("auto", "diagonal", "pivot"):
            raise TypeError(f"scale_search={self.scale_search!r}; choose from auto, diagonal, pivot")
        if self.block_size < 1:
            raise TypeError(f"block_size={self.block_size} is not positive")


def wanted(options: Options) -> Wanted:
    """Second moments, of the windows to solve with and of those that judge."""
    return Wanted(gram=True, held_out=True)


@dataclass(frozen=True, slots=True)
class _Problem:
    """One stack of layers: weights, Hessian (dead columns made harmless), solving order, and what judges."""

    weight: Tensor
    hessian: Tensor
    order: Tensor
    judge: Tensor
    scheme: QuantScheme
    block_size: int

    def rows(self, count: int) -> "_Problem":
        """The same problem for ``count`` evenly taken rows."""
        step = -(-self.weight.shape[0] // count)
        return _Problem(self.weight[::step], self.hessian, self.order, self.judge, self.scheme, self.block_size)

    def solve(self, qparams: Qparams, factor: Tensor) -> QuantizedWeight:
        """Codes by error feedback."""
        codes = solve_columns(self.weight, *qparams, factor, self.order, self.scheme, self.block_size)
        return QuantizedWeight(codes, qparams[0], self.scheme, qparams[1])

    def error(self, quantized: QuantizedWeight) -> float:
        """Relative output error on the tokens that judge."""
        return output_error(self.weight, quantized.dequantize(), self.judge)


def output_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T) with D = quantized - weight: the squared error of the outputs against their size."""
    difference = quantized - weight
    size = float(((weight @ hessian) * weight).sum())
    return float(((difference @ hessian) * difference).sum()) / size if size > 0 else 0.0


def gptq(
    weight: Tensor,
    statistics: InputStatistics | None,
    scheme: QuantScheme,
    options: Options,
    scale_dtype: torch.dtype,
) -> Solution:
    """Quantize so that the layer's output on the calibration tokens changes least.

    Scales are searched on the original weights and stay fixed; columns are visited by descending activation ("static"
    act-order), so groups keep their place and the file needs no g_idx.

    Args:
        weight: [N, K] float32; not modified.
        statistics: inputs of the layer, at least one token.
        scheme: its group size divides K.
        options: which stages there are.
        scale_dtype: dtype in which the scales are stored; they are rounded to it before the first column is.

    Returns:
        Codes and scales, the damping that was used, and for every stage what was tried and which won.

    Raises:
        QuantizationError: no tokens, or the Hessian cannot be factored at any damping.

    Source: arXiv:2210.17323, Algorithm 1; the pivots as the weights of rounding errors: arXiv:2507.18553. Deviations:
    columns in static act-order, scales from a weighted search instead of the group's extremes, factorization in
    float64, and the stages of :class:`Options`.
    """
    if statistics is None or statistics.num_tokens == 0:
        raise QuantizationError("GPTQ needs calibration tokens and saw none", fix="Add calibration sources")
    hessian = statistics.hessian()
    diagonal = hessian.diagonal().clone()
    dead = diagonal <= 0
    if dead.any():  # before the scales are searched: a column that is never active must not widen its group's scale
        weight = weight.masked_fill(dead, 0.0)
        hessian[dead, dead] = diagonal[~dead].mean() if (~dead).any() else 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)
    judge, judged_by = statistics.judge()
    problem = _Problem(weight, hessian, order, judge, scheme, options.block_size)
    stages: dict[str, Any] = {"judged_by": judged_by}
    qparams, factor, damp_fraction = _choose(problem, diagonal.float(), options, scale_dtype, stages)
    solved = problem.solve(qparams, factor)
    solved = _refit_if_better(problem, solved, stages) if options.scale_refit else solved
    escalated = damp_fraction not in options.damp_fraction
    asked = ", ".join(f"{fraction:g}" for fraction in options.damp_fraction)
    fallbacks = (f"damp_fraction raised from {asked} to {damp_fraction:g}",) if escalated else ()
    return Solution(solved, damp_fraction, int(dead.sum()), fallbacks, stages)


def _choose(
    problem: _Problem, diagonal: Tensor, options: Options, scale_dtype: torch.dtype, stages: dict[str, Any]
) -> tuple[Qparams, Tensor, float]:
    """Grid and damping with the least held-out error on a share of the rows.

    Returns:
        Scales and zero points of all rows, the factor of the inverse Hessian, and its damping fraction.
    """
    scheme, trial = problem.scheme, problem.rows(_TRIAL_ROWS)
    hessian = problem.hessian[problem.order][:, problem.order]
    factor, damp_fraction = factor_inverse(hessian, options.damp_fraction[0])
    pivots = torch.empty_like(diagonal)
    pivots[problem.order] = factor.diagonal().pow(-2)  # an error e in column i costs e^2 / U_ii^2 in the end
    measures = {"pivot": pivots, "diagonal": diagonal}
    if options.scale_search != "auto":
        measures = {options.scale_search: measures[options.scale_search]}
    grid = next(iter(measures))
    if len(measures) > 1:
        errors = {}
        for name, measure in measures.items():
            qparams = search_qparams(trial.weight, measure, scheme, scale_dtype)
            errors[name] = trial.error(trial.solve(qparams, factor))
        grid = min(errors, key=errors.__getitem__)
        stages["scale_search"] = {"chosen": grid, "errors": errors}
    if len(options.damp_fraction) > 1:
        qparams = search_qparams(trial.weight, measures[grid], scheme, scale_dtype)
        factors = {damp_fraction: factor}
        errors = {f"{damp_fraction:g}": trial.error(trial.solve(qparams, factor))}
        for fraction in options.damp_fraction[1:]:
            if fraction > damp_fraction:
                other, used = factor_inverse(hessian, fraction)
                errors[f"{used:g}"] = trial.error(trial.solve(qparams, other))
                factors[used] = other
        damp_fraction = min(factors, key=lambda used: errors[f"{used:g}"])
        factor = factors[damp_fraction]
        stages["damp_fraction"] = {"chosen": damp_fraction, "errors": errors}
    return search_qparams(problem.weight, measures[grid], scheme, scale_dtype), factor, damp_fraction


def _refit_if_better(problem: _Problem, solved: QuantizedWeight, stages: dict[str, Any]) -> QuantizedWeight:
    """The solution with scales fitted to its codes, if the held-out error falls."""
    refitted = refit_scales(problem.weight, solved, problem.hessian.float())
    before, after = problem.error(solved), problem.error(refitted)
    stages["scale_refit"] = {"kept": after < before, "errors": {"before": before, "after": after}}
    return refitted if after < before else solved
