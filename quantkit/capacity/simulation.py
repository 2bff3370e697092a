"""The engine's own scheduler and block pool with a modelled time for each step.

Only the clock is made up: who is admitted, chunked, preempted and finished in which step is decided by the code that
serves (`quantkit.serve.scheduler`).
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.capacity.fit import Demand, Fit
from quantkit.capacity.kv_footprint import CacheLayout, KVDtype, sequence_bytes
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.roofline import SpeedModel, Step
from quantkit.capacity.trace import TracedRequest
from quantkit.errors import UsageError
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.block_tables import BlockTables
from quantkit.serve.request import Request, SamplingParams
from quantkit.serve.scheduler import Scheduled, Scheduler

DEFAULT_NUM_SEQS = 256  # vLLM's max_num_seqs


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the scheduler works with.

    Attributes:
        num_blocks: of the cache, the null block included.
        kv_block_size: tokens of a block.
        max_num_seqs: most running requests.
        max_num_batched_tokens: most tokens of a step.
        max_model_len: most tokens of a request.
        enable_prefix_caching: keep what was computed for prompts, for others that begin alike.
    """

    num_blocks: int
    kv_block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of the requests of a log.

    Attributes:
        finished: requests that got their whole answer.
        refused: requests that can never fit.
        seconds: from the first arrival to the last token.
        ttft: seconds from arrival to the first token, p50 and p99.
        itl: seconds between tokens of a request, p50 and p99.
        preemptions: how often a request lost its cache.
        hit_rate: share of prompt tokens that the engine's prefix cache had.
        busiest: most requests that ran at once.
        output_rate: new tokens a second.
    """

    finished: int
    refused: int
    seconds: float
    ttft: tuple[float, float]
    itl: tuple[float, float]
    preemptions: int
    hit_rate: float
    busiest: int
    output_rate: float

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("ttft", "itl")}
        values |= {"ttft_p50_s": self.ttft[0], "ttft_p99_s": self.ttft[1]}
        return values | {"itl_p50_s": self.itl[0], "itl_p99_s": self.itl[1]}


class Simulation:
    """One run; times are seconds of the modelled clock.

    Args:
        model: how long a step takes.
        settings: of the server.
    """

    def __init__(self, model: SpeedModel, settings: ServerSettings) -> None:
        self._model = model
        pool = BlockPool(settings.num_blocks, settings.kv_block_size)
        self.tables = BlockTables(pool, enable_prefix_caching=settings.enable_prefix_caching)
        self.scheduler = Scheduler(
            pool,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.max_model_len,
            tables=self.tables,
        )
        self.clock = 0.0
        self.refused = self.finished = self.busiest = 0
        self.prompt_tokens = self.new_tokens = 0
        self.finish_times: list[float] = []
        self.ttft: list[float] = []
        self.gaps: list[float] = []
        self._arrival: dict[str, float] = {}
        self._last_token: dict[str, float] = {}

    def arrive(self, name: str, traced: TracedRequest, arrival: float) -> None:
        """A request comes in."""
        try:
            self.scheduler.resolve_max_tokens(traced.prompt_tokens, traced.output_tokens)
        except UsageError:
            self.refused += 1
            return
        request = Request(
            request_id=name,
            prompt_token_ids=_token_ids(traced, name),
            params=SamplingParams(temperature=0, max_tokens=traced.output_tokens, ignore_eos=True),
            max_tokens=traced.output_tokens,
            stop_token_ids=frozenset(),
            detokenizer=None,
            generator=None,
        )
        self._arrival[name] = arrival
        self.prompt_tokens += traced.prompt_tokens
        self.scheduler.add(request)

    def step(self) -> bool:
        """Compute one step; False if there is nothing to do."""
        planned = self.scheduler.schedule()
        if not planned:
            return False
        self.clock += self._model.time(_step(planned)).total
        self.busiest = max(self.busiest, len(self.scheduler.running))
        sampled = [part.request for part in planned if part.is_sampled]
        for part in planned:
            part.request.num_computed_tokens = part.start + part.num_tokens
        for request in sampled:
            self._take(request)
        return True

    def _take(self, request: Request) -> None:
        """A request gets its next token."""
        name = request.request_id
        if name in self._last_token:
            self.gaps.append(self.clock - self._last_token[name])
        else:
            self.ttft.append(self.clock - self._arrival[name])
        self._last_token[name] = self.clock
        self.new_tokens += 1
        _, status, _ = request.append_token(0)
        if status is not None:
            self.scheduler.finish(request, status)
            self.finished += 1
            self.finish_times.append(self.clock)


def _token_ids(traced: TracedRequest, name: str) -> tuple[int, ...]:
    """Tokens that are equal where prompts begin alike, and different otherwise."""
    ids: list[int] = []
    for piece in traced.prefix:
        ids += [piece % (1 << 31)] * traced.prefix_tokens
    own = random.Random(name).randrange(1 << 31)
    return tuple((ids + [own] * traced.prompt_tokens)[: traced.prompt_tokens])


def _step(planned: Sequence[Scheduled]) -> Step:
    """What the step computes, for its time."""
    contexts: Counter[int] = Counter()
    tokens, sampled, pairs = 0, 0, 0.0
    for part in planned:
        contexts[part.start + part.num_tokens] += 1
        tokens += part.num_tokens
        sampled += part.is_sampled
        pairs += part.num_tokens * (part.start + (part.num_tokens + 1) / 2)
    return Step(tokens, len(planned), sampled, tuple(contexts.items()), pairs)


def simulate(
    model: SpeedModel, settings: ServerSettings, requests: Sequence[tuple[float, TracedRequest]]
) -> Simulation:
    """Serve requests, each with its arrival, until the last one is done."""
    simulation = Simulation(model, settings)
    index = 0
    while True:
        while index < len(requests) and requests[index][0] <= simulation.clock:
            simulation.arrive(str(index), requests[index][1], requests[index][0])
            index += 1
        if not simulation.step():
            if index == len(requests):
                return simulation
            simulation.clock = max(simulation.clock, requests[index][0])


def summarize(simulation: Simulation) -> Replay:
    """What became of the requests of a run."""
    return Replay(
        finished=simulation.finished,
        refused=simulation.refused,
        seconds=simulation.clock,
        ttft=(_quantile(simulation.ttft, 0.5), _quantile(simulation.ttft, 0.99)),
        itl=(_quantile(simulation.gaps, 0.5), _quantile(simulation.gaps, 0.99)),
        preemptions=simulation.scheduler.num_preemptions,
        hit_rate=simulation.tables.num_hit_tokens / max(1, simulation.prompt_tokens),
        busiest=simulation.busiest,
        output_rate=simulation.new_tokens / simulation.clock if simulation.clock else 0.0,
    )


def _quantile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; 0 if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def batch_rate(model: SpeedModel, settings: ServerSettings, batch: int, prompt_tokens: int, new_tokens: int) -> float:
    """New tokens a second of ``batch`` equal requests that come at once, as ``quantkit bench`` measures them."""
    request = TracedRequest(0.0, prompt_tokens, new_tokens)
    done = simulate(model, settings, [(0.0, request)] * batch)
    return done.new_tokens / done.clock


def settings_for(
    facts: ModelFacts, fit: Fit, kv_dtype: KVDtype, layout: CacheLayout, demand: Demand, longest: int
) -> ServerSettings:
    """The settings of a server with a fit's cache, for requests of up to ``longest`` tokens.

    Blocks are counted as the engine of ``layout`` gives them to the longest request: where windows free blocks, a block
    of the pool stands for the mean of what a request keeps.
    """
    blocks = math.ceil(longest / layout.block_size)
    block_bytes = sequence_bytes(facts, longest, kv_dtype, layout, demand.tp) / blocks
    most = facts.max_model_len or longest
    seqs = fit.max_num_seqs if demand.concurrency is not None else DEFAULT_NUM_SEQS
    return ServerSettings(
        num_blocks=max(2, int(fit.kv_bytes // block_bytes)),
        kv_block_size=layout.block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(demand.max_num_batched_tokens, seqs),
        max_model_len=min(max(longest, demand.context_p99), most),
    )
