"""Time of an operation, and the time that a part of the check may take."""

import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 1 << 28  # more than the caches of a GPU hold
CALLS, REPEATS = 8, 5


class Budget:
    """Seconds that a part has.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._end


def cpu_microseconds(function: Callable[[], object]) -> float:
    """One call, for a dry run."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


class GpuTimer:
    """Microseconds of a call on the GPU alone: calls in a CUDA graph, each with nothing of its data in the cache."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._flush_time = self._measure(lambda: None)

    def __call__(self, function: Callable[[], object]) -> float:
        """Time of one call, which must have run before and must be able to become a graph."""
        return max(self._measure(function) - self._flush_time, 0.01)

    def _measure(self, function: Callable[[], object]) -> float:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        function()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                self._flush.zero_()
                function()
        times = []
        for _ in range(REPEATS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1000 / CALLS)
        return sorted(times)[REPEATS // 2]
