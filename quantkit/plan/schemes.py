"""Which scheme each layer gets: the recipe's own, or that of the last override that matches its name."""

import re
from collections.abc import Iterable, Mapping

from torch import nn

from quantkit.errors import RecipeError
from quantkit.recipe import Quantization, SchemeChoice
from quantkit.recipe.document import KeyPath, key_path
from quantkit.scheme import GROUP_SIZES, PER_CHANNEL, QuantScheme


def choose_schemes(quantization: Quantization, targets: Mapping[str, nn.Linear]) -> dict[str, QuantScheme]:
    """The scheme of every layer that is quantized, in the order of the model.

    Args:
        quantization: of the recipe.
        targets: the layers that are not ignored.

    Raises:
        RecipeError: an override that matches no layer, or a group size that does not divide the layers it is for.
    """
    chosen: dict[str, SchemeChoice | None] = dict.fromkeys(targets, quantization)
    for number, override in enumerate(quantization.overrides):
        matched = [name for name in targets if name == override.match or re.fullmatch(override.match, name)]
        if not matched:
            names = list(targets) or ["none"]
            raise RecipeError(
                f"quantization.overrides[{number}]: {override.match!r} matches no layer that is quantized",
                fix=f"Layers are called {names[0]} ... {names[-1]}; a pattern must match the whole name",
                keys=("quantization", "overrides", number),
            )
        chosen |= dict.fromkeys(matched, None if override.keeps else override)
    sizes = {}
    for place, choice in quantization.choices.items():
        members = {name: targets[name] for name, other in chosen.items() if other is choice}
        sizes[id(choice)] = _group_size(("quantization", *place, "group_size"), choice, members)
    return {name: choice.scheme(sizes[id(choice)]) for name, choice in chosen.items() if choice is not None}


def overridden(quantization: Quantization, names: Iterable[str]) -> set[str]:
    """The layers whose scheme an override has decided."""
    patterns = [override.match for override in quantization.overrides]
    return {name for name in names if any(name == pattern or re.fullmatch(pattern, name) for pattern in patterns)}


def _group_size(keys: KeyPath, choice: SchemeChoice, members: Mapping[str, nn.Linear]) -> int:
    """The group size of a choice if it divides every layer; for ``auto`` the largest that does."""
    asked = choice.group_size
    if asked == "auto":
        for size in GROUP_SIZES:
            if all(module.in_features % size == 0 for module in members.values()):
                return size
        name, module = next((n, m) for n, m in members.items() if m.in_features % GROUP_SIZES[-1])
        raise RecipeError(
            f"{key_path(keys)}: auto found none of {', '.join(map(str, GROUP_SIZES))} that divides every layer "
            f"({name} has {module.in_features} input columns)",
            fix="Use group_size: channel, or ignore that layer",
            keys=keys,
        )
    wrong = [name for name, module in members.items() if asked != PER_CHANNEL and module.in_features % asked]
    if wrong:
        raise RecipeError(
            f"{key_path(keys)}: {asked} does not divide the {members[wrong[0]].in_features} input columns of "
            f"{wrong[0]} (and {len(wrong) - 1} more layers)",
            fix="Use group_size: auto",
            keys=keys,
        )
    return asked
