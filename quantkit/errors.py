"""What can go wrong for a user. Each error says what was wrong, names the value, and says how to mend it.

A command prints the message as one line and leaves with ``exit_code``; assertions are for our own bugs.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path


def looked_in(path: str | Path) -> str:
    """`` (looked in /current/folder)`` for a relative path that leads nowhere; nothing for an absolute one."""
    return "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"


def did_you_mean(given: object, allowed: Sequence[str]) -> str:
    """``; did you mean 'extract'?``, or nothing if no word is near."""
    by_lower = {word.lower(): word for word in allowed}
    close = difflib.get_close_matches(str(given).lower(), list(by_lower), n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


class QuantkitError(Exception):
    """A known failure (exit code 1).

    Args:
        message: one line that names the value that is wrong.
        fix: what the user can do about it; appended to the message.
        keys: path of the key in the recipe that is at fault, if one is.
    """

    exit_code = 1

    def __init__(self, message: str, *, fix: str | None = None, keys: tuple[str | int, ...] = ()) -> None:
        self.message = message
        self.fix = fix
        self.keys = keys
        super().__init__(f"{message}. {fix}" if fix else message)


class UsageError(QuantkitError):
    """The command line or a request is wrong (exit code 2)."""

    exit_code = 2


class RecipeError(UsageError):
    """The recipe is wrong: unknown key, wrong type, impossible combination (exit code 2)."""


class SourceError(QuantkitError):
    """The model cannot be found or read."""


class CapacityError(QuantkitError):
    """Nothing of what was demanded can run on the devices."""


class CalibrationError(QuantkitError):
    """The calibration data is missing, empty or too short."""


class QuantizationError(QuantkitError):
    """A layer cannot be quantized as the recipe asks."""


class CheckpointError(QuantkitError):
    """A checkpoint cannot be written, or what was written does not read back as it should."""


class EngineError(QuantkitError):
    """A request that the engine refuses, or one that failed."""


class QueueFullError(EngineError):
    """A request that the engine refuses because too many wait already."""
