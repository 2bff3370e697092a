"""Algorithms: a weight and the statistics of its inputs go in, integer codes and scales come out.

A newcomer adds one file and one line to ``ALGORITHMS``. An algorithm is a function

    algorithm(weight, statistics, scheme, options, scale_dtype) -> Solution

with ``weight`` [N, K] float32, ``statistics`` of the layer's inputs or None when the recipe calibrates nothing, and
``options`` the file's own ``Options`` dataclass. It works on each row alone: layers that share their input are solved
together by stacking their rows. ``wanted(options)`` of the file says what of the inputs it looks at.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import RecipeError
from quantkit.primitives import QuantizedWeight
from quantkit.recipe import Recipe
from quantkit.scheme import QuantScheme


@dataclass(frozen=True, slots=True)
class Solution:
    """What an algorithm found.

    Attributes:
        weight: codes and scales, the scales in the dtype that is stored.
        damp_fraction: damping that was used, as a fraction of the Hessian's mean diagonal; None if there is none.
        dead_columns: input columns that no calibration token ever activated.
        fallbacks: in plain words, whatever was done other than asked; empty when nothing was.
        stages: for each stage that had a choice, what was tried, the errors, and which won.
    """

    weight: QuantizedWeight
    damp_fraction: float | None = None
    dead_columns: int = 0
    fallbacks: tuple[str, ...] = field(default_factory=tuple)
    stages: dict[str, Any] = field(default_factory=dict)


AlgorithmFunction = Callable[[Tensor, InputStatistics | None, QuantScheme, Any, torch.dtype], Solution]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An entry of the table, imported: the function, its options and what it looks at of a layer's inputs."""

    name: str
    solve: AlgorithmFunction
    options: Any
    wanted: Wanted

    @property
    def needs_calibration(self) -> bool:
        """Whether it looks at inputs at all."""
        return bool(self.wanted)

    def for_layer(self, name: str) -> "Algorithm":
        """The same without what the options leave out for a layer."""
        correction = getattr(self.options, "target_correction", None)
        return self if correction is None or correction.covers(name) else self.without_correction()

    def without_correction(self) -> "Algorithm":
        """The same, aiming at a layer's own weight."""
        if getattr(self.options, "target_correction", None) is None:
            return self
        options = replace(self.options, target_correction=None)
        return replace(self, options=options, wanted=replace(self.wanted, original=False))


ALGORITHMS = {  # recipe name -> module; imported on first use
    "rtn": "quantkit.algorithms.rtn",
    "gptq": "quantkit.algorithms.gptq",
}


def load_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """Import an algorithm and check its options.

    Raises:
        RecipeError: unknown name, or an option that the algorithm does not have.
    """
    if name not in ALGORITHMS:
        raise RecipeError(f"unknown algorithm {name!r}", fix=f"Choose from {', '.join(sorted(ALGORITHMS))}")
    module = importlib.import_module(ALGORITHMS[name])
    try:
        built = module.Options(**(options or {}))
    except TypeError as error:
        raise RecipeError(f"algorithm {name}: {error}") from error
    return Algorithm(name, getattr(module, name), built, module.wanted(built))


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The algorithm that a recipe names, with its options. Raises as `load_algorithm`."""
    section = recipe.require_quantization().algorithm
    return load_algorithm(section.name, section.model_dump(exclude={"name"}))
