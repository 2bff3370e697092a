"""Turns what happened to a request into an output, and counts it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from quantkit.serve.metrics import EngineMetrics
from quantkit.serve.next_tokens import NextToken
from quantkit.serve.outputs import RequestOutput
from quantkit.serve.paged_memory import PagedMemory
from quantkit.serve.request import Request, RequestStatus
from quantkit.serve.scheduler import Scheduled, Scheduler


class Reporter:
    """The outputs and the metrics of an engine.

    Args:
        clock: seconds, monotonic.

    Attributes:
        metrics: as of now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics = EngineMetrics()
        self._clock = clock

    def arrived(self, request: Request) -> None:
        """A prompt was taken."""
        self.metrics.prompt_tokens += request.num_prompt_tokens
        now = self._clock()
        for continuation in (request, *request.followers):
            continuation.arrival_time = now

    def computed(self, step: Sequence[Scheduled]) -> None:
        """A step went through the model."""
        self.metrics.steps += 1
        self.metrics.computed_tokens += sum(part.num_tokens for part in step)

    def token(
        self, chosen: NextToken, text: str, status: RequestStatus | None, stop_reason: str | int | None
    ) -> RequestOutput:
        """A request got a token, which it has appended already."""
        request, now = chosen.request, self._clock()
        is_first = request.num_output_tokens == 1
        self.metrics.generation_tokens += 1
        if is_first:
            self.metrics.ttft.observe(now - request.arrival_time)
        else:
            self.metrics.itl.observe(now - request.last_token_time)
        request.last_token_time = now
        has_prompt = is_first and request.index == 0 and request.prompt_logprobs is not None
        assert chosen.token_id is not None, "a request without a token has failed"
        return self._output(
            request,
            (chosen.token_id,),
            text,
            status,
            stop_reason=stop_reason,
            logprobs=None if chosen.logprobs is None else (chosen.logprobs,),
            prompt_logprobs=tuple(request.prompt_logprobs or ()) if has_prompt else None,
        )

    def ended(self, request: Request, status: RequestStatus, text: str = "", error: str | None = None) -> RequestOutput:
        """A request ended without a token."""
        return self._output(request, (), text, status, error=error)

    def _output(
        self, request: Request, token_ids: tuple[int, ...], text: str, status: RequestStatus | None, **more: Any
    ) -> RequestOutput:
        if status is not None:
            reason: Any = status.value
            self.metrics.requests[reason] += 1
            self.metrics.forced_tokens += request.num_forced_tokens
            if status in (RequestStatus.FINISHED_STOP, RequestStatus.FINISHED_LENGTH):
                self.metrics.e2e.observe(self._clock() - request.arrival_time)
            more["finish_reason"] = reason
            if request.matcher is not None:
                total, number = request.legal_masses
                more["num_forced_tokens"] = request.num_forced_tokens
                more["legal_mass"] = total / number if number else None
        return RequestOutput(
            request.request_id,
            token_ids,
            text,
            index=request.index,
            num_cached_tokens=request.num_cached_tokens or 0,
            **more,
        )

    def measure(self, scheduler: Scheduler, memory: PagedMemory) -> None:
        """Note how things stand."""
        metrics, pool, mover = self.metrics, memory.pool, memory.mover
        metrics.num_running = len(scheduler.running)
        held = sum(len(request.followers) for request in (*scheduler.running, *scheduler.waiting))
        metrics.num_waiting = len(scheduler.waiting) + held
        metrics.preemptions = scheduler.num_preemptions
        metrics.swaps = memory.tables.num_swaps
        metrics.prefix_cache_queries = memory.tables.num_queried_tokens
        metrics.prefix_cache_hits = memory.tables.num_hit_tokens
        metrics.kv_cache_usage = pool.num_used / pool.num_usable
        metrics.num_cached_blocks = pool.num_cached
        used = mover.num_host_blocks - mover.num_free_host_blocks
        metrics.swap_usage = used / mover.num_host_blocks if mover.num_host_blocks else 0.0
