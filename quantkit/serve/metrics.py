"""What the engine counts: plain numbers, for whoever shows them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from quantkit.serve.outputs import FinishReason

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
ITL_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Observations by size.

    Args:
        bounds: upper ends of the buckets, ascending; a last bucket has no end.

    Attributes:
        bounds: as given.
        counts: observations of each bucket alone, the last one included.
        total: sum of all observations.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @property
    def num_observations(self) -> int:
        """All of them."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one; a value on a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "total": self.total}


@dataclass(slots=True)
class EngineMetrics:
    """Counters only grow; gauges (the last five numbers) say how it stands after the last step.

    Attributes:
        requests: continuations that ended, by finish reason.
        prompt_tokens: tokens of the prompts of all requests that were taken, once for n continuations.
        generation_tokens: new tokens of all requests, of those that were aborted too.
        computed_tokens: tokens that went through the model, those computed anew included.
        steps: forward steps.
        preemptions: how often a running request gave its cache blocks back.
        swaps: those of them that were copied to host memory.
        prefix_cache_queries: tokens of prompts that were looked for in the prefix cache.
        prefix_cache_hits: those that were found.
        forced_tokens: new tokens for which a structured form left no choice.
        ttft: seconds from a request's arrival to its first token.
        itl: seconds between two tokens of a continuation.
        e2e: seconds from arrival to end, of continuations that ended well.
        num_running: continuations that run.
        num_waiting: continuations that wait.
        kv_cache_usage: share of the cache blocks that are in use.
        num_cached_blocks: blocks kept for their content alone.
        swap_usage: share of the host blocks that are in use; 0 if there are none.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    swaps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    forced_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS))
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_cached_blocks: int = 0
    swap_usage: float = 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the tokens looked for that were found; 0 before the first."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {k: v.to_dict() if isinstance(v, Histogram) else v for k, v in values.items()}
