"""The sensitivities of a model as a table: what each candidate of each unit costs, and its share of the whole."""

from collections.abc import Callable
from typing import Any

from quantkit.algorithms import algorithm_of
from quantkit.allocation.allocate import choose_windows, legal_choices
from quantkit.allocation.sensitivity import measure_sensitivity
from quantkit.calibration.dataset import build_calibration
from quantkit.plan import make_plan
from quantkit.recipe import Calibration, Recipe, name_places

Progress = Callable[[str, int, int], None]


def sensitivity_table(recipe: Recipe, progress: Progress) -> dict[str, Any]:
    """Measure what an allocation for a size would choose by. Reads all weights.

    Args:
        recipe: with quantization; its candidates, or its scheme at every group size and 8-bit weights. Without a
            calibration the default one is taken.
        progress: is called with (stage, done, total).

    Returns:
        ``units``, the one with the largest KL at its smallest candidate first: each with its ``candidates`` (scheme,
        kl in nats a token, standard_error, bytes, share: of ``total_kl``), the smallest first; ``total_kl``, the sum
        if every unit took its smallest candidate; ``largest_share``; ``num_windows``; ``notes``.

    Raises:
        QuantkitError: the model or the recipe cannot be taken.
    """
    plan = make_plan(recipe)
    units, legal, sizes = legal_choices(plan, recipe)
    section = recipe.calibration or Calibration()
    with name_places(recipe):
        windows = choose_windows(build_calibration(section, plan.source, progress))
    measured = measure_sensitivity(plan, units, legal, windows, progress, algorithm_of(recipe), section.seed)
    smallest = [min(zip(sizes[entry.unit.name], entry.kl, strict=True))[1] for entry in measured]
    total = sum(smallest)
    rows: list[dict[str, Any]] = []
    for entry in measured:
        name = entry.unit.name
        candidates: list[dict[str, Any]] = [
            {
                "scheme": str(scheme),
                "kl": kl,
                "standard_error": error,
                "bytes": nbytes,
                "share": kl / total if total > 0 else 0.0,
            }
            for scheme, kl, error, nbytes in zip(legal[name], entry.kl, entry.standard_error, sizes[name], strict=True)
        ]
        candidates.sort(key=lambda candidate: candidate["bytes"])
        rows.append({"unit": name, "num_weights": entry.unit.num_weights, "candidates": candidates})
    rows.sort(key=lambda row: row["candidates"][0]["kl"], reverse=True)
    shares = [candidate["share"] for row in rows for candidate in row["candidates"]]
    return {
        "model": plan.source.name,
        "units": rows,
        "total_kl": total,
        "largest_share": max(shares),
        "num_windows": len(windows),
        "notes": [
            f"weights were read and {len(windows)} windows ran through the model",
            "KL: nats a token that rounding the unit alone costs; share: of all units in their smallest scheme",
        ],
    }
