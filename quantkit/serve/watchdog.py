"""Notices when the engine steps and steps and nothing comes of it: a bug of ours that must not hang a server."""

from collections.abc import Sequence

from quantkit.serve.block_pool import BlockPool
from quantkit.serve.request import Request
from quantkit.serve.scheduler import Scheduled, Scheduler


class Watchdog:
    """Counts steps without progress. A step makes progress if it computes a token that was never computed before.

    Args:
        max_idle_steps: so many steps without progress are taken for a bug. To compute a preempted request anew takes
            one step a token at most.
    """

    def __init__(self, max_idle_steps: int) -> None:
        self._max_idle_steps = max_idle_steps
        self._num_idle = 0

    def is_stuck(self, step: Sequence[Scheduled]) -> bool:
        """Look at a planned step; True if it is empty, or one too many of those that lead nowhere."""
        has_progress = False
        for part in step:
            stop = part.start + part.num_tokens
            has_progress |= stop > part.request.furthest
            part.request.furthest = max(part.request.furthest, stop)
        self._num_idle = 0 if has_progress else self._num_idle + 1
        is_stuck = not step or self._num_idle > self._max_idle_steps
        if is_stuck:
            self._num_idle = 0
        return is_stuck


def dump_state(scheduler: Scheduler, pool: BlockPool) -> str:
    """One line about all requests and blocks."""
    running, waiting = (" ".join(map(_describe, requests)) for requests in (scheduler.running, scheduler.waiting))
    return (
        f"running [{running}]; waiting [{waiting}]; blocks used {pool.num_used}, cached {pool.num_cached}, "
        f"free {pool.num_free}"
    )


def _describe(request: Request) -> str:
    return (
        f"{request.request_id}/{request.index}:{request.status}:{request.num_computed_tokens}/{request.num_tokens} "
        f"tokens:{len(request.block_table)}+{len(request.swapped_blocks)} blocks"
    )
