"""What can go wrong in an evaluation. Each error is one line that names the value, the choices and the fix.

The package stands alone, so this family is its own; a command catches it beside its own errors and
leaves with ``exit_code``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit_eval.protocol import Generation


class EvalError(Exception):
    """A known failure of an evaluation (exit code 1).

    Args:
        message: one line that names the value that is wrong.
        fix: what the user can do about it; appended to the message.
    """

    exit_code = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        self.message = message
        self.fix = fix
        super().__init__(f"{message}. {fix}" if fix else message)


class OptionError(EvalError):
    """An unknown suite, or an option of a suite, a gate or a measurement that makes no sense (exit code 2)."""

    exit_code = 2


class RecordError(EvalError):
    """A record file is missing, damaged, or does not fit its schema."""


class ReferenceMismatch(EvalError):
    """The reference distributions belong to other text, other windows or another tokenizer."""


class IncomparableResults(EvalError):
    """Two results that do not rest on the same items, prompts, template or sampling."""


class ModelOutputError(EvalError):
    """A model broke the protocol: generations missing or out of order, scores of a wrong shape or not finite."""


class NotOfferedError(EvalError):
    """A server does not tell what a suite needs, so that the suite is left out rather than guessed."""


class TargetError(EvalError):
    """A server cannot be reached, refuses, or answers what is no answer.

    Args:
        message: as in `EvalError`.
        fix: likewise.
        finished: what the server had answered of the requests that it was asked together.
    """

    def __init__(self, message: str, *, fix: str | None = None, finished: "Sequence[Generation]" = ()) -> None:
        super().__init__(message, fix=fix)
        self.finished = tuple(finished)
