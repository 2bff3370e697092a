"""What comes out of the engine: a step's news of a request, and whole continuations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
TokenLogprobs = Mapping[int, tuple[float, int]]  # token id -> log-probability, and its rank, 1 for the most likely


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step did for one continuation of a request.

    Attributes:
        request_id: its name.
        token_ids: the tokens that are new in this step.
        text: the text that became certain in this step; the pieces of all steps make the whole text.
        finish_reason: None while it goes on; otherwise this is the continuation's last output.
        stop_reason: the stop string or token that ended it, for finish_reason ``stop``.
        error: what went wrong, for finish_reason ``error``.
        index: which of n continuations.
        logprobs: for each new token itself and the most likely ones; None if not asked for.
        prompt_logprobs: for each token of the prompt, None for the first; in the first output with a token.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
        num_forced_tokens: tokens for which the structured form left no choice; in the last output.
        legal_mass: mean probability that the model itself gave to the tokens which the form allows; in the last output.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    num_forced_tokens: int | None = None
    legal_mass: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole continuation.

    Attributes:
        request_id: its name.
        prompt_token_ids: the prompt.
        token_ids: the new tokens, with the one that ended it.
        text: the new text, without special tokens and without the stop string.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the stop string or token that ended it.
        index: which of n continuations.
        logprobs: for each new token; see `RequestOutput`.
        prompt_logprobs: for each token of the prompt; see `RequestOutput`.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
        num_forced_tokens: see `RequestOutput`.
        legal_mass: see `RequestOutput`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    num_forced_tokens: int | None = None
    legal_mass: float | None = None


def join_outputs(prompt_token_ids: tuple[int, ...], outputs: list[RequestOutput]) -> Completion:
    """The whole continuation from all outputs of it, which ended without an error."""
    last = outputs[-1]
    assert last.finish_reason is not None, "only what has ended is whole"
    logprobs = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    return Completion(
        request_id=last.request_id,
        prompt_token_ids=prompt_token_ids,
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        index=last.index,
        logprobs=logprobs,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
        num_cached_tokens=last.num_cached_tokens,
        num_forced_tokens=last.num_forced_tokens,
        legal_mass=last.legal_mass,
    )
