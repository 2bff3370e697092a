"""quantkit: quantize a language model, serve it before and after, and prove that it still works.

The names below are imported on first use, so that ``import quantkit`` stays cheap and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.errors import QuantkitError
    from quantkit.pipeline import quantize_model
    from quantkit.recipe import Recipe, load_recipe
    from quantkit.serve import Engine, EngineConfig, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "EngineConfig",
    "QuantkitError",
    "Recipe",
    "SamplingParams",
    "__version__",
    "load_recipe",
    "quantize_model",
]

_HOMES = {
    "Engine": "quantkit.serve",
    "EngineConfig": "quantkit.serve",
    "QuantkitError": "quantkit.errors",
    "Recipe": "quantkit.recipe",
    "SamplingParams": "quantkit.serve",
    "load_recipe": "quantkit.recipe",
    "quantize_model": "quantkit.pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
