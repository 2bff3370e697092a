"""Who is next: by priority and arrival, but nobody waits for ever."""

from bisect import insort
from collections.abc import Iterator

from quantkit.errors import QueueFullError
from quantkit.serve.request import Request

MAX_OVERTAKEN = 64  # so many later requests may start before one, whatever their priority


def order(request: Request) -> tuple[bool, int, int, int]:
    """The smaller one comes first: who was overtaken too often, then by priority, arrival and index."""
    return request.num_overtaken < MAX_OVERTAKEN, request.priority, request.arrival, request.index


class WaitingQueue:
    """Requests that wait for their first or another turn, the next one first.

    Args:
        max_num_waiting: most requests that may join; None is no limit.
    """

    def __init__(self, max_num_waiting: int | None = None) -> None:
        self._max_num_waiting = max_num_waiting
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The next one."""
        return self._requests[0]

    def join(self, request: Request) -> None:
        """Let a new request wait.

        Raises:
            QueueFullError: so many wait already.
        """
        if self._max_num_waiting is not None and len(self._requests) >= self._max_num_waiting:
            raise QueueFullError(
                f"{len(self._requests)} requests are waiting, max_num_waiting={self._max_num_waiting}", fix="try later"
            )
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Let a request wait that was running; there is always room for it."""
        insort(self._requests, request, key=order)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        self._requests.remove(request)

    def take_first(self) -> Request:
        """Take the next one out; those that came before it and still wait were overtaken."""
        taken = self._requests.pop(0)
        if any(request.priority != taken.priority for request in self._requests[:1] + self._requests[-1:]):
            for request in self._requests:
                request.num_overtaken += request.arrival < taken.arrival
            self._requests.sort(key=order)
        return taken
