"""What a search tries, the smallest first: the recipe's named variants, or a ladder made from its scheme."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.allocation.allocate import check_target
from quantkit.errors import QuantkitError, RecipeError
from quantkit.pipeline import check_data
from quantkit.plan import make_plan
from quantkit.recipe import Quantization, Recipe, name_places, parse_recipe
from quantkit.recipe.variants import lay_over, recipe_data, variant_text
from quantkit.scheme import GROUP_SIZES
from quantkit.source import ModelSource

TARGET_BITS = (4.5, 5.0)  # of the ladder's allocations
Changes = Mapping[str, Mapping[str, Any]]  # section -> key -> value; None removes a key


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe to try.

    Attributes:
        name: of the variant.
        data: the whole recipe, without a search, with the outputs and reports of the recipe that it comes from.
        nbytes: tensor bytes of its first output, as planned.
        bits: stored bits of a quantized weight, as planned.
    """

    name: str
    data: Mapping[str, Any]
    nbytes: int
    bits: float


def find_candidates(recipe: Recipe, source: ModelSource) -> tuple[list[Candidate], list[str]]:
    """The candidates of a search in the order in which they are tried: by bytes, equal ones as they stand.

    Args:
        recipe: with a search.
        source: its model.

    Returns:
        The candidates; and those of the ladder that the model or the outputs rule out, each with the reason.

    Raises:
        RecipeError: a candidate that the recipe names cannot be made, or none of the ladder can.
    """
    given = recipe.require_search().candidates
    base = recipe_data(recipe)
    named: Iterable[tuple[str, Changes]]
    if given is None:
        named = ladder(recipe.require_quantization(), base["quantization"])
    else:
        named = [
            (entry.name, {"quantization": entry.quantization, "calibration": entry.calibration}) for entry in given
        ]
    found: list[Candidate] = []
    left_out: list[str] = []
    with name_places(recipe, "search"):
        for number, (name, changes) in enumerate(named):
            try:
                found.append(_planned(name, lay_over(base, changes), source))
            except QuantkitError as error:
                if given is not None:
                    words = f"the search's candidate {name!r}: {error.message}"
                    raise RecipeError(words, fix=error.fix, keys=("search", "candidates", number)) from error
                left_out.append(f"{name}: {error.message}")
        if not found:
            raise RecipeError(f"nothing to try: {'; '.join(left_out)}", fix="Name candidates in `search`")
    return sorted(found, key=lambda candidate: candidate.nbytes), left_out


def ladder(quantization: Quantization, data: Mapping[str, Any]) -> list[tuple[str, Changes]]:
    """What is tried if the recipe names nothing.

    For 4 bits: every group size as it is and tuned, allocations of 4.5 and 5 bits tuned, 8-bit weights as the last
    resort. For 8 bits: as it is, tuned, with 8-bit inputs also smoothed, and with 16-bit inputs at last.

    Args:
        quantization: of the recipe.
        data: the same section as the file has it; its tuning is taken where a candidate is tuned.
    """
    scheme = quantization.given_scheme
    assert scheme is not None, "a recipe's own scheme quantizes"
    plain = dict.fromkeys(("target_bits", "target_bytes", "candidates", "tuning"))
    tuned = {"tuning": dict(data.get("tuning", {}))}
    entries: list[tuple[str, dict[str, Any]]] = []
    if scheme.num_bits == 4:
        four = plain | {"scheme": {"num_bits": 4, "symmetric": scheme.symmetric}}
        for size in GROUP_SIZES:
            uniform = four | {"group_size": size}
            entries += [(f"w4-g{size}", uniform), (f"w4-g{size}-tuned", uniform | tuned)]
        for bits in TARGET_BITS:
            entries.append((f"w4-{bits}bits-tuned", four | tuned | {"group_size": None, "target_bits": bits}))
        entries.append(("w8", plain | {"scheme": "W8A16", "group_size": None}))
    else:
        entries += [("w8", plain), ("w8-tuned", plain | tuned)]
        if scheme.input != "none":
            smooth = plain | {"transforms": ["smoothquant"]}
            entries += [("w8-smooth", smooth), ("w8-smooth-tuned", smooth | tuned)]
            entries.append(("w8a16-tuned", plain | tuned | {"scheme": "W8A16", "group_size": None}))
    return [(name, {"quantization": changes}) for name, changes in entries]


def _planned(name: str, data: Mapping[str, Any], source: ModelSource) -> Candidate:
    """The candidate with its size. Raises QuantkitError if it cannot be made."""
    variant = parse_recipe(variant_text(data), origin=name)
    plan = make_plan(variant, source)
    check_data(variant, source, plan, [])
    nbytes = check_target(plan, variant) if variant.require_quantization().has_target else plan.bytes_after
    layers = sum(layer.bytes_after for layer in plan.layers)
    bits = plan.bits_per_weight * (nbytes - plan.bytes_after + layers) / layers
    return Candidate(name, data, nbytes, bits)
