"""File and line for mistakes that show only when the recipe meets its model."""

from collections.abc import Iterator
from contextlib import contextmanager

from quantkit.errors import QuantizationError, UsageError
from quantkit.recipe.document import KeyPath
from quantkit.recipe.model import Recipe


@contextmanager
def name_places(recipe: Recipe, *keys: str | int) -> Iterator[None]:
    """Put file, line and column before the message of an error that knows its key in the recipe.

    Args:
        recipe: whose keys they are; one that was read from no file changes nothing.
        keys: of an error that knows none itself.
    """
    try:
        yield
    except (UsageError, QuantizationError) as error:
        place = _place(recipe, error.keys or keys)
        if place:
            error.prepend(place)
        raise


def _place(recipe: Recipe, keys: KeyPath) -> str:
    if not keys or recipe.path is None or recipe.document is None:
        return ""
    position = recipe.document.position(keys, at_key=True)
    return f"{recipe.path}:{position.line}:{position.column}: "
