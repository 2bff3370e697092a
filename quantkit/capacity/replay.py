"""What a log of requests says of a server: the log replayed as it is, the load at which it saturates, other loads."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.capacity.roofline import SpeedModel
from quantkit.capacity.simulation import Replay, ServerSettings, Simulation, simulate, summarize
from quantkit.capacity.trace import TracedRequest, possible_hit_rate
from quantkit.errors import UsageError

LOADS = (0.5, 0.7, 0.85, 1.0, 1.2)  # of the saturation load, for the curve
BURST_ROUNDS = 2  # times as many requests as run at once, so that most of the burst is a full server
CURVE_TOKENS, CURVE_REQUESTS = 30_000, 300  # most new tokens and requests that a point of the curve simulates
ASSUMED_LOAD = 0.7  # of the saturation load, where a log has no arrival times


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What a log says of a server.

    Attributes:
        replay: of the log as it is.
        requests: in the log.
        offered_rate: requests a second of the log; None if it has no arrival times.
        saturation_rate: requests a second that the server finishes while others wait.
        possible_hit_rate: what an unlimited prefix cache would save; None if the log does not say.
        curve: the log's requests at other loads: requests a second and what became of them.
        notes: what was assumed.
    """

    replay: Replay
    requests: int
    offered_rate: float | None
    saturation_rate: float
    possible_hit_rate: float | None
    curve: tuple[tuple[float, Replay], ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return {
            "requests": self.requests,
            "offered_requests_per_s": self.offered_rate,
            "saturation_requests_per_s": self.saturation_rate,
            "possible_hit_rate": self.possible_hit_rate,
            "replay": self.replay.to_dict(),
            "curve": [{"requests_per_s": rate, **replay.to_dict()} for rate, replay in self.curve],
            "notes": list(self.notes),
        }


def replay_trace(
    model: SpeedModel, settings: ServerSettings, requests: Sequence[TracedRequest], *, seed: int = 0
) -> TraceReport:
    """Replay a log as it is, find the load at which the server saturates, and try other loads.

    Args:
        model: how long a step takes.
        settings: of the server.
        requests: of the log, by arrival.
        seed: of the arrivals where the log has none.

    Raises:
        UsageError: no request of the log can ever fit.
    """
    notes = []
    burst = _burst(model, settings, requests)
    if not burst.finished:
        raise UsageError(
            f"none of the {len(requests)} requests fits into {settings.num_blocks - 1} cache blocks of "
            f"{settings.kv_block_size} tokens and max_model_len={settings.max_model_len}"
        )
    saturation = _steady_rate(burst.finish_times)
    span = requests[-1].arrival
    offered = None if span is None else (len(requests) / span if span > 0 else saturation)
    if offered is None:
        notes.append(f"the log has no arrival times: random ones at {ASSUMED_LOAD:.0%} of the saturation load")
        timed = _at_rate(requests, ASSUMED_LOAD * saturation, seed)
    else:
        timed = [(request.arrival or 0.0, request) for request in requests]
    sample = _as_many(requests, min(CURVE_REQUESTS, round(CURVE_TOKENS / _mean_output(requests))))
    curve = tuple(
        (load * saturation, summarize(simulate(model, settings, _at_rate(sample, load * saturation, seed))))
        for load in LOADS
    )
    return TraceReport(
        replay=summarize(simulate(model, settings, timed)),
        requests=len(requests),
        offered_rate=offered,
        saturation_rate=saturation,
        possible_hit_rate=possible_hit_rate(list(requests)),
        curve=curve,
        notes=tuple(notes),
    )


def _burst(model: SpeedModel, settings: ServerSettings, requests: Sequence[TracedRequest]) -> Simulation:
    """Everybody comes at once: `BURST_ROUNDS` times as many as run at the same time."""
    mean = sum(request.prompt_tokens + request.output_tokens for request in requests) / len(requests)
    held = (settings.num_blocks - 1) * settings.kv_block_size / mean
    count = round(BURST_ROUNDS * max(8, min(settings.max_num_seqs, held)))
    return simulate(model, settings, [(0.0, request) for request in _as_many(requests, count)])


def _steady_rate(finish_times: Sequence[float]) -> float:
    """Requests a second between the first and the last quarter of those that finished."""
    first, last = len(finish_times) // 4, 3 * len(finish_times) // 4
    if last > first and finish_times[last] > finish_times[first]:
        return (last - first) / (finish_times[last] - finish_times[first])
    return len(finish_times) / finish_times[-1]


def _as_many(requests: Sequence[TracedRequest], count: int) -> list[TracedRequest]:
    """The log from its start, again and again if it is short."""
    return [requests[index % len(requests)] for index in range(max(1, count))]


def _mean_output(requests: Sequence[TracedRequest]) -> float:
    return sum(request.output_tokens for request in requests) / len(requests)


def _at_rate(requests: Sequence[TracedRequest], rate: float, seed: int) -> list[tuple[float, TracedRequest]]:
    """The same requests with Poisson arrivals."""
    generator = random.Random(seed)
    clock, timed = 0.0, []
    for request in requests:
        timed.append((clock, request))
        clock += generator.expovariate(rate)
    return timed
