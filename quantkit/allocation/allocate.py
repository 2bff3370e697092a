"""From a recipe with a target size to a scheme for every layer."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.algorithms import algorithm_of
from quantkit.allocation.knapsack import choose
from quantkit.allocation.sensitivity import Sensitivity, measure_sensitivity
from quantkit.allocation.units import Unit, find_units
from quantkit.calibration.dataset import CalibrationSet
from quantkit.errors import RecipeError
from quantkit.plan import Plan, make_plan
from quantkit.plan.schemes import overridden
from quantkit.recipe import Quantization, Recipe, name_places
from quantkit.scheme import GROUP_SIZES, PER_CHANNEL, QuantScheme

NUM_WINDOWS = 96
WINDOW_TOKENS = 128
MIN_TOKENS = 16  # of a window

Progress = Callable[[str, int, int], None]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A scheme for every layer, and why.

    Attributes:
        schemes: layer name -> scheme.
        table: one row a unit: its candidates with estimated KL, its standard error, bytes, and which was chosen.
        predicted_kl: sum of the chosen candidates' KL in nats a token, as if errors did not interact.
        bits: mean stored bits of a quantized weight.
    """

    schemes: dict[str, QuantScheme]
    table: list[dict[str, Any]]
    predicted_kl: float
    bits: float

    def to_record(self) -> dict[str, Any]:
        """For quantkit.json."""
        return {"bits": self.bits, "predicted_kl": self.predicted_kl, "units": self.table}


def allocate(plan: Plan, recipe: Recipe, calibration: CalibrationSet, progress: Progress) -> Allocation:
    """Choose schemes for the recipe's target.

    Args:
        plan: by the recipe's own scheme; its model has no weights in memory.
        recipe: with a target.
        calibration: windows on which sensitivities are measured.
        progress: is called with (stage, done, total).

    Raises:
        RecipeError: as `check_target`.
    """
    units, legal, sizes, budget = _choices(plan, recipe)
    largest = sum(max(sizes[unit.name]) for unit in units)
    if largest < budget:
        words = "the target allows %s bytes more than the largest candidates take; every layer may have its best one"
        logger.warning(words, f"{budget - largest:,}")
    windows = choose_windows(calibration)
    table = measure_sensitivity(
        plan,
        units,
        legal,
        windows,
        progress,
        algorithm_of(recipe),
        recipe.calibration.seed if recipe.calibration else 0,
    )
    rows = [sizes[unit.name] for unit in units]
    chosen = choose([entry.kl for entry in table], rows, budget)
    schemes = dict(plan.schemes)
    for unit, number in zip(units, chosen, strict=True):
        schemes |= dict.fromkeys(unit.layers, legal[unit.name][number])
    final = make_plan(recipe, plan.source, schemes=schemes)
    predicted = sum(entry.kl[number] for entry, number in zip(table, chosen, strict=True))
    described = [_describe(entry, legal, row, number) for entry, row, number in zip(table, rows, chosen, strict=True)]
    return Allocation(schemes, described, predicted, final.bits_per_weight)


def check_target(plan: Plan, recipe: Recipe) -> int:
    """Raise what `allocate` would, before anything is measured, if no allocation can meet the recipe's target.

    Returns:
        Tensor bytes that the first output has at most: what the target allows, or less if the largest candidates are.

    Raises:
        RecipeError: nothing to choose, a unit for which no candidate is legal, or the target is too small.
    """
    target = "target_bits" if recipe.require_quantization().target_bits is not None else "target_bytes"
    with name_places(recipe, "quantization", target):
        units, _, sizes, budget = _choices(plan, recipe)
    return _rest(plan, units) + min(budget, sum(max(sizes[unit.name]) for unit in units))


def _choices(plan: Plan, recipe: Recipe) -> tuple[list[Unit], dict[str, list[QuantScheme]], dict[str, list[int]], int]:
    """Units, the legal candidates of each, their bytes, and the bytes that all units may take."""
    units, legal, sizes = legal_choices(plan, recipe)
    if all(len(schemes) == 1 for schemes in legal.values()):
        only = next(iter(legal.values()))[0]
        raise RecipeError(
            f"quantization.candidates: only {only} is left for every layer, and the target has no choice",
            keys=("quantization", "candidates"),
        )
    budget = _budget(plan, recipe.require_quantization(), units)
    missing = sum(min(sizes[unit.name]) for unit in units) - budget
    if missing > 0:
        raise _too_small(plan, recipe.require_quantization(), missing)
    return units, legal, sizes, budget


def _too_small(plan: Plan, quantization: Quantization, missing: int) -> RecipeError:
    """The error of a target that is ``missing`` bytes below the smallest candidates."""
    if quantization.target_bytes is not None:
        key, given, least = "target_bytes", f"{quantization.target_bytes:,}", f"{quantization.target_bytes + missing:,}"
    else:
        assert quantization.target_bits is not None, "a target is set"
        key, given = "target_bits", f"{quantization.target_bits:g}"
        bits = quantization.target_bits + 8 * (missing + 1) / _num_weights(plan)
        least = f"{math.ceil(1000 * bits) / 1000:g}"
    return RecipeError(
        f"quantization.{key}: {given} is too small: the smallest candidates need {least}",
        fix="Raise the target, or give candidates with fewer bits",
        keys=("quantization", key),
    )


def _num_weights(plan: Plan) -> int:
    """Weights of all quantized layers."""
    return sum(layer.shape[0] * layer.shape[1] for layer in plan.layers)


def legal_choices(plan: Plan, recipe: Recipe) -> tuple[list[Unit], dict[str, list[QuantScheme]], dict[str, list[int]]]:
    """What an allocation chooses among: units, the legal candidates of each, and their bytes.

    Raises:
        RecipeError: overrides decide every layer, or no candidate of a unit is legal.
    """
    quantization = recipe.require_quantization()
    fixed = overridden(quantization, plan.schemes)
    units = find_units([layer for layer in plan.layers if layer.name not in fixed])
    if not units:
        raise RecipeError(
            "quantization.overrides decide every layer, and nothing is left to choose",
            keys=("quantization", "overrides"),
        )
    columns = {layer.name: layer.shape[1] for layer in plan.layers}
    candidates = tuple(dict.fromkeys(_candidates(quantization)))
    legal = {unit.name: _legal(unit, {columns[name] for name in unit.layers}, candidates) for unit in units}
    return units, legal, _sizes(plan, recipe, units, legal)


def _legal(unit: Unit, columns: Set[int], candidates: Sequence[QuantScheme]) -> list[QuantScheme]:
    """The candidates whose groups divide the input columns of every layer of a unit."""
    found = [
        scheme
        for scheme in candidates
        if scheme.group_size == PER_CHANNEL or all(size % scheme.group_size == 0 for size in columns)
    ]
    if not found:
        raise RecipeError(
            f"quantization.candidates: no group size divides the {min(columns)} input columns of {unit.name}",
            keys=("quantization", "candidates"),
        )
    return found


def _candidates(quantization: Quantization) -> list[QuantScheme]:
    """The recipe's candidates; else its scheme at every group size, and 8 bits."""
    if quantization.candidates is None:
        base = quantization.scheme(PER_CHANNEL)
        sized = [QuantScheme(base.num_bits, size, base.symmetric) for size in GROUP_SIZES]
        return [*sized, QuantScheme(8, PER_CHANNEL, base.symmetric)]
    schemes = []
    for candidate in quantization.candidates:
        sizes = GROUP_SIZES if candidate.group_size == "auto" else (candidate.group_size,)
        schemes += [candidate.scheme(size) for size in sizes]
    return schemes


def _sizes(
    plan: Plan, recipe: Recipe, units: Sequence[Unit], legal: Mapping[str, Sequence[QuantScheme]]
) -> dict[str, list[int]]:
    """Bytes of every unit under each of its candidates, in the first output's format."""
    found: dict[tuple[str, QuantScheme], int] = {}
    for scheme in dict.fromkeys(scheme for schemes in legal.values() for scheme in schemes):
        takers = [unit for unit in units if scheme in legal[unit.name]]
        schemes = dict(plan.schemes) | {name: scheme for unit in takers for name in unit.layers}
        planned = {layer.name: layer.bytes_after for layer in make_plan(recipe, plan.source, schemes=schemes).layers}
        found |= {(unit.name, scheme): sum(planned[name] for name in unit.layers) for unit in takers}
    return {unit.name: [found[unit.name, scheme] for scheme in legal[unit.name]] for unit in units}


def _budget(plan: Plan, quantization: Quantization, units: Sequence[Unit]) -> int:
    """Bytes that the units may take together."""
    rest = _rest(plan, units)
    if quantization.target_bytes is not None:
        return quantization.target_bytes - rest
    assert quantization.target_bits is not None, "a target is set"
    not_layers = plan.bytes_after - sum(layer.bytes_after for layer in plan.layers)
    return int(quantization.target_bits * _num_weights(plan) / 8) - (rest - not_layers)


def _rest(plan: Plan, units: Sequence[Unit]) -> int:
    """Bytes of the first output outside the units, which no allocation changes."""
    allocated = {name for unit in units for name in unit.layers}
    return plan.bytes_after - sum(layer.bytes_after for layer in plan.layers if layer.name in allocated)


def choose_windows(calibration: CalibrationSet) -> list[Tensor]:
    """Pieces of calibration windows, evenly taken, each [T] int64 with at most ``WINDOW_TOKENS``."""
    pieces = []
    for ids, length in zip(calibration.token_ids, calibration.lengths.tolist(), strict=True):
        for start in range(0, length, WINDOW_TOKENS):
            piece = ids[start : min(start + WINDOW_TOKENS, length)]
            if len(piece) >= MIN_TOKENS:
                pieces.append(piece)
    count = min(NUM_WINDOWS, len(pieces))
    return [pieces[number * len(pieces) // count] for number in range(count)]


def _describe(
    entry: Sensitivity, legal: Mapping[str, Sequence[QuantScheme]], sizes: Sequence[int], chosen: int
) -> dict[str, Any]:
    schemes = legal[entry.unit.name]
    candidates = [
        {"scheme": str(scheme), "kl": kl, "standard_error": error, "bytes": size}
        for scheme, kl, error, size in zip(schemes, entry.kl, entry.standard_error, sizes, strict=True)
    ]
    return {"unit": entry.unit.name, "chosen": str(schemes[chosen]), "candidates": candidates}
