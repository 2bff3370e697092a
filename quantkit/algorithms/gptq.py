"""GPTQ with its grid, its damping and its scales chosen by held-out error, one plain function a stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms import Solution
from quantkit.algorithms.error_feedback import MAX_DAMP_FRACTION, factor_inverse, solve_columns
from quantkit.algorithms.scale_refit import refit_scales
from quantkit.algorithms.scale_search import search_qparams
from quantkit.algorithms.target_correction import TargetCorrection, correct_target, original_error
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
        scale_search: what weights the rounding error of a column when scales are searched: ``diagonal`` (its mean
            square), ``pivot`` (what error feedback leaves of it: its mean square given the columns that are solved
            later), or ``auto`` (by held-out error).
        scale_refit: fit the scales again to the finished codes if that lowers the held-out error.
        block_size: columns whose errors are passed on to the rest in one matrix product.
        target_correction: aim at the outputs of the original model's stream; None aims at the layer's own weight.
    """

    damp_fraction: tuple[float, ...] = (0.01,)
    scale_search: str = "diagonal"
    scale_refit: bool = True
    block_size: int = 128
    target_correction: TargetCorrection | None = None

    def __post_init__(self) -> None:
        if isinstance(self.target_correction, Mapping):  # as a recipe has it
            object.__setattr__(self, "target_correction", TargetCorrection(**self.target_correction))
        for fraction in self.damp_fraction:
            if not 0 < fraction <= MAX_DAMP_FRACTION:
                raise TypeError(f"damp_fraction={fraction} is outside (0, {MAX_DAMP_FRACTION}]")
        if self.scale_search not in ("auto", "diagonal", "pivot"):
            raise TypeError(f"scale_search={self.scale_search!r}; choose from auto, diagonal, pivot")
        if self.block_size < 1:
            raise TypeError(f"block_size={self.block_size} is not positive")


def wanted(options: Options) -> Wanted:
    """Second moments; of windows that judge apart from the rest, if there is something to choose."""
    correction = options.target_correction
    corrects = correction is not None and correction.alpha > 0
    judges = _has_choices(options) or (correction is not None and corrects and correction.apply == "auto")
    return Wanted(gram=True, held_out=judges, original=corrects)


def _has_choices(options: Options) -> bool:
    return options.scale_refit or options.scale_search == "auto" or len(options.damp_fraction) > 1


@dataclass(frozen=True, slots=True)
class _Problem:
    """One stack of layers: weights, Hessian (dead columns made harmless), and the order of its columns."""

    weight: Tensor
    hessian: Tensor
    order: Tensor
    scheme: QuantScheme
    block_size: int

    @classmethod
    def pose(cls, weight: Tensor, hessian: Tensor, scheme: QuantScheme, block_size: int) -> "_Problem":
        """The problem of minimising the output error under one second moment, [K, K] float64."""
        diagonal = hessian.diagonal().clone()
        dead = diagonal <= 0
        if dead.any():  # before the scales are searched: a column that is never active must not widen its group's scale
            weight = weight.masked_fill(dead, 0.0)
            hessian[dead, dead] = diagonal[~dead].mean() if (~dead).any() else 1.0
        order = torch.argsort(diagonal, descending=True, stable=True)
        return cls(weight, hessian, order, scheme, block_size)

    def rows(self, count: int) -> "_Problem":
        """The same problem for ``count`` evenly taken rows."""
        step = -(-self.weight.shape[0] // count)
        return _Problem(self.weight[::step], self.hessian, self.order, self.scheme, self.block_size)

    def factor(self, damp_fraction: float) -> tuple[Tensor, float]:
        """The factor of the inverse Hessian in solving order, and the damping that it took."""
        return factor_inverse(self.hessian, self.order, damp_fraction)

    def search(self, grid: str, diagonal: Tensor, factor: Tensor, scale_dtype: torch.dtype) -> Qparams:
        """Scales and zero points by one of the grids of :class:`Options`."""
        measure = diagonal.float()
        if grid == "pivot":
            measure = torch.empty_like(measure)
            measure[self.order] = factor.diagonal().pow(-2)  # an error e in column i costs e^2 / U_ii^2 in the end
        return search_qparams(self.weight, measure, self.scheme, scale_dtype)

    def solve(self, qparams: Qparams, factor: Tensor) -> QuantizedWeight:
        """Codes by error feedback."""
        codes = solve_columns(self.weight, *qparams, factor, self.order, self.scheme, self.block_size)
        return QuantizedWeight(codes, qparams[0], self.scheme, qparams[1])

    def refit(self, solved: QuantizedWeight) -> QuantizedWeight:
        """The same codes with scales fitted to them."""
        return refit_scales(self.weight, solved, self.hessian.float())


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

    With a target correction that is the change from what the original model's layer answers in the original's stream.
    Scales are searched on the original weights and stay fixed; columns are visited by descending activation ("static"
    act-order), so groups keep their place and the file needs no g_idx. What there is to choose is chosen on a share of
    the rows, solved on most windows and judged on the others; then all rows are solved on all windows.

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
    stages: dict[str, Any] = {}
    fallbacks: tuple[str, ...] = ()
    fit_target = target = weight
    if options.target_correction is not None:
        kept, reason = _keeps_correction(weight, statistics, scheme, options, scale_dtype, stages)
        fallbacks += () if reason is None else (reason,)
        if kept:
            assert statistics.original is not None
            pair = statistics.fit_hessian(), statistics.original.fit_cross()
            fit_target = correct_target(weight, *pair, options.target_correction)
            pair = statistics.hessian(), statistics.original.cross()
            target = correct_target(weight, *pair, options.target_correction)
            moved = float((target - weight).square().sum() / weight.square().sum().clamp(min=1e-30))
            stages["target_correction"]["relative_change"] = moved
    chosen = _Chosen(options.scale_search, options.damp_fraction[0], scale_refit=False)
    if _has_choices(options):
        chosen = _choose(fit_target, statistics, scheme, options, scale_dtype, stages)
    hessian = statistics.hessian()
    diagonal = hessian.diagonal().clone()
    problem = _Problem.pose(target, hessian, scheme, options.block_size)
    factor, damp_fraction = problem.factor(chosen.damp_fraction)
    solved = problem.solve(problem.search(chosen.grid, diagonal, factor, scale_dtype), factor)
    if chosen.scale_refit:
        solved = problem.refit(solved)
    if damp_fraction not in options.damp_fraction:
        asked = ", ".join(f"{fraction:g}" for fraction in options.damp_fraction)
        fallbacks += (f"damp_fraction raised from {asked} to {damp_fraction:g}",)
    return Solution(solved, damp_fraction, int((diagonal <= 0).sum()), fallbacks, stages)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What the held-out windows decided."""

    grid: str
    damp_fraction: float
    scale_refit: bool


def _keeps_correction(
    weight: Tensor,
    statistics: InputStatistics,
    scheme: QuantScheme,
    options: Options,
    scale_dtype: torch.dtype,
    stages: dict[str, Any],
) -> tuple[bool, str | None]:
    """Whether the target is corrected; and in words, if something else than asked is done. What was tried: stages."""
    correction, stream = options.target_correction, statistics.original
    assert correction is not None
    assert stream is not None
    record: dict[str, Any] = {"kept": False, "alpha": correction.alpha, "damping": correction.damping}
    stages["target_correction"] = record
    if stream.num_tokens != statistics.num_tokens:
        return False, "target not corrected: the original's stream routes other tokens to this layer"
    if correction.apply == "always":
        record["kept"] = True
        return True, None
    pairs = stream.pairs()
    if not pairs:
        return False, "target not corrected: there are no held-out windows to judge by"
    rows = weight[:: -(-weight.shape[0] // _TRIAL_ROWS)]
    targets = {"without": rows, "with": correct_target(rows, statistics.fit_hessian(), stream.fit_cross(), correction)}
    diagonal = statistics.fit_hessian().diagonal().clone()
    errors: dict[str, dict[str, float]] = {f"sources[{number}]": {} for number in pairs}
    for name, target in targets.items():
        problem = _Problem.pose(target, statistics.fit_hessian(), scheme, options.block_size)
        factor, _ = problem.factor(options.damp_fraction[0])
        grid = "diagonal" if options.scale_search == "auto" else options.scale_search
        solved = problem.solve(problem.search(grid, diagonal, factor, scale_dtype), factor).dequantize()
        for number, pair in pairs.items():
            errors[f"sources[{number}]"][name] = original_error(rows, solved, pair)
    record["errors"] = errors
    record["kept"] = all(error["with"] < error["without"] for error in errors.values())
    return record["kept"], None


def _choose(
    weight: Tensor,
    statistics: InputStatistics,
    scheme: QuantScheme,
    options: Options,
    scale_dtype: torch.dtype,
    stages: dict[str, Any],
) -> _Chosen:
    """Grid, damping and refit with the least held-out error on a share of the rows; what was tried goes to stages."""
    fit = statistics.fit_hessian()
    diagonal = fit.diagonal().clone()
    trial = _Problem.pose(weight, fit, scheme, options.block_size).rows(_TRIAL_ROWS)
    factor, damp_fraction = trial.factor(options.damp_fraction[0])
    judge, stages["judged_by"] = statistics.judge()  # after the factor, whose work needs the memory

    def error(solved: QuantizedWeight) -> float:
        return output_error(trial.weight, solved.dequantize(), judge)

    grids = ("diagonal", "pivot") if options.scale_search == "auto" else (options.scale_search,)
    solved = {grid: trial.solve(trial.search(grid, diagonal, factor, scale_dtype), factor) for grid in grids}
    errors = {grid: error(solution) for grid, solution in solved.items()}
    grid = min(errors, key=errors.__getitem__)
    if len(grids) > 1:
        stages["scale_search"] = {"chosen": grid, "errors": errors}
    best, least = solved[grid], errors[grid]
    if len(options.damp_fraction) > 1:
        damping = {f"{damp_fraction:g}": least}
        for fraction in options.damp_fraction[1:]:
            if fraction > damp_fraction:
                factor, used = trial.factor(fraction)
                other = trial.solve(trial.search(grid, diagonal, factor, scale_dtype), factor)
                damping[f"{used:g}"] = error(other)
                if damping[f"{used:g}"] < least:
                    best, least, damp_fraction = other, damping[f"{used:g}"], used
        stages["damp_fraction"] = {"chosen": damp_fraction, "errors": damping}
    keeps_refit = False
    if options.scale_refit:
        after = error(trial.refit(best))
        keeps_refit = after < least
        stages["scale_refit"] = {"kept": keeps_refit, "errors": {"before": least, "after": after}}
    return _Chosen(grid, damp_fraction, keeps_refit)
