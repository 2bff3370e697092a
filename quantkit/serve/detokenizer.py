"""Token ids to text, a token at a time: no half characters, no piece of a stop string, and in sum the whole text."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet
Decode = Callable[[Sequence[int]], str]


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Token ids -> text without special tokens; the Rust tokenizer directly if there is one, which is much faster."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "decode"):
        return lambda token_ids: str(backend.decode(list(token_ids), skip_special_tokens=True))
    return lambda token_ids: str(
        tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def decode_all(decode: Decode, token_ids: Sequence[int]) -> str:
    """The text of all tokens, exactly as it would have come in pieces.

    For broken UTF-8 this may differ from ``decode`` of the whole, which looks ahead without limit.
    """
    detokenizer = IncrementalDetokenizer(decode)
    return "".join([detokenizer.append(token_id) for token_id in token_ids]) + detokenizer.flush()


class IncrementalDetokenizer:
    """The text of a growing list of tokens.

    A token may be part of a character, and how it reads may depend on the token before it (a leading space). So a
    short window of tokens is decoded twice, without and with the new ones, and the difference is the new text, once it
    does not end in a half character. Text that may be the beginning of a stop string is held back.

    Args:
        decode: token ids -> text.
        stop: strings that end the text. Of several the one that is complete first counts, as if the text came
            character by character, so that the result does not depend on where tokens end.

    Attributes:
        matched_stop: the stop string that ended the text, or None.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._window_start = 0  # the window's first token ...
        self._window_read = 0  # ... and the first one whose text is not out yet
        self._held = ""
        self.matched_stop: str | None = None

    def append(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take a token; the text that is certain now. Nothing more comes after a stop string.

        Args:
            token_id: the token.
            may_stop: False where the text must go on: then its text is no part of a stop string.
        """
        self._token_ids.append(token_id)
        text = self._read(is_last=False)
        return self._release(text, is_last=False) if may_stop else text

    def flush(self) -> str:
        """The rest of the text, when no token follows."""
        return self._release(self._read(is_last=True), is_last=True)

    def _read(self, *, is_last: bool) -> str:
        """New whole characters; a half one at the end waits for its rest, or is replaced if there is none."""
        known = self._decode(self._token_ids[self._window_start : self._window_read])
        text = self._decode(self._token_ids[self._window_start :])
        if len(text) <= len(known) or (text.endswith(REPLACEMENT) and not is_last):
            return ""
        self._window_start = self._window_read
        self._window_read = len(self._token_ids)
        return text[len(known) :]

    def _release(self, text: str, *, is_last: bool) -> str:
        if self.matched_stop is not None:
            return ""
        self._held += text
        ends = [(self._held.find(stop) + len(stop), stop) for stop in self._stop if stop in self._held]
        if ends:
            end, self.matched_stop = min(ends, key=lambda item: (item[0], -len(item[1])))
            released, self._held = self._held[: end - len(self.matched_stop)], ""
            return released
        keep = 0 if is_last else self._possible_stop()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
