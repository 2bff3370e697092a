"""A request: what was asked (`SamplingParams`), how far it is (`Request`), and what comes out (`RequestOutput`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

import torch

from quantkit.errors import UsageError
from quantkit.serve.detokenizer import IncrementalDetokenizer

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. The names are vLLM's; a field of vLLM's that is not here is not supported yet.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: sample from the most likely tokens that together reach this probability; in (0, 1].
        max_tokens: most new tokens; None is as many as the model and the cache have room for.
        stop: strings that end the text and are not part of it.
        stop_token_ids: tokens that end the text, besides the model's own.
        ignore_eos: go on when the model says that it is done.
        seed: of this request's sampling; the same seed gives the same tokens whatever else runs, as far as the logits
            agree. None takes one from the engine's seed and the number of the request.

    Raises:
        UsageError: a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature={self.temperature!r} is not a number of 0 or more")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise UsageError(f"top_p={self.top_p!r} is not a number above 0 and up to 1")
        if self.max_tokens is not None and not (_is_integer(self.max_tokens) and self.max_tokens >= 1):
            raise UsageError(f"max_tokens={self.max_tokens!r} is neither None nor an integer of 1 or more")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UsageError(f"stop={list(self.stop)!r} holds {text!r}, which is no string with characters in it")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            if not _is_integer(token_id) or token_id < 0:
                raise UsageError(f"stop_token_ids holds {token_id!r}, which is no token id")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos={self.ignore_eos!r} is neither True nor False")
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise UsageError(f"seed={self.seed!r} is neither None nor an integer from 0 to {MAX_SEED}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Make it from names and values that came from outside; an unknown name is refused, never ignored.

        Raises:
            UsageError: a name that is not supported, or a value out of range.
        """
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise UsageError(
                    f"the sampling parameter {name} is not supported", fix=f"choose from {', '.join(known)}"
                )
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        """True if no random number is drawn."""
        return self.temperature == 0


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class RequestStatus(StrEnum):
    """Where a request stands. The four FINISHED states are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, its cache was given to others; its tokens are kept and computed anew
    FINISHED_STOP = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORT = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """True for the final states."""
        return self not in NEXT_STATUSES


NEXT_STATUSES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {RequestStatus.RUNNING, RequestStatus.FINISHED_ABORT, RequestStatus.FINISHED_ERROR}
    ),
    RequestStatus.RUNNING: frozenset(RequestStatus) - {RequestStatus.WAITING, RequestStatus.RUNNING},
    RequestStatus.PREEMPTED: frozenset(
        {RequestStatus.RUNNING, RequestStatus.FINISHED_ABORT, RequestStatus.FINISHED_ERROR}
    ),
}


@dataclass(eq=False, slots=True)
class Request:
    """A request inside the engine.

    Attributes:
        request_id: its name.
        prompt_token_ids: at least one.
        params: how to continue.
        max_tokens: params.max_tokens, or what there is room for.
        stop_token_ids: every token that ends it: the model's own, unless it ignores them, and those of params.
        detokenizer: makes text of the new tokens; None if text is made at the end.
        generator: random numbers; None if greedy.
        status: see `RequestStatus`.
        token_ids: prompt and new tokens.
        num_computed_tokens: how many of them have their keys and values in the cache.
        block_table: the request's cache blocks, in order.
        num_preemptions: how often its cache was taken away.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    detokenizer: IncrementalDetokenizer | None
    generator: torch.Generator | None
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and new ones."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """New tokens so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The new tokens so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; only along `NEXT_STATUSES`."""
        assert status in NEXT_STATUSES.get(self.status, ()), f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def append_token(self, token_id: int) -> tuple[str, RequestStatus | None, str | int | None]:
        """Take the next token.

        Returns:
            The text that became certain; the final status if the request ends with this token; and the stop string or
            token that ended it.
        """
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return self._end_of_text(), RequestStatus.FINISHED_STOP, token_id
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.append(token_id)
            if self.detokenizer.matched_stop is not None:
                return text, RequestStatus.FINISHED_STOP, self.detokenizer.matched_stop
        if self.num_output_tokens >= self.max_tokens:
            return text + self._end_of_text(), RequestStatus.FINISHED_LENGTH, None
        return text, None, None

    def _end_of_text(self) -> str:
        return "" if self.detokenizer is None else self.detokenizer.flush()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step did for one request.

    Attributes:
        request_id: its name.
        token_ids: the tokens that are new in this step.
        text: the text that became certain in this step; the pieces of all steps make the whole text.
        finish_reason: None while it goes on; otherwise this is the request's last output.
        stop_reason: the stop string or token that ended it, for finish_reason ``stop``.
        error: what went wrong, for finish_reason ``error``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


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
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
