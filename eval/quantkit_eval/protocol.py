"""How a model comes in: anything that can describe itself, generate, tokenize and score.

A serving engine, a transformers model or a client of a remote server implements the four methods; nothing else is
asked of it.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One chat prompt and how to continue it.

    Attributes:
        id: names the request; its Generation carries the same id.
        messages: the chat, rendered by the model with its own template and a generation prompt.
        max_tokens: most new tokens; reaching it ends with finish_reason ``length``.
        temperature: 0 is greedy.
        top_p: mass of the nucleus; 1 keeps everything.
        seed: of the sampling; None leaves it to the model. Greedy ignores it.
        stop: strings that end the text; they are not part of it.
        ignore_eos: go on to max_tokens, whatever the model says. For measuring speed.
    """

    id: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """What a model made of one request.

    Attributes:
        id: of the request.
        text: the new text, without special tokens and without the stop string.
        token_ids: the new tokens.
        finish_reason: ``stop`` (end of sequence or a stop string) or ``length`` (max_tokens reached).
        prompt_hash: ``hash_token_ids`` of the rendered prompt; equal hashes mean equal input.
        num_prompt_tokens: tokens of the rendered prompt.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_hash: str
    num_prompt_tokens: int


@runtime_checkable
class Model(Protocol):
    """A model under evaluation."""

    def describe(self) -> dict[str, Any]:
        """Who this is: JSON-able, with the keys ``model``, ``engine`` (both objects) and ``template_hash`` (text).

        ``model`` should name ``name``, ``revision``, ``checkpoint_hash`` and ``scheme``.
        """
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Continue every request; the list is in the order of the requests."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens."""
        ...

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities of every next token.

        Args:
            token_ids: T tokens, used as they are.

        Returns:
            [T, V] float32; row t is the distribution of token t + 1 given tokens 0 to t.
        """
        ...


def hash_token_ids(token_ids: Sequence[int]) -> str:
    """The prompt_hash of a token sequence: sha256, in hex, of the ids as little-endian 32-bit integers."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).hexdigest()
