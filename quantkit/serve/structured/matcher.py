"""Where an answer stands in its grammar: which tokens may come next."""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from quantkit.errors import EngineError


class FormError(EngineError):
    """An answer that cannot go on in its form; it concerns this request alone, and the form is the reason."""


class Matcher:
    """Follows one answer through its grammar. Belongs to one thread.

    Args:
        state: llguidance's matcher, at the beginning.
        end_token_ids: tokens that end a complete answer.
    """

    def __init__(self, state: Any, end_token_ids: Collection[int]) -> None:
        self._state = state
        self._end_token_ids = frozenset(end_token_ids)

    def fill(self, row: Tensor) -> None:
        """Write the legal tokens as a bit mask: bit ``t % 32`` of word ``t // 32`` is 1 if token t may come next.

        A token of the end is legal where the answer is complete.

        Args:
            row: [ceil(V / 32)] int32 on the CPU, contiguous; every word is overwritten.

        Raises:
            FormError: no token may come next, or the grammar cannot be followed further within the limits.
        """
        self._require_sound()
        self._state.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        self._require_sound()

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and no change, if it is not legal. A token of the end leaves all as it is.

        A legal token at which the grammar breaks a limit is taken, and the next `fill` says which.
        """
        if token_id in self._end_token_ids:
            return self.is_complete
        return bool(self._state.try_consume_tokens([token_id]) == 1) or bool(self._state.is_error())

    @property
    def is_finished(self) -> bool:
        """True if nothing but a token of the end may follow."""
        return bool(self._state.is_stopped()) and not self._state.is_error()

    @property
    def is_complete(self) -> bool:
        """True if the answer may end here."""
        return bool(self._state.is_accepting())

    def _require_sound(self) -> None:
        if self._state.is_error():
            raise FormError(f"the answer's form cannot be followed further: {_first_line(self._state.get_error())}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
