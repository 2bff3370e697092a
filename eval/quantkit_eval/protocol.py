"""How a model comes in: anything that can describe itself, generate, tokenize and score.

A serving engine, a transformers model or a client of a remote server implements the four methods; nothing else is
asked of it.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from quantkit_eval.errors import ModelOutputError

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

# In place of a template_hash, where a server keeps its template to itself:
RENDERED_BY_SERVER = "rendered by the server"  # it shows the token ids of each prompt, so prompt_hash says all
MESSAGES_ONLY = "unknown: hashes are of messages and token counts"  # it does not; prompt_hash is ``hash_messages``


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
        schema: the JSON Schema that the answer is forced into; None leaves the form to the model.
    """

    id: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What a model made of one request.

    Attributes:
        id: of the request.
        text: the new text, without special tokens and without the stop string.
        token_ids: the new tokens; empty if a server tells only how many they were.
        finish_reason: ``stop`` (end of sequence or a stop string) or ``length`` (max_tokens reached).
        prompt_hash: ``hash_token_ids`` of the rendered prompt; equal hashes mean equal input.
        num_prompt_tokens: tokens of the rendered prompt.
        num_counted_tokens: new tokens, where ``token_ids`` does not hold them.
        num_forced_tokens: new tokens for which the schema left no choice; None if there was none or nobody tells.
        legal_mass: mean probability that the model itself gave to the tokens which the schema allowed; None likewise.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_hash: str
    num_prompt_tokens: int
    num_counted_tokens: int | None = None
    num_forced_tokens: int | None = None
    legal_mass: float | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return len(self.token_ids) if self.num_counted_tokens is None else self.num_counted_tokens


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


@runtime_checkable
class TokenScorer(Protocol):
    """A model that knows the probability of given tokens, but not of every other: most servers are such."""

    def score_tokens(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probability of each token but the first.

        Args:
            token_ids: T tokens, used as they are.

        Returns:
            [T - 1] float32; entry t is that of token t + 1 given tokens 0 to t.

        Raises:
            NotOfferedError: it cannot tell exactly.
        """
        ...


@runtime_checkable
class TextModel(Protocol):
    """A model that also takes prompts as they are, without its chat template: what lm-eval's tasks need.

    Attributes:
        tokenizer: of transformers' interface, with the chat template.
        max_model_len: most tokens of a prompt and its continuation together.
    """

    tokenizer: Any
    max_model_len: int

    def token_logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[tuple[float, bool]]]:
        """Of each prompt, the log-probability of every token but the first, and whether none is more likely."""
        ...

    def continue_prompts(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, bool]]:
        """The text that follows each prompt, and whether ``max_tokens`` cut it off.

        Args:
            prompts: token ids, used as they are.
            sampling: of each prompt: ``max_tokens``, ``stop``, ``temperature`` and the like.
        """
        ...


class LoadTarget(Protocol):
    """A model that is asked token by token.

    Attributes:
        vocab_size: token ids are below it.
    """

    vocab_size: int

    def describe(self) -> dict[str, Any]:
        """See ``Model.describe``."""
        ...

    def submit(self, request_id: str, prompt: Sequence[int], new_tokens: int) -> None:
        """Take a request that gets exactly so many tokens."""
        ...

    def step(self) -> list[tuple[str, bool]]:
        """Compute; each request that got a token, and whether it was its last. Raises ModelOutputError: one failed."""
        ...

    def memory(self) -> tuple[int, float, int | None]:
        """Bytes of the weights, bytes of the cache for each token, and bytes of the device's memory, if known."""
        ...


def check_generations(requests: Sequence[GenerationRequest], generations: Sequence[Generation]) -> None:
    """Refuse generations that are not those of the requests, in their order, each with a proper end.

    Raises:
        ModelOutputError: says which.
    """
    asked, got = [request.id for request in requests], [generation.id for generation in generations]
    if asked != got:
        raise ModelOutputError(
            f"the model answered {len(got)} requests, {got[:3]}..., not {len(asked)}, {asked[:3]}..."
        )
    for generation in generations:
        if generation.finish_reason not in ("stop", "length"):
            raise ModelOutputError(
                f"request {generation.id!r} ended with {generation.finish_reason!r}, neither 'stop' nor 'length'"
            )


def hash_token_ids(token_ids: Sequence[int]) -> str:
    """The prompt_hash of a token sequence: sha256, in hex, of the ids as little-endian 32-bit integers."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).hexdigest()


def hash_messages(messages: Sequence[Message], num_prompt_tokens: int) -> str:
    """The prompt_hash where nobody shows the rendered prompt: of the chat and of how many tokens a server made of it.

    Another template shows only if it gives another number of tokens.
    """
    content = [[dict(message) for message in messages], num_prompt_tokens]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
