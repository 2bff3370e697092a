"""Who computes what in the next step: one budget of tokens for prompts and continuations alike."""

from bisect import insort
from dataclasses import dataclass

from quantkit.errors import UsageError
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.block_tables import BlockTables
from quantkit.serve.request import Request, RequestStatus
from quantkit.serve.waiting_queue import WaitingQueue, order


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

    @property
    def num_scored(self) -> int:
        """Of its tokens, the first ones, those whose logits score the next token of the prompt for prompt_logprobs."""
        if self.request.prompt_logprobs is None or self.request.num_output_tokens:
            return 0
        return min(self.start + self.num_tokens, self.request.num_prompt_tokens - 1) - self.start


class Scheduler:
    """Continuous batching: requests join and leave between steps.

    Every request tries to close the gap between the tokens it knows and those in the cache, so a chunk of a prompt, a
    decoded token and what a preempted request computes anew are one case. Running requests come first, in order of
    priority and arrival; what is left of the budget goes to waiting ones. When the cache is full the request that is
    last in order gives its blocks back and waits, with its tokens kept; nobody joins in a step that preempted.

    Args:
        pool: blocks of the cache.
        max_num_seqs: most running requests.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: most tokens of a request.
        tables: gives requests their blocks; None is without prefix cache and swapping.
        max_num_waiting: most requests that may wait when one comes; None is no limit.
        chunk: cut prompts at multiples of this many tokens and nowhere else, and compute one token at a time behind
            them, so that a request is cut in one way whatever runs beside it; at most max_num_batched_tokens -
            max_num_seqs. None cuts where the budget ends.

    Attributes:
        waiting: requests that wait, the next one first.
        running: requests that run, in order of priority and arrival.
        num_preemptions: how often a request was preempted.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        *,
        tables: BlockTables | None = None,
        max_num_waiting: int | None = None,
        chunk: int | None = None,
    ) -> None:
        assert chunk is None or chunk <= max_num_batched_tokens - max_num_seqs, "a chunk must fit beside all decodes"
        self._pool = pool
        self._tables = tables if tables is not None else BlockTables(pool)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._chunk = chunk
        self._num_added = 0
        self.waiting = WaitingQueue(max_num_waiting)
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
        """Let a request wait for its turn; `resolve_max_tokens` must have accepted it.

        Raises:
            QueueFullError: too many wait.
        """
        request.arrival = self._num_added
        self.waiting.join(request)
        self._num_added += 1

    def fork(self, leader: Request) -> list[Request]:
        """Let the followers of a request whose prompt is computed run, from the same blocks; returns them."""
        followers = list(leader.followers)
        leader.followers = ()
        for follower in followers:
            follower.arrival, follower.is_held = leader.arrival, False
            self._tables.fork(leader, follower)
            follower.move_to(RequestStatus.RUNNING)
            insort(self.running, follower, key=order)
        return followers

    def schedule(self, lookahead: int = 0) -> list[Scheduled]:
        """Plan a step and reserve the cache for it.

        Args:
            lookahead: room for this many tokens more than each request computes, for drafts of a later decoder.

        Returns:
            At most max_num_batched_tokens tokens; empty only if there is no request.
        """
        budget = self._max_num_batched_tokens
        step: list[Scheduled] = []
        was_preempted = len(self.running) > self._max_num_seqs
        while len(self.running) > self._max_num_seqs:  # after a fork
            self._preempt(self.running[-1])
        for request in sorted(self.running, key=lambda request: request.num_tokens - request.num_computed_tokens > 1):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one that came before it
            num_tokens = self._cut(request, budget)
            if num_tokens == 0:
                continue
            kept, preempted = self._make_room(request, request.num_computed_tokens + num_tokens + lookahead)
            was_preempted |= preempted
            if kept:
                budget -= self._plan(request, num_tokens, step)
        while not was_preempted and self.waiting and budget and len(self.running) < self._max_num_seqs:
            request = self.waiting.first
            if (self._chunk or 0) > budget or not self._tables.start(request, lookahead):
                break
            self.waiting.take_first()
            request.move_to(RequestStatus.RUNNING)
            insort(self.running, request, key=order)
            budget -= self._plan(request, self._cut(request, budget), step)
        return step

    def _cut(self, request: Request, budget: int) -> int:
        """How many tokens of a request to compute; 0 if the budget must not be spent on it."""
        computed = request.num_computed_tokens
        if self._chunk is None:
            return min(request.num_tokens - computed, budget)
        stop = computed + 1
        if computed < request.num_prompt_tokens:
            stop = min(request.num_prompt_tokens, (computed // self._chunk + 1) * self._chunk)
        return stop - computed if stop - computed <= budget else 0

    def _plan(self, request: Request, num_tokens: int, step: list[Scheduled]) -> int:
        start = request.num_computed_tokens
        step.append(Scheduled(request, start, num_tokens))
        self._tables.register(request, start, start + num_tokens)
        return num_tokens

    def _make_room(self, request: Request, num_tokens: int) -> tuple[bool, bool]:
        """Grow a block table to ``num_tokens``, preempting from the end.

        Returns:
            Whether the request still runs, and whether somebody was preempted.
        """
        was_preempted = False
        while not self._tables.grow(request, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            was_preempted = True
            if victim is request:
                return False, True
        return True, was_preempted

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._tables.suspend(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.move_to(RequestStatus.PREEMPTED)
        self.waiting.put_back(request)

    def restart(self, request: Request) -> None:
        """Let a running request compute all its tokens anew, after a step that was interrupted."""
        self._tables.forget(request)
        request.num_computed_tokens = 0
        self._preempt(request)

    def finish(self, request: Request, status: RequestStatus, *, forget_from: int | None = None) -> list[int]:
        """Take a request out, for good.

        Args:
            request: one that was added, or follows one that was.
            status: how it ended.
            forget_from: the first of its blocks whose content may be wrong; None if all is right.

        Returns:
            The blocks that are free now.
        """
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif not request.is_held:
            self.waiting.remove(request)
        request.move_to(status)
        if forget_from is not None:
            self._tables.forget(request, forget_from)
        return self._tables.release(request)
