"""Who computes what in the next step: one budget of tokens for prompts and continuations alike."""

from collections import deque
from dataclasses import dataclass

from quantkit.errors import UsageError
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part in a step.

    Attributes:
        request: the request; its block table has room for the tokens.
        start: its first token in this step; those before are in the cache.
        num_tokens: how many from there.
    """

    request: Request
    start: int
    num_tokens: int

    @property
    def is_sampled(self) -> bool:
        """True if the step reaches the request's last token, so that the next one can be chosen."""
        return self.start + self.num_tokens == self.request.num_tokens


class Scheduler:
    """Continuous batching: requests join and leave between steps.

    Every request tries to close the gap between the tokens it knows and those in the cache, so a chunk of a prompt, a
    decoded token and what a preempted request computes anew are one case. Running requests come first, in order of
    arrival; what is left of the budget goes to waiting ones. When the cache is full the request that joined last gives
    its blocks back and waits at the front, with its tokens kept; nobody joins in a step that preempted.

    Args:
        pool: blocks of the cache.
        max_num_seqs: most running requests.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: most tokens of a request.

    Attributes:
        waiting: requests that wait, the next one first.
        running: requests that run, in the order in which they joined.
        num_preemptions: how often a request was preempted.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one request, prompt and continuation, that can ever fit."""
        return min(self._max_model_len, self._pool.num_usable * self._pool.kv_block_size + 1)

    def resolve_max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The most new tokens of a request, or a refusal: a request that can never fit must not wait for ever.

        The last new token is never computed, so it needs no room in the cache.

        Raises:
            UsageError: prompt and continuation are longer than the model or the whole cache allows.
        """
        wanted = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
        asked = (
            f"a prompt of {num_prompt_tokens} tokens and max_tokens={'1 or more' if max_tokens is None else max_tokens}"
        )
        if wanted > self._max_model_len:
            raise UsageError(
                f"{asked} are {wanted} tokens, more than max_model_len={self._max_model_len}",
                fix="Shorten the prompt or lower max_tokens",
            )
        need = self._pool.blocks_for(wanted - 1)
        if need > self._pool.num_usable:
            raise UsageError(
                f"{asked} need {need} cache blocks of {self._pool.kv_block_size} tokens, "
                f"the whole cache has {self._pool.num_usable}",
                fix="Shorten the prompt or lower max_tokens; a larger cache needs more free memory or kv_cache_bytes",
            )
        return max_tokens if max_tokens is not None else self.max_request_tokens - num_prompt_tokens

    def add(self, request: Request) -> None:
        """Let a request wait for its turn; `resolve_max_tokens` must have accepted it."""
        self.waiting.append(request)

    def schedule(self, lookahead: int = 0) -> list[Scheduled]:
        """Plan a step and reserve the cache for it.

        Args:
            lookahead: room for this many tokens more than each request computes, for drafts of a later decoder.

        Returns:
            At most max_num_batched_tokens tokens; empty only if there is no request.
        """
        budget = self._max_num_batched_tokens
        step: list[Scheduled] = []
        was_preempted = False
        for request in sorted(self.running, key=lambda request: request.num_tokens - request.num_computed_tokens > 1):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one that came before it
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_tokens == 0:
                break
            kept, preempted = self._make_room(request, request.num_computed_tokens + num_tokens + lookahead)
            was_preempted |= preempted
            if kept:
                step.append(Scheduled(request, request.num_computed_tokens, num_tokens))
                budget -= num_tokens
        while not was_preempted and self.waiting and budget and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            need = self._blocks_for(request.num_tokens + lookahead)
            if need > self._pool.num_free:
                break
            request.block_table = self._pool.allocate(need)
            request.move_to(RequestStatus.RUNNING)
            self.running.append(self.waiting.popleft())
            num_tokens = min(request.num_tokens, budget)
            step.append(Scheduled(request, 0, num_tokens))
            budget -= num_tokens
        return step

    def _make_room(self, request: Request, num_tokens: int) -> tuple[bool, bool]:
        """Grow a block table to ``num_tokens``, preempting from the end.

        Returns:
            Whether the request still runs, and whether somebody was preempted.
        """
        need = self._blocks_for(num_tokens) - len(request.block_table)
        was_preempted = False
        while need > self._pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            was_preempted = True
            if victim is request:
                return False, True
        if need > 0:
            request.block_table += self._pool.allocate(need)
        return True, was_preempted

    def _blocks_for(self, num_tokens: int) -> int:
        """Blocks to reserve; lookahead must not make a request larger than the cache."""
        return min(self._pool.blocks_for(num_tokens), self._pool.num_usable)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._pool.free(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.move_to(RequestStatus.PREEMPTED)
        self.waiting.appendleft(request)

    def finish(self, request: Request, status: RequestStatus) -> list[int]:
        """Take a request out, for good; returns the blocks that became free."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.move_to(status)
        freed = self._pool.free(request.block_table)
        request.block_table = []
        return freed
