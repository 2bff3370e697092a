"""File and line for mistakes that show only when the recipe meets its model, its files and its outputs."""

from collections.abc import Iterator
from contextlib import contextmanager

from quantkit.errors import QuantkitError, SourceError
from quantkit.recipe.model import Recipe
from quantkit_eval.errors import EvalError


@contextmanager
def name_places(recipe: Recipe, *keys: str | int) -> Iterator[None]:
    """Put file, line and column before the message of an error that knows its key in the recipe.

    Args:
        recipe: whose keys they are; one that was read from no file changes nothing.
        keys: of an error that knows none itself, unless it is about the model.
    """
    try:
        yield
    except (QuantkitError, EvalError) as error:
        known = getattr(error, "keys", ())
        place = recipe.place(*(known or (() if isinstance(error, SourceError) else keys)))
        if place:
            error.args, error.message = (place + str(error),), place + error.message
            if isinstance(error, QuantkitError):
                error.keys = ()  # they are said
        raise


@contextmanager
def at_keys(*keys: str | int) -> Iterator[None]:
    """Give an error that knows no key in the recipe these, for whoever has the recipe to name their place."""
    try:
        yield
    except QuantkitError as error:
        error.keys = error.keys or keys
        raise
