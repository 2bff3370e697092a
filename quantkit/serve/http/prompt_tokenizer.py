"""Texts to token ids for many callers: long ones hold nobody up, and hopeless ones are refused before any work."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from quantkit.errors import UsageError
from quantkit.serve.structured.token_bytes import token_bytes

T = TypeVar("T")
SPACE = "\u2581"  # how some tokenizers write a space
LONG_TEXT = 65_536  # characters, about a tenth of a second of work


class PromptTokenizer:
    """A tokenizer with two threads: one for short texts, one with a copy for long ones, since it is not safe in both.

    Args:
        tokenizer: of the model; nobody else may use it at the same time.
        vocab_size: of the model.
        max_model_len: most tokens of a request.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._copy: PreTrainedTokenizerBase | None = None
        self._count_least: Callable[[str], int] | None = None
        self._short_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")

    async def run(self, function: Callable[[Any], T], num_characters: int = 0) -> T:
        """What a function of the tokenizer returns, without holding up anybody.

        Args:
            function: gets a tokenizer that nobody else uses meanwhile.
            num_characters: how much it has to read.
        """
        loop = asyncio.get_running_loop()
        if num_characters <= LONG_TEXT:
            return await loop.run_in_executor(self._short_thread, function, self._tokenizer)
        if self._copy is None:
            self._copy = await loop.run_in_executor(self._short_thread, copy.deepcopy, self._tokenizer)
        return await loop.run_in_executor(self._long_thread, function, self._copy)

    async def require_room(self, text: str) -> None:
        """Refuse a text that cannot fit, however well it is tokenized: from its size alone, which takes no time.

        Raises:
            UsageError: it has more bytes than max_model_len of the longest tokens.
        """
        if len(text) <= LONG_TEXT:
            return
        if self._count_least is None:
            self._count_least = await self.run(lambda one: least_tokens(one, self._vocab_size), len(text))
        count = self._count_least
        least = await self.run(lambda _: count(text), len(text))
        if least > self._max_model_len:
            raise UsageError(
                f"the prompt of {len(text)} characters has at least {least} tokens, "
                f"more than max_model_len={self._max_model_len}"
            )

    def close(self) -> None:
        """End the threads."""
        for thread in (self._short_thread, self._long_thread):
            thread.shutdown(wait=False, cancel_futures=True)


def least_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Callable[[str], int]:
    """Makes a function that tells how many tokens a text has at least: its bytes by those of the longest token.

    That holds where each byte of a text is in some token: in a vocabulary with all single bytes. Of any other it tells
    nothing, and is 0.

    Args:
        tokenizer: of the model.
        vocab_size: of the model.
    """
    try:
        tokens = token_bytes(tokenizer, vocab_size)
    except UsageError:
        return lambda _text: 0
    backend: Any = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    has_all_bytes = len({token for token in tokens if len(token) == 1}) == 256
    if not has_all_bytes:
        return lambda _text: 0
    longest = max(max(map(len, tokens)), *(len(token.content.encode()) for token in added), 1)
    eats_spaces = any(token.lstrip or token.rstrip for token in added)

    def count(text: str) -> int:
        seen = text if backend.normalizer is None else backend.normalizer.normalize_str(text).replace(SPACE, " ")
        return -(-len(("".join(seen.split()) if eats_spaces else seen).encode()) // longest)

    return count
