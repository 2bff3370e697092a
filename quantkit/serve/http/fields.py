"""Which field of a request an error is about."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quantkit.errors import UsageError

FIRST_WORD = re.compile(r"[a-z_]+")


class FieldError(UsageError):
    """A wrong value, with the request's field that holds it.

    Attributes:
        param: the field's name.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@contextmanager
def about(param: str) -> Iterator[None]:
    """Errors of values in here are about a field of the request, whatever their own words are.

    Raises:
        FieldError: instead of a UsageError.
    """
    try:
        yield
    except FieldError:
        raise
    except UsageError as error:
        raise FieldError(param, str(error)) from error


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors in here begin with the engine's name of a value, which the request calls otherwise.

    Args:
        names: the engine's name -> the request's.

    Raises:
        FieldError: instead of a UsageError whose first word is one of them.
    """
    try:
        yield
    except UsageError as error:
        word = first_word(error)
        if word not in names:
            raise
        raise FieldError(names[word], names[word] + str(error)[len(word) :]) from error


def first_word(error: Exception) -> str:
    """The name that a message begins with; empty if it begins otherwise."""
    found = FIRST_WORD.match(str(error))
    return "" if found is None else found[0]
