"""Whether a value fits a JSON Schema, and what breaks first if it does not."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

# Only formats that jsonschema checks without further packages, so that a score does not depend on what is installed.
FORMATS = ("date", "email", "idn-email", "ipv4", "ipv6", "regex", "time", "uuid")
_FORMAT_CHECKER = FormatChecker(FORMATS)
_REGISTRY: Registry[Any] = Registry()  # holds nothing and fetches nothing: a reference leads into its own schema
TIME_LIMIT_S = 2.0  # of one answer; a pattern like (a+)+$ would take longer than the universe has been there
TIMEOUT, BROKEN_REFERENCE, TOO_LARGE = "timeout", "$ref", "overflow"


class _Timeout(Exception):
    """The validation took too long."""


def first_error(schema: Mapping[str, Any], value: object) -> tuple[str, str] | None:
    """Place and keyword of the first violation, or None if the value fits (Draft 2020-12).

    Of several, the one nearest to the root comes first, then by place and keyword, so that the order in which a
    library finds them does not matter.

    Args:
        schema: a valid schema.
        value: any JSON value.

    Returns:
        JSON pointer into the value (empty: the value itself) and the keyword of the schema, e.g. ("/age", "minimum").
        ("", "timeout") if a pattern of the schema cannot be matched in ``TIME_LIMIT_S``, ("", "$ref") if a reference
        leads nowhere or into itself, ("", "overflow") if a number of the value is too large for the check: what cannot
        be shown to fit does not fit.
    """
    validator = Draft202012Validator(schema, format_checker=_FORMAT_CHECKER, registry=_REGISTRY)
    try:
        with _time_limit():
            found = [
                (len(error.absolute_path), json_pointer(error), str(error.validator))
                for error in validator.iter_errors(value)
            ]
    except _Timeout:
        return "", TIMEOUT
    except (Unresolvable, RecursionError):
        return "", BROKEN_REFERENCE
    except OverflowError:  # multipleOf of an integer that no float holds, a regex with too many repetitions
        return "", TOO_LARGE
    return min(found)[1:] if found else None


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _Timeout in the block after ``TIME_LIMIT_S``: Python's matcher lets signals through.

    Signals reach the main thread only; another thread waits, as Python gives it no way to leave a running match.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise _Timeout

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def json_pointer(error: ValidationError) -> str:
    """Where in the value an error lies (RFC 6901)."""
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in error.absolute_path)
    return "".join(f"/{part}" for part in parts)
