"""Transforms: rescale a block so that it computes the same and quantizes better.

A newcomer adds one file and one line to ``TRANSFORMS``. A file has an ``Options`` dataclass, a ``WANTED`` (what it
looks at of the layers' inputs) and a function

    search(fold, block, schemes, statistics, options, dtype) -> FoldScale

that chooses the scale of each channel of a fold; `fold_block.transform_block` does the rest. A file may also have
``clip``, which changes the folded weights.
"""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.architectures import ARCHITECTURES, DecoderBlocks
from quantkit.calibration.statistics import Wanted
from quantkit.errors import RecipeError
from quantkit.transforms.folding import applicable_folds, rewritten_parameter

TRANSFORMS = {  # recipe name -> module; imported on first use
    "awq": "quantkit.transforms.awq",
    "smoothquant": "quantkit.transforms.smoothquant",
}


@dataclass(frozen=True, slots=True)
class Transform:
    """An entry of the table, imported.

    Attributes:
        name: in recipes.
        search: chooses the scales of a fold.
        clip: changes weights after the folds, or None.
        options: of the file.
        wanted: what it looks at of the layers' inputs.
    """

    name: str
    search: Callable[..., Any]
    clip: Callable[..., Any] | None
    options: Any
    wanted: Wanted


def load_transform(name: str, options: Mapping[str, Any] | None = None) -> Transform:
    """Import a transform and check its options.

    Raises:
        RecipeError: unknown name, or an option that the transform does not have.
    """
    if name not in TRANSFORMS:
        raise RecipeError(f"unknown transform {name!r}", fix=f"Choose from {', '.join(sorted(TRANSFORMS))}")
    module = importlib.import_module(TRANSFORMS[name])
    try:
        built = module.Options(**(options or {}))
    except TypeError as error:
        raise RecipeError(f"transform {name}: {error}") from error
    return Transform(name, module.search, getattr(module, "clip", None), built, module.WANTED)


def rewritten_parameters(
    transforms: Sequence[Transform], decoder: DecoderBlocks, quantized: Collection[str], family: str
) -> frozenset[str]:
    """Names of the parameters that transforms change and that are not quantized.

    Args:
        transforms: of the recipe.
        decoder: its blocks.
        quantized: names of the layers that are quantized.
        family: model_type of the configuration.

    Returns:
        Parameter names of the model; empty without transforms, or if the family is not in the table.
    """
    found: set[str] = set()
    for index, block in enumerate(decoder.blocks):
        prefix = f"{decoder.name}.{index}."
        inside = {name.removeprefix(prefix) for name in quantized if name.startswith(prefix)}
        for fold in applicable_folds(family, block, inside) if transforms else ():
            parameter = rewritten_parameter(fold, block)
            if parameter is not None:
                found.add(prefix + parameter)
    return frozenset(found)


def fold_notes(
    transforms: Sequence[Transform], decoder: DecoderBlocks, quantized: Collection[str], family: str
) -> tuple[str, ...]:
    """What the user should know about where the recipe's transforms cannot act; nothing without transforms."""
    if not transforms:
        return ()
    names = ", ".join(transform.name for transform in transforms)
    if family not in ARCHITECTURES:
        return (f"{names}: it is not known where scales can be folded in family {family}, so nothing is transformed",)
    notes = []
    for fold in ARCHITECTURES[family].folds:
        blocks = 0
        for index, block in enumerate(decoder.blocks):
            prefix = f"{decoder.name}.{index}."
            inside = {name.removeprefix(prefix) for name in quantized if name.startswith(prefix)}
            blocks += fold not in applicable_folds(family, block, inside)
        if blocks:
            notes.append(f"{names}: the fold {fold} is passed over in {blocks} of {len(decoder.blocks)} blocks")
    return tuple(notes)
