"""A request inside the engine: what was asked, how far it is, and what belongs to it alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quantkit.serve.detokenizer import IncrementalDetokenizer
from quantkit.serve.outputs import TokenLogprobs
from quantkit.serve.sampling_params import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from quantkit.serve.penalties import TokenCounts


class Matcher(Protocol):
    """Follows a continuation through the form that it must have; see `quantkit.serve.structured`."""

    @property
    def is_finished(self) -> bool:
        """True if nothing but an end of text may follow."""
        ...

    def fill(self, row: Tensor) -> None:
        """Set the bits of the tokens that may come next: [ceil(V / 32)] int32."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take the next token; False if the form does not allow it."""
        ...


class RequestStatus(StrEnum):
    """Where a request stands. The four FINISHED states are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again: its cache was given to others, and its tokens kept
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
    """One continuation of a prompt inside the engine.

    Attributes:
        request_id: its name; n continuations of a prompt share it.
        prompt_token_ids: at least one.
        params: how to continue.
        max_tokens: params.max_tokens, or what there is room for.
        stop_token_ids: every token that ends it: the model's own, unless it ignores them, and those of params.
        detokenizer: makes text of the new tokens; None if text is made at the end.
        generator: random numbers; None if greedy.
        index: which of n continuations.
        priority: the lower ones come first.
        arrival: number of the request in the order of arrival.
        hash_root: what its chain of block hashes starts from.
        matcher: the form that the continuation must have.
        counts: its tokens counted, for penalties.
        followers: the other continuations, until the prompt is computed; then they start from its cache.
        is_held: True for a follower until then.
        status: see `RequestStatus`.
        token_ids: prompt and new tokens.
        num_computed_tokens: how many of them have their keys and values in the cache.
        furthest: the most that num_computed_tokens has been.
        block_table: the request's cache blocks, in order.
        num_found_blocks: so many of them, the first ones, came from the prefix cache.
        block_hashes: of its full blocks, as far as they are known; see `prefix_hash`.
        swapped_blocks: where its blocks are in host memory, while it waits to get them back.
        num_preemptions: how often its cache was taken away.
        num_overtaken: how many requests that arrived later started before it.
        num_cached_tokens: tokens of the prompt that the prefix cache had; None before it starts.
        prompt_logprobs: for each token of the prompt, as far as they are computed.
        num_forced_tokens: tokens for which the matcher left no choice.
        legal_masses: probability of the tokens that the matcher allowed: the sum over all new tokens, and how many.
        arrival_time: seconds of the engine's clock.
        last_token_time: when it got its last token; 0 before the first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    detokenizer: IncrementalDetokenizer | None
    generator: torch.Generator | None
    index: int = 0
    priority: int = 0
    arrival: int = 0
    hash_root: bytes = b""
    matcher: Matcher | None = None
    counts: "TokenCounts | None" = None
    followers: Sequence["Request"] = ()
    is_held: bool = False
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    furthest: int = 0
    block_table: list[int] = field(default_factory=list)
    num_found_blocks: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    swapped_blocks: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_overtaken: int = 0
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_forced_tokens: int = 0
    legal_masses: tuple[float, int] = (0.0, 0)
    arrival_time: float = 0.0
    last_token_time: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt_token_ids)

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

    @property
    def may_stop(self) -> bool:
        """True once min_tokens allows the next token to end it."""
        return self.num_output_tokens >= self.params.min_tokens

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
        may_stop = self.may_stop
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if token_id in self.stop_token_ids:
            return self._end_of_text(), RequestStatus.FINISHED_STOP, token_id
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.append(token_id, may_stop=may_stop)
            if self.detokenizer.matched_stop is not None:
                return text, RequestStatus.FINISHED_STOP, self.detokenizer.matched_stop
        if self.matcher is not None and self.matcher.is_finished:
            return text + self._end_of_text(), RequestStatus.FINISHED_STOP, None
        if self.num_output_tokens >= self.max_tokens:
            return text + self._end_of_text(), RequestStatus.FINISHED_LENGTH, None
        return text, None, None

    def _end_of_text(self) -> str:
        return "" if self.detokenizer is None else self.detokenizer.flush()
